"""Where a run came from: real git checkouts, real files, a run of the stand-in trainer; and runs compared, replayed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes import cli, differences, fingerprint, masking, params, provenance, replay, report
from recipes.command import build
from recipes.errors import RecipeError
from recipes.masking import MASK
from recipes.run import launch
from recipes.run.directory import Run, begin_attempt, create, is_alive, open_run, write_json

CHILDREN = Path(__file__).parent / "children"

# None was ever valid. The first has a known shape, the second is a secret by its variable's name, the third by a URL.
TOKEN, OPAQUE, THIRD = "hf_" + "aB3" * 12, "opaque-word-" + "77", "hunter" + "3"


def started(path: Path, does: str, *overrides: str) -> Run:
    """A run of our stand-in for the trainer that has ended, and whose provenance was gathered."""
    composed = params.compose("quickstart/grpo", [*inputs(path.parent), *overrides], run_dir=str(path))
    command = build(composed)
    environment = {**command.environment, "PYTHONPATH": str(CHILDREN), "TRAINER": does}
    run = launch.start(composed, dataclasses.replace(command, entry="trainer", environment=environment))
    state = launch.wait(run, timeout=30)
    limit = time.monotonic() + 60
    while is_alive(state["supervisor"]):  # it masks the log after the end
        assert time.monotonic() < limit
        time.sleep(0.1)
    while not differences.told(run).get("gathered"):
        assert time.monotonic() < limit, (run.path / "provenance.log").read_text()
        time.sleep(0.1)
    return run


def inputs(folder: Path) -> list[str]:
    """Files that stand for model and data: the stand-in reads neither, and nothing has to be prepared."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("train", "val"):
        (folder / f"{name}.parquet").write_bytes(name.encode())
    places = {
        "model.path": model,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "val.parquet",
    }
    return ["prepare=[]", *(f"{key}={place}" for key, place in places.items())]


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory):
    """A run whose trainer prints its whole environment, a token in it, and fails with the token in its last words."""
    before = dict(os.environ)
    os.environ.update(
        {"HF_TOKEN": TOKEN, "JUDGE_API_KEY": OPAQUE, "MY_UNTOLD": "mine", "NO_PROXY": f"http://me:{THIRD}@h"}
    )
    try:
        return started(tmp_path_factory.mktemp("secret") / "it's a run", "leak")
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    return started(tmp_path_factory.mktemp("good") / "it's a run", "metrics")


def known(part: differences.Part) -> dict:
    """The differences of a part but for where the model and the data of two tests are."""
    return {key: pair for key, pair in part.differing.items() if not str(pair[0]).startswith("/")}


def test_no_secret_of_the_environment_is_anywhere_in_the_run_directory(secret_run):
    files = [path for path in secret_run.path.rglob("*") if path.is_file()]
    assert len(files) > 8
    for secret in (TOKEN, OPAQUE, THIRD):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    log = secret_run.log(1).read_text()
    assert f"401 for token {MASK}" in log
    assert f"'JUDGE_API_KEY': '{MASK}'" in log
    state = json.loads(secret_run.state_file.read_text())
    assert state["state"] == "failed"
    assert f"401 for token {MASK}" in state["cause"]


def test_provenance_says_what_ran_and_with_what(secret_run):
    told = differences.told(secret_run)
    assert told["faults"] == []
    recipe, command = provenance.recorded(secret_run)
    assert told["command"]["argv"] == command["argv"]
    assert told["written"].keys() == {"recipe.yaml", "verl.yaml", "command.json"}
    assert told["packages"]["click"]
    assert told["interpreter"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["stack"]["stack"] == recipe["stack"]
    assert "params/quickstart/grpo.yaml" in told["recipe_files"]
    assert told["hardware"]["memory"] > 2**30
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHILDREN, capture_output=True, text=True, check=True)
    assert len(told["repositories"]["workbook"]["commit"]) == len(head.stdout.strip()) == 40
    assert told["launcher"]
    assert json.loads((secret_run.attempt(1) / "provenance.json").read_text()) == told


