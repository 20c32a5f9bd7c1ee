"""When a training is taken to hang, and what is said of it. The clock is the test's own; no training is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.run import hang, supervisor
from recipes.run.directory import create, write_json

PATIENCE = hang.Patience(factor=10.0, least=600.0, startup=7200.0)


@pytest.fixture
def follow(tmp_path):
    """A pace, and what writes a line of metrics for it."""
    file = tmp_path / "metrics.jsonl"

    def begin(patience: hang.Patience = PATIENCE):
        return hang.Pace(file, patience, began=100.0), lambda count=1: file.open("a").write("{}\n" * count)

    return begin


def test_no_first_step_is_a_hang_when_startup_is_over(follow):
    pace, _ = follow()
    assert pace.look(100.0 + 7200) == ""
    assert pace.look(100.0 + 7201) == "no first step after 7201 s (supervision.startup_minutes: 120)"


def test_a_hang_in_the_first_training_step_is_seen(follow):
    """verl's validation before it has written the first line; no median says how long a step takes."""
    pace, step = follow()
    step()
    assert pace.look(1000.0) == ""
    assert pace.look(1000.0 + 7200) == ""
    assert pace.look(1000.0 + 7201) == "no second step after 7201 s (supervision.startup_minutes: 120)"


def test_startup_without_a_limit_waits_for_ever(follow):
    pace, step = follow(hang.Patience(startup=None))
    assert pace.look(1e9) == ""
    step()
    assert pace.look(1e9) == ""
    assert pace.look(2e9) == ""


@pytest.mark.parametrize(("seconds", "limit"), [(10.0, 600.0), (300.0, 3000.0)])
def test_a_step_may_take_a_multiple_of_the_median_and_never_less_than_the_minimum(follow, seconds, limit):
    pace, step = follow()
    at = 500.0
    for _ in range(4):
        at += seconds
        step()
        assert pace.look(at) == ""
    assert (pace.median, pace.limit) == (seconds, limit)
    assert pace.look(at + limit) == ""
    silent = f"no step for {limit + 1:.0f} s; the median of the latest steps is {seconds:.1f} s"
    assert pace.look(at + limit + 1) == silent
    step()  # it goes on after all, and the alarm is over
    assert pace.look(at + limit + 2) == ""


def test_one_slow_step_does_not_move_the_limit(follow):
    pace, step = follow(hang.Patience(factor=10.0, least=0.0))
    for at in (10.0, 20.0, 30.0, 40.0, 100.0):  # four of ten seconds, one of a minute
        step()
        pace.look(100.0 + at)
    assert pace.limit == 100.0


def test_lines_that_come_at_once_share_the_time_and_half_a_line_is_none(follow, tmp_path):
    pace, step = follow()
    step()
    pace.look(110.0)
    step(2)
    pace.look(130.0)
    assert (pace.steps, pace.median) == (3, 10.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    pace.look(140.0)
    assert (pace.steps, pace.last) == (3, 130.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("}\n")
    pace.look(150.0)
    assert (pace.steps, pace.last) == (4, 150.0)


@pytest.mark.parametrize("where", ["local", "ray"])
def test_an_alarm_says_whose_stacks_it_has(tmp_path, where):
    """Of a job of a cluster only what waits for it runs here."""
    run = create(tmp_path / "run", "r", {"launch": where})
    write_json(run.attempt(1) / "command.json", {"argv": [], "environment": {}})
    owner = supervisor.Supervisor(run, 1)
    Path(owner.ray_folder).rmdir()
    sentence = owner._alarm("no step for 700 s", lines=3)
    assert sentence.startswith("no step for 700 s; the stacks of ")
    assert ("the ranks are on the cluster's nodes" in sentence) == (where == "ray")
    (alarm,) = json.loads(run.state_file.read_text())["alarms"]
    assert (alarm["sentence"], alarm["after_lines"]) == (sentence, 3)
