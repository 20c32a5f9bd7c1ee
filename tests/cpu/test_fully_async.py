"""verl's fully asynchronous entry for real: a rank trains while a replica generates, and weights go from one to the
other by verl's checkpoint engine, over gloo.
"""

import math

import pytest

from recipes import metrics

pytestmark = pytest.mark.slow


def test_the_replica_samples_from_the_policy_that_is_trained_after_every_weight_sync(train, tmp_path, monkeypatch):
    """No sample may be stale here, so each was drawn from the newest weights: the two agree to rounding, although the
    policy moves by much more than that from sync to sync. A replica left behind would show.
    """
    monkeypatch.setenv("RECIPES_WORK", str(tmp_path / "work"))
    changes = ("staleness=0", "sync_every=1", "rollout_steps=16")
    run = train("cpu/qwen3_async", "learning_rate=1e-3", *(f"fully_async.{change}" for change in changes))
    assert (run.state["state"], run.state["steps"]) == ("finished", 4), run.log[-4000:]
    table = metrics.read(run.folder).table
    assert list(table.index) == [0, 1, 2, 3, 4]  # weight syncs; the first is made before anything is trained
    # verl logs an update with the sync after it, so the last one's numbers are lost
    trained = table.loc[2:, ["training/rollout_probs_diff_mean", "actor/entropy", "actor/grad_norm"]]
    assert all(math.isfinite(value) for value in trained.to_numpy().ravel())
    assert trained["training/rollout_probs_diff_mean"].max() < 1e-5
    assert trained["actor/entropy"].diff().abs().iloc[1:].min() > 1e-3
    assert list(table["fully_async/count/current_param_version"].loc[2:]) == [0, 1, 2]
    assert table["fully_async/count/stale_trajectory_processed"].max() == 0
    assert table["fully_async/static/max_required_samples"].max() == 4