def test_values_are_kept_of_variables_that_decide_something(secret_run):
    shown = differences.told(secret_run)["environment"]
    assert shown["TRAINER"] == "leak"  # the recipe's command names it
    assert shown["OMP_NUM_THREADS"] == "1"
    assert shown["NO_PROXY"] == f"http://{MASK}@h"
    assert [shown[name] for name in ("HF_TOKEN", "JUDGE_API_KEY", "MY_UNTOLD", "HOME")] == [MASK] * 4
    assert provenance.kept({"AWS_PROFILE": "x", "VLLM_API_KEY": "y", "HF_HOME": "/z"}) == {
        "AWS_PROFILE": MASK,
        "HF_HOME": "/z",
        "VLLM_API_KEY": MASK,
    }


def test_a_run_whose_provenance_cannot_be_gathered_says_so(tmp_path):
    run = create(tmp_path / "run", "r", {})
    assert "FileNotFoundError" in provenance.write(run)["faults"][0]
    assert "could not be gathered" in differences.told(run)["faults"][0]


@pytest.mark.parametrize("where", ["local", "ray"])
def test_of_a_job_of_a_cluster_it_is_said_whose_packages_and_hardware_these_are(tmp_path, where):
    command = {"argv": [str(tmp_path / "no-python")], "environment": {}, "verl": "0"}
    found, _ = provenance.gather({"stack": "none", "launch": where}, command)
    assert found["gathered_on"] == (provenance.LAUNCHING if where == "ray" else "")
    html = report._provenance({**found, "gathered": "2026-11-30"})
    assert ("2026-11-30, on the launching machine" in html) == (where == "ray")


def test_an_attempt_gathered_late_does_not_replace_the_latest(tmp_path):
    run = create(tmp_path / "run", "r", {})
    begin_attempt(run, 2)
    for attempt in (2, 1):
        provenance.write(run, attempt)
    assert [json.loads((run.attempt(n) / "provenance.json").read_text())["attempt"] for n in (1, 2)] == [1, 2]
    assert differences.told(run)["attempt"] == 2


def test_a_part_that_cannot_be_gathered_costs_no_other(tmp_path):
    recipe = {"stack": "no-such-stack", "data": {"train_files": str(tmp_path / "none.parquet")}}
    found, _ = provenance.gather(recipe, {"argv": [str(tmp_path / "no-python")], "environment": {}, "verl": "0"})
    assert [fault.split(" could not")[0] for fault in found["faults"]] == ["packages", "stack"]
    assert found["data"]["data.train_files"]["kind"] == "missing"
    assert found["repositories"]["workbook"]["commit"]


def test_a_child_that_is_killed_leaves_word(tmp_path, monkeypatch):
    run = create(tmp_path / "run", "r", {})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    provenance.start(run)
    assert differences.told(run) == {
        "gathered": None,
        "faults": ["nothing was gathered yet, or the process was ended"],
    }


# ---------------------------------------------------------------------------------------------------------------- git


@pytest.fixture
def checkout(tmp_path):
    """A git repository with one commit."""
    root = tmp_path / "plugin"
    root.mkdir()
    (root / "code.py").write_text("rate = 1\n")

    def git(*words: str) -> str:
        argv = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True).stdout

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return root, git


def test_a_clean_checkout_has_a_commit_and_no_diff(checkout):
    root, git = checkout
    found, diffs = provenance._repositories({"plugin": str(root)}, ())
    assert found["plugin"]["commit"] == git("rev-parse", "HEAD").strip()
    assert (found["plugin"]["branch"], found["plugin"]["dirty"], diffs) == ("main", [], {})


