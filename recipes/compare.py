"""Runs and logs side by side: seeds as bands, on one axis, with what differs between their recipes.

    compare(["npu=train_npu.log", "gpu=train_gpu.log"])  → Comparison
    align(a, b)                                          → [Aligned]   step by step, and where two first part

Sources that differ in nothing but their seed are one group: its line is the mean over them, its band goes from the
lowest to the highest. Two sources alone are never a group: then the two are compared, also step by step.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipes import curves, differences, metrics
from recipes.errors import RecipeError
from recipes.metrics import Metrics
from recipes.params import SHORT_NAMES
from recipes.run.directory import Run, open_run
from recipes.series import number, ranges, series

AXES = {"step": None, "tokens": "perf/total_num_tokens", "time": "timing_s/step"}
"""How curves are laid over each other, and the key that is summed up for it: tokens of a step over all devices,
prompts included; seconds of a step, without what lies between two (start, resumptions)."""

MOST = 14  # groups a page can tell apart: seven colours, whole and broken lines

# --- what is compared ---


@dataclass(frozen=True)
class Source:
    """One run or log. `facts` are what a run recorded, empty for a log; `label` is what the user called it."""

    name: str
    path: Path
    metrics: Metrics
    run: Run | None = None
    facts: differences.Facts = field(default_factory=dict)
    label: str = ""

    @property
    def recipe(self) -> dict[str, Any]:
        return self.facts.get("recipe", {})

    @property
    def seed(self) -> Any:
        return self.recipe.get(SHORT_NAMES["seed"])


@dataclass(frozen=True)
class Group:
    """Sources that are repetitions of each other; often one alone."""

    name: str
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        if len(self.sources) == 1:
            return self.name
        seeds = [str(source.seed) for source in self.sources if source.seed is not None]
        told = f"seeds {', '.join(seeds)}" if len(set(seeds)) == len(self.sources) else f"{len(self.sources)} runs"
        return f"{self.name}: {told}; mean, band from lowest to highest"


def read(texts: Sequence[str | Path]) -> list[Source]:
    """Read sources: paths, or LABEL=PATH. The names of all are different.

    Raises RecipeError for a path that holds no metrics, or the same path twice.
    """
    given: list[tuple[str, Path]] = []
    for text in texts:
        label, cut, path = str(text).partition("=")
        named = cut and label and "/" not in label and not Path(text).exists()
        given.append((label, Path(path)) if named else ("", Path(text)))
    places = [path.resolve() for _, path in given]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise RecipeError(f"{given[i][1]} is given twice: a source compared with itself says nothing.")
    names = _names(given)
    return [_source(label, path, name) for (label, path), name in zip(given, names, strict=True)]


def _source(label: str, path: Path, name: str) -> Source:
    found = metrics.read(path)
    if found.state != "ok":
        raise RecipeError(f"{found} There is nothing to compare.")
    if not (path / "run.json").is_file():
        return Source(name, path, found, label=label)
    run = open_run(path)
    return Source(name, path, found, run, differences.of_run(run), label)


def _names(given: list[tuple[str, Path]]) -> list[str]:
    """The label, or as much of the end of a path as makes it differ from the others. Same labels get a number."""
    parts = [[label] if label else [p for p in path.absolute().parts if p != "/"] for label, path in given]
    names: list[str] = []
    for mine in parts:
        depth = 1
        while depth < len(mine) and sum(other[-depth:] == mine[-depth:] for other in parts) > 1:
            depth += 1
        name, again = "/".join(mine[-depth:]), 2
        while name in names:
            name, again = f"{'/'.join(mine[-depth:])} ({again})", again + 1
        names.append(name)
    return names


def group(sources: Sequence[Source]) -> list[Group]:
    """Sources of the same label, or runs of the same recipe and settings but for the seed, as one group each.

    Two sources are two groups. A log tells no settings: it is a group of its own, unless it has a label.
    """
    found: dict[str, list[Source]] = {}
    for i, source in enumerate(sources):
        key = f"alone {i}"
        if len(sources) > 2 and source.label:
            key = f"label {source.label}"
        elif len(sources) > 2 and source.recipe:
            told = {k: v for k, v in source.recipe.items() if k != SHORT_NAMES["seed"] and not k.startswith("(")}
            key = json.dumps(told, sort_keys=True, default=str)
        found.setdefault(key, []).append(source)
    if len(found) > MOST:
        raise RecipeError(f"{len(found)} groups cannot be told apart on one page: give {MOST} at most.")
    return _told_apart([Group(_group_name(members), tuple(members)) for members in found.values()])


def _told_apart(groups: list[Group]) -> list[Group]:
    """Groups of one name with the settings, three at most, that are not the same in all of them."""
    named = []
    for one in groups:
        same = [other.sources[0].recipe for other in groups if other.name == one.name]
        keys = {key for recipe in same for key in recipe if any(recipe[key] != r.get(key) for r in same)}
        mine = one.sources[0].recipe
        told = [f"{key}={mine.get(key)}" for key in sorted(keys - {"title", SHORT_NAMES["seed"]}) if key[0] != "("]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        words = f" with {', '.join(told[:3])}{more}" if len(same) > 1 and told else ""
        named.append(Group(f"{one.name}{words}", one.sources))
    return named


def _group_name(members: list[Source]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.name
    return first.label or str(first.recipe.get("recipe", first.name))


# --- one axis ---


def positions(source: Source, by: str) -> np.ndarray:
    """Where each row of a source's table lies on the axis `by`: its step, tokens so far, or seconds so far.

    Raises RecipeError for an unknown axis, or a source without the numbers for it.
    """
    if by not in AXES:
        raise RecipeError(f"--by {by!r} must be one of {', '.join(AXES)}.")
    table, key = source.metrics.table, AXES[by]
    if key is None:
        return table.index.to_numpy().astype(float)
    if key not in table or not table[key].notna().any():
        raise RecipeError(f"{source.path} cannot be laid over the others by {by}: it has no {key}. Use --by step.")
    return np.cumsum(np.nan_to_num(table[key].to_numpy()))


@dataclass(frozen=True)
class Line:
    """A group's curve: the mean of its sources at `x`, and the lowest and highest of them (equal for one alone).

    `sources` is how many have this key. A band ends where the first of them ends.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sources: int
    nonfinite: tuple[int, ...] = ()


