"""Curves as plain numbers, for baselines and verdicts: of a whole table, or line by line while a run goes on.

No numpy and no pandas, so that the watch of an early stop stays small beside a training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.metrics import Metrics

Points = list[tuple[int, float]]
"""(step, finite value), steps rising."""


class Curves:
    """What training steps reported: finite values by key and step, and the steps at which a value was not finite."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}
        self.lost: dict[str, set[int]] = {}
        self.trained: set[int] = set()

    @classmethod
    def of(cls, metrics: Metrics) -> Curves:
        """All of a table, but for what was validated before the first step (step 0 of a key that is no validation)."""
        found = cls()
        found.trained = {int(step) for step in metrics.table.index if step > 0}
        steps, there = metrics.table.index.to_numpy(), metrics.table.notna().to_numpy()
        for i, key in enumerate(metrics.table):
            counts = there[:, i] if key.startswith("val-") else there[:, i] & (steps > 0)
            values = metrics.table[key].to_numpy()[counts]
            found.values[key] = dict(zip(steps[counts].tolist(), values.tolist(), strict=True))
            found.lost[key] = {step for step in metrics.nonfinite.get(key, ()) if step > 0 or key.startswith("val-")}
        return found

    def add(self, step: int, data: Mapping[str, Any]) -> None:
        """Take in one line of verl's `file` logger; None, or anything that is no finite number, is not finite."""
        if step > 0 and not all(key.startswith("val-") for key in data):
            self.trained.add(step)
        for key, value in data.items():
            if step < 1 and not key.startswith("val-"):
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                self.values.setdefault(key, {})[step] = float(value)
                self.lost.get(key, set()).discard(step)
            else:
                self.lost.setdefault(key, set()).add(step)

    def has(self, key: str) -> bool:
        """Say whether a key was ever computed, finite or not."""
        return bool(self.values.get(key) or self.lost.get(key))

    def points(self, key: str) -> Points:
        return sorted(self.values.get(key, {}).items())

    def nonfinite(self, key: str) -> list[int]:
        return sorted(self.lost.get(key, ()))


def first_of(points: Points, wrong: Any, times: int = 1) -> int | None:
    """The first step at which `wrong(value)` held for `times` points in a row, None if it never did."""
    row = 0
    for step, value in points:
        row = row + 1 if wrong(value) else 0
        if row >= times:
            return step
    return None


def mean(points: Points) -> float:
    """The mean of the values of at least one point; infinite where their sum is, which statistics.fmean refuses."""
    return sum(value for _, value in points) / len(points)


def means(points: Points, width: int = 5) -> Points:
    """Means of `width` points in a row, each at the step of its last; none for fewer points."""
    return [(points[i][0], mean(points[i - width + 1 : i + 1])) for i in range(width - 1, len(points))]


def extreme(points: Points, key: Any = abs) -> tuple[int, float]:
    """The point with the largest `key(value)`, the first of several."""
    return max(points, key=lambda point: key(point[1]))