def test_what_was_changed_is_kept_and_applies_again(checkout):
    root, git = checkout
    git("remote", "add", "origin", "https://me:hunter2@example.org/plugin.git")
    (root / "code.py").write_text("rate = 2\n")
    (root / "new.py").write_text("")
    found, diffs = provenance._repositories({"plugin": str(root), "again": str(root)}, ())
    assert list(found) == ["plugin"]
    assert (found["plugin"]["dirty"], found["plugin"]["untracked"]) == (["code.py"], ["new.py"])
    assert found["plugin"]["diff"]["cut"] is False
    assert "hunter2" not in str(masking.mask_tree(found))
    git("checkout", "-q", "code.py")
    (root / "kept.diff").write_text(diffs["plugin"])
    git("apply", "kept.diff")
    assert (root / "code.py").read_text() == "rate = 2\n"


def test_a_diff_is_bounded_and_holds_no_secret(checkout, monkeypatch):
    root, _ = checkout
    (root / "code.py").write_text(f"token = '{TOKEN}'\n" + "x = 1\n" * 1000)
    monkeypatch.setattr(provenance, "DIFF_BYTES", 2000)
    found, diffs = provenance._repositories({"plugin": str(root)}, ())
    assert found["plugin"]["diff"]["cut"] is True
    assert diffs["plugin"].endswith("# cut here: the diff is longer than 2000 bytes\n")
    assert len(diffs["plugin"]) < 2100
    assert MASK in diffs["plugin"]
    assert TOKEN not in diffs["plugin"]


def test_diffs_are_written_beside_the_provenance(checkout, tmp_path, monkeypatch):
    root, _ = checkout
    (root / "code.py").write_text("rate = 2\n")
    run = create(tmp_path / "run", "r", {})
    (run.path / "recipe.yaml").write_text("stack: cpu\n")
    write_json(run.command_file, {"argv": [sys.executable, "-u", "-m", "x"], "environment": {}, "verl": "0.9.1"})
    monkeypatch.setattr(provenance, "_ask_packages", lambda *_: {"editable": {"my-plugin": f"file://{root}"}})
    told = provenance.write(run)
    named = told["repositories"]["my-plugin"]["diff"]["file"]
    assert named == "provenance/my-plugin.diff"
    assert "+rate = 2" in (run.path / named).read_text()


# ------------------------------------------------------------------------------------------------------- fingerprints


def test_a_file_is_told_from_one_that_was_cut_or_trained_further(tmp_path):
    path = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(4 * 3 * fingerprint.MOST))
    path.write_bytes(content)
    first = fingerprint.fingerprint(str(path))
    assert (first["kind"], first["bytes"], first["whole"]) == ("file", len(content), False)
    os.utime(path, (1, 1))
    assert fingerprint.fingerprint(str(path))["sample"] == first["sample"]
    for place in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert fingerprint.fingerprint(str(path))["sample"] != first["sample"]
    path.write_bytes(content[:-1])
    assert fingerprint.fingerprint(str(path))["sample"] != first["sample"]


def test_a_small_file_is_hashed_whole(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}" + " " * 1000 + "x")
    first = fingerprint.fingerprint(str(path))
    path.write_text("{}" + " " * 999 + "yx")
    assert first["whole"]
    assert fingerprint.fingerprint(str(path))["sample"] != first["sample"]


def test_terabytes_are_sampled(tmp_path):
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)  # a hole: no disk is used
    began = time.process_time()
    told = fingerprint.fingerprint(str(tmp_path))
    assert time.process_time() - began < 1
    assert (told["files"], told["bytes"], told["unsampled"]) == (2, 2**41, 0)