def line(one: Group, key: str, by: str = "step") -> Line | None:
    """The curve of a group, None if none of its sources has the key.

    By tokens or time the places of seeds differ: each is drawn on between its own places, at the places of all, so
    that no spike is lost.
    """
    points, lost = [], set()
    for source in one.sources:
        s = series(source.metrics, key)
        lost |= set(s.nonfinite)
        if len(s.steps):
            rows = source.metrics.table.index.get_indexer(s.steps)
            points.append((positions(source, by)[rows], s.values))
    if not points:
        return None
    if len(points) == 1:
        [(x, y)] = points
        return Line(x, y, y, y, 1, tuple(sorted(lost)) if by == "step" else ())
    if by == "step":
        x = points[0][0]
        for other, _ in points[1:]:
            x = np.intersect1d(x, other)
        values = np.array([y[np.isin(at, x)] for at, y in points])
    else:
        first, last = max(at[0] for at, _ in points), min(at[-1] for at, _ in points)
        x = np.unique(np.concatenate([at for at, _ in points]))
        x = x[(x >= first) & (x <= last)]
        values = np.array([np.interp(x, at, y) for at, y in points])
    if not len(x):
        return None
    return Line(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(points))


# --- the table ---

REWARD = ("critic/rewards/mean", "critic/score/mean")
SHOWN = (
    *REWARD,
    "training/rollout_probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr",
    "rollout_corr/kl",
    "actor/entropy",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/grad_norm",
    "response_length/mean",
    "response_length/clip_ratio",
    "timing_s/step",
    "perf/throughput",
    "actor/perf/max_memory_allocated_gb",
)
LAST = 5  # steps in a mean at the end: one step's reward is mostly noise


