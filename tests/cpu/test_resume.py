"""A resumed run goes on as if it had never ended: the same numbers, bit for bit, as the run it was cut from."""

import json
import shutil

import pytest

from recipes import metrics
from recipes.run import launch, resume
from recipes.run.checkpoints import TRACKER

pytestmark = pytest.mark.slow

SAME = ("critic/rewards/mean", "actor/grad_norm", "actor/entropy", "response_length/mean", "actor/pg_loss")


def test_a_resumed_run_makes_the_steps_of_the_uninterrupted_one(train, tmp_path, monkeypatch):
    """Step 3 needs weights, data order and random states from the checkpoint; step 4 also Adam's moments and count."""
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    whole = train(
        "cpu/qwen3", "steps=4", "seed=1", "checkpoint.save_freq=2", "checkpoint.contents=[model,optimizer,extra]"
    )
    assert whole.state["state"] == "finished", whole.log[-4000:]
    checkpoints = whole.folder / "checkpoints"
    shutil.rmtree(checkpoints / "global_step_4")
    (checkpoints / TRACKER).write_text("2")

    planned = resume.plan(launch.Run(whole.folder))
    assert (planned.attempt, planned.point.step, planned.reached, planned.changes) == (2, 2, 4, ())
    run = resume.resume(planned, deadline_seconds=600)
    state = launch.wait(run)
    assert state["state"] == "finished", run.log(2).read_text()[-4000:]
    again = [json.loads(line) for line in run.metrics(2).read_text().splitlines()]
    assert [line["step"] for line in again] == [3, 4]
    for line, before in zip(again, whole.metrics[2:], strict=True):
        assert {key: line["data"][key] for key in SAME} == {key: before[key] for key in SAME}
    assert metrics.of_run(run.path).attempts == {1: 1, 2: 1, 3: 2, 4: 2}
