"""What resuming would start, decided before anything is: runs and checkpoints made by hand, no training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import params, provenance
from recipes.errors import RecipeError
from recipes.run import launch, resume
from recipes.run.checkpoints import MANIFEST, TRACKER, resume_point
from recipes.run.directory import NEVER_STARTED, Run, create, identify, read_state, update_state, write_text

CONTENTS = ("model", "optimizer", "extra")


def checkpoint(folder: Path, step: int, contents: tuple[str, ...] | None = None, *, tracked: bool = False) -> Path:
    """A global_step_N as verl leaves it; with `contents` also its manifest. Returns its folder actor/."""
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "model.safetensors").write_bytes(b"weights")
    (actor.parent / "data.pt").write_bytes(b"order")
    if contents is not None:
        told = {"save_contents": list(contents), "contents": {name: {"path": name} for name in contents}}
        for name in contents:
            (actor / name).mkdir()
        (actor / MANIFEST).write_text(json.dumps(told))
    if tracked:
        (folder / TRACKER).write_text(str(step))
    return actor


@pytest.fixture
def ended(tmp_path):
    """Makes a run of cpu/qwen3 that has failed after 3 of 6 steps, and its folder of checkpoints."""

    def make(*overrides: str) -> tuple[Run, Path]:
        given = ["trainer.steps=6", *overrides]
        composed = params.compose("cpu/qwen3", given, run_dir=str(tmp_path / "run"), work=str(tmp_path / "work"))
        run = create(tmp_path / "run", composed.name, launch.terms(composed))
        write_text(run.path / "recipe.yaml", params.dump(composed.recipe))
        run.metrics(1).write_text("".join(json.dumps({"step": step, "data": {}}) + "\n" for step in (1, 2, 3)))
        update_state(run, state="failed", attempts=[{"number": 1}])
        return run, Path(composed.recipe.checkpoint.directory)

    return make


# ------------------------------------------------------------------------------------------------------- the plan


def test_a_run_whose_directory_was_moved_is_refused_with_the_place_it_was_made_in(ended, tmp_path):
    run, folder = ended()
    checkpoint(folder, 2, CONTENTS, tracked=True)
    moved = run.path.rename(tmp_path / "moved")
    with pytest.raises(RecipeError, match=f"{moved} was made in {run.path}, .*Move it back"):
        resume.plan(Run(moved))
    run.path.symlink_to(moved)  # there again, by its old name
    assert resume.plan(run).point.step == 2


def test_it_goes_on_from_the_whole_checkpoint_and_says_so(ended):
    run, folder = ended()
    checkpoint(folder, 2, CONTENTS, tracked=True)
    planned = resume.plan(run, ["optimizer.lr=1e-5"])
    assert (planned.attempt, planned.point.step, planned.reached) == (2, 2, 3)
    where = folder / "global_step_2"
    assert planned.composed.recipe.checkpoint.resume_path == str(where)
    (word,) = (text for text in planned.command.argv if "resume_from_path=" in text)
    assert str(where) in word
    before = planned.changes[0][1]
    assert planned.lines() == [
        f"Attempt 2 of {run.path}.",
        f"It would go on after step 2, from {where} (model, optimizer, extra).",
        "Step 3 would be made again; the first try of them stays on record.",
        f"Changed: optimizer.lr from {before} to 1e-05.",
    ]
    assert not run.attempt(2).exists()


def test_without_a_checkpoint_it_starts_from_the_model(ended):
    run, _ = ended()
    planned = resume.plan(run)
    assert (planned.point.checkpoint, planned.composed.recipe.checkpoint.resume) == (None, "disable")
    assert "There is no whole checkpoint: it would start from the model, at step 0." in planned.lines()


def test_a_run_that_goes_on_is_not_resumed(ended, monkeypatch):
    run, _ = ended()
    update_state(run, state="running", supervisor=identify(1))
    with pytest.raises(RecipeError, match=r"is running \(step 3\); `recipes watch` shows it"):
        resume.plan(run)


def test_a_run_that_is_about_to_start_is_not_resumed_until_it_is_lost(ended):
    run, _ = ended()
    update_state(run, state="prepared")
    with pytest.raises(RecipeError, match="about to start"):
        resume.plan(run)
    update_state(run, created="2026-01-01T00:00:00+00:00")
    assert read_state(run)["cause"] == NEVER_STARTED
    assert resume.plan(run).attempt == 2


def test_a_run_with_all_its_steps_wants_a_larger_number(ended):
    run, folder = ended()
    checkpoint(folder, 6, tracked=True)
    with pytest.raises(RecipeError, match=r"has made all its 6 steps \(trainer.steps\).* give a larger number"):
        resume.plan(run)
    assert resume.plan(run, ["steps=8"]).point.step == 6


@pytest.mark.parametrize("change", ["model.name=tiny_qwen3_moe", "checkpoint.directory=/somewhere/else"])
def test_what_makes_the_checkpoints_worthless_cannot_be_changed(ended, change):
    run, _ = ended()
    key, _, value = change.partition("=")
    with pytest.raises(RecipeError, match=f"{key}='{value}' cannot be changed by resuming .* start a new run"):
        resume.plan(run, [change])


def test_a_run_without_its_recipe_cannot_be_resumed(ended):
    run, _ = ended()
    (run.path / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"it has no recipe\.yaml"):
        resume.plan(run)


# --------------------------------------------------------------------------------- a recipe file that has changed


def test_a_recipe_that_says_something_else_by_now_is_refused_until_a_value_is_named(params_folder, ended):
    run, _ = ended()
    then = resume.plan(run).composed.recipe.rollout.n
    file = params_folder / "cpu" / "qwen3.yaml"
    recipe = params.compose("cpu/qwen3", run_dir=str(run.path))
    assert recipe.history["rollout.n"][-1].origin.startswith("params/"), "the test changes what the files say"
    file.write_text(file.read_text() + f"\nrollout.n: {then + 2}\n")
    with pytest.raises(
        RecipeError, match=f"rollout.n is {then + 2} there, {then} in the run.* such as rollout.n={then}"
    ):
        resume.plan(run)
    assert resume.plan(run, [f"rollout.n={then}"]).changes == ()
    assert resume.plan(run, [f"rollout.n={then + 2}"]).changes == (("rollout.n", then, then + 2),)


def test_a_recipe_file_that_is_gone_leaves_the_runs_own_copy(params_folder, ended):
    run, _ = ended()
    (params_folder / "cpu" / "qwen3.yaml").unlink()
    assert resume.plan(run).composed.recipe.rollout.n > 0


def test_a_recipe_file_that_has_become_invalid_is_no_file_that_is_gone(params_folder, ended):
    run, _ = ended()
    file = params_folder / "cpu" / "qwen3.yaml"
    file.write_text(file.read_text() + "\nno_such_key: 1\n")
    with pytest.raises(RecipeError, match=r"cpu/qwen3 says by now cannot be compared .*no_such_key.* Mend the file"):
        resume.plan(run)


# ------------------------------------------------------------------------------------------------- the checkpoints


def test_a_tracker_that_names_what_is_not_there_is_refused(tmp_path):
    """verl would start from step 0 without a word."""
    checkpoint(tmp_path, 2)
    (tmp_path / TRACKER).write_text("4")
    with pytest.raises(RecipeError, match=r"names step '4', and there is no global_step_4 beside it.*\(2\)"):
        resume_point(tmp_path)


def test_a_recorded_checkpoint_that_is_not_whole_is_refused(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, tracked=True)
    (tmp_path / "global_step_4" / "data.pt").unlink()
    with pytest.raises(RecipeError, match=r"has no data.pt.*though verl recorded it as saved. Whole .* here: 2;"):
        resume_point(tmp_path)


def test_what_came_after_the_recorded_checkpoint_is_passed_over(tmp_path):
    checkpoint(tmp_path, 2, tracked=True)
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    point = resume_point(tmp_path)
    assert point.step == 2
    said = f"Passed over: {tmp_path}/global_step_4 has no data.pt, so it was not finished."
    assert point.lines(4, 6)[-1] == said


def test_without_a_tracker_the_latest_whole_checkpoint_holds(tmp_path):
    for step in (2, 10, 4):
        checkpoint(tmp_path, step, CONTENTS)
    (tmp_path / "global_step_10" / "actor" / "optimizer").rmdir()
    (tmp_path / "global_step_x").mkdir()
    point = resume_point(tmp_path)
    assert (point.step, [one.lacks for one in point.unfinished]) == (4, ["lacks optimizer"])


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    checkpoint(tmp_path, 2, ("model",), tracked=True)
    said = resume_point(tmp_path).lines(2, 6)
    assert "The checkpoint holds no optimizer: its moments and the learning rate start afresh." in said


def _no_shard(actor: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (actor / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (actor / "model" / "one.safetensors").write_bytes(b"")


def _half(actor: Path) -> None:
    told = json.loads((actor / MANIFEST).read_text())
    told["contents"]["optimizer"]["path"] = "dist_ckpt"
    (actor / "dist_ckpt").mkdir()
    (actor / MANIFEST).write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("harm", "lacks"),
    [
        (_no_shard, "lacks two.safetensors"),
        (_half, "lacks dist_ckpt/metadata.json"),
        (lambda actor: (actor / MANIFEST).write_text("{"), f"has a {MANIFEST} that cannot be read"),
        (lambda actor: actor.rename(actor.parent / "critic"), "has no folder actor/"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(tmp_path, harm, lacks):
    harm(checkpoint(tmp_path, 2, CONTENTS))
    point = resume_point(tmp_path)
    assert (point.checkpoint, [one.lacks for one in point.unfinished]) == (None, [lacks])


# --------------------------------------------------------------------------------------------------- the start


@pytest.mark.parametrize("fails", ["stop", "write_down"])
def test_a_resumption_that_fails_leaves_no_attempt(ended, monkeypatch, fails):
    """Else each further try would leave one more, and the latest of them has no log and no recipe."""
    run, _ = ended()
    monkeypatch.setattr(provenance, "start", lambda *_: None)
    planned, before = resume.plan(run), read_state(run)

    def broken(*_):
        raise RecipeError("processes are still there")

    monkeypatch.setattr(launch, fails, broken)
    with pytest.raises(RecipeError, match="still there"):
        resume.resume(planned)
    assert run.attempts == (1,)
    assert read_state(run) == before
