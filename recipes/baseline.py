"""Metrics of several runs → a baseline: for each metric a band in which the next run of the same recipe should be.

A file under params/baselines/<recipe>/<stack>-<hardware>.yaml. Its key is recipe, stack, hardware and number of
devices; it says which runs it was made from, at which commits, and when. A band may be open on one side: then nothing
that is better fails. Warm-up steps are left out, and a value that is missing or not finite fails.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from recipes import params
from recipes.errors import RecipeError
from recipes.metrics.plain import Curves

STATISTICS = ("mean", "median", "last")
FEWEST_RUNS = 3
WARMUP = 3

# 0.995 quantile of Student's t by degrees of freedom: one more run falls outside a side of the band once in 200.
_T = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)

RULE = (
    "mean ± t·s·√(1 + 1/n), the 99 % prediction interval of one more run from n, t of Student with n − 1 degrees of"
    " freedom; not narrower than the tolerance of the metric"
)


@dataclass(frozen=True)
class Tolerance:
    """How a metric is summed up, which side of its band is worse, and how narrow the band may be.

    `tail`: only the last so many steps. `relative` and `absolute` (in the metric's unit) are the least half-width.
    """

    statistic: str
    worse: str  # above, below or both
    tail: int | None = None
    relative: float = 0.0
    absolute: float = 0.0
    performance: bool = False


# Reward, memory, throughput and step time: the tolerances of verl's Ascend nightly. The others are our choice.
METRICS: dict[str, Tolerance] = {
    "critic/rewards/mean": Tolerance("mean", "below", tail=5, absolute=0.05),
    "val-core/": Tolerance("last", "below", absolute=0.05),
    "training/rollout_probs_diff_mean": Tolerance("mean", "above", relative=0.25, absolute=1e-6),
    "training/rollout_actor_probs_pearson_corr": Tolerance("mean", "below", absolute=0.002),
    "actor/entropy": Tolerance("mean", "both", tail=5, absolute=0.05),
    "actor/grad_norm": Tolerance("median", "above", relative=0.5),
    "response_length/mean": Tolerance("mean", "both", tail=5, relative=0.1),
    "timing_s/step": Tolerance("median", "above", relative=0.05, performance=True),
    "perf/throughput": Tolerance("median", "below", relative=0.05, performance=True),
    "actor/perf/max_memory_allocated_gb": Tolerance("last", "above", absolute=1.0, performance=True),
}


@dataclass(frozen=True)
class Band:
    """Where a metric should be: its statistic over steps `first` to `last`, both included, between `low` and `high`.

    A side that is None is open. `middle` is what the runs measured on average.
    """

    key: str
    statistic: str
    first: int
    last: int
    middle: float
    low: float | None
    high: float | None
    performance: bool = False

    def measure(self, curves: Curves) -> float:
        """The statistic of a run. Raises ValueError, with a sentence, for a value that is missing or not finite."""
        lost = [step for step in curves.nonfinite(self.key) if self.first <= step <= self.last]
        if lost:
            raise ValueError(f"{self.key} is not finite at step {lost[0]}")
        values = {step: v for step, v in curves.points(self.key) if self.first <= step <= self.last}
        if self.statistic == "last":
            if self.last not in values:
                raise ValueError(f"{self.key} has no value at step {self.last}")
            return values[self.last]
        missing = self.last - self.first + 1 - len(values)
        if missing:
            raise ValueError(f"{self.key} has no value at {missing} of the steps {self.first} to {self.last}")
        return (fmean if self.statistic == "mean" else median)(values.values())

    def words(self) -> str:
        """The band as words: at least, at most, or between."""
        if self.low is None:
            return f"at most {self.high:.6g}"
        return f"at least {self.low:.6g}" if self.high is None else f"{self.low:.6g} to {self.high:.6g}"

    def over(self) -> str:
        """Which statistic of which steps, as words."""
        if self.statistic == "last":
            return f"at step {self.last}"
        return f"{self.statistic} of steps {self.first} to {self.last}"


@dataclass(frozen=True)
class Compared:
    """A metric of a run against its band: pass or fail, in a sentence, with the step where its window begins."""

    key: str
    outcome: str
    sentence: str
    value: float | None
    step: int | None
    performance: bool


@dataclass(frozen=True)
class Baseline:
    """Bands of one recipe on one stack and one kind of hardware, and where they come from."""

    recipe: str
    stack: str
    hardware: str
    devices: int
    made: datetime.date
    bands: tuple[Band, ...]
    runs: tuple[Mapping[str, Any], ...] = ()
    published: str = ""
    commit: str = ""
    rule: str = ""
    notes: tuple[str, ...] = ()
    path: Path | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """Where the bands come from, as a few words."""
        return f"baseline of {self.made}, commit {self.commit[:12] or 'unknown'}"

    @property
    def steps(self) -> int:
        """The fewest steps a run must have."""
        return max(band.last for band in self.bands)

    def age(self, today: datetime.date | None = None) -> int:
        """Days since it was made."""
        return ((today or datetime.datetime.now().astimezone().date()) - self.made).days

    def described(self) -> str:
        """What it is, how old, and whether this workbook measured it, as a sentence."""
        origin = f"of {len(self.runs)} runs here" if not self.published else f"published elsewhere ({self.published})"
        words = f"compared with {self.label}, {self.age()} days old, {origin}: {self.recipe} on {self.devices} devices"
        return f"{words} of {self.hardware}, stack {self.stack}"

    def compare(self, curves: Curves) -> list[Compared]:
        """Every band against a run. What is missing, not finite, or not there yet fails; a short run, as a whole."""
        last = max(curves.trained, default=0)
        if last < self.steps:
            words = f"the run has {last} steps, and the baseline is of runs of {self.steps}: nothing can be compared"
            return [Compared("steps", "fail", words, None, None, performance=False)]
        return [self._compared(band, curves) for band in self.bands]

    def _compared(self, band: Band, curves: Curves) -> Compared:
        try:
            value = band.measure(curves)
        except ValueError as fault:
            return Compared(band.key, "fail", str(fault), None, None, band.performance)
        good = (band.low is None or value >= band.low) and (band.high is None or value <= band.high)
        words = f"{band.key} is {value:.6g} ({band.over()})"
        words += f", {'within the band' if good else 'not'} {band.words()}; the baseline has {band.middle:.6g}"
        return Compared(
            band.key, "pass" if good else "fail", words, value, None if good else band.first, band.performance
        )


# ------------------------------------------------------------------------------------------------------------- making


@dataclass(frozen=True)
class Sample:
    """One run that a baseline is made from: its curves, and what is known of it (recipe.yaml, run.json, provenance)."""

    curves: Curves
    recipe: str
    stack: str
    hardware: str
    devices: int
    about: Mapping[str, Any]


def sample(path: str | Path) -> Sample:
    """Read one run. Raises RecipeError when there is none, or it did not finish."""
    from recipes import metrics
    from recipes.run.directory import open_run, read_state

    run = open_run(path)
    state = read_state(run)
    if state["state"] != "finished":
        raise RecipeError(f"{path}: the run is {state['state']}, and a baseline is made from finished runs.")
    told = key_of(run.path)
    curves = Curves.of(metrics.of_run(run.path))
    provenance = _json(run.path / "provenance.json")
    about = {
        "run": state["id"],
        "date": state["created"][:10],
        "seed": told["seed"],
        "steps": len(curves.trained),
        "commit": (provenance.get("repositories", {}).get("workbook") or {}).get("commit", ""),
        "verl": provenance.get("packages", {}).get("verl") or _json(run.command_file).get("verl", ""),
    }
    return Sample(curves, state["recipe"], told["stack"], told["hardware"], told["devices"], about)


def key_of(folder: Path) -> dict[str, Any]:
    """Stack, hardware, number of devices and seed of a run, from its recipe.yaml. Raises RecipeError without one."""
    import yaml

    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        a_node = recipe["devices"] or params.hardware_facts(recipe["hardware"]).devices_per_node
        seed = recipe["trainer"]["seed"]
        return {
            "stack": recipe["stack"],
            "hardware": recipe["hardware"],
            "devices": recipe["nodes"] * a_node,
            "seed": seed,
        }
    except (OSError, yaml.YAMLError, KeyError, TypeError) as fault:
        raise RecipeError(f"{folder / 'recipe.yaml'} does not tell stack, hardware and devices: {fault}.") from fault


def make(samples: Sequence[Sample], *, warmup: int = WARMUP, today: datetime.date | None = None) -> Baseline:
    """A baseline from runs of the same recipe, stack and hardware with as many steps, `warmup` steps left out.

    A metric is in it if every run has it. On a processor there is no band of time, throughput or memory: a CPU is not
    one kind of hardware. Raises RecipeError for fewer than three runs, for runs that do not belong together, and for a
    run whose values are missing or not finite.
    """
    if len(samples) < FEWEST_RUNS:
        raise RecipeError(f"A baseline takes {FEWEST_RUNS} runs or more to know a spread; {len(samples)} were given.")
    for name in ("recipe", "stack", "hardware", "devices"):
        found = sorted({str(getattr(s, name)) for s in samples})
        if len(found) > 1:
            raise RecipeError(f"The runs do not belong together: {name} is {' and '.join(found)}.")
    steps = sorted({max(s.curves.trained, default=0) for s in samples})
    if len(steps) > 1:
        raise RecipeError(f"The runs have {' and '.join(map(str, steps))} steps: a baseline takes runs of one length.")
    for name, words in (("run", "is given twice"), ("seed", "has been run twice: that is no spread")):
        values = [s.about.get(name) for s in samples]
        twice = [v for v in values if v is not None and values.count(v) > 1]
        if twice:
            raise RecipeError(f"{name} {twice[0]} {words}.")
    for i, one in enumerate(samples):
        for other in samples[:i]:
            if one.curves.values == other.curves.values:
                names = f"{other.about.get('run')} and {one.about.get('run')}"
                raise RecipeError(f"The runs {names} have the same values at every step: a copy is no spread.")
    if not 0 <= warmup < steps[0]:
        raise RecipeError(f"--warmup {warmup} leaves nothing of {steps[0]} steps.")
    first = samples[0]
    bands = [b for key in _keys(samples) if (b := _band(key, samples, warmup + 1, steps[0], first.hardware != "cpu"))]
    commits = sorted({s.about.get("commit") or "" for s in samples})
    return Baseline(
        recipe=first.recipe,
        stack=first.stack,
        hardware=first.hardware,
        devices=first.devices,
        made=today or datetime.datetime.now().astimezone().date(),
        bands=tuple(bands),
        runs=tuple(dict(s.about) for s in samples),
        commit=commits[0] if len(commits) == 1 else "",
        rule=RULE,
    )


def _keys(samples: Sequence[Sample]) -> list[str]:
    found = [key for key in samples[0].curves.values if all(s.curves.has(key) for s in samples)]
    return [key for name in METRICS for key in found if key == name or (name.endswith("/") and key.startswith(name))]


def _band(key: str, samples: Sequence[Sample], first: int, last: int, timed: bool) -> Band | None:
    tolerance = METRICS[next(name for name in METRICS if key.startswith(name))]
    if tolerance.performance and not timed:
        return None
    if tolerance.statistic == "last":
        shared = set.intersection(*(set(s.curves.values.get(key, ())) for s in samples))
        first = last = max(shared, default=last)
    elif tolerance.tail:
        first = max(first, last - tolerance.tail + 1)
    whole = Band(key, tolerance.statistic, first, last, 0.0, None, None, tolerance.performance)
    try:
        values = [whole.measure(s.curves) for s in samples]
    except ValueError as fault:
        raise RecipeError(f"No baseline can be made from these runs: {fault}.") from fault
    middle = fmean(values)
    half = max(_reach(values), tolerance.relative * abs(middle), tolerance.absolute)
    bottom = middle - half
    if bottom <= 0 < min(values):
        # A band that begins at or below 0 would hold whatever a positive quantity falls to: its logarithm has a spread.
        logs = [math.log(value) for value in values]
        bottom = math.exp(fmean(logs) - _reach(logs))
    low = None if tolerance.worse == "above" else _rounded(bottom)
    high = None if tolerance.worse == "below" else _rounded(middle + half)
    return dataclasses.replace(whole, middle=_rounded(middle), low=low, high=high)


def _reach(values: Sequence[float]) -> float:
    """Half the width of RULE's interval around the mean of these values."""
    n = len(values)
    return _T[min(n - 2, len(_T) - 1)] * stdev(values) * math.sqrt(1 + 1 / n)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# ------------------------------------------------------------------------------------------------------------- files


def place(recipe: str, stack: str, hardware: str) -> Path:
    """Where the baseline of a key lives in the checkout."""
    return params.home() / "params" / "baselines" / recipe.replace("/", "-") / f"{stack}-{hardware}.yaml"


def find(recipe: str, stack: str, hardware: str, devices: int) -> tuple[Baseline | None, str]:
    """The baseline of a key, and why there is none. Raises RecipeError for a file that cannot be read."""
    path = place(recipe, stack, hardware)
    if not path.is_file():
        return None, f"there is no baseline of {recipe} on {hardware}, stack {stack}"
    found = read(path)
    if found.devices != devices:
        return None, f"the baseline of {recipe} is of {found.devices} devices, and this run has {devices}"
    return found, ""


# What a run may change and still be the recipe its baseline is of. A band names its steps: too short a run fails.
_SAME = re.compile(
    r"trainer\.(seed|steps|logger|project|experiment|rollout_dump)$|checkpoint\.|supervision\.|ray_|launch$"
)


def of_run(folder: Path, state: Mapping[str, Any]) -> tuple[Baseline | None, str]:
    """The baseline that a run is to be compared with, and why there is none. A run that changes its recipe has none."""
    try:
        told = key_of(folder)
    except RecipeError as fault:
        return None, f"no baseline: {fault}"
    changed = [key for key in state.get("given", ()) if not _SAME.match(key)]
    found, why = find(state["recipe"], told["stack"], told["hardware"], told["devices"])
    if found and changed:
        words = f"not compared with the {found.label}: this run changes {', '.join(changed)}, so it is another recipe"
        return None, f"{words}; --baseline compares all the same"
    return found, why


def foreign(baseline: Baseline, folder: Path, state: Mapping[str, Any]) -> str:
    """How the key of a run differs from that of a baseline it was told to be compared with, empty where it does not."""
    try:
        told = key_of(folder)
    except RecipeError as fault:
        return str(fault)
    own = {"recipe": state["recipe"], **{name: told[name] for name in ("stack", "hardware", "devices")}}
    other = {name: value for name, value in own.items() if value != getattr(baseline, name)}
    if not other:
        return ""
    return "the baseline is of another " + ", ".join(
        f"{name} ({getattr(baseline, name)}, this run: {value})" for name, value in other.items()
    )


def read(path: str | Path) -> Baseline:
    """Read a baseline. Raises RecipeError, with the key, for a file that is none."""
    import yaml

    path = Path(path)
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as fault:
        raise RecipeError(f"{path} does not exist.") from fault
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise RecipeError(f"{path} cannot be read: {fault}.") from fault
    try:
        bands = tuple(_read_band(path, str(key), value) for key, value in told["metrics"].items())
        found = Baseline(
            recipe=str(told["recipe"]),
            stack=str(told["stack"]),
            hardware=str(told["hardware"]),
            devices=int(told["devices"]),
            made=_date(told["made"]),
            bands=bands,
            runs=tuple(told.get("runs") or ()),
            published=str(told.get("published") or ""),
            commit=str(told.get("commit") or ""),
            rule=str(told.get("rule") or ""),
            notes=tuple(told.get("notes") or ()),
            path=path,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise RecipeError(f"{path} is no baseline: {type(fault).__name__}: {fault}.") from fault
    if not bands:
        raise RecipeError(f"{path} is no baseline: it has no metrics.")
    return found


def _read_band(path: Path, key: str, told: Mapping[str, Any]) -> Band:
    first, last = told["steps"]
    band = Band(
        key,
        told["statistic"],
        int(first),
        int(last),
        float(told["middle"]),
        None if told.get("low") is None else float(told["low"]),
        None if told.get("high") is None else float(told["high"]),
        bool(told.get("performance", False)),
    )
    numbers = [v for v in (band.low, band.middle, band.high) if v is not None]
    if band.statistic not in STATISTICS:
        raise RecipeError(f"{path}: {key}.statistic={band.statistic!r} must be one of {', '.join(STATISTICS)}.")
    if not 1 <= band.first <= band.last:
        raise RecipeError(
            f"{path}: {key}.steps={[band.first, band.last]} must be two steps from 1, the first one first."
        )
    if len(numbers) == 1 or numbers != sorted(numbers) or not all(map(math.isfinite, numbers)):
        raise RecipeError(f"{path}: {key} needs low, high or both, with middle between them, and finite.")
    return band


def _date(value: Any) -> datetime.date:
    return value if isinstance(value, datetime.date) else datetime.date.fromisoformat(str(value))


def dump(baseline: Baseline) -> str:
    """A baseline as YAML, as `read` takes it."""
    import yaml

    told: dict[str, Any] = {
        "recipe": baseline.recipe,
        "stack": baseline.stack,
        "hardware": baseline.hardware,
        "devices": baseline.devices,
        "made": baseline.made,
        "commit": baseline.commit,
        "published": baseline.published,
        "rule": baseline.rule,
        "notes": list(baseline.notes),
        "runs": [dict(run) for run in baseline.runs],
        "metrics": {band.key: _dumped(band) for band in baseline.bands},
    }
    text = yaml.safe_dump({k: v for k, v in told.items() if v not in ("", [])}, sort_keys=False, width=118)
    return f"# Written by `recipes baseline make`. A band is where the next run should be, not a goal.\n{text}"


def _dumped(band: Band) -> dict[str, Any]:
    told = {"statistic": band.statistic, "steps": [band.first, band.last], "middle": band.middle}
    told |= {name: value for name, value in (("low", band.low), ("high", band.high)) if value is not None}
    return told | ({"performance": True} if band.performance else {})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def lines(baseline: Baseline) -> Iterable[str]:
    """A baseline as lines of text: what it is of, its age, its runs, its bands."""
    yield f"{baseline.recipe}, stack {baseline.stack}, {baseline.devices} devices of {baseline.hardware}"
    yield f"  made {baseline.made}, {baseline.age()} days ago, at commit {baseline.commit[:12] or 'unknown'}"
    if baseline.published:
        yield f"  PUBLISHED, not measured by this workbook: {baseline.published}"
    for run in baseline.runs:
        yield "  run " + ", ".join(f"{name} {value}" for name, value in run.items() if value not in ("", None))
    for note in baseline.notes:
        yield f"  {note}"
    yield f"  runs are compared from {baseline.steps} steps on"
    width = max(len(band.key) for band in baseline.bands)
    for band in baseline.bands:
        sides = "two-sided" if band.low is not None and band.high is not None else "one-sided"
        yield f"  {band.key:{width}}  {band.words():28} {sides}, {band.over()}, measured {band.middle:.6g}"
