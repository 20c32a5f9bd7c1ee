"""The registry of rules: what each looks at, what it says at worst, and whether it may end a run early.

A rule yields at least one judgement, so that a verdict never passes over anything in silence. Rules see plain numbers
(`Curves`), a whole run's or those of one that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from recipes.metrics.plain import Curves, Points, extreme, first_of, mean, means
from recipes.verdict.thresholds import Thresholds

if TYPE_CHECKING:
    from recipes.baseline import Baseline
    from recipes.exports import Exported

REWARD = "critic/rewards/mean"
ENTROPY = "actor/entropy"
GRAD = "actor/grad_norm"
PPO_KL = "actor/ppo_kl"
KL_LOSS = "actor/kl_loss"
DIFFERENCE = "training/rollout_probs_diff_mean"
LARGEST = "training/rollout_probs_diff_max"
VALID = "training/rollout_probs_diff_valid"
PEARSON = "training/rollout_actor_probs_pearson_corr"
WATCHED = (REWARD, ENTROPY, GRAD, "actor/pg_loss", PPO_KL, DIFFERENCE)
"""Every GRPO run with Megatron computes these; one that is missing fails."""

OF_THE_TRAINING = ("actor/", "critic/", "prompt_length/", "response", "rollout_corr/", "training/", "val-core/")
"""How keys begin of which no value may be other than finite: none is a time or a side of a validation."""

CLIPPED, ABORTED = "response_length/clip_ratio", "response/aborted_ratio"
ADVANTAGES = ("critic/advantages/max", "critic/advantages/min")

TURNS_ON = {
    DIFFERENCE: "rollout.log_probs=true",
    KL_LOSS: "algorithm.kl_loss_coef",
    "rollout_corr/kl": "rollout.log_probs=true",
    "rollout_corr/rollout_is_mean": "algorithm.rollout_correction.importance",
}
"""The key of a recipe that makes a metric appear; one that is not here is written by every training step."""

SHOWN = 5  # lines of metrics that could not be read; all of them would bury the judgements

ORDER = {"fail": 0, "warn": 1, "pass": 2, "info": 3}


@dataclass(frozen=True)
class Judgement:
    """The outcome of one rule: pass, warn, fail or info, the sentence with its numbers, and the first step it held.

    `source` says where the threshold comes from.
    """

    rule: str
    outcome: str
    sentence: str
    step: int | None = None
    source: str = ""

    def __str__(self) -> str:
        at = "" if self.step is None else f", first at step {self.step}"
        source = f" ({self.source})" if self.source and self.outcome in ("fail", "warn") else ""
        return f"{self.outcome:5} {self.rule}: {self.sentence}{at}{source}"


@dataclass(frozen=True)
class Told:
    """What the run was told that decides what must be there.

    Determinism, checkpoint.strict (None where verl has no such key), metrics to expect, and why others cannot be.
    """

    deterministic: bool = False
    strict: bool | None = None
    expected: tuple[str, ...] = ()
    impossible: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """What is judged. `state` is run.json, None for a bare file; `live` while the run goes on.

    `restarts`, `rounded` and `trainer` are those of recipes.metrics.Metrics; `ended` says what a bare log shows of a
    training that failed.
    """

    curves: Curves
    state: Mapping[str, Any] | None = None
    limits: Thresholds = field(default_factory=Thresholds)
    told: Told = field(default_factory=Told)
    broken: tuple[Any, ...] = ()
    unfinished: bool = False
    restarts: tuple[Any, ...] = ()
    rounded: frozenset[str] = frozenset()
    trainer: str = ""
    ended: str = ""
    logged: tuple[str, ...] = ()
    exported: Exported | None = None
    baseline: Baseline | None = None
    unmatched: str = ""
    hint: str = ""
    live: bool = False

    @cached_property
    def rewards(self) -> Points:
        """Means of the reward of five steps in a row, each at the step of its last."""
        return means(self.curves.points(REWARD))

    def never(self, *keys: str) -> tuple[str, str]:
        """(outcome, sentence) of metrics that are not there. Of another trainer it need not be a fault."""
        if self.trainer in ("", "verl"):
            words = [f"{key} ({TURNS_ON[key]} turns it on)" if key in TURNS_ON else key for key in keys]
            return "fail", f"never computed: {', '.join(words)}"
        return "warn", f"a log of {self.trainer} without {', '.join(keys)}: what these would show is not judged"


@dataclass(frozen=True)
class Rule:
    """A rule: its name, what it says at worst, whether `supervision.stop_on` may name it, and what it is for."""

    name: str
    worst: str
    stops: bool
    meaning: str
    function: Callable[[Subject], Iterator[tuple[Any, ...] | Judgement]]


RULES: dict[str, Rule] = {}


def rule(name: str, *, worst: str = "fail", stops: bool = False) -> Callable:
    """Register a function that yields (outcome, sentence, step, source), the last two optional, or Judgements."""

    def register(function: Callable) -> Callable:
        if name in RULES:
            raise ValueError(f"two rules are called {name}")
        RULES[name] = Rule(name, worst, stops, (function.__doc__ or "").strip().splitlines()[0], function)
        return function

    return register


# Of a rule whose metrics are not there. Whether they should be, and are missed, is for NAN and INCOMPLETE to say.
NOTHING = "nothing to judge: too few steps, or it was not computed"


def apply(one: Rule, subject: Subject) -> list[Judgement]:
    """The judgements of one rule."""
    found = [j if isinstance(j, Judgement) else Judgement(one.name, *j) for j in one.function(subject)]
    return found or [Judgement(one.name, "info", NOTHING)]


# ------------------------------------------------------------------------------------------------ the run as a whole


@rule("ENDED")
def _ended(s: Subject) -> Iterator[tuple]:
    """The training ended by itself, with exit code 0."""
    if s.state is None and s.ended:
        yield "fail", f"its log shows that the training failed: {s.ended}", None, "the log"
    elif s.state is None:
        yield "info", "how the training ended is not known from a file"
    elif s.state["state"] == "finished":
        yield "pass", "the training ended by itself with exit code 0"
    else:
        cause = f": {s.state['cause']}" if s.state.get("cause") else ""
        yield "fail", f"the run is {s.state['state']}{cause}", None, "run.json"


@rule("HANG", worst="warn")
def _hung(s: Subject) -> Iterator[tuple]:
    """No step took so long that the supervisor gave an alarm; a run that got over one is believed, and looked into."""
    alarms = (s.state or {}).get("alarms", ())
    for alarm in alarms:
        yield "warn", alarm["sentence"], None, "recipe, supervision"
    if not alarms and s.state is not None:
        yield "pass", "no alarm"


@rule("INCOMPLETE")
def _complete(s: Subject) -> Iterator[tuple]:
    """Every step from 1 to the last one asked for is in the metrics, and every line can be read."""
    steps = sorted(s.curves.trained)
    expected = (s.state or {}).get("steps")
    if not steps:
        yield "fail", f"there is not one training step in the metrics{s.hint}"
        return
    first = 1 if s.state is not None else steps[0]
    wanted = range(first, (expected or steps[-1]) + 1)
    gaps = sorted(set(wanted) - set(steps))
    if gaps:
        yield "fail", f"{len(gaps)} of {len(wanted)} steps are missing, the first is step {gaps[0]}", gaps[0]
    elif expected and steps[-1] > expected:
        yield "fail", f"the last step is {steps[-1]}, and {expected} were asked for", expected + 1
    else:
        words = f"all {len(steps)} steps are there"
        if s.state is None:
            words = f"steps {first} to {steps[-1]} have no gap; how many were asked for is not known from a file"
        elif not expected:
            words += "; the recipe counts epochs, so how many were due is not known"
        yield "pass" if s.state is not None else "info", words
    yield from _again(s, steps)
    for broken in s.broken[:SHOWN]:
        yield "warn", f"metrics, {broken}"
    if (more := len(s.broken) - SHOWN) > 0:
        yield "warn", f"metrics, {more} more lines or values that cannot be read; `recipes metrics` shows them"
    if s.unfinished:
        yield "warn", "the last line of the metrics is unfinished: its writer was cut off, or still writes"


def _again(s: Subject, steps: list[int]) -> Iterator[tuple]:
    """What to think of steps that go back: a resumption repeats a few, a second training begins anew."""
    if not s.restarts:
        return
    more = f", and {len(s.restarts) - 1} times more" if len(s.restarts) > 1 else ""
    words = f"metrics, {s.restarts[0]}{more}"
    anew = next((r for r in s.restarts if r.step <= steps[0]), None)
    if anew is not None or 4 * len(s.restarts) > len(steps):
        at = anew or s.restarts[0]
        yield "fail", f"{words}: more than one training is in it, and none can be judged; give each its own", at.step
    else:
        yield "warn", f"{words}: it was resumed, and the later values count", s.restarts[0].step


@rule("TOO FEW")
def _enough(s: Subject) -> Iterator[tuple]:
    """There are enough steps for trends to mean anything."""
    steps, least = len(s.curves.trained), s.limits.minimum_steps
    if steps < least:
        words = f"{steps} steps show no trend of reward, entropy or gradient; that takes {least}"
        yield "fail", words, None, s.limits.source("minimum_steps")
    else:
        yield "pass", f"{steps} steps show a trend", None, s.limits.source("minimum_steps")


@rule("NAN", stops=True)
def _finite(s: Subject) -> Iterator[tuple]:
    """Every watched value is there and finite, and no log says that a gradient was not."""
    found = False
    lost = {key: steps for key in sorted(s.curves.lost) if (steps := s.curves.nonfinite(key))}
    bad = [key for key in lost if key.startswith(OF_THE_TRAINING) or key in s.told.expected]
    for key in sorted(bad, key=lambda key: (key not in WATCHED, lost[key][0]))[:SHOWN]:
        found = True
        yield "fail", f"{key} is not finite at {_count(lost[key])}", lost[key][0]
    if len(bad) > SHOWN:
        yield "fail", f"nor are {len(bad) - SHOWN} more: {', '.join(bad[SHOWN:][:SHOWN])}"
    for key in [key for key in lost if key not in bad][:SHOWN]:
        yield "warn", f"{key} is not finite at {_count(lost[key])}; no rule reads it", lost[key][0]
    invalid = first_of(s.curves.points(VALID), lambda v: v == 0)
    if invalid is not None:
        found = True
        yield "fail", f"{VALID} is 0: no token of the rollout could be compared with the trainer", invalid
    for line in s.logged[:1]:
        found = True
        yield "fail", f"the log says {len(s.logged)} times that a value was not finite, first: {line}", None, "the log"
    missing = [] if s.live else [k for k in dict.fromkeys([*WATCHED, *s.told.expected]) if not s.curves.has(k)]
    for key in sorted(s.told.impossible.keys() & set(missing)):
        found = True
        yield "warn", f"{key} cannot be computed: {s.told.impossible[key]}"
    if absent := [key for key in missing if key not in s.told.impossible]:
        found = True
        yield s.never(*absent)
    holes = {k: h for k in WATCHED if k not in missing and (h := _holes(s, k))} if not s.live else {}
    for key, steps in holes.items():
        found = True
        yield "fail", f"{key} was not computed at {_count(steps)}", steps[0]
    if not found:
        yield "pass", "every value of the training is finite"


def _holes(s: Subject, key: str) -> list[int]:
    """Training steps at which a key has no value, finite or not."""
    return sorted(s.curves.trained - set(s.curves.values.get(key, ())) - s.curves.lost.get(key, set()))


# --------------------------------------------------------------------------------------------- trainer against rollout


@rule("MISMATCH", stops=True)
def _mismatch(s: Subject) -> Iterator[tuple]:
    """Trainer and rollout give the same tokens the same probabilities."""
    limits, points = s.limits, s.curves.points(DIFFERENCE)
    fail, warn = limits.probability_difference_fail, limits.probability_difference_warn
    if points:
        at, worst = extreme(points)
        words = f"trainer and rollout probabilities differ by {worst:.2g} at most (step {at})"
        if (step := first_of(points, lambda v: v > fail)) is not None:
            yield "fail", f"{words}, more than {fail:g}", step, limits.source("probability_difference_fail")
        elif (step := first_of(points, lambda v: v > warn)) is not None:
            yield "warn", f"{words}, more than {warn:g}", step, limits.source("probability_difference_warn")
        else:
            yield "pass", words, None, limits.source("probability_difference_warn")
    correlated = s.curves.points(PEARSON)
    if correlated:
        at, lowest = min(correlated, key=lambda point: point[1])
        if (step := first_of(correlated, lambda v: v < limits.pearson_fail)) is not None:
            words = f"the correlation of the two falls to {lowest:.4f}, below {limits.pearson_fail:g}"
            yield "fail", words, step, limits.source("pearson_fail")
        elif points:
            yield "pass", f"their correlation is {lowest:.5f} at least (step {at})", None, limits.source("pearson_fail")
    elif points and not s.live:
        yield "info", f"{PEARSON} was not computed, so their correlation is not known"


@rule("MISMATCH-JUMP", worst="warn")
def _jump(s: Subject) -> Iterator[tuple]:
    """The difference of trainer and rollout stays where it began."""
    limits, points = s.limits, s.curves.points(DIFFERENCE)
    if len(points) <= limits.jump_first:
        return
    usual = median(value for _, value in points[: limits.jump_first])
    bound = max(limits.jump_factor * usual, limits.jump_floor)
    later = points[limits.jump_first :]
    at, worst = extreme(later)
    if (step := first_of(later, lambda v: v > bound)) is not None:
        words = f"the probability difference jumps to {worst:.2g} (step {at}), more than {bound:.2g}"
        words += f"; the median of the first {limits.jump_first} steps is {usual:.2g}"
        yield "warn", words, step, limits.source("jump_factor", "jump_floor")
    else:
        yield (
            "pass",
            f"{worst:.2g} at most after a median of {usual:.2g} at the start",
            None,
            limits.source("jump_factor"),
        )


@rule("ROLLOUT CORRECTION")
def _correction(s: Subject) -> Iterator[tuple]:
    """The mismatch in log space, and what importance weights leave of the samples, are within bounds."""
    limits = s.limits
    looks = (
        ("rollout_corr/kl", "fail", lambda v: abs(v) > limits.rollout_kl_fail, "rollout_kl_fail", "|value| above"),
        ("rollout_corr/k3_kl", "warn", lambda v: v > limits.rollout_k3_warn, "rollout_k3_warn", "above"),
        ("rollout_corr/rollout_is_mean", "warn", lambda v: v < limits.importance_low, "importance_low", "below"),
        ("rollout_corr/rollout_is_mean", "warn", lambda v: v > limits.importance_high, "importance_high", "above"),
        (
            "rollout_corr/rollout_is_eff_sample_size",
            "warn",
            lambda v: v < limits.effective_samples,
            "effective_samples",
            "below",
        ),
    )
    seen, found = [], False
    for key, outcome, wrong, name, side in looks:
        points = s.curves.points(key)
        if points:
            seen.append(key)
        if (step := first_of(points, wrong)) is not None:
            found = True
            at, worst = extreme(points) if side != "below" else min(points, key=lambda p: p[1])
            words = f"{key} reaches {worst:.3g} (step {at}): {side} {getattr(limits, name):g}"
            yield outcome, words, step, limits.source(name)
    if not seen:
        yield "info", f"rollout_corr/kl was not computed ({TURNS_ON['rollout_corr/kl']} turns it on)"
    elif not found:
        yield (
            "pass",
            f"{len(dict.fromkeys(seen))} measures of the mismatch are within bounds",
            None,
            limits.source("rollout_kl_fail"),
        )


@rule("DETERMINISM")
def _determinism(s: Subject) -> Iterator[tuple]:
    """Where determinism was asked for, trainer and rollout agree bit by bit, or but for rounding."""
    if not s.told.deterministic:
        yield "info", "determinism was not asked for"
        return
    limits, points = s.limits, s.curves.points(DIFFERENCE)
    bound = limits.deterministic_difference
    if not points:
        yield "fail", f"determinism was asked for, and {DIFFERENCE} was not computed: nothing shows that it holds"
        return
    step = first_of(points, lambda v: v >= bound)
    at, worst = extreme(points)
    largest = s.curves.points(LARGEST)
    over = first_of(largest, lambda v: v >= limits.deterministic_largest)
    if over is not None:
        token = max(value for _, value in largest)
        words = f"determinism was asked for, and trainer and rollout differ by {token:.2g} in one token"
        words += f", not below {limits.deterministic_largest:g}"
        yield "fail", words, over, limits.source("deterministic_largest")
    if step is not None:
        words = f"determinism was asked for, and trainer and rollout differ by {worst:.2g} (step {at}), not below"
        yield "fail", f"{words} {bound:g}", step, limits.source("deterministic_difference")
    if over is not None or step is not None:
        return
    if worst == 0 and DIFFERENCE in s.rounded:
        yield "warn", f"{DIFFERENCE} is printed as 0.000 in a log that rounds: how large it is is not known"
    elif worst == 0 and len(largest) == len(points) and all(value == 0 for _, value in largest):
        yield "pass", f"bitwise: the probabilities of every sampled token are equal in all {len(points)} steps"
    elif worst == 0 and not any(value for _, value in largest):
        words = f"the mean difference is 0 in all {len(points)} steps; {LARGEST}, which would show that every token is"
        yield "pass", f"{words} equal, was computed in {len(largest)} of them"
    else:
        yield "pass", f"trainer and rollout differ by {worst:.2g} at most: rounding, but not bitwise"


# ---------------------------------------------------------------------------------------------------------- the update


@rule("ENTROPY COLLAPSE", stops=True)
def _collapse(s: Subject) -> Iterator[tuple]:
    """The policy still explores, or is sure because it solves the task."""
    limits, points = s.limits, s.curves.points(ENTROPY)
    if len(points) < limits.entropy_first:
        return
    start = mean(points[: limits.entropy_first])
    bound = limits.entropy_collapse * start
    steps = [first_of(points, lambda v: v < bound, limits.entropy_steps)]
    if start >= limits.entropy_floor:
        steps.append(first_of(points, lambda v: v < limits.entropy_floor))
    step = min((found for found in steps if found is not None), default=None)
    words = f"entropy from {start:.3g} at the start to {points[-1][1]:.3g}"
    source = limits.source("entropy_collapse", "entropy_floor")
    share = _solved(s)
    if share is not None and share >= limits.solved and (step is not None or start < limits.entropy_floor):
        yield "info", f"{words}, with {share:.0%} of the best reward: the task is solved", step
    elif step is not None:
        words += f", below {limits.entropy_collapse:g} of that for {limits.entropy_steps} steps, or below"
        yield "fail", f"{words} {limits.entropy_floor:g}, and the task is not solved", step, source
    elif start < limits.entropy_floor:
        words = f"entropy starts at {start:.3g}, below {limits.entropy_floor:g}: the policy hardly explores"
        yield "warn", words, points[0][0], source
    else:
        yield "pass", words, None, source


def _solved(s: Subject) -> float | None:
    """The latest five-step mean reward as a share of the best single reward of the run; None without such rewards."""
    best = max((v for _, v in s.curves.points("critic/rewards/max")), default=0.0)
    return s.rewards[-1][1] / best if s.rewards and best > 0 else None


@rule("ENTROPY EXPLOSION")
def _explosion(s: Subject) -> Iterator[tuple]:
    """The policy does not fall apart into noise."""
    limits, points = s.limits, s.curves.points(ENTROPY)
    if len(points) < limits.entropy_first:
        return
    start = mean(points[: limits.entropy_first])
    at, worst = extreme(points)
    bound, ceiling = limits.entropy_explosion * start, limits.entropy_ceiling
    steps = [first_of(points, lambda v: v > bound, limits.entropy_steps)]
    if start <= ceiling:
        steps.append(first_of(points, lambda v: v > ceiling))
    step = min((found for found in steps if found is not None), default=None)
    if step is not None:
        words = f"entropy rises from {start:.3g} at the start to {worst:.3g} (step {at}): more than"
        words += f" {limits.entropy_explosion:g} times that for {limits.entropy_steps} steps, or than {ceiling:g}"
        yield "fail", words, step, limits.source("entropy_explosion", "entropy_ceiling")
    elif start > ceiling:
        words = f"entropy starts at {start:.3g}, above {ceiling:g}: a random or untuned model, or a wrong chat template"
        yield "warn", words, points[0][0], limits.source("entropy_ceiling")
    else:
        yield "pass", f"{worst:.3g} at most (step {at})", None, limits.source("entropy_explosion", "entropy_ceiling")


@rule("KL BLOW-UP", stops=True)
def _update(s: Subject) -> Iterator[tuple]:
    """No update, and no drift from the reference policy, is too large."""
    limits = s.limits
    points = [(step, abs(value)) for step, value in s.curves.points(PPO_KL)]
    if points:
        at, worst = extreme(points)
        source = limits.source("ppo_kl_fail")
        if (step := first_of(points, lambda v: v > limits.ppo_kl_fail)) is not None:
            words = f"|ppo_kl| reaches {worst:.2g} (step {at}), more than {limits.ppo_kl_fail:g}"
            yield "fail", f"{words}: the updates are too large", step, source
        else:
            yield "pass", f"|ppo_kl| is {worst:.2g} at most (step {at})", None, source
    points = s.curves.points(KL_LOSS)
    if not points:
        return
    at, worst = extreme(points)
    over, blown = first_of(points, lambda v: v > limits.kl_loss_fail), _blown(points, limits)
    if over is not None:
        words = f"kl_loss reaches {worst:.2g} (step {at}), more than {limits.kl_loss_fail:g}"
        yield "fail", words, over, limits.source("kl_loss_fail")
    if blown is not None and (over is None or blown[0] < over):
        step, value, usual = blown
        words = f"kl_loss of {value:.2g} is more than {limits.kl_loss_factor:g} times the mean of the steps before"
        yield "fail", f"{words}, {usual:.2g}", step, limits.source("kl_loss_factor", "kl_loss_floor")
    if over is None and blown is None:
        yield "pass", f"kl_loss is {worst:.2g} at most (step {at})", None, limits.source("kl_loss_fail")


def _blown(points: Points, limits: Thresholds) -> tuple[int, float, float] | None:
    """The first step whose KL loss is many times the mean of those before, with both; five steps make a mean."""
    for i in range(5, len(points)):
        before = mean(points[max(0, i - limits.kl_loss_window) : i])
        step, value = points[i]
        if value > max(limits.kl_loss_factor * before, limits.kl_loss_floor):
            return step, value, before
    return None


@rule("GRAD", worst="warn")
def _gradient(s: Subject) -> Iterator[tuple]:
    """Gradients neither spike nor grow without end."""
    limits, points = s.limits, s.curves.points(GRAD)
    if len(points) < 6:
        return
    found = False
    for i in range(5, len(points)):
        usual = median(value for _, value in points[max(0, i - limits.grad_window) : i])
        step, value = points[i]
        if value > max(limits.grad_factor * usual, limits.grad_floor):
            found = True
            words = f"grad_norm of {value:.3g} is more than {limits.grad_factor:g} times the median before, {usual:.3g}"
            yield "warn", words, step, limits.source("grad_factor", "grad_floor")
            break
    smooth, rising = means(points), 0
    for (_, before), (step, value) in pairwise(smooth):
        rising = rising + 1 if value > before else 0
        if rising >= limits.grad_window:
            found = True
            words = f"the mean of grad_norm has risen for {limits.grad_window} steps, to {value:.3g}"
            yield "warn", words, step, limits.source("grad_window")
            break
    if not found:
        at, worst = extreme(points)
        yield "pass", f"grad_norm is {worst:.3g} at most (step {at})", None, limits.source("grad_factor")


# ------------------------------------------------------------------------------------------------ reward and responses


@rule("NO SIGNAL", stops=True)
def _signal(s: Subject) -> Iterator[tuple]:
    """Responses of a group differ in reward: GRPO learns from that difference alone."""
    largest, smallest = (dict(s.curves.points(key)) for key in ADVANTAGES)
    flat = [(step, max(abs(largest[step]), abs(smallest[step]))) for step in sorted(largest.keys() & smallest.keys())]
    if not flat:
        if not s.live:
            yield s.never(*ADVANTAGES)
        return
    step = first_of(flat, lambda v: v == 0, s.limits.no_signal_steps)
    if step is not None and not s.rounded.isdisjoint(ADVANTAGES):
        words = "advantages are printed as 0.000 in a log that rounds, so whether all are 0 is not known"
        yield "info", words, step
        step = None
    # With a KL penalty in the reward advantages differ where no score does: then only the penalty is learned.
    for stem in ("critic/score", "critic/rewards"):
        same = first_of(_spread(s, stem), lambda v: v == 0, s.limits.no_signal_steps)
        if same is not None and (step is None or same < step):
            value = s.curves.values[f"{stem}/max"][same]
            words = (
                f"{stem} is {value:g} for every response of {s.limits.no_signal_steps} steps: there is nothing to learn"
            )
            words += ", and the reward function may never match" if value == 0 else ""
            yield "fail", words, same, s.limits.source("no_signal_steps")
            return
    if step is None:
        yield "pass", "groups disagree, so there is a signal", None, s.limits.source("no_signal_steps")
        return
    words = f"all advantages are 0 for {s.limits.no_signal_steps} steps: every group agrees, there is nothing to learn"
    rewards = [s.curves.values.get(f"critic/rewards/{side}", {}).get(step) for side in ("min", "max")]
    if rewards == [0, 0]:
        words += "; every reward is 0, so the reward function may never match"
    yield "fail", words, step, s.limits.source("no_signal_steps")


def _spread(s: Subject, stem: str) -> Points:
    """The distance of the largest to the smallest of a step, where both were computed."""
    if not s.rounded.isdisjoint({f"{stem}/min", f"{stem}/max"}):
        return []
    low, high = s.curves.values.get(f"{stem}/min", {}), s.curves.values.get(f"{stem}/max", {})
    return [(step, high[step] - low[step]) for step in sorted(low.keys() & high.keys())]


@rule("REWARD COLLAPSE", stops=True)
def _reward(s: Subject) -> Iterator[tuple]:
    """The reward keeps what it has gained, but for what chance takes."""
    limits, found = s.limits, s.rewards
    if len(found) < 6:
        return
    first, last = found[0][1], found[-1][1]
    at, best = extreme(found, key=lambda v: v)
    words = (
        f"mean reward of five steps: {first:.2f} at the start, {best:.2f} at best (step {at}), {last:.2f} at the end"
    )
    # Shares are of what lies above the lowest reward there is: 0, or what a reward with negative values fell to.
    low = min([0.0, *(value for _, value in s.curves.points("critic/rewards/min"))])
    noise, source = _noise(s.curves.points(REWARD)), limits.source("reward_kept", "reward_noise")
    bound = min(low + limits.reward_kept * (best - low), best - limits.reward_noise * noise)
    # A run is not ended for one bad moment: judged at each of its steps, chance has many tries.
    recent = found[-limits.reward_steps :] if s.live else found[-1:]
    if best > low and all(step > at and value < bound for step, value in recent):
        fell = next(step for step, value in found if step > at and value < bound)
        kept = (
            f"less than {limits.reward_kept:g} of it"
            if low == 0
            else f"{(last - low) / (best - low):.2f} of it above {low:g}"
        )
        yield "fail", f"{words}, {kept}", fell, source
    elif last < first:
        yield "warn", f"{words}: it fell", None, source
    else:
        yield "pass", words, None, source


def _noise(points: Points) -> float:
    """The standard deviation of a mean of five steps in a row, as far as it is chance.

    Second differences leave a trend out; of values with the variance v each has the variance 6 v.
    """
    values = [value for _, value in points]
    twice = [before - 2 * value + after for before, value, after in zip(values, values[1:], values[2:], strict=False)]
    return math.sqrt(sum(d * d for d in twice) / len(twice) / 6 / 5) if twice else 0.0


@rule("PLATEAU", worst="info")
def _plateau(s: Subject) -> Iterator[tuple]:
    """How long the mean reward has not been better: a run may be done, or stuck."""
    found = s.rewards
    if not found:
        return
    at, best = extreme(found, key=lambda v: v)
    since = sum(step > at for step, _ in found)
    if since >= s.limits.plateau_steps:
        yield "info", f"the mean reward has not been better than {best:.2f} for {since} steps", at
    else:
        yield "info", f"no plateau: the best mean reward is {best:.2f}, {since} before the last step"


@rule("VALIDATION", worst="info")
def _validation(s: Subject) -> Iterator[tuple]:
    """How far validation came."""
    for key in s.curves.values:
        points = s.curves.points(key)
        if key.startswith("val-core/") and len(points) > 1:
            (first, before), (last, after) = points[0], points[-1]
            yield "info", f"{key}: {before:.2f} (step {first}) → {after:.2f} (step {last})"


@rule("LENGTH")
def _length(s: Subject) -> Iterator[tuple]:
    """Responses fit into their limit: what is cut has no answer, and trains the model on noise."""
    limits, found = s.limits, means(s.curves.points(CLIPPED))
    if not found:
        if not s.live and not s.curves.has(CLIPPED):
            yield s.never(CLIPPED)
        return
    rising = [(step, value) for (_, before), (step, value) in zip(found, found[5:], strict=False) if value > before]
    at, worst = extreme(found)
    words = f"{worst:.0%} of the responses are cut at the limit (five steps to step {at})"
    if (step := first_of(rising, lambda v: v > limits.clip_ratio_fail)) is not None:
        yield "fail", f"{words}, and the share rises", step, limits.source("clip_ratio_fail")
    elif (step := first_of(found, lambda v: v > limits.clip_ratio_all)) is not None:
        yield "fail", f"{words}: hardly one has room for its answer", step, limits.source("clip_ratio_all")
    elif (step := first_of(found, lambda v: v > limits.clip_ratio_warn)) is not None:
        yield "warn", words, step, limits.source("clip_ratio_warn")
    else:
        words = f"{worst:.0%} of the responses at most are cut at the limit (five steps to step {at})"
        yield "pass", words, None, limits.source("clip_ratio_warn")


@rule("ABORTED")
def _aborted(s: Subject) -> Iterator[tuple]:
    """The engine gives up on no response."""
    limits, points = s.limits, s.curves.points(ABORTED)
    if not points:
        if not s.live and not s.curves.has(ABORTED):
            yield s.never(ABORTED)
        return
    at, worst = extreme(points)
    words = f"{worst:.1%} of the responses were given up (step {at})"
    if (step := first_of(points, lambda v: v > limits.aborted_fail)) is not None:
        yield "fail", words, step, limits.source("aborted_fail")
    elif (step := first_of(points, lambda v: v > limits.aborted_warn)) is not None:
        yield "warn", words, step, limits.source("aborted_warn")
    else:
        yield "pass", f"{worst:.1%} at most were given up", None, limits.source("aborted_warn")


# --------------------------------------------------------------------------------------------- baselines and exports


@rule("BASELINE")
def _baseline(s: Subject) -> Iterator[tuple]:
    """Reward, agreement and memory are where earlier runs of this recipe, stack and hardware were."""
    if s.baseline is None:
        yield "info", s.unmatched or "there is no baseline to compare with"
        return
    yield "info", s.baseline.described()
    if s.unmatched and s.state is not None:
        yield "warn", s.unmatched
    for one in s.baseline.compare(s.curves):
        if not one.performance:
            yield one.outcome, one.sentence, one.step, s.baseline.label


@rule("PERF")
def _performance(s: Subject) -> Iterator[tuple]:
    """The run is as fast as earlier ones."""
    found = [one for one in s.baseline.compare(s.curves) if one.performance] if s.baseline else []
    for one in found:
        yield one.outcome, one.sentence, one.step, s.baseline.label if s.baseline else ""
    if not found:
        yield "info", "no baseline says how fast it should be"


@rule("EXPORT")
def _exports(s: Subject) -> Iterator[tuple]:
    """What was exported is the whole model (checkpoint.strict), and something was, if it was asked for."""
    source, exported = "safetensors indexes and headers", s.exported
    if exported is None or not (exported.due or exported.checks or exported.trouble):
        yield "info", "no export is due or there"
        return
    for path, check in exported.checks.items():
        words = f"{check.found} of {check.expected} tensors arrived in {path}"
        if s.told.strict is not None:
            words += f" with checkpoint.strict {str(s.told.strict).lower()}"
        worst = [f.sentence for f in check.findings if f.severity == "error"] or [f.sentence for f in check.findings]
        outcome = "fail" if not check.passed else "warn" if worst else "pass"
        yield outcome, ": ".join([words, *worst[:1]]), None, source
    for path, reason in exported.trouble.items():
        yield "warn", f"{path} could not be compared with its source: {reason}", None, source
    finished = (s.state or {}).get("state") == "finished"
    if exported.due and finished and not exported.checks and not exported.trouble:
        yield "fail", "checkpoint.contents asks for hf_model, and nothing was exported"


def _count(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the first is {steps[0]}"


STOPPABLE = tuple(name for name, one in RULES.items() if one.stops)
"""Rules that may end a run early (supervision.stop_on)."""
