"""A verdict: missing, non-finite or too few is a failure, never a skip; each judgement says its number."""

from __future__ import annotations

import json

import pytest

from recipes import metrics, verdict

FINISHED = {"state": "finished", "cause": "", "steps": 12}


def healthy(step: int) -> dict:
    """One step as verl logs it, with numbers of a healthy quickstart run."""
    return {
        "critic/rewards/mean": 0.4 + 0.04 * step,
        "critic/advantages/max": 1.6,
        "critic/advantages/min": -1.2,
        "actor/entropy": 0.3,
        "actor/grad_norm": 1.0,
        "actor/pg_loss": 0.01,
        "actor/ppo_kl": 1e-4,
        "training/rollout_probs_diff_mean": 1e-4,
        "training/rollout_actor_probs_pearson_corr": 0.9999,
    }


def judge(tmp_path, rows: dict[int, dict], state=FINISHED):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in rows.items()))
    return verdict.judge(metrics.read_jsonl(path), state)


def outcomes(found, rule):
    return [j.outcome for j in found.judgements if j.rule == rule]


def run(**changes) -> dict[int, dict]:
    """Twelve healthy steps; `changes` map a step (as s3) to what is different there (None: the step is missing)."""
    rows = {s: healthy(s) for s in range(1, 13)}
    for name, change in changes.items():
        step = int(name[1:])
        if change is None:
            del rows[step]
        else:
            rows[step] |= change
    return rows


def test_a_healthy_run_passes(tmp_path):
    found = judge(tmp_path, run())
    assert found.passed
    assert {j.outcome for j in found.judgements} == {"pass", "info"}


@pytest.mark.parametrize(
    ("changes", "rule", "step"),
    [
        ({"s5": {"actor/grad_norm": None}}, "NAN", 5),
        ({"s4": None}, "INCOMPLETE", 4),
        ({"s12": None}, "INCOMPLETE", 12),
        ({"s3": {"training/rollout_probs_diff_mean": 0.81}}, "MISMATCH", 3),
        ({"s6": {"training/rollout_actor_probs_pearson_corr": 0.9}}, "MISMATCH", 6),
        ({"s7": {"actor/ppo_kl": -0.5}}, "KL BLOW-UP", 7),
        (
            {s: {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0} for s in ("s8", "s9")},
            "NO SIGNAL",
            9,
        ),
    ],
)
def test_a_fault_fails_with_the_first_step_it_held_at(tmp_path, changes, rule, step):
    found = judge(tmp_path, run(**changes))
    assert not found.passed
    failed = [j for j in found.judgements if j.outcome == "fail"]
    assert [(j.rule, j.step) for j in failed] == [(rule, step)]
    assert failed[0] == found.judgements[0]  # the worst comes first


def test_one_flat_step_is_no_lack_of_signal(tmp_path):
    assert judge(tmp_path, run(s8={"critic/advantages/max": 0.0, "critic/advantages/min": 0.0})).passed


def test_a_difference_between_normal_and_problem_only_warns(tmp_path):
    """Healthy mixture-of-experts runs sit near 0.0056."""
    found = judge(tmp_path, run(s3={"training/rollout_probs_diff_mean": 0.0056}))
    assert found.passed
    assert outcomes(found, "MISMATCH") == ["warn"]


def test_a_metric_that_was_never_computed_fails(tmp_path):
    rows = {s: {k: v for k, v in d.items() if "probs_diff" not in k} for s, d in run().items()}
    found = judge(tmp_path, rows)
    assert [j.sentence for j in found.judgements if j.outcome == "fail"] == [
        "never computed: training/rollout_probs_diff_mean (rollout.log_probs=true turns it on)"
    ]


def test_no_metrics_at_all_fail(tmp_path):
    assert not judge(tmp_path, {}).passed


@pytest.mark.parametrize("state", ["failed", "stopped", "lost", "running"])
def test_a_run_that_did_not_finish_fails_however_good_its_curve(tmp_path, state):
    found = judge(tmp_path, run(), {"state": state, "cause": "exit code 1: ValueError: x", "steps": 12})
    assert outcomes(found, "ENDED") == ["fail"]
    assert "ValueError: x" in found.judgements[0].sentence


def with_rewards(*rewards):
    return {s: healthy(s) | {"critic/rewards/mean": r} for s, r in enumerate(rewards, 1)}


def test_a_falling_reward_is_said(tmp_path):
    rows = with_rewards(*[0.6] * 6, *[0.5] * 6)
    assert outcomes(judge(tmp_path, rows), "REWARD COLLAPSE") == ["warn"]


def test_a_reward_that_falls_far_from_its_best_fails(tmp_path):
    """The rewards of a real quickstart run with ten times the learning rate: up within four steps, then down again."""
    broken = (0.375, 0.656, 0.719, 0.906, 0.656, 0.578, 0.828, 0.562, 0.422, 0.625, 0.766, 0.578, 0.469, 0.281, 0.328)
    found = judge(tmp_path, with_rewards(*broken), FINISHED | {"steps": 15})
    assert not found.passed
    failed = next(j for j in found.judgements if j.outcome == "fail")
    assert failed.rule == "REWARD COLLAPSE"
    assert "0.48 at the end" in failed.sentence


def test_a_verdict_is_plain_data(tmp_path):
    found = judge(tmp_path, run()).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["passed"] is True