@dataclass(frozen=True)
class Value:
    """One key of one group up to where all end: the mean of its last five values, and of all. Of validation, the last.

    `low` and `high` are the last values of the sources that are farthest apart.
    """

    last: float
    mean: float
    low: float
    high: float
    sources: int


@dataclass(frozen=True)
class Row:
    """One key: a value for each group, None where it was not recorded."""

    key: str
    values: tuple[Value | None, ...]

    def difference(self, i: int) -> tuple[float, float] | None:
        """Last value of group `i` less that of the first: absolute, and as a share of the first (nan of 0)."""
        first, other = self.values[0], self.values[i]
        if first is None or other is None:
            return None
        delta = other.last - first.last
        return delta, delta / abs(first.last) if first.last else math.nan

    def apart(self, i: int) -> bool | None:
        """Whether no source of group `i` reaches any of the first; None unless both have two sources or more."""
        first, other = self.values[0], self.values[i]
        if first is None or other is None or min(first.sources, other.sources) < 2:
            return None
        return other.low > first.high or other.high < first.low


def validation_keys(sources: Iterable[Source], limit: int | None = 1) -> list[str]:
    """The val-core keys most sources have, means (`mean@k`) first."""
    count: dict[str, int] = {}
    for source in sources:
        for key in curves.validation_keys(source.metrics, limit=None):
            count[key] = count.get(key, 0) + 1
    return sorted(count, key=lambda key: (-count[key], "/mean@" not in key))[:limit]


def table(groups: Sequence[Group], by: str = "step") -> tuple[list[Row], float]:
    """(rows of the keys that somebody recorded, the place up to which all were compared: where the shortest ends)."""
    sources = [source for one in groups for source in one.sources]
    end = min(float(positions(source, by)[-1]) for source in sources)
    keys = [*SHOWN[:2], *validation_keys(sources, limit=3), *SHOWN[2:]]
    rows = [Row(key, tuple(_value(one, key, by, end) for one in groups)) for key in keys]
    if any(value for row in rows[:1] for value in row.values):
        rows = [row for row in rows if row.key != REWARD[1]]  # the score is the reward before KL: told once
    return [row for row in rows if any(row.values)], end


def _value(one: Group, key: str, by: str, end: float) -> Value | None:
    lasts, means = [], []
    for source in one.sources:
        s = series(source.metrics, key)
        at = positions(source, by)[source.metrics.table.index.get_indexer(s.steps)]
        values = s.values[at <= end]
        if len(values):
            lasts.append(float(values[-1 if key.startswith("val-") else -LAST :].mean()))
            means.append(float(values.mean()))
    if not lasts:
        return None
    return Value(float(np.mean(lasts)), float(np.mean(means)), min(lasts), max(lasts), len(lasts))


# --- step by step ---

ALIGNED = (
    *REWARD,
    "rollout_corr/rollout_log_ppl",
    "rollout_corr/training_log_ppl",
    "rollout_corr/kl",
    "training/rollout_probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_loss",
)
"""Rewards, and what log-probabilities decide. *_log_ppl is the mean negative log-probability of a token, as the rollout
and as the trainer sees it."""
EQUAL = 1e-6
"""Relative difference up to which two numbers are the same: float32 rounds at 6e-8, and a mean of many sums it up."""
NOISE = 5.0
"""Standard deviations of a mean difference. Judged at each of two thousand steps, one pair of runs in a thousand whose
steps differ by chance alone goes beyond; real quickstarts of other seeds stay below 3, broken ones reach 7 to 13."""
TIMES = 5
WHY = {
    "given": "given: by --tolerance",
    "noise": f"noise: {NOISE:g} standard deviations of such a mean, as the calmer source varies from step to step",
    "rounding": f"rounding: {EQUAL:g} of the largest value, where a source hardly varies",
    "few": "few: fewer than 6 steps in common show no noise, and nothing is judged; --tolerance sets one",
}
"""Where a tolerance comes from."""
_CHANGES = 5  # changes from step to step that a deviation can be estimated from


