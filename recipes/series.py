"""What a curve is made of: the values of one key by step, thinned without losing a spike, and numbers in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.metrics import Metrics

BUCKETS = 300  # the width of a panel in pixels, to the hundred: finer thinning could not be seen


@dataclass(frozen=True)
class Series:
    """The finite values of one key, the steps they belong to, and the steps at which its value was not finite."""

    key: str
    steps: np.ndarray
    values: np.ndarray
    nonfinite: tuple[int, ...] = ()

    @property
    def recorded(self) -> bool:
        return bool(len(self.steps) or self.nonfinite)


def series(metrics: Metrics, key: str) -> Series:
    if key not in metrics.table.columns:
        return Series(key, np.empty(0, dtype=int), np.empty(0), tuple(metrics.nonfinite.get(key, ())))
    values = metrics.table[key].to_numpy()
    finite = np.isfinite(values)
    return Series(key, metrics.table.index.to_numpy()[finite], values[finite], tuple(metrics.nonfinite.get(key, ())))


def holes(s: Series) -> np.ndarray:
    """Where a line must not be drawn on: True at i if point i+1 does not follow point i.

    A non-finite value between the two, or a gap of more than three times the usual stride (a part of the
    run is missing).
    """
    if len(s.steps) < 2:
        return np.zeros(0, dtype=bool)
    stride = np.diff(s.steps)
    lost = np.searchsorted(np.asarray(s.nonfinite), s.steps) if s.nonfinite else np.zeros(len(s.steps), dtype=int)
    return (stride > 3 * np.median(stride)) | (np.diff(lost) > 0)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of those there are at the start."""
    if not len(values):
        return values
    total = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def thin(values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Indices that draw the same picture: first, last, and the lowest and highest of each of `buckets` stretches."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    width = -(-n // buckets)
    padded = np.concatenate([values, np.full(-n % width, values[-1])]).reshape(-1, width)
    start = np.arange(len(padded)) * width
    picked = np.concatenate([[0, n - 1], start + padded.argmin(axis=1), start + padded.argmax(axis=1)])
    picked = np.sort(np.minimum(picked, n - 1))
    return picked[np.concatenate([[True], np.diff(picked) > 0])]


def path(s: Series, values: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, y, alone) of a thinned line with NaN at its holes; `alone` marks points that have no neighbour to join."""
    values = s.values if values is None else values
    kept = thin(values)
    cut = cuts(s, kept)
    x = np.insert(s.steps[kept].astype(float), cut, np.nan)
    y = np.insert(values[kept], cut, np.nan)
    edge = np.concatenate([[np.nan], y, [np.nan]])
    alone = np.isfinite(y) & np.isnan(edge[:-2]) & np.isnan(edge[2:])
    return x, y, alone


def cuts(s: Series, kept: np.ndarray) -> np.ndarray:
    """Places among the kept points where a NaN goes, because a hole lies before the point."""
    before = np.concatenate([[0], np.cumsum(holes(s))])[kept]
    return np.flatnonzero(np.diff(before)) + 1


def window_of(s: Series) -> int:
    """Steps to average over: five, or a hundredth of a long run."""
    return max(5, len(s.values) // 100)


def resumptions(metrics: Metrics) -> list[tuple[int, int]]:
    """(first step, number) of each attempt after the first that has made a step which still counts."""
    found: dict[int, int] = {}
    for step, number in metrics.attempts.items():
        found.setdefault(number, step)
    return sorted((step, number) for number, step in found.items())[1:]


def number(value: float, digits: int = 3) -> str:
    """A number as a person writes it: few significant digits, `1.1e-5` rather than `1.1e-05`, no trailing zeros."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    if 1e-3 <= abs(rounded) < 1e5:
        text = f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{rounded:g}"
    else:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def ranges(steps: Sequence[int], limit: int = 3) -> str:
    """Steps in words: `12–14, 20`, cut after `limit` ranges."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs[:limit])
    return text + (f" and {len(runs) - limit} more" if len(runs) > limit else "")


def not_finite(steps: Sequence[int]) -> str:
    return f"not finite at step{'s' if len(steps) > 1 else ''} {ranges(steps)}"
