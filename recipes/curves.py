"""The curves of a run: one page of panels, the same in light and dark, from a table of metrics.

    figure(metrics)            the page: reward, trainer vs rollout, entropy, KL, response length, time
    headline(metrics)          reward and response length only, for a README or a report
    png(figure) -> bytes       for a live notebook
    save(metrics, directory)   curves.png, curves-dark.png, curves.svg, curves.csv
    describe(metrics) -> str   the page in words, a sentence per panel

Nothing is dropped in silence. A value that was not computed leaves a hole, and a panel without any says
which parameter turns it on; a value that is not finite is a cross at the top of its panel; a zero on a
logarithmic axis is a triangle at its foot; a spike survives the thinning of a long run. Only matplotlib's
object interface is used: no pyplot, no global figure, no display.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recipes.metrics import Metrics, as_metrics, replace_file, write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

# --- style ---


@dataclass(frozen=True)
class Theme:
    """Colours on one surface. After Okabe and Ito, darkened or lightened until each holds as a line and as text."""

    surface: str
    text: str
    muted: str
    rule: str
    first: str
    second: str
    alarm: str
    stages: tuple[str, ...]
    """Fills of the time stack, in the order of STAGES; neighbours are also parted by a line of the surface colour."""


THEMES = {
    "light": Theme(
        surface="#ffffff",
        text="#1f2328",
        muted="#59636e",
        rule="#dfe3e8",
        first="#0072b2",
        second="#a35200",
        alarm="#c4122f",
        stages=(
            "#0072b2",
            "#a3477f",
            "#2f8dc4",
            "#007d5c",
            "#59636e",
            "#c77a00",
            "#7a5195",
            "#4f7a28",
            "#848d97",
        ),
    ),
    "dark": Theme(
        surface="#0d1117",
        text="#e6edf3",
        muted="#9198a1",
        rule="#272d36",
        first="#56b4e9",
        second="#e69f00",
        alarm="#ff7b72",
        stages=(
            "#56b4e9",
            "#d68fbc",
            "#3d85b8",
            "#2cb68d",
            "#9198a1",
            "#e69f00",
            "#b39ddb",
            "#a3c76d",
            "#6e7681",
        ),
    ),
}

SMALL, BODY, HEAD = 9.0, 9.0, 11.0  # points; at 100 dots an inch 9 points are 12.5 pixels of a 960 pixel page
_WIDTH = 9.6
_BUCKETS = 350  # about the width of a panel in pixels: finer thinning could not be seen


def _rc(theme: Theme) -> dict[str, Any]:
    """The style as matplotlib settings, in force only while a figure is built or written."""
    return {
        "font.family": ["DejaVu Sans"],
        "font.size": BODY,
        "text.color": theme.text,
        "text.parse_math": False,  # names of data sources are not ours: a `$` in one is a dollar
        "figure.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.rule,
        "axes.labelcolor": theme.muted,
        "axes.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "axes.xmargin": 0,
        "grid.color": theme.rule,
        "grid.linewidth": 0.7,
        "grid.linestyle": "-",
        "grid.alpha": 1.0,
        "xtick.color": theme.rule,
        "ytick.color": theme.rule,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
        "path.simplify": True,
        "savefig.facecolor": "auto",
        "savefig.bbox": None,
        "svg.fonttype": "path",  # the reader of an SVG need not have our font
        "svg.hashsalt": "recipes",
    }


# --- what the metrics mean ---

STAGES = {
    "gen": "generate",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference",
    "adv": "advantage",
    "update_actor": "update actor",
    "update_weights": "update weights",
    "save_checkpoint": "checkpoint",
    "rest": "rest",
}
"""The parts of a step, timing_s/<key>, that verl runs one after the other; `rest` is what is left of timing_s/step."""

_DIFF = "training/rollout_probs_diff_mean"
_PEARSON = "training/rollout_actor_probs_pearson_corr"
_CORR_KL = "rollout_corr/kl"
_RECORD = (
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "algorithm.rollout_correction.bypass_mode=False",
)

NEEDS: dict[str, tuple[str, ...]] = {
    _DIFF: _RECORD,
    _PEARSON: _RECORD,
    _CORR_KL: _RECORD,
    "actor/entropy": ("algorithm.rollout_correction.bypass_mode=False",),
    "actor/kl_loss": ("actor_rollout_ref.actor.use_kl_loss=True",),
    "val-core": ("trainer.test_freq=10",),
}
"""Which verl settings make a key appear. A key that is not here is written by every training step."""

DIFF_NORMAL, DIFF_PROBLEM = 0.005, 0.01
"""Mean probability difference: below the first normal, above the second a problem (verl's FAQ on mismatch)."""


# --- one series ---


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


def trailing_mean(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Mean of the last `window` values at each place, of those there are at the start."""
    if not len(values):
        return values
    total = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def thin(values: np.ndarray, buckets: int = _BUCKETS) -> np.ndarray:
    """Indices that draw the same picture: first, last, and the lowest and highest of each of `buckets` stretches."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    width = -(-n // buckets)
    padded = np.concatenate([values, np.full(-n % width, values[-1])]).reshape(-1, width)
    start = np.arange(len(padded)) * width
    picked = np.concatenate([[0, n - 1], start + padded.argmin(axis=1), start + padded.argmax(axis=1)])
    return np.unique(np.minimum(picked, n - 1))


def _path(s: Series, values: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, y, alone) of a thinned line with NaN at its holes; `alone` marks points that have no neighbour to join."""
    values = s.values if values is None else values
    kept = thin(values)
    before = np.concatenate([[0], np.cumsum(holes(s))])[kept]
    cut = np.flatnonzero(np.diff(before)) + 1
    x = np.insert(s.steps[kept].astype(float), cut, np.nan)
    y = np.insert(values[kept], cut, np.nan)
    edge = np.concatenate([[np.nan], y, [np.nan]])
    alone = np.isfinite(y) & np.isnan(edge[:-2]) & np.isnan(edge[2:])
    return x, y, alone


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


# --- the page ---


@dataclass
class _Page:
    """A figure being filled: what it shows, in which colours, over which steps."""

    fig: Figure
    metrics: Metrics
    theme: Theme
    span: tuple[float, float]
    training: bool
    drawn: set[str]

    def series(self, key: str) -> Series:
        self.drawn.add(key)
        return series(self.metrics, key)


def figure(
    table: pd.DataFrame | Metrics,
    *,
    theme: Literal["light", "dark"] = "light",
    title: str | None = None,
    total_steps: int | None = None,
) -> Figure:
    """The whole page, 960 × 940 pixels at 100 dots an inch. `total_steps` fixes the step axis while a run goes on.

    Raises ValueError for an unknown theme, and what `as_metrics` raises for a table that is not one.
    """
    import matplotlib

    with matplotlib.rc_context(_rc(_theme(theme))):
        page = _page(as_metrics(table), _theme(theme), height=9.4, total_steps=total_steps)
        cells = page.fig.add_gridspec(3, 2, left=0.05, right=0.852, top=0.888, bottom=0.042, wspace=0.58, hspace=0.42)
        _reward(page, cells[0, 0])
        _mismatch(page, cells[0, 1])
        _entropy(page, cells[1, 0])
        _kl(page, cells[1, 1])
        _length(page, cells[2, 0])
        _time(page, cells[2, 1])
        _heading(page, title, total_steps)
    return page.fig


def headline(
    table: pd.DataFrame | Metrics,
    *,
    theme: Literal["light", "dark"] = "light",
    title: str | None = None,
    total_steps: int | None = None,
) -> Figure:
    """Reward with validation, and response length: 960 × 320 pixels, for a README or the top of a report."""
    import matplotlib

    with matplotlib.rc_context(_rc(_theme(theme))):
        page = _page(as_metrics(table), _theme(theme), height=3.2, total_steps=total_steps)
        cells = page.fig.add_gridspec(
            1, 2, left=0.05, right=0.875, top=0.72, bottom=0.12, wspace=0.5, width_ratios=(1.25, 1)
        )
        _reward(page, cells[0])
        _length(page, cells[1], strip=False)
        _heading(page, title, total_steps)
    return page.fig


def png(fig: Figure, *, dpi: int = 100) -> bytes:
    """The figure as PNG. 100 dots an inch give 960 pixels; use 200 where the page is shown at half its size."""
    return _png(fig, dpi=dpi, metadata={"Software": None})


def _png(fig: Figure, *, dpi: int, metadata: dict[str, str | None]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    usual = fig.dpi
    fig.set_dpi(dpi)
    try:
        # Not fig.savefig: that draws everything twice, the first time for layouts this page does not use.
        FigureCanvasAgg(fig).print_png(file, metadata=metadata, pil_kwargs={"compress_level": 4})
    finally:
        fig.set_dpi(usual)
    return file.getvalue()


def save(
    table: pd.DataFrame | Metrics,
    directory: str | os.PathLike[str],
    *,
    title: str | None = None,
    total_steps: int | None = None,
) -> dict[str, Path]:
    """Write curves.png and curves-dark.png (1920 pixels wide), curves.svg and curves.csv; returns name → path.

    Each file is replaced as a whole. The pictures carry `describe()` as their description.
    """
    import matplotlib

    metrics = as_metrics(table)
    words = describe(metrics)
    paths = {}
    light, dark = (figure(metrics, theme=name, title=title, total_steps=total_steps) for name in ("light", "dark"))
    for fig, name in ((light, "curves.png"), (dark, "curves-dark.png")):
        content = _png(fig, dpi=200, metadata={"Software": None, "Description": words})
        paths[name] = replace_file(Path(directory) / name, content)
    file = io.BytesIO()
    with matplotlib.rc_context(_rc(THEMES["light"])):
        light.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Description": words})
    paths["curves.svg"] = replace_file(Path(directory) / "curves.svg", file.getvalue())
    paths["curves.csv"] = write_csv(metrics, Path(directory) / "curves.csv")
    return paths


def _theme(name: str) -> Theme:
    if name not in THEMES:
        raise ValueError(f"There is no theme {name!r}; curves come in {' and '.join(THEMES)}.")
    return THEMES[name]


def _page(metrics: Metrics, theme: Theme, *, height: float, total_steps: int | None) -> _Page:
    from matplotlib.figure import Figure

    steps = metrics.table.index
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    last = max(last, total_steps or 0, first + 3)
    pad = 0.5 + 0.01 * (last - first)
    training = [key for key in metrics.table.columns if not key.startswith("val-")]
    return _Page(
        fig=Figure(figsize=(_WIDTH, height), dpi=100),
        metrics=metrics,
        theme=theme,
        span=(first - pad, last + pad),
        training=bool(training),
        drawn=set(),
    )


def _heading(page: _Page, title: str | None, total_steps: int | None) -> None:
    """Title, how far the run is, and whatever the panels can't show: other non-finite values, unreadable lines."""
    pixels = 100 * page.fig.get_figheight()
    left, right, top = 0.012, 0.988, 1 - 12 / pixels
    page.fig.text(left, top, _plain(title or "", 70), size=13, weight="bold", va="top")
    steps = page.metrics.table.index
    of = f" of {total_steps}" if total_steps else ""
    where = f"step {steps[-1]}{of}" if len(steps) else "no step yet"
    page.fig.text(right, top, where, ha="right", va="top", size=BODY, color=page.theme.muted)
    notes = []
    others = [key for key in page.metrics.nonfinite if key not in page.drawn]
    if others:
        listed = ", ".join(_plain(key, 40) for key in others[:2]) + (" …" if len(others) > 2 else "")
        notes.append(
            f"{len(others)} more {'key has' if len(others) == 1 else 'keys have'} values that are not finite: {listed}"
        )
    if page.metrics.broken:
        lines = [broken.line for broken in page.metrics.broken]
        notes.append(f"unreadable in the metrics file: line {ranges(sorted(set(lines)))}")
    if notes:
        page.fig.text(left, top - 21 / pixels, " · ".join(notes), va="top", size=SMALL, color=page.theme.alarm)


# --- the panels ---


def _reward(page: _Page, cell: SubplotSpec) -> None:
    mean = page.series("critic/rewards/mean")
    stem = "critic/rewards"
    if not mean.recorded and page.series("critic/score/mean").recorded:
        mean, stem = page.series("critic/score/mean"), "critic/score"
    validation = [page.series(key) for key in validation_keys(page.metrics)]
    names = f"{stem}/mean, min, max" + "".join(f" · {s.key}" for s in validation[:1])
    ax = _axes(page, cell, "Reward per response", names)
    if not any(s.recorded for s in (mean, *validation)):
        return _absent(page, ax, f"{stem}/mean")
    labels = _smoothed(page, ax, mean, stem)
    marks = [("D", page.theme.second), ("s", page.theme.stages[3]), ("^", page.theme.stages[1])]
    for s, (marker, color) in zip(validation, marks, strict=False):
        x, y, _ = _path(s)
        ax.plot(x, y, color=color, lw=1, marker=marker, ms=5, mec=page.theme.surface, mew=0.7, zorder=4)
        if len(s.values):
            name = "validation" if len(validation) == 1 else s.key.split("/")[1]
            labels.append((s.values[-1], f"{number(s.values[-1])} {_plain(name, 13)}", color))
    everything = np.concatenate([mean.values, *(s.values for s in validation), *_band_values(page, stem)])
    if len(everything) and everything.min() >= 0 and everything.max() <= 1:
        _linear(ax, 0.0, 1.0)
    else:
        _linear(ax, *_extent(everything))
    _end_labels(page, ax, labels)
    _crosses(page, ax, mean, *validation)
    if not validation and page.training:
        _note(page, ax, ["no validation yet;", "it needs", *NEEDS["val-core"]], beside=labels)
    return None


def _mismatch(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    diff, pearson, kl = (page.series(key) for key in (_DIFF, _PEARSON, _CORR_KL))

    ax = _axes(page, upper, "Trainer vs rollout: mean probability difference", _DIFF, ticks=False)
    if diff.recorded:
        _logarithmic(ax, diff.values, include=(DIFF_PROBLEM * 2, DIFF_NORMAL))
        labels = []
        for level, words, color in (
            (DIFF_NORMAL, f"{DIFF_NORMAL:g} ▼ normal", theme.muted),
            (DIFF_PROBLEM, f"{DIFF_PROBLEM:g} ▲ problem", theme.alarm),
        ):
            ax.axhline(level, color=color, lw=1, ls=(0, (4, 3)), zorder=1.5)
            labels.append((level, words, color))
        labels += _log_line(page, ax, diff, theme.first, "mean")
        _end_labels(page, ax, labels)
        _crosses(page, ax, diff)
    else:
        _absent(page, ax, _DIFF)

    ax = _axes(page, lower, None, f"1 − {_PEARSON.removeprefix('training/')} · |{_CORR_KL}|", nbins=2)
    distance = Series(_PEARSON, pearson.steps, np.maximum(1 - pearson.values, 0), pearson.nonfinite)
    if distance.recorded or kl.recorded:
        _logarithmic(ax, np.concatenate([distance.values, np.abs(kl.values)]), decades=3)
        labels = _log_line(page, ax, distance, theme.first, "1 − Pearson") + _log_line(
            page, ax, kl, theme.second, "|KL|"
        )
        _end_labels(page, ax, labels)
        _crosses(page, ax, distance, kl)
    else:
        _absent(page, ax, _PEARSON, brief=True)


def _entropy(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.25, 1), hspace=0.36)
    entropy, norm = page.series("actor/entropy"), page.series("actor/grad_norm")
    ax = _axes(page, upper, "Entropy, nats per token", entropy.key, ticks=False)
    if entropy.recorded:
        _plain_line(page, ax, entropy, page.theme.first)
    else:
        _absent(page, ax, entropy.key)
    ax = _axes(page, lower, None, f"Gradient norm · {norm.key}", nbins=2)
    if norm.recorded:
        positive = norm.values[norm.values > 0]
        if len(positive) and positive.max() > 30 * np.median(positive):
            _logarithmic(ax, norm.values)
            _end_labels(page, ax, _log_line(page, ax, norm, page.theme.first, ""))
            _crosses(page, ax, norm)
        else:
            _plain_line(page, ax, norm, page.theme.first, from_zero=True)
    else:
        _absent(page, ax, norm.key, brief=True)


def _kl(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    ppo, loss, clip = (page.series(f"actor/{key}") for key in ("ppo_kl", "kl_loss", "pg_clipfrac"))
    ax = _axes(
        page,
        upper,
        "KL, nats per token",
        "|actor/ppo_kl|, to the old policy · actor/kl_loss, to the reference",
        ticks=False,
    )
    if ppo.recorded or loss.recorded:
        _logarithmic(ax, np.concatenate([ppo.values, loss.values]))
        labels = _log_line(page, ax, ppo, theme.first, "|ppo_kl|") + _log_line(page, ax, loss, theme.second, "kl_loss")
        _end_labels(page, ax, labels)
        _crosses(page, ax, ppo, loss)
        if not loss.recorded:
            _note(page, ax, ["kl_loss needs", *_folded(NEEDS[loss.key][0])], beside=labels)
        if len(ppo.values) and not ppo.values.any():
            words = "ppo_kl is 0 with one update a batch:\nppo_mini_batch_size = train_batch_size"
            ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", size=SMALL, color=theme.muted)
    else:
        _absent(page, ax, ppo.key)
    ax = _axes(page, lower, None, f"Clip fraction of tokens · {clip.key}", nbins=2)
    if clip.recorded:
        _plain_line(page, ax, clip, theme.first, from_zero=True, at_least=0.01)
    else:
        _absent(page, ax, clip.key, brief=True)


def _length(page: _Page, cell: SubplotSpec, *, strip: bool = True) -> None:
    mean, clip = page.series("response_length/mean"), page.series("response_length/clip_ratio")
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36) if strip else (cell, None)
    ax = _axes(page, upper, "Response length, tokens", "response_length/mean, min, max", ticks=not strip)
    if mean.recorded:
        labels = _smoothed(page, ax, mean, "response_length")
        _linear(ax, *_extent(np.concatenate([mean.values, *_band_values(page, "response_length")]), from_zero=True))
        _end_labels(page, ax, labels)
        _crosses(page, ax, mean)
    else:
        _absent(page, ax, mean.key)
    if lower is None:
        return
    ax = _axes(page, lower, None, f"Share cut at the limit · {clip.key}", nbins=2)
    if clip.recorded:
        _plain_line(page, ax, clip, page.theme.first, from_zero=True, at_least=0.05)
    else:
        _absent(page, ax, clip.key, brief=True)


def _time(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    ax = _axes(page, upper, "Time per step, seconds", "timing_s/… (figures: median of the steps)", ticks=False)
    steps, parts = time_parts(page.metrics)
    page.drawn.update(f"timing_s/{stage}" for stage in STAGES)
    page.drawn.add("timing_s/step")
    if parts:
        _stack(page, ax, steps, parts)
    else:
        _absent(page, ax, "timing_s/step")
    rate = page.series("perf/throughput")
    ax = _axes(page, lower, None, f"Tokens per second and device · {rate.key}", nbins=2)
    if rate.recorded:
        _plain_line(page, ax, rate, theme.first, from_zero=True)
    else:
        _absent(page, ax, rate.key, brief=True)


def validation_keys(metrics: Metrics, limit: int = 3) -> list[str]:
    """The val-core keys to draw: the means (`mean@k`) first, at most `limit`."""
    keys = [key for key in metrics.table.columns if key.startswith("val-core/")]
    return sorted(keys, key=lambda key: "/mean@" not in key)[:limit]


def time_parts(metrics: Metrics) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(steps, seconds of each stage in STAGES) for the steps that were timed; a stage that did not run took 0 s."""
    table = metrics.table
    timed = [f"timing_s/{stage}" for stage in STAGES if f"timing_s/{stage}" in table.columns]
    whole = "timing_s/step" in table.columns
    if not timed and not whole:
        return np.empty(0, dtype=int), {}
    rows = table[[*timed, "timing_s/step"] if whole else timed].dropna(how="all")
    parts = {key.removeprefix("timing_s/"): rows[key].fillna(0.0).to_numpy() for key in timed}
    if whole:
        known = sum(parts.values(), start=np.zeros(len(rows)))
        parts["rest"] = np.maximum(rows["timing_s/step"].fillna(0.0).to_numpy() - known, 0.0)
    return rows.index.to_numpy(), {stage: seconds for stage, seconds in parts.items() if seconds.any()}


# --- drawing ---


def _axes(page: _Page, spec: SubplotSpec, title: str | None, names: str, *, ticks: bool = True, nbins: int = 4) -> Axes:
    """Empty axes with the panel's title (which carries the unit) and, in small print, the keys it shows."""
    from matplotlib.ticker import MaxNLocator

    ax = page.fig.add_subplot(spec)
    ax.set_xlim(*page.span)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.tick_params(labelbottom=ticks, length=3 if ticks else 0)
    ax.recipes_bins = nbins
    at = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom", "annotation_clip": False}
    if title:
        ax.annotate(title, (0, 1), xytext=(0, 17), size=HEAD, weight="bold", **at)
    ax.annotate(_plain(names, 62), (0, 1), xytext=(0, 4), size=SMALL, color=page.theme.muted, **at)
    if ticks:
        ax.annotate(
            "step", (0, 0), xytext=(-4, -5), size=SMALL, color=page.theme.muted, **(at | {"ha": "right", "va": "top"})
        )
    return ax


def _smoothed(page: _Page, ax: Axes, mean: Series, stem: str) -> list[tuple[float, str, str]]:
    """A min–max band, each step's mean as a light point, and the mean of five steps as the line. Returns end labels."""
    color, muted = page.theme.first, page.theme.muted
    low, high = page.series(f"{stem}/min"), page.series(f"{stem}/max")
    labels = []
    both = np.intersect1d(low.steps, high.steps)
    if len(both):
        lows = low.values[np.isin(low.steps, both)]
        highs = high.values[np.isin(high.steps, both)]
        kept = np.union1d(thin(lows), thin(highs))
        labels += [(highs[-1], f"{number(highs[-1])} max", muted), (lows[-1], f"{number(lows[-1])} min", muted)]
        if len(both) == 1:
            ax.vlines(both, lows, highs, color=color, lw=6, alpha=0.18)
        elif np.ptp(lows) or np.ptp(highs):  # a band that never moves is a grey wall: its two labels say it all
            ax.fill_between(both[kept], lows[kept], highs[kept], color=color, alpha=0.12, lw=0)
    if len(mean.values):
        x, y, _ = _path(mean)
        ax.plot(x, y, ls="none", marker="o", ms=3.2 if len(x) <= 200 else 1.6, mew=0, color=color, alpha=0.45)
        smooth = trailing_mean(mean.values)
        _draw(ax, mean, color, values=smooth, lw=2)
        window = min(5, len(smooth))
        labels.append((smooth[-1], f"{number(smooth[-1])} " + (f"mean of {window}" if window > 1 else "mean"), color))
    return labels


def _band_values(page: _Page, stem: str) -> list[np.ndarray]:
    return [page.series(f"{stem}/{end}").values for end in ("min", "max")]


def _draw(ax: Axes, s: Series, color: str, *, values: np.ndarray | None = None, lw: float = 1.6) -> None:
    """A line with its holes, thinned; points without a neighbour as dots, since a line of one point can't be seen."""
    x, y, alone = _path(s, values)
    ax.plot(x, y, color=color, lw=lw, zorder=3)
    if alone.any():
        ax.plot(x[alone], y[alone], ls="none", marker="o", ms=4, mew=0, color=color, zorder=3)


def _plain_line(
    page: _Page,
    ax: Axes,
    s: Series,
    color: str,
    *,
    from_zero: bool = False,
    at_least: float = 0.0,
) -> None:
    """One line on a linear axis of its own, with its last value at its end."""
    _draw(ax, s, color)
    low, high = _extent(s.values, from_zero=from_zero)
    _linear(ax, low, max(high, at_least))
    if len(s.values):
        _end_labels(page, ax, [(s.values[-1], number(s.values[-1]), color)])
    _crosses(page, ax, s)


def _log_line(page: _Page, ax: Axes, s: Series, color: str, name: str) -> list[tuple[float, str, str]]:
    """The size of a value on a logarithmic axis; an exact zero is a triangle at its foot. Returns end labels."""
    size = np.abs(s.values)
    positive = size > 0
    _draw(ax, Series(s.key, s.steps[positive], size[positive], s.nonfinite), color)
    if not positive.all():
        zeros = s.steps[~positive]
        ax.plot(
            zeros,
            np.full(len(zeros), 0.03),
            ls="none",
            marker="v",
            ms=4,
            mew=0,
            color=color,
            clip_on=False,
            transform=ax.get_xaxis_transform(),
            zorder=3,
        )
    return [(size[-1], f"{number(size[-1], 2)} {name}".strip(), color)] if len(size) else []


def _stack(page: _Page, ax: Axes, steps: np.ndarray, parts: dict[str, np.ndarray]) -> None:
    """Seconds of each stage, one on the other, a column as wide as its step. A far outlier is cut and named."""
    total = sum(parts.values())
    colors = dict(zip(STAGES, page.theme.stages, strict=True))
    kept = thin(total)
    s = Series("timing_s/step", steps[kept], total[kept])
    hole = holes(s)
    middle = (s.steps[1:] + s.steps[:-1]) / 2
    left = np.concatenate([[s.steps[0] - 0.5], np.where(hole, s.steps[1:] - 0.5, middle)])
    right = np.concatenate([np.where(hole, s.steps[:-1] + 0.5, middle), [s.steps[-1] + 0.5]])
    cut = 2 * (np.flatnonzero(hole) + 1)

    def columns(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.insert(np.column_stack([left, right]).ravel().astype(float), cut, np.nan)

    base = np.zeros(len(kept))
    labels = []
    for stage, seconds in parts.items():
        top = base + seconds[kept]
        ax.fill_between(columns(left, right), columns(base, base), columns(top, top), color=colors[stage], lw=0)
        middle_of_last = (base[-1] + top[-1]) / 2
        labels.append((middle_of_last, f"{number(np.median(seconds), 2)} {STAGES[stage]}", colors[stage]))
        base = top
    far = total > 4 * np.median(total)
    _linear(ax, 0, total[~far].max() * (1.3 if far.any() else 1.05))
    if far.any():
        more = f", and {far.sum() - 1} more" if far.sum() > 1 else ""
        ax.annotate(
            f"▲ step {steps[far][0]}: {number(total[far][0])} s{more}",
            (max(steps[far][0] + 0.5, page.span[0]), 1),
            xycoords=ax.get_xaxis_transform(),
            xytext=(3, -2),
            textcoords="offset points",
            size=SMALL,
            va="top",
        )
    _end_labels(page, ax, labels, swatch=True)


def _extent(values: np.ndarray, *, from_zero: bool = False) -> tuple[float, float]:
    """Limits for these values. A nearly constant one is not blown up: the axis spans at least 5 % of its size."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if low >= 0 and (from_zero or low < 0.5 * high):
        return 0.0, high or 1.0
    room = max(0.05 * max(abs(low), abs(high)) - (high - low), 0.0) / 2
    return low - room, high + room


def _linear(ax: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    room = 0.06 * (high - low or 1.0)
    share = (low, high) == (0.0, 1.0)
    ax.set_ylim(low - (0 if low == 0 and not share else room), high + room)
    bins = ax.recipes_bins
    quarters = FixedLocator(np.linspace(0, 1, 5 if bins > 2 else 3))
    ax.yaxis.set_major_locator(quarters if share else MaxNLocator(nbins=bins, min_n_ticks=2))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _logarithmic(ax: Axes, values: np.ndarray, *, include: Sequence[float] = (), decades: int = 4) -> None:
    """A logarithmic y axis around the sizes of `values`, at least two decades, at most `decades` labels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    size = np.abs(values)
    size = np.concatenate([size[size > 0], include])
    low, high = (np.floor(np.log10(size.min())), np.ceil(np.log10(size.max()))) if len(size) else (-6, -1)
    if high - low < 2:
        low = high - 2
    ax.set_yscale("log")
    ax.set_ylim(10.0**low, 10.0**high)
    stride = int(np.ceil((high - low + 1) / (decades + 1)))
    ax.yaxis.set_major_locator(FixedLocator(10.0 ** np.arange(low, high + 1, stride)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _end_labels(page: _Page, ax: Axes, labels: list[tuple[float, str, str]], *, swatch: bool = False) -> None:
    """Names and last values at the right end of their lines, pushed apart until none covers another."""
    if not labels:
        return
    height = ax.get_position().height * page.fig.get_figheight() * 100
    to_axes = ax.transScale + ax.transLimits
    wanted = []
    for value, text, color in labels:
        on_scale = value if ax.get_yscale() == "linear" or value > 0 else ax.get_ylim()[0]
        y = float(np.clip(to_axes.transform((page.span[0], on_scale))[1], 0, 1))
        wanted.append((y, text, color))
    wanted.sort(key=lambda label: label[0])
    for y, (_, text, color) in zip(apart([w[0] for w in wanted], 13.5 / height), wanted, strict=True):
        at = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center", "annotation_clip": False}
        if swatch:
            ax.annotate("■", (1, y), xytext=(6, 0), size=SMALL, color=color, **at)
            ax.annotate(text, (1, y), xytext=(17, 0), size=SMALL, color=page.theme.text, **at)
        else:
            ax.annotate(text, (1, y), xytext=(6, 0), size=SMALL, color=color, **at)


def apart(places: Sequence[float], gap: float, top: float = 1.02) -> list[float]:
    """Places, in rising order, moved as little as needed to lie `gap` apart and, if they fit, not above `top`."""
    moved = list(places)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = top
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _crosses(page: _Page, ax: Axes, *lines: Series) -> None:
    """A cross at the top of the panel at each step whose value was NaN or infinite, and which steps these are."""
    lost = [s for s in lines if s.nonfinite]
    for i, s in enumerate(lost):
        at = np.asarray(s.nonfinite)
        at = at[np.unique(np.linspace(0, len(at) - 1, min(len(at), 60)).astype(int))]
        ax.plot(
            at,
            np.ones(len(at)),
            ls="none",
            marker="x",
            ms=5,
            mew=1.4,
            color=page.theme.alarm,
            clip_on=False,
            transform=ax.get_xaxis_transform(),
            zorder=5,
        )
        name = f"{s.key.rsplit('/', 1)[-1]} " if len(lines) > 1 else ""
        many = len(s.nonfinite) > 1
        ax.annotate(
            f"{_plain(name, 24)}not finite at step{'s' if many else ''} {ranges(s.nonfinite)}",
            (0, 1),
            xycoords="axes fraction",
            xytext=(6, -6 - 13 * i),
            textcoords="offset points",
            va="top",
            size=SMALL,
            color=page.theme.alarm,
            zorder=6,
            bbox={"facecolor": page.theme.surface, "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    if lost and not any(len(s.values) for s in lines):
        ax.set_yticks([])


def _absent(page: _Page, ax: Axes, key: str, *, brief: bool = False) -> None:
    """An empty panel says why it is empty."""
    ax.set_yticks([])
    if not page.training:
        lines = ["waiting for the first training step"]
    elif key in NEEDS:
        lines = [] if brief else ["not recorded; it needs"]
        lines += NEEDS[key][:1] if brief else NEEDS[key]
    else:
        lines = ["not recorded, though verl writes", f"{key} at every training step"]
    ax.text(
        0.5,
        0.5,
        "\n".join(lines),
        transform=ax.transAxes,
        ha="center",
        va="center",
        size=SMALL,
        color=page.theme.muted,
        linespacing=1.4,
    )


def _note(page: _Page, ax: Axes, lines: Sequence[str], *, beside: Sequence[tuple[float, str, str]] = ()) -> None:
    """A remark in the right margin, where the label of the missing line would be; at the end its labels leave free."""
    middle = np.mean(ax.get_ylim()) if ax.get_yscale() == "linear" else np.sqrt(np.prod(ax.get_ylim()))
    low = any(value < middle for value, _, _ in beside)
    ax.annotate(
        "\n".join(lines),
        (1, 1 if low else 0),
        xycoords="axes fraction",
        xytext=(6, 0),
        textcoords="offset points",
        va="top" if low else "bottom",
        size=SMALL,
        color=page.theme.muted,
        linespacing=1.25,
        annotation_clip=False,
    )


def _folded(setting: str) -> list[str]:
    """A dotted setting in lines that fit a margin: broken after a dot."""
    lines = [""]
    for part in setting.replace(".", ".\n").split("\n"):
        if len(lines[-1]) + len(part) > 20 and lines[-1]:
            lines.append("")
        lines[-1] += part
    return lines


def _plain(text: str, limit: int) -> str:
    """Text that is not ours, for a label: printable, on one line, its middle cut out if it is too long."""
    text = "".join(c if c.isprintable() else "�" for c in text)
    if len(text) <= limit:
        return text
    return text[: limit - limit // 3 - 1] + "…" + text[-(limit // 3) :]


# --- in words ---


def describe(table: pd.DataFrame | Metrics) -> str:
    """The page in words: a sentence per panel, first value → last value. An alternative text for the picture."""
    metrics = as_metrics(table)
    if not len(metrics.table):
        return "No step has been recorded yet."
    stem = "rewards" if series(metrics, "critic/rewards/mean").recorded else "score"
    validation = validation_keys(metrics, limit=1) or ["val-core"]
    sentences = [
        ("Reward", [(f"critic/{stem}/mean", "mean of five steps"), (validation[0], "validation")]),
        (
            "Trainer vs rollout",
            [(_DIFF, "mean probability difference"), (_PEARSON, "Pearson correlation"), (_CORR_KL, "KL")],
        ),
        ("Entropy", [("actor/entropy", "nats per token"), ("actor/grad_norm", "gradient norm")]),
        (
            "KL",
            [
                ("actor/ppo_kl", "to the old policy"),
                ("actor/kl_loss", "to the reference"),
                ("actor/pg_clipfrac", "clip fraction"),
            ],
        ),
        (
            "Response length",
            [("response_length/mean", "tokens"), ("response_length/clip_ratio", "share cut at the limit")],
        ),
        ("Time", [("timing_s/step", "seconds a step"), ("perf/throughput", "tokens per second and device")]),
    ]
    first, last = metrics.table.index[0], metrics.table.index[-1]
    text = [f"Steps {first} to {last}."]
    for head, parts in sentences:
        text.append(f"{head}: {'; '.join(_phrase(series(metrics, key), name) for key, name in parts)}.")
    return " ".join(text)


def _phrase(s: Series, name: str) -> str:
    lost = f" (not finite at step {ranges(s.nonfinite)})" if s.nonfinite else ""
    if not len(s.values):
        if lost:
            return name + lost
        needs = f", needs {' and '.join(NEEDS[s.key])}" if s.key in NEEDS else ""
        return f"{name} not recorded{needs}"
    window = 5 if name == "mean of five steps" else 1
    first, last = s.values[:window].mean(), s.values[-window:].mean()
    digits = (lambda v: f"{v:.5f}") if s.key == _PEARSON else number
    return f"{name} {digits(first)} → {digits(last)}{lost}"