@dataclass(frozen=True)
class Aligned:
    """One key at the steps both have it. A value that was not finite is NaN, and its delta infinite.

    `tolerance` is None where none could be told, and `why`, a word of WHY, is where it comes from. `unequal` is the
    first step whose values differ at all (EQUAL), `diverged` the first of `times` steps in a row that differ by more
    than `tolerance`; where the tolerance comes of noise, of steps whose mean difference does, the largest left out.
    """

    key: str
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    tolerance: float | None
    why: str
    times: int
    unequal: int | None
    diverged: int | None

    @property
    def delta(self) -> np.ndarray:
        """b less a, infinite where one of them is not finite and the other is."""
        gone_a, gone_b = np.isnan(self.a), np.isnan(self.b)
        return np.where(gone_a & gone_b, 0.0, np.where(gone_a | gone_b, np.inf, self.b - self.a))

    @property
    def relative(self) -> np.ndarray:
        """The delta as a share of a; NaN where a is 0 or not finite."""
        size = np.where((self.a == 0) | np.isnan(self.a), np.nan, np.abs(self.a))
        return self.delta / size

    @property
    def largest(self) -> tuple[int, float]:
        """(step, delta) of the largest."""
        i = int(np.argmax(np.abs(self.delta)))
        return int(self.steps[i]), float(self.delta[i])

    def rows(self, limit: int | None = None) -> list[tuple[int, float, float, float, float]]:
        """(step, a, b, delta, relative), all, or `limit`: spread over the run, and those around the divergence."""
        chosen = np.arange(len(self.steps))
        if limit is not None and len(chosen) > limit:
            near = []
            if (at := self.diverged if self.diverged is not None else self.unequal) is not None:
                i = int(np.searchsorted(self.steps, at))
                near = range(max(0, i - 2), min(len(chosen), i + self.times + 1))
            spread = np.linspace(0, len(chosen) - 1, max(2, limit - len(near))).round().astype(int)
            chosen = np.union1d(spread, np.array(near, dtype=int))
        columns = (self.steps, self.a, self.b, self.delta, self.relative)
        return [(int(self.steps[i]), *(float(column[i]) for column in columns[1:])) for i in chosen]  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        step, delta = self.largest
        return {
            "key": self.key,
            "steps": len(self.steps),
            "first_unequal": self.unequal,
            "first_divergence": self.diverged,
            "tolerance": self.tolerance,
            "tolerance_source": WHY[self.why],
            "in_a_row": self.times,
            "largest": {"step": step, "delta": _plain(delta)},
            "rows": [
                dict(zip(("step", "a", "b", "delta", "relative"), (s, *map(_plain, rest)), strict=True))
                for s, *rest in self.rows()
            ],
        }


def align(
    a: Source, b: Source, *, keys: Sequence[str] = ALIGNED, tolerance: float | None = None, times: int = TIMES
) -> list[Aligned]:
    """Compare two sources step by step, key by key; keys that not both have are left out.

    `tolerance` is absolute. Without one the mean difference of `times` steps in a row is judged, the largest of them
    left out, so that no outlier parts two runs: by NOISE standard deviations of such a mean, or EQUAL of the values'
    size, if that is more. What a step is by chance is taken from the calmer source, whichever is named first: the noise
    of one that has gone astray would hide it.
    """
    found = []
    for key in keys:
        left, right = _recorded(a.metrics, key), _recorded(b.metrics, key)
        steps = np.array(sorted(left.keys() & right.keys()), dtype=int)
        if not len(steps):
            continue
        x, y = (np.array([side[step] for step in steps.tolist()]) for side in (left, right))
        allowed, why = (tolerance, "given") if tolerance is not None else _tolerance(x, y, times)
        one = Aligned(key, steps, x, y, allowed, why, times, None, None)
        size = np.fmax(np.abs(x), np.abs(y))
        delta = np.abs(one.delta)
        different = delta > EQUAL * np.nan_to_num(size)
        unequal = int(steps[np.argmax(different)]) if different.any() else None
        if allowed is None:
            diverged = None
        elif why == "noise":
            diverged = _on_the_whole(steps, one.delta, allowed, times)
        else:
            diverged = _in_a_row(steps, delta > allowed, times)
        found.append(Aligned(key, steps, x, y, allowed, why, times, unequal, diverged))
    return found


