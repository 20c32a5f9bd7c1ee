"""Early stop, where a recipe asks for it: the run is ended by the rule that failed, and says so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import notebook, params, schema, verdict
from recipes.command import build
from recipes.errors import RecipeError
from recipes.run import launch, processes
from recipes.run.directory import read_state, update_state
from recipes.verdict import early

CHILDREN = Path(__file__).parent / "children"
FLAT = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}


@pytest.fixture
def start(tmp_path):
    """Starts the stand-in trainer with `stop_on` and numbers that each step logs; ends what is left."""
    runs = []

    def begin(stop_on: str, numbers: dict, step: float, *more: str):
        changes = [f"supervision.stop_on={stop_on}", *more]
        composed = params.compose("quickstart/grpo", changes, run_dir=str(tmp_path / "run"))
        command = build(composed)
        told = {"PYTHONPATH": str(CHILDREN), "TRAINER": "train", "TRAINER_DATA": json.dumps(numbers)}
        told["TRAINER_STEP_SECONDS"] = str(step)
        command = dataclasses.replace(command, entry="trainer", environment={**command.environment, **told})
        runs.append(launch.start(composed, command))
        return runs[-1]

    yield begin
    for run in runs:
        with contextlib.suppress(RecipeError):
            launch.stop(run)


def test_a_rule_that_fails_ends_the_run_and_is_its_cause(start):
    run = start("NO SIGNAL", FLAT | {"critic/rewards/min": 0.0, "critic/rewards/max": 0.0}, step=0.5)
    state = launch.wait(run, timeout=40)
    assert state["state"] == "failed"
    assert state["cause"].startswith("stopped early: NO SIGNAL: all advantages are 0 for 2 steps")
    assert "the reward function may never match" in state["cause"]
    assert "at step 2" in state["cause"]
    assert len(run.metrics().read_text().splitlines()) < 30
    assert processes.of_run(state["id"]) == []


def test_the_recipe_s_own_thresholds_decide_when_a_rule_fails_and_what_the_verdict_says(start):
    flat = FLAT | {"critic/rewards/min": 0.0, "critic/rewards/max": 0.0}
    run = start("NO SIGNAL", flat, 0.2, "supervision.thresholds=[no_signal_steps=4, minimum_steps=3]")
    state = launch.wait(run, timeout=40)
    assert "NO SIGNAL: all advantages are 0 for 4 steps" in state["cause"]
    assert notebook.judge(run).verdict.thresholds.changed() == {"no_signal_steps": 4, "minimum_steps": 3}
    again = notebook.judge(run, thresholds=["minimum_steps=7"]).verdict.thresholds.changed()
    assert again == {"no_signal_steps": 4, "minimum_steps": 7}


def test_a_threshold_nobody_knows_is_refused_before_anything_starts(tmp_path):
    given = {"recipe": "quickstart/grpo", "overrides": ["supervision.thresholds=[no_signal=4]"]}
    with pytest.raises(RecipeError, match=r"supervision.thresholds 'no_signal=4'.*did you mean no_signal_steps"):
        notebook.resolve(given | {"run_dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_a_rule_that_was_not_asked_for_ends_nothing(start):
    run = start("NAN,MISMATCH", FLAT, step=0.05)
    state = launch.wait(run, timeout=60)
    assert (state["state"], state["cause"]) == ("finished", "")
    assert len(run.metrics().read_text().splitlines()) == 30


def test_a_watch_that_breaks_is_put_on_record_and_costs_no_training(start, monkeypatch):
    written = launch.write_down

    def no_such_rule(run, *rest):
        update_state(run, stop_on=["NO SUCH RULE"])
        return written(run, *rest)

    monkeypatch.setattr(launch, "write_down", no_such_rule)
    run = start("NAN", FLAT, step=0.5)
    limit = time.monotonic() + 60
    while not (alarms := read_state(run).get("alarms")):
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert [alarm["sentence"] for alarm in alarms] == [
        "the watch of supervision.stop_on ended by itself (2): no rule ends the run any more"
    ]
    steps = len(run.metrics().read_text().splitlines())
    while len(run.metrics().read_text().splitlines()) < steps + 2:
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert read_state(run)["state"] == "running"


def test_the_recipe_names_the_rules_that_may_stop_a_run():
    assert schema.STOP_ON == verdict.STOPPABLE
    with pytest.raises(RecipeError, match=r"supervision.stop_on=.*must be one of NAN.*did you mean MISMATCH"):
        params.compose("quickstart/grpo", ["supervision.stop_on=[MISMATC]"])


def test_by_default_no_run_is_stopped_early():
    assert params.compose("quickstart/grpo").recipe.supervision.stop_on == []


def line(step: int, **data) -> bytes:
    return json.dumps({"step": step, "data": data}).encode() + b"\n"


def test_the_watch_reads_what_is_new_and_starts_over_with_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    watch = early.Watch(path, ["MISMATCH"])
    assert watch.look() is None  # not there yet
    key = "training/rollout_probs_diff_mean"
    path.write_bytes(line(1, **{key: 0.001}) + b'{"step": 2, "da')
    assert watch.look() is None
    path.write_bytes(line(1, **{key: 0.001}))  # a restart, which erases the file
    assert watch.look() is None
    with path.open("ab") as file:
        file.write(b"not json\n" + line(2, **{key: 0.002})[:-9])
    assert watch.look() is None
    with path.open("ab") as file:
        file.write(line(2, **{key: 0.002})[-9:] + line(3, **{key: 0.5}))
    found = watch.look()
    assert (found.rule, found.step) == ("MISMATCH", 3)


@pytest.mark.parametrize("bad", [None, "NaN", [1]])
def test_the_watch_takes_anything_but_a_number_for_not_finite(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1, **{"actor/grad_norm": 1.0}) + line(2, **{"actor/grad_norm": bad}))
    found = early.Watch(path, ["NAN"]).look()
    assert (found.rule, found.step, found.sentence) == ("NAN", 2, "actor/grad_norm is not finite at step 2")


def test_a_metric_that_has_not_come_yet_stops_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(0, **{"val-core/x": 0.1}) + line(1, **{"critic/rewards/mean": 0.1}))
    assert early.Watch(path, verdict.STOPPABLE).look() is None


def test_the_watch_is_small_beside_a_training():
    code = (
        "import sys, recipes.verdict.early;"
        "print([m for m in ('numpy', 'pandas', 'torch', 'omegaconf') if m in sys.modules]);"
        "import psutil; print(psutil.Process().memory_info().rss)"
    )
    words = [sys.executable, "-c", code]
    loaded, resident = subprocess.run(words, capture_output=True, text=True, env=os.environ).stdout.splitlines()
    assert loaded == "[]"
    assert int(resident) < 50e6