def test_a_directory_is_summed_up_and_says_what_it_did_not_read(tmp_path, monkeypatch):
    for name in ("a", "b/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    told = fingerprint.fingerprint(str(tmp_path))
    assert (told["files"], told["bytes"], told["fault"]) == (3, 4, "1 files cannot be read")
    assert told["parts"].keys() == {"a", "b/c"}
    monkeypatch.setattr(fingerprint, "SAMPLED", 1)
    monkeypatch.setattr(fingerprint, "NAMED", 1)
    cut = fingerprint.fingerprint(str(tmp_path))
    assert cut["unsampled"] == 1
    assert "parts" not in cut


def test_what_is_no_file_here_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    reference = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("0123abcd")
    found = {path: fingerprint.fingerprint(path) for path in ("Qwen/Qwen3-0.6B", "/no/such", "pkg://a.b", "hdfs://x/y")}
    assert found["Qwen/Qwen3-0.6B"] == {"path": "Qwen/Qwen3-0.6B", "kind": "hub id", "revision": "0123abcd"}
    assert [one["kind"] for one in found.values()] == ["hub id", "missing", "address", "address"]


# ------------------------------------------------------------------------------------------------------ diff, replay


def test_diff_of_two_runs_names_what_differs_and_sums_up_the_rest(secret_run, good_run):
    told = CliRunner().invoke(cli.main, ["diff", str(good_run.path), str(secret_run.path), "--json"])
    assert told.exit_code == 0, told.output
    parts = json.loads(told.output)
    assert parts["outcome"]["differing"]["state"] == {"a": "finished", "b": "failed"}
    assert parts["outcome"]["differing"]["steps"] == {"a": 2, "b": 0}
    assert parts["outcome"]["differing"]["last critic/rewards/mean"]["b"] is None
    assert parts["environment"]["differing"]["TRAINER"] == {"a": "metrics", "b": "leak"}
    # Two directories with nothing else changed: their paths are in dozens of keys and count for nothing.
    for name in ("recipe", "verl configuration", "packages", "hardware", "data", "model"):
        places = {key for key, pair in parts[name]["differing"].items() if not str(pair["a"]).startswith("/")}
        assert (places, parts[name]["absent"]) == (set(), "")
    assert parts["verl configuration"]["equal"] > 500
    words = CliRunner().invoke(cli.main, ["diff", str(good_run.path), str(secret_run.path)]).output
    assert "  TRAINER" in words
    assert "equal: packages (" in words
    assert TOKEN not in words


def test_diff_of_recipes_goes_key_by_key(good_run, tmp_path):
    other = started(tmp_path / "run", "metrics", "learning_rate=1e-3")
    parts = {part.name: part for part in differences.compare(*map(differences.of_run, (good_run, other)))}
    assert known(parts["recipe"]) == {"optimizer.lr": (1e-4, 1e-3)}
    assert known(parts["verl configuration"]) == {"actor_rollout_ref.actor.optim.lr": (1e-4, 1e-3)}
    assert re.search(r"optimizer\.lr +0\.0001 +→  0\.001", differences.describe(list(parts.values())))


def test_what_one_side_never_recorded_is_no_difference(good_run, tmp_path):
    bare = create(tmp_path / "bare", "r", {})
    parts = differences.compare(differences.of_run(good_run), differences.of_run(bare))
    assert {part.name for part in parts if part.absent == "b"} >= {"recipe", "packages", "commits", "data"}
    assert "not recorded by bare: " in differences.describe(parts, "good", "bare")


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("/runs/a", "/new"),
        ("file:///runs/a/x.parquet", "file:///new/x.parquet"),
        ("x='/runs/a/attempts/1/hydra'", "x='/new/attempts/1/hydra'"),
        ("/runs/ab", "/runs/ab"),
        ("/runs/a.b and /other/runs/a", "/runs/a.b and /other/runs/a"),
        ("/runs/a,/runs/a", "/new,/new"),
    ],
)
def test_a_path_moves_and_a_longer_one_does_not(text, moved):
    assert differences.replace_path(text, "/runs/a", "/new") == moved


def test_attempts_of_a_resumed_run_become_the_first():
    assert replay.moved_path("/a/attempts/12/metrics.jsonl", "/a", "/b") == "/b/attempts/1/metrics.jsonl"


def test_a_replay_has_the_same_argv_and_environment_but_for_paths(good_run, tmp_path):
    target = tmp_path / "it's again"
    planned = replay.plan(good_run, target)
    first = json.loads(good_run.command_file.read_text())
    old, new = (str(path).replace("'", "\\'") for path in (good_run.path, target))
    assert list(planned.command.argv) == [word.replace(old, new) for word in first["argv"]]
    assert [word for word in planned.command.argv if "a run" in word] == []
    old, new = str(good_run.path), str(target)
    assert planned.command.environment == {name: text.replace(old, new) for name, text in first["environment"].items()}
    assert planned.composed.recipe.checkpoint.directory == f"{target}/checkpoints"
    assert not target.exists()