def _recorded(found: Metrics, key: str) -> dict[int, float]:
    s = series(found, key)
    return dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) | dict.fromkeys(s.nonfinite, math.nan)


def _tolerance(a: np.ndarray, b: np.ndarray, times: int) -> tuple[float | None, str]:
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if len(a) <= _CHANGES:
        return None, "few"
    floor = EQUAL * float(max(np.abs(a).max(), np.abs(b).max()))
    deviation = math.sqrt(2) * min(_deviation(a), _deviation(b))
    tolerance = NOISE * deviation / math.sqrt(times)
    return (tolerance, "noise") if tolerance > floor else (floor, "rounding")


def _deviation(values: np.ndarray) -> float:
    """The standard deviation of a step by chance.

    Second differences leave a trend out; those of values with the variance v have the variance 6 v. Their median size x
    1.4826 is the standard deviation of a normal distribution, and minds no outlier.
    """
    return 1.4826 * float(np.median(np.abs(np.diff(values, 2)))) / math.sqrt(6)


def _on_the_whole(steps: np.ndarray, delta: np.ndarray, tolerance: float, times: int) -> int | None:
    """The first step beyond the tolerance of the first `times` in a row whose mean is, the largest left out."""
    for i in range(len(steps) - times + 1):
        window = delta[i : i + times]
        rest = np.delete(window, np.argmax(np.abs(window))) if times > 1 else window
        if abs(rest.mean()) > tolerance:
            return int(steps[i + int(np.argmax(np.abs(window) > tolerance))])
    return None


def _in_a_row(steps: np.ndarray, wrong: np.ndarray, times: int) -> int | None:
    row = 0
    for i, one in enumerate(wrong.tolist()):
        row = row + 1 if one else 0
        if row >= times:
            return int(steps[i - times + 1])
    return None


def sampling(a: Source, b: Source) -> list[str]:
    """What may be expected of two sources step by step: whether they saw the same prompts and could sample the same."""
    said = []
    if a.recipe and b.recipe:
        if a.seed != b.seed or a.seed is None:
            seeds = f"The seeds differ ({a.seed}, {b.seed})" if a.seed != b.seed else "No seed was set"
            said.append(
                f"{seeds}: prompts come in another order and every response is sampled anew, so that values of one "
                "step are not meant to be equal. Compare the curves over many steps, or the means of several seeds."
            )
        elif not all(_deterministic(source) for source in (a, b)):
            said.append(
                "The seed is the same, but rollout.full_determinism is not on for both: at the first token that comes "
                "out differently, sampling goes another way, and later steps are not meant to be equal."
            )
    else:
        said.append(
            "A log does not tell its seed. With different seeds values of one step are not meant to be equal; with the "
            "same one they are until the first token that is sampled differently."
        )
    prompts = align(a, b, keys=("prompt_length/mean",), tolerance=0.0, times=1)
    if prompts and prompts[0].unequal is None:
        said.append(f"The mean prompt length is equal at all {len(prompts[0].steps)} steps: both saw the same prompts.")
    elif prompts:
        said.append(
            f"The mean prompt length differs from step {prompts[0].unequal} on: from there they did not see the same "
            "prompts, and step by step nothing can be compared."
        )
    left, right = ({int(s) for s in one.metrics.table.index} for one in (a, b))
    for one, only in ((a, sorted(left - right)), (b, sorted(right - left))):
        if only:
            said.append(f"Only {one.name} has step {ranges(only)}.")
    return said


def _deterministic(source: Source) -> bool:
    told = source.facts.get("verl configuration", {})
    return told.get("actor_rollout_ref.rollout.full_determinism") is True


# --- all of it ---


