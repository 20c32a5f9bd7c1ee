"""Metrics → verdict: a few rules that say whether a run may be believed, each with its number and its source.

"Reward up and no NaN" is not enough: a public run once passed that gate with a mean probability difference of 0.81.
Whatever is missing or not finite fails; nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recipes.exports import Exported
from recipes.metrics import Metrics

# Mean |trainer probability - rollout probability| of the sampled tokens: verl's FAQ calls < 0.005 normal and > 0.01 a
# problem; healthy mixture-of-experts runs sit near 0.0056, so the lower bound only warns.
PROBABILITY_DIFFERENCE_WARN, PROBABILITY_DIFFERENCE_FAIL = 0.005, 0.01
# Both log-prob streams describe the same tokens, so they must agree almost perfectly; Ascend runs show 0.997 and more.
PEARSON_FAIL = 0.98
# |KL| between consecutive updates: 1e-6 to 1e-4 is normal in published runs; 0.1 is our choice of a bound.
PPO_KL_FAIL = 0.1
# A run keeps at least this share of its best five-step mean reward; our choice. A quickstart that learned well ended at
# 0.99 of its best; one with ten times the learning rate at 0.69.
REWARD_KEPT = 0.75

DIFFERENCE = "training/rollout_probs_diff_mean"
PEARSON = "training/rollout_actor_probs_pearson_corr"
WATCHED = ("critic/rewards/mean", "actor/entropy", "actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", DIFFERENCE)

ORDER = {"fail": 0, "warn": 1, "pass": 2, "info": 3}


@dataclass(frozen=True)
class Judgement:
    """The outcome of one rule: pass, warn, fail or info, the sentence with its numbers, and the first step it held."""

    rule: str
    outcome: str
    sentence: str
    step: int | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:5} {self.rule}: {self.sentence}"


@dataclass(frozen=True)
class Verdict:
    """All judgements of a run. `passed` is false as soon as one rule fails."""

    judgements: tuple[Judgement, ...]

    @property
    def passed(self) -> bool:
        return all(j.outcome != "fail" for j in self.judgements)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "judgements": [asdict(j) for j in self.judgements]}


def judge(metrics: Metrics, state: Mapping[str, Any], exported: Exported | None = None) -> Verdict:
    """Judge a run by its metrics, its state (run.json: `state`, `cause`, `steps`) and what it exported, if anything."""
    rules = (_ended, _hung, _complete, _finite, _agreement, _update, _signal, _reward, _validation)
    found = [j for rule in rules for j in rule(metrics, state)]
    found += _exported(exported, state) if exported else []
    return Verdict(tuple(sorted(found, key=lambda j: ORDER[j.outcome])))


def _ended(_: Metrics, state: Mapping[str, Any]) -> Iterator[Judgement]:
    if state["state"] == "finished":
        yield Judgement("ENDED", "pass", "the training ended by itself with exit code 0", source="run.json")
    else:
        words = f"the run is {state['state']}" + (f": {state['cause']}" if state.get("cause") else "")
        yield Judgement("ENDED", "fail", words, source="run.json")


def _hung(_: Metrics, state: Mapping[str, Any]) -> Iterator[Judgement]:
    """An alarm of the supervisor that the run got over: it is believed, and looked into."""
    for alarm in state.get("alarms", ()):
        yield Judgement("HANG", "warn", alarm["sentence"], source="recipe, supervision")


def _complete(metrics: Metrics, state: Mapping[str, Any]) -> Iterator[Judgement]:
    steps = [int(s) for s in metrics.table.index if s > 0]
    expected = state.get("steps")
    if not steps:
        yield Judgement("INCOMPLETE", "fail", "there is not one training step in the metrics")
        return
    gaps = sorted(set(range(1, (expected or steps[-1]) + 1)) - set(steps))
    if gaps:
        words = f"{len(gaps)} of {expected or steps[-1]} steps are missing, the first is step {gaps[0]}"
        yield Judgement("INCOMPLETE", "fail", words, gaps[0])
    else:
        yield Judgement("INCOMPLETE", "pass", f"all {len(steps)} steps are there")
    for broken in metrics.broken:
        yield Judgement("INCOMPLETE", "warn", f"metrics file, {broken}")


def _finite(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    missing = [key for key in WATCHED if key not in metrics.table]
    bad = {key: steps[0] for key, steps in metrics.nonfinite.items() if key in WATCHED}
    for key, step in bad.items():
        yield Judgement("NAN", "fail", f"{key} is not finite", step)
    if missing:
        yield Judgement("NAN", "fail", f"never computed: {', '.join(missing)}")
    if not bad and not missing:
        yield Judgement("NAN", "pass", "every watched value is finite")


def _agreement(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    source = "verl FAQ on training and rollout"
    if DIFFERENCE in metrics.table:
        values = metrics.table[DIFFERENCE].dropna()
        if len(values):
            worst, step = float(values.max()), int(values.idxmax())
            over = values[values > PROBABILITY_DIFFERENCE_FAIL]
            words = f"trainer and rollout probabilities differ by {worst:.2g} at most (step {step})"
            if len(over):
                words += f", more than {PROBABILITY_DIFFERENCE_FAIL}"
                yield Judgement("MISMATCH", "fail", words, int(over.index[0]), source)
            else:
                outcome = "warn" if worst > PROBABILITY_DIFFERENCE_WARN else "pass"
                yield Judgement("MISMATCH", outcome, words, source=source)
    if PEARSON in metrics.table:
        values = metrics.table[PEARSON].dropna()
        low = values[values < PEARSON_FAIL]
        if len(low):
            words = f"Pearson correlation of the two falls to {float(values.min()):.4f}, below {PEARSON_FAIL}"
            yield Judgement("MISMATCH", "fail", words, int(low.index[0]), source)


def _update(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    if "actor/ppo_kl" not in metrics.table:
        return
    values = metrics.table["actor/ppo_kl"].dropna().abs()
    over = values[values > PPO_KL_FAIL]
    if len(over):
        words = f"|ppo_kl| reaches {float(values.max()):.2g}, more than {PPO_KL_FAIL}: the updates are too large"
        yield Judgement("KL BLOW-UP", "fail", words, int(over.index[0]), "our choice")
    elif len(values):
        yield Judgement("KL BLOW-UP", "pass", f"|ppo_kl| stays below {float(values.max()):.2g}", source="our choice")


def _signal(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    """GRPO learns from differences inside a group: all advantages 0 for two steps, and there is nothing to learn."""
    keys = [k for k in ("critic/advantages/max", "critic/advantages/min") if k in metrics.table]
    if len(keys) < 2:
        return
    flat = (metrics.table[keys].dropna().abs() == 0).all(axis=1)
    twice = flat & flat.shift(1, fill_value=False)
    if twice.any():
        words = "all advantages are 0 for two steps: every group agrees, there is nothing to learn from"
        yield Judgement("NO SIGNAL", "fail", words, int(twice.idxmax()))
    else:
        yield Judgement("NO SIGNAL", "pass", "groups disagree, so there is a signal")


def _reward(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    if "critic/rewards/mean" not in metrics.table:
        return
    values = metrics.table["critic/rewards/mean"].dropna()
    if len(values) >= 10:
        means = values.rolling(5).mean().dropna()
        first, best, last = float(means.iloc[0]), float(means.max()), float(means.iloc[-1])
        words = f"mean reward of five steps: {first:.2f} at the start, {best:.2f} at best, {last:.2f} at the end"
        if last < REWARD_KEPT * best:
            yield Judgement("REWARD COLLAPSE", "fail", words, int(means.idxmax()), "our choice")
        else:
            yield Judgement("REWARD", "warn" if last < first else "info", words)


def _validation(metrics: Metrics, _: Mapping[str, Any]) -> Iterator[Judgement]:
    for key in metrics.table:
        if key.startswith("val-core/"):
            values = metrics.table[key].dropna()
            if len(values) > 1:
                words = f"{key}: {float(values.iloc[0]):.2f} (step {values.index[0]}) → {float(values.iloc[-1]):.2f}"
                yield Judgement("VALIDATION", "info", f"{words} (step {values.index[-1]})")


def _exported(exported: Exported, state: Mapping[str, Any]) -> Iterator[Judgement]:
    source = "safetensors indexes and headers"
    for path, check in exported.checks.items():
        words = f"{check.found} of {check.expected} tensors arrived in {path}"
        worst = [f.sentence for f in check.findings if f.severity == "error"] or [f.sentence for f in check.findings]
        outcome = "fail" if not check.passed else "warn" if worst else "pass"
        yield Judgement("EXPORT", outcome, ": ".join([words, *worst[:1]]), source=source)
    for path, reason in exported.trouble.items():
        yield Judgement("EXPORT", "warn", f"{path} could not be compared with its source: {reason}", source=source)
    if exported.due and state["state"] == "finished" and not exported.checks and not exported.trouble:
        yield Judgement("EXPORT", "fail", "checkpoint.contents asks for hf_model, and nothing was exported")