@pytest.mark.slow
def test_a_replay_is_launched_watched_and_says_what_it_is_a_replay_of(good_run, tmp_path):
    target = tmp_path / "it's again"
    waived = ["--waive", "files.model", "--waive", "data.schema"]  # neither model nor data is one
    told = CliRunner().invoke(cli.main, ["replay", str(good_run.path), "--run-dir", str(target), *waived])
    assert told.exit_code == 0, told.output
    again = open_run(target)
    assert params.compose(str(again.path / "recipe.yaml")).recipe.optimizer.lr == 1e-4
    noted = json.loads((target / "replay.json").read_text())
    assert noted["of"] == str(good_run.path)
    assert noted["differences"]["packages"]["differing"] == {}
    parts = differences.compare(differences.of_run(good_run), differences.of_run(again))
    assert [part.differing for part in parts if part.name in ("recipe", "verl configuration")] == [{}, {}]


def test_a_dry_replay_says_what_differs_now_and_writes_nothing(good_run, tmp_path, monkeypatch):
    (good_run.path / "provenance.json.kept").write_bytes((good_run.path / "provenance.json").read_bytes())
    then = differences.told(good_run)
    then["packages"]["click"] = "0.0.1"
    then["recipe_files"]["params/quickstart/grpo.yaml"] = "0" * 64
    write_json(good_run.path / "provenance.json", then)
    try:
        told = CliRunner().invoke(
            cli.main, ["replay", str(good_run.path), "--run-dir", str(tmp_path / "x"), "--dry-run"]
        )
    finally:
        (good_run.path / "provenance.json.kept").replace(good_run.path / "provenance.json")
    assert told.exit_code == 0, told.output
    assert "click  0.0.1  →" in told.stderr
    assert "params/quickstart/grpo.yaml" in told.stderr
    assert "-u -m trainer" in told.stdout
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"argv": ["/no/such/python", "-u", "-m", "trainer"]}, "its interpreter /no/such/python is not here"),
        ({"argv": ["sh", "-c"]}, "not `python -u -m MODULE"),
        (None, "no whole recipe.yaml and command.json"),
    ],
)
def test_what_cannot_be_replayed_is_refused(good_run, tmp_path, change, words):
    run = create(tmp_path / "run", "quickstart/grpo", {})
    if change:
        command = json.loads(good_run.command_file.read_text())
        write_json(run.command_file, {**command, **change})
        (run.path / "recipe.yaml").write_text((good_run.path / "recipe.yaml").read_text())
    with pytest.raises(RecipeError, match="cannot be replayed") as refused:
        replay.plan(run, tmp_path / "again")
    assert words in str(refused.value)


def test_a_replay_without_its_data_is_refused(good_run, tmp_path):
    run = create(tmp_path / "run", "quickstart/grpo", {})
    write_json(run.command_file, json.loads(good_run.command_file.read_text()))
    composed = params.compose("quickstart/grpo", [*inputs(tmp_path), f"data.train_files={tmp_path}/gone.parquet"])
    (run.path / "recipe.yaml").write_text(params.dump(composed.recipe))
    with pytest.raises(RecipeError, match=r"data\.train_files=.*gone\.parquet is not here"):
        replay.plan(run, tmp_path / "again")


@pytest.mark.parametrize("name", ["quickstart/grpo", "glm5_2/grpo_a3_512", "qwen3/grpo_235b_a22b_256k_vllm_a3_16nodes"])
def test_a_recorded_recipe_composes_to_itself_in_another_place(name, tmp_path):
    then = params.compose(name, run_dir="/runs/a b's", work=str(tmp_path)).recipe
    tree = params.to_dict(then)
    again = replay._compose(tree, {"recipe": name}, "/runs/a b's", "/new")
    assert again.name == name
    assert again.recipe == params.compose(name, run_dir="/new", work=str(tmp_path)).recipe