@dataclass(frozen=True)
class Comparison:
    """Everything about several sources. `alignment` and `notes` are empty unless there are two."""

    groups: tuple[Group, ...]
    by: str
    rows: tuple[Row, ...]
    end: float
    """the place on the axis up to which `rows` compare"""
    recipes: tuple[tuple[str, list[differences.Part]], ...]
    """for each group after the first that recorded one: its name and what differs from the first"""
    alignment: tuple[Aligned, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Source]:
        return [source for one in self.groups for source in one.sources]

    @property
    def shortest(self) -> Source:
        return min(self.sources, key=lambda source: float(positions(source, self.by)[-1]))

    @property
    def letters(self) -> list[str]:
        return [chr(ord("A") + i) for i in range(len(self.groups))]

    def legend(self) -> list[tuple[str, str]]:
        """(letter, what it stands for) of each group."""
        return [(letter, str(one)) for letter, one in zip(self.letters, self.groups, strict=True)]

    def header(self) -> list[str]:
        first, *others = self.letters
        return ["", first, *(cell for letter in others for cell in (letter, f"{letter} − {first}"))]

    def cells(self) -> list[list[str]]:
        """The table as text: last value and, in brackets, the mean of all; then the difference to the first group."""
        told = []
        for row in self.rows:
            line, digits = [row.key], 6 if row.key.endswith("pearson_corr") else 3
            for i, value in enumerate(row.values):
                line.append("–" if value is None else f"{number(value.last, digits)} ({number(value.mean, digits)})")
                if i:
                    line.append(_difference(row, i))
            told.append(line)
        return told

    def caption(self) -> str:
        """What the numbers of the table are."""
        where = {"step": f"step {self.end:.0f}", "tokens": f"{self.end:,.0f} tokens", "time": f"{self.end:,.0f} s"}
        return (
            f"Up to {where[self.by]}, where {self.shortest.name} ends, the first of them: mean of the last {LAST} "
            "steps (of validation the last value), in brackets of all."
        )

    def aligned(self) -> tuple[list[str], list[list[str]]]:
        """(header, rows) of the alignment, a row a key."""
        head = ["", "steps", "first unequal", "first divergence", "largest delta", "tolerance"]
        body = []
        for one in self.alignment:
            step, delta = one.largest
            allowed = "–" if one.tolerance is None else number(one.tolerance, 2)
            parted = "none" if one.diverged is None else f"step {one.diverged}"
            body.append(
                [
                    one.key,
                    str(len(one.steps)),
                    "none" if one.unequal is None else f"step {one.unequal}",
                    "not judged" if one.tolerance is None else parted,
                    f"{_shown(delta)} at step {step}",
                    f"{allowed}, {one.why}",
                ]
            )
        return head, body

    def parting(self) -> str:
        """What counts as a divergence, and where the tolerances come from."""
        reasons = dict.fromkeys(WHY[one.why] for one in self.alignment)
        times = max(one.times for one in self.alignment)
        row = f"{times} steps in a row that differ" if times > 1 else "a step that differs"
        words = f"A divergence is {row} by more than the tolerance"
        if "noise" in {one.why for one in self.alignment} and times > 1:
            words += ": where it comes of noise, on the mean, the largest difference left out"
        return f"{words}. Tolerances: {'; '.join(reasons)}."

    def alignment_shown(self) -> list[Aligned]:
        """What is worth its rows: the reward, and the first of the log-probabilities."""
        reward = [one for one in self.alignment if one.key in REWARD][:1]
        return reward + [one for one in self.alignment if one.key not in REWARD][:1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "by": self.by,
            "end": self.end,
            "groups": [
                {
                    "letter": letter,
                    "name": one.name,
                    "sources": [{"name": s.name, "path": str(s.path), "seed": s.seed} for s in one.sources],
                }
                for letter, one in zip(self.letters, self.groups, strict=True)
            ],
            "metrics": {row.key: [_value_dict(row, i) for i in range(len(row.values))] for row in self.rows},
            "recipes": {name: differences.to_dict(parts) for name, parts in self.recipes},
            "alignment": [one.to_dict() for one in self.alignment],
            "notes": list(self.notes),
        }


