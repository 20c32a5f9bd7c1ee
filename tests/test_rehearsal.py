"""A rehearsal launches a stand-in, and accounts for every setting of the recipe it rehearses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from recipes import metrics, notebook, params, preflight, rehearsal
from recipes.cli import main
from recipes.command import build, compose_verl
from recipes.errors import RecipeError

NPU = [name for name in params.names() if params.compose(name).recipe.hardware != "cpu"]


@pytest.mark.parametrize("name", NPU)
def test_every_setting_of_every_recipe_is_accounted_for(name):
    composed = params.compose(name)
    told = rehearsal.fold(composed, ranks=4, export=True)
    groups = [told.kept, told.folded, told.replaced, told.left_out]
    keys = [change.key for group in groups for change in group]
    assert len(keys) == len(set(keys))
    values = dict(params.flatten(params.to_dict(composed.recipe)))
    said = {key for key in composed.history if values.get(key) is not None}
    assert said - {"recipe", "title", "notes", "run_dir", "work"} <= set(keys)
    assert all(change.why and change.why != "not exercised" for group in groups[1:] for change in group)
    assert all(change.value == change.rehearsed for change in told.kept)
    recipe = told.composed.recipe
    assert (recipe.hardware, recipe.stack, recipe.rollout.engine) == ("cpu", "cpu", "hf_cpu")
    build(told.composed, environment={})
    assert [str(f) for f in preflight.check(told.composed, here=False)] == []


def test_the_layout_is_folded_in_the_order_that_exercises_most():
    composed = params.compose("glm5_2/grpo_a3_512")

    def layout(ranks):
        recipe = rehearsal.fold(composed, ranks=ranks).composed.recipe
        p = recipe.parallel
        return recipe.devices, p.pipeline, p.tensor, p.expert

    assert [layout(ranks) for ranks in (1, 2, 4)] == [(1, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 2)]


def test_a_dense_model_is_folded_over_tensor_parallel_ranks():
    p = rehearsal.fold(params.compose("qwen3/grpo_8b_vllm_a2"), ranks=4).composed.recipe.parallel
    assert (p.pipeline, p.tensor) == (2, 2)


def test_what_decides_losses_and_exports_is_kept():
    recipe = rehearsal.fold(params.compose("glm5_2/grpo_a3_512"), export=True).composed.recipe
    assert recipe.algorithm.clip_high == 0.28
    assert recipe.algorithm.rollout_correction.rejection_threshold == "0.6_1.6"
    assert recipe.checkpoint.strict is False
    assert recipe.checkpoint.save_freq == recipe.trainer.steps == 2


def test_generating_and_training_apart_is_rehearsed_apart():
    told = rehearsal.fold(params.compose("glm5_2/fully_async"), steps=3)
    recipe, apart = told.composed.recipe, told.composed.recipe.fully_async
    assert (recipe.mode, recipe.algorithm.router_replay, recipe.algorithm.policy_loss) == ("fully_async", "R3", "gspo")
    assert (apart.sync_every, apart.staleness, apart.partial_rollout) == (4, 0.3, True)
    assert (apart.rollout_nodes, apart.rollout_devices, apart.rollout_steps) == (1, 1, 3 * 4 * 4)
    assert recipe.steps == 3
    left_out = {change.key for change in told.left_out}
    assert not left_out & {"mode", "batch.train", *(f"fully_async.{name}" for name in vars(apart))}
    config = compose_verl(build(told.composed, environment={}), told.composed)
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "gloo"
    assert config.algorithm.rollout_correction.bypass_mode is True  # verl's default, which the recipe leaves alone
    kept = params.compose("glm5_2/fully_async", ["verl.algorithm.rollout_correction.bypass_mode=false"])
    config = rehearsal.fold(kept).composed.recipe.verl
    assert dict(params.flatten(config))["algorithm.rollout_correction.bypass_mode"] is False


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("quickstart/grpo", {}, "runs without an accelerator already"),
        ("glm5_2/grpo_a3_512", {"ranks": 3}, "ranks=3: a layout is folded to 1, 2 or 4 ranks"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(name, options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        rehearsal.fold(params.compose(name), **options)


def test_the_notebook_never_takes_a_rehearsal_for_the_recipe():
    plan = notebook.resolve({"recipe": "glm5_2/grpo_a3_512", "target": "cpu"})
    shown = plan._repr_mimebundle_()
    for text in shown.values():
        assert "NOT glm5_2/grpo_a3_512 but its rehearsal: cpu/glm5_2" in text
    assert plan.composed.name == "rehearsal of glm5_2/grpo_a3_512"
    with pytest.raises(RecipeError, match="target='gpu' must be npu"):
        notebook.resolve({"recipe": "glm5_2/grpo_a3_512", "target": "gpu"})


def test_dry_run_tells_the_account_and_starts_nothing(tmp_path):
    done = CliRunner().invoke(main, ["rehearse", NPU[0], "--dry-run", "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 0
    for heading in ("as in the recipe:", "folded:", "replaced:", "not exercised:"):
        assert f"{heading}\n" in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_glm_is_rehearsed_for_real(tmp_path, monkeypatch):
    """Two pipeline stages of a GLM-5.2-shaped model; the losses and the export of the 512-device recipe."""
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    run = tmp_path / "run"
    done = CliRunner().invoke(main, ["rehearse", "glm5_2/grpo_a3_512", "--run-dir", str(run), "--deadline", "10"])
    assert done.exit_code == 0, done.output[-3000:]
    assert json.loads((run / "rehearsal.json").read_text())["rehearses"] == "glm5_2/grpo_a3_512"
    assert "pass  EXPORT: 51 of 51 tensors arrived" in done.output


@pytest.mark.slow
def test_generating_apart_with_router_replay_is_rehearsed_for_real(tmp_path, monkeypatch):
    """verl's fully asynchronous entry with R3: an update trains on the experts a standalone replica chose."""
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    run = tmp_path / "run"
    words = ["rehearse", "glm5_2/fully_async", "--ranks", "1", "--run-dir", str(run), "--deadline", "10"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output[-3000:]
    assert "pass  EXPORT: 51 of 51 tensors arrived" in done.output
    assert "rollout_corr/rollout_is_mean cannot be computed" in done.output  # a note of the recipe says why
    table = metrics.read(run).table
    assert list(table.index) == [0, 1, 2]
    stale = table["fully_async/count/stale_trajectory_processed"]
    assert stale[1] == 0 < stale[2]
    assert (table["actor/grad_norm"].loc[1:] > 0).all()