def compare(
    texts: Sequence[str | Path], *, by: str = "step", tolerance: float | None = None, times: int = TIMES
) -> Comparison:
    """Compare two or more sources, each a path or LABEL=PATH.

    Raises RecipeError for fewer than two, one that cannot be read, or an axis it has no numbers for.
    """
    if len(texts) < 2:
        raise RecipeError("A comparison needs two runs or logs at least.")
    if by not in AXES:
        raise RecipeError(f"--by {by!r} must be one of {', '.join(AXES)}.")
    sources = read(texts)
    groups = group(sources)
    rows, end = table(groups, by)
    base, recipes = groups[0].sources[0], []
    for i, one in enumerate(groups[1:], 1):
        if base.facts and one.sources[0].facts:
            recipes.append((chr(ord("A") + i), differences.compare(base.facts, one.sources[0].facts)))
    alignment, notes = [], []
    if len(sources) == 2:
        alignment = align(*sources, tolerance=tolerance, times=times)
        notes = sampling(*sources)
    if missing := [one.name for one in groups if not one.sources[0].facts]:
        notes.append(f"A log tells nothing of its recipe; not compared there: {', '.join(missing)}.")
    if bad := [f"{s.name}: {len(s.metrics.broken)}" for s in sources if s.metrics.broken]:
        notes.append(f"Places that could not be read ({'; '.join(bad)}) are left out; `recipes metrics` lists them.")
    if lost := [s.name for s in sources if s.metrics.nonfinite]:
        notes.append(f"Values that are not finite are in no mean here; they are in {', '.join(lost)}.")
    return Comparison(tuple(groups), by, tuple(rows), end, tuple(recipes), tuple(alignment), tuple(notes))


def curves_csv(found: Comparison) -> str:
    """Every curve of the table as CSV, long: letter, key, place on the axis, mean, lowest, highest, sources."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "key", found.by, "mean", "low", "high", "sources"])
    for letter, one in zip(found.letters, found.groups, strict=True):
        for row in found.rows:
            if curve := line(one, row.key, found.by):
                for x, *values in zip(curve.x, curve.mean, curve.low, curve.high, strict=True):
                    writer.writerow([letter, row.key, f"{x:.10g}", *(repr(float(v)) for v in values), curve.sources])
    return text.getvalue()


def alignment_csv(found: Comparison) -> str:
    """The alignment as CSV: key, step, a, b, delta, relative, and whether the delta exceeds the tolerance."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["key", "step", "a", "b", "delta", "relative", "exceeds"])
    for one in found.alignment:
        for step, *values in one.rows():
            exceeds = "" if one.tolerance is None else int(abs(values[2]) > one.tolerance)
            writer.writerow([one.key, step, *map(repr, values), exceeds])
    return text.getvalue()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def row_text(row: Sequence[float]) -> list[str]:
    """A row of an alignment as text."""
    step, a, b, delta, relative = row
    share = "–" if not math.isfinite(relative) else f"{relative:+.1%}".replace("-", "−")
    return [str(step), *(_shown(v, 5) for v in (a, b)), _shown(delta), share]


def _shown(value: float, digits: int = 3) -> str:
    return number(value, digits) if math.isfinite(value) else "not finite"


def _difference(row: Row, i: int) -> str:
    if (found := row.difference(i)) is None:
        return "–"
    delta, share = found
    words = ("+" if delta > 0 else "") + number(delta)
    # A share says nothing of numbers that go through zero.
    same_sign = all(v is not None and v.last > 0 for v in (row.values[0], row.values[i]))
    if same_sign and 0.005 <= abs(share) < 10:
        words += f" ({share:+.0%})".replace("-", "−")
    return words + {True: " apart", False: " overlap", None: ""}[row.apart(i)]


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _value_dict(row: Row, i: int) -> dict[str, Any] | None:
    value, found = row.values[i], row.difference(i)
    if value is None:
        return None
    told = {"last": value.last, "mean": value.mean, "low": value.low, "high": value.high, "sources": value.sources}
    if i and found:
        told |= {"difference": found[0], "relative": _plain(found[1]), "apart": row.apart(i)}
    return told
