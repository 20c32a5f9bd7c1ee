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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recipes.atomic import replace_file
from recipes.metrics import Metrics, as_metrics, write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.transforms import Transform
    from PIL.Image import Image

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
    """Fills of the time stack, in the order of STAGES."""


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

BODY, HEAD, TITLE = 9.0, 11.0, 13.0  # points; at 100 dots an inch 9 points are 12.5 pixels of a 960 pixel page
_WIDTH = 9.6
_BUCKETS = 300  # the width of a panel in pixels, to the hundred: finer thinning could not be seen
_MARKED = 60  # points of a line on which marks of five pixels stand apart


def _rc(theme: Theme) -> dict[str, Any]:
    """The style as matplotlib settings, in force only while a figure is built or written."""
    return {
        "font.family": ["DejaVu Sans", "sans-serif"],
        "text.color": theme.text,
        "text.parse_math": False,  # names of data sources are not ours: a `$` in one is a dollar
        "figure.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.rule,
        "axes.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": False,
        "axes.xmargin": 0,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
        "path.simplify": True,
        "savefig.facecolor": "auto",
        "savefig.bbox": None,
        "svg.fonttype": "none",  # text that can be searched and copied; a reader without our font gets a similar one
        "svg.hashsalt": "recipes",
    }


# --- what the metrics mean ---

STAGES = {
    "gen": "generate",
    "reward": "reward",
    "old_log_prob": "old log-prob",
    "ref": "reference",
    "adv": "advantage",
    "update_actor": "update actor",
    "update_weights": "weight sync",
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


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
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
    cut = _cuts(s, kept)
    x = np.insert(s.steps[kept].astype(float), cut, np.nan)
    y = np.insert(values[kept], cut, np.nan)
    edge = np.concatenate([[np.nan], y, [np.nan]])
    alone = np.isfinite(y) & np.isnan(edge[:-2]) & np.isnan(edge[2:])
    return x, y, alone


def _cuts(s: Series, kept: np.ndarray) -> np.ndarray:
    """Places among the kept points where a NaN goes, because a hole lies before the point."""
    before = np.concatenate([[0], np.cumsum(holes(s))])[kept]
    return np.flatnonzero(np.diff(before)) + 1


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


def _not_finite(steps: Sequence[int]) -> str:
    return f"not finite at step{'s' if len(steps) > 1 else ''} {ranges(steps)}"


# --- the page ---


Label = tuple[float, str, str]
"""What stands at the right end of a line: its last value, the words, the colour."""


@dataclass(frozen=True)
class _Word:
    """One line of text: where its baseline is anchored (inches from the lower left of the page), and how it looks."""

    text: str
    anchor: np.ndarray
    ha: str
    size: float
    bold: bool

    def outline(self) -> tuple[np.ndarray, np.ndarray]:
        """Its path on the page: vertices in inches, codes."""
        vertices, codes, width = _outline(self.text, self.size, self.bold)
        return vertices + self.anchor - (width * _ANCHORS[self.ha], 0), codes


_ANCHORS = {"left": 0.0, "center": 0.5, "right": 1.0}


@dataclass
class _Page:
    """A figure being filled: what it shows, in which colours, over which steps."""

    fig: Figure
    metrics: Metrics
    theme: Theme
    span: tuple[float, float]
    training: bool
    drawn: set[str] = field(default_factory=set)
    words: dict[str, list[_Word]] = field(default_factory=dict)
    paper: list[tuple[float, float, float, float]] = field(default_factory=list)
    along: str = "step"
    blank: list[Axes] = field(default_factory=list)
    """Emptied axes of the drawing before, in their order on the page; new ones are made where none are left."""

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
    return _whole(as_metrics(table), theme, title, total_steps, outlines=True)


def _whole(
    metrics: Metrics,
    theme: str,
    title: str | None,
    total_steps: int | None,
    *,
    outlines: bool,
    over: Figure | None = None,
) -> Figure:
    import matplotlib

    with matplotlib.rc_context(_rc(_theme(theme))):
        page = _page(metrics, _theme(theme), height=9.4, total_steps=total_steps, over=over)
        cells = page.fig.add_gridspec(3, 2, left=0.05, right=0.85, top=0.888, bottom=0.042, wspace=0.58, hspace=0.42)
        _reward(page, cells[0, 0])
        _mismatch(page, cells[0, 1])
        _entropy(page, cells[1, 0])
        _kl(page, cells[1, 1])
        _length(page, cells[2, 0])
        _time(page, cells[2, 1])
        _heading(page, title, total_steps)
        _print(page, outlines=outlines)
    return page.fig


def headline(
    table: pd.DataFrame | Metrics,
    *,
    theme: Literal["light", "dark"] = "light",
    title: str | None = None,
    total_steps: int | None = None,
) -> Figure:
    """Reward with validation, and response length: 960 × 300 pixels, for a README or the top of a report."""
    import matplotlib

    with matplotlib.rc_context(_rc(_theme(theme))):
        height = 3.2 if title else 2.95
        page = _page(as_metrics(table), _theme(theme), height=height, total_steps=total_steps)
        cells = page.fig.add_gridspec(
            1, 2, left=0.05, right=0.875, top=2.3 / height, bottom=0.38 / height, wspace=0.5, width_ratios=(1.25, 1)
        )
        _reward(page, cells[0])
        _length(page, cells[1], strip=False)
        _heading(page, title, total_steps, brief=True)
        _print(page, outlines=True)
    return page.fig


_QUICK, _SMALL = 3, 9
"""Levels of zlib: for a page that is drawn again and again, and for a file that is kept."""


def png(fig: Figure, *, dpi: int = 100) -> bytes:
    """The figure as PNG. 100 dots an inch give 960 pixels; use 200 where the page is shown at half its size."""
    return _written(_pixels(fig, dpi), dpi, _QUICK)


def png_to_keep(fig: Figure, description: str) -> bytes:
    """The figure as PNG for a file: 1920 pixels wide, packed small, with its description in words."""
    return _written(_pixels(fig, 200), 200, _SMALL, description)


def _pixels(fig: Figure, dpi: int) -> Image:
    """Draw the figure. Not by fig.savefig: that draws everything twice, first for layouts this page does not use."""
    import PIL.Image
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    usual = fig.dpi
    fig.set_dpi(dpi)
    try:
        canvas = FigureCanvasAgg(fig)
        canvas.draw()
        pixels = canvas.buffer_rgba()
        # Without the page's opacity, which is 1 everywhere: packing it would take as long as drawing.
        return PIL.Image.frombytes("RGB", canvas.get_width_height(), bytes(pixels), "raw", "RGBX")
    finally:
        fig.set_dpi(usual)


def _written(image: Image, dpi: int, compress_level: int, description: str = "") -> bytes:
    from PIL.PngImagePlugin import PngInfo

    file, info = io.BytesIO(), PngInfo()
    if description:
        info.add_text("Description", description)
    image.save(file, "png", pnginfo=info, dpi=(dpi, dpi), compress_level=compress_level)
    return file.getvalue()


class Sheet:
    """The page of one run, drawn again and again: making eleven axes takes longer than drawing all that is in them."""

    def __init__(self) -> None:
        self._figure: Figure | None = None

    def pair(
        self, table: pd.DataFrame | Metrics, *, title: str | None = None, total_steps: int | None = None, dpi: int = 100
    ) -> tuple[bytes, bytes]:
        """The page as PNG, light and dark, as `png(figure(…))` gives them; built once and coloured anew.

        Raises what `figure` raises; the next drawing then starts from nothing.
        """
        from concurrent.futures import ThreadPoolExecutor

        over, self._figure = self._figure, None
        fig = _whole(as_metrics(table), "light", title, total_steps, outlines=True, over=over)
        with ThreadPoolExecutor(1) as pool:  # packing leaves Python to others: the dark page is drawn in the meantime
            light = pool.submit(_written, _pixels(fig, dpi), dpi, _QUICK)
            recolor(fig, THEMES["light"], THEMES["dark"])
            dark = _written(_pixels(fig, dpi), dpi, _QUICK)
        self._figure = fig
        return light.result(), dark


def _emptied(fig: Figure) -> list[Axes]:
    """Take everything off a page of `_whole` but its axes; they are as new, whatever was drawn in them."""
    for artist in (*fig.artists, *fig.patches, *fig.texts):
        artist.remove()
    for ax in fig.axes:
        for artist in (*ax.lines, *ax.patches, *ax.collections, *ax.texts):
            artist.remove()
        ax.relim()  # of nothing: what is drawn next starts from its own limits
        if ax.get_yscale() != "linear":
            ax.set_yscale("linear")
        ax.set_ylim(0, 1, auto=True)
    return list(fig.axes)


def recolor(fig: Figure, old: Theme, new: Theme) -> None:
    """Give everything on a page the colour that stands in `new` where its own stands in `old`; alpha stays."""
    import matplotlib
    from matplotlib.collections import Collection
    from matplotlib.colors import to_rgba, to_rgba_array
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def listed(theme: Theme) -> list[str]:
        names = ("surface", "text", "muted", "rule", "first", "second", "alarm")
        return [*(getattr(theme, name) for name in names), *theme.stages]

    colors = {to_rgba(a)[:3]: to_rgba(b)[:3] for a, b in zip(listed(old), listed(new), strict=True)}

    def turned(color: Any) -> Any:
        rgba = to_rgba(color)
        return (*colors.get(rgba[:3], rgba[:3]), rgba[3])

    def turned_all(found: Any) -> Any:
        return [turned(color) for color in to_rgba_array(found)]

    with matplotlib.rc_context(_rc(new)):
        for artist in _artists(fig):
            if isinstance(artist, Line2D):
                artist.set_color(turned(artist.get_color()))
                artist.set_markerfacecolor(turned(artist.get_markerfacecolor()))
                artist.set_markeredgecolor(turned(artist.get_markeredgecolor()))
            elif isinstance(artist, Patch):
                edge = artist.get_edgecolor()
                artist.set_facecolor(turned(artist.get_facecolor()))
                artist.set_edgecolor(turned(edge))
            elif isinstance(artist, Collection):
                face, edge = artist.get_facecolor(), artist.get_edgecolor()
                artist.set_facecolor(turned_all(face))
                artist.set_edgecolor(turned_all(edge))


def _artists(artist: Artist) -> Iterator[Artist]:
    """The artist and all below it but the scales of axes: hidden, they would first make ticks to be asked for them."""
    from matplotlib.axis import Axis

    yield artist
    for child in artist.get_children():
        if not isinstance(child, Axis):
            yield from _artists(child)


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
    for theme, name in (("light", "curves.png"), ("dark", "curves-dark.png")):
        fig = figure(metrics, theme=theme, title=title, total_steps=total_steps)
        content = png_to_keep(fig, words)
        paths[name] = replace_file(Path(directory) / name, content)
    file = io.BytesIO()
    with matplotlib.rc_context(_rc(THEMES["light"])):
        fig = _whole(metrics, "light", title, total_steps, outlines=False)
        fig.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Description": words})
    paths["curves.svg"] = replace_file(Path(directory) / "curves.svg", file.getvalue())
    paths["curves.csv"] = write_csv(metrics, Path(directory) / "curves.csv")
    return paths


def resumptions(metrics: Metrics) -> list[tuple[int, int]]:
    """(first step, number) of each attempt after the first that has made a step which still counts."""
    found: dict[int, int] = {}
    for step, number in metrics.attempts.items():
        found.setdefault(number, step)
    return sorted((step, number) for number, step in found.items())[1:]


def _theme(name: str) -> Theme:
    if name not in THEMES:
        raise ValueError(f"There is no theme {name!r}; curves come in {' and '.join(THEMES)}.")
    return THEMES[name]


def _page(
    metrics: Metrics, theme: Theme, *, height: float, total_steps: int | None, over: Figure | None = None
) -> _Page:
    from matplotlib.figure import Figure

    steps = metrics.table.index
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    last = max(last, total_steps or 0, first + 3)
    pad = 0.5 + 0.01 * (last - first)
    training = [key for key in metrics.table.columns if not key.startswith("val-")]
    trained = bool(len(steps)) and any(series(metrics, key).recorded for key in training)
    fig = over or Figure(figsize=(_WIDTH, height), dpi=100)
    fig.set_facecolor(theme.surface)
    return _Page(
        fig=fig,
        metrics=metrics,
        theme=theme,
        span=(first - pad, last + pad),
        training=trained,
        blank=_emptied(over) if over else [],
    )


def _heading(page: _Page, title: str | None, total_steps: int | None, *, brief: bool = False) -> None:
    """Title, how far the run is, and whatever the panels can't show: other non-finite values, unreadable lines."""
    if title:
        _say(page, None, 0.012, 1, _plain(title, 70), dy=-8, va="top", size=TITLE, bold=True)
    if title or not brief:
        steps = page.metrics.table.index
        of = f" of {total_steps}" if total_steps else ""
        where = f"step {steps[-1]}{of}" if len(steps) else "no step yet"
        if again := resumptions(page.metrics):
            more = f" (and {len(again) - 1} before)" if len(again) > 1 else ""
            where += f"; attempt {again[-1][1]} from step {again[-1][0]}{more}"
        _say(page, None, 0.988, 1, where, dy=-10, ha="right", va="top", color=page.theme.muted)
    notes = []
    others = [key for key in page.metrics.nonfinite if key not in page.drawn]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(f"Not finite, not drawn here: {_plain(others[0], 44)}{more}.")
    if page.metrics.broken:
        lines = sorted({broken.line for broken in page.metrics.broken})
        notes.append(f"Unreadable in the metrics file: line {ranges(lines)}.")
    if notes:
        _say(page, None, 0.012, 1, " ".join(notes), dy=-27 if title else -8, va="top", color=page.theme.alarm)


# --- the panels ---


def _reward(page: _Page, cell: SubplotSpec) -> None:
    mean = page.series("critic/rewards/mean")
    stem = "critic/rewards"
    if not mean.recorded and page.series("critic/score/mean").recorded:
        mean, stem = page.series("critic/score/mean"), "critic/score"
    validation = [page.series(key) for key in validation_keys(page.metrics)]
    names = " · ".join([f"{stem}/mean", *(s.key for s in validation[:1])])
    more = len(validation_keys(page.metrics, limit=None)) - 1
    names = f"{_plain(names, 57)} +{more} more" if more > 0 else names
    ax = _axes(page, cell, "Reward per response", names)
    if not any(s.recorded for s in (mean, *validation)):
        return _absent(page, ax, f"{stem}/mean")
    labels = _smoothed(page, ax, mean, stem)
    marks = [("D", page.theme.second), ("s", page.theme.stages[3]), ("^", page.theme.stages[1])]
    for s, (marker, color) in zip(validation, marks, strict=False):
        x, y, _ = _path(s)
        mark = {"lw": 1, "marker": marker, "ms": 5, "mec": page.theme.surface, "mew": 0.7}
        _line(ax, x, y, color=color, zorder=4, **(mark if len(x) <= _MARKED else {}))
        if len(s.values):
            name = "validation" if len(validation) == 1 else s.key.split("/")[1]
            labels.append((s.values[-1], f"{number(s.values[-1])} {_plain(name, 10)}", color))
    everything = np.concatenate([s.values for s in (mean, *validation, *_band(page, stem))])
    if len(everything) and everything.min() >= 0 and everything.max() <= 1:
        _linear(page, ax, 0.0, 1.0)
    elif len(everything):
        _linear(page, ax, *_extent(everything))
    note = ["no validation yet;", "needs", *_folded(NEEDS["val-core"][0])] if page.training and not validation else []
    _end_labels(page, ax, labels, note=note)
    _crosses(page, ax, {"reward": mean, **{s.key: s for s in validation}})
    return None


def _mismatch(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    diff, pearson, kl = (page.series(key) for key in (_DIFF, _PEARSON, _CORR_KL))

    ax = _axes(page, upper, "Trainer vs rollout: mean probability difference", _DIFF, steps=False)
    if diff.recorded:
        _logarithmic(page, ax, diff.values, include=(DIFF_PROBLEM,))
        labels = []
        for level, words, color in (
            (DIFF_NORMAL, f"{DIFF_NORMAL:g} ▼ normal", theme.muted),
            (DIFF_PROBLEM, f"{DIFF_PROBLEM:g} ▲ problem", theme.alarm),
        ):
            ax.axhline(level, color=color, lw=1, ls=(0, (4, 3)), zorder=1.5)
            labels.append((level, words, color))
        labels += _on_log(ax, diff, theme.first, "mean")
        _end_labels(page, ax, labels)
        _crosses(page, ax, {"mean": diff})
    else:
        _absent(page, ax, _DIFF)

    ax = _axes(page, lower, None, f"1 − {_PEARSON.removeprefix('training/')} · |{_CORR_KL}|")
    distance = Series(_PEARSON, pearson.steps, np.maximum(1 - pearson.values, 0), pearson.nonfinite)
    if distance.recorded or kl.recorded:
        _logarithmic(page, ax, np.concatenate([distance.values, np.abs(kl.values)]))
        labels = _on_log(ax, distance, theme.first, "1 − Pearson") + _on_log(ax, kl, theme.second, "|KL|")
        _end_labels(page, ax, labels)
        _crosses(page, ax, {"Pearson": distance, "KL": kl})
    else:
        _absent(page, ax, _PEARSON, brief=True)


def _entropy(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.25, 1), hspace=0.36)
    entropy, norm = page.series("actor/entropy"), page.series("actor/grad_norm")
    ax = _axes(page, upper, "Entropy, nats per token", entropy.key, steps=False)
    if entropy.recorded:
        _single(page, ax, entropy, digits=3)
    else:
        _absent(page, ax, entropy.key)
    ax = _axes(page, lower, None, f"Gradient norm · {norm.key}")
    if norm.recorded:
        positive = norm.values[norm.values > 0]
        if len(positive) and positive.max() > 30 * np.median(positive):
            _logarithmic(page, ax, norm.values)
            _end_labels(page, ax, _on_log(ax, norm, page.theme.first, ""))
            _crosses(page, ax, {"norm": norm})
        else:
            _single(page, ax, norm, from_zero=True)
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
        "|actor/ppo_kl| (old policy) · actor/kl_loss (reference)",
        steps=False,
    )
    if ppo.recorded or loss.recorded:
        _logarithmic(page, ax, np.concatenate([ppo.values, loss.values]))
        labels = _on_log(ax, ppo, theme.first, "|ppo_kl|") + _on_log(ax, loss, theme.second, "kl_loss")
        note = [] if loss.recorded else ["kl_loss needs", *_folded(NEEDS[loss.key][0])]
        _end_labels(page, ax, labels, note=note)
        _crosses(page, ax, {"ppo_kl": ppo, "kl_loss": loss})
        if len(ppo.values) and not ppo.values.any():
            words = "ppo_kl is 0 with one update a batch:\nppo_mini_batch_size = train_batch_size"
            _say(page, ax, 0.5, 0.5, words, ha="center", va="center", color=theme.muted)
    else:
        _absent(page, ax, ppo.key)
    ax = _axes(page, lower, None, f"Clip fraction of tokens · {clip.key}")
    if clip.recorded:
        _single(page, ax, clip, from_zero=True, at_least=0.01)
    else:
        _absent(page, ax, clip.key, brief=True)


def _length(page: _Page, cell: SubplotSpec, *, strip: bool = True) -> None:
    mean, clip = page.series("response_length/mean"), page.series("response_length/clip_ratio")
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36) if strip else (cell, None)
    ax = _axes(page, upper, "Response length, tokens", "response_length/mean, min, max", steps=not strip)
    if mean.recorded:
        labels = _smoothed(page, ax, mean, "response_length")
        everything = np.concatenate([s.values for s in (mean, *_band(page, "response_length"))])
        if len(everything):
            _linear(page, ax, *_extent(everything, from_zero=True))
        _end_labels(page, ax, labels)
        _crosses(page, ax, {"mean": mean})
    else:
        _absent(page, ax, mean.key)
    if lower is None:
        return
    ax = _axes(page, lower, None, f"Share cut at the limit · {clip.key}")
    if clip.recorded:
        _single(page, ax, clip, from_zero=True, at_least=0.05)
    else:
        _absent(page, ax, clip.key, brief=True)


def _time(page: _Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    ax = _axes(
        page, upper, "Time per step, seconds", "timing_s/… (figures: median of the steps that ran it)", steps=False
    )
    steps, parts = time_parts(page.metrics)
    if parts:
        _stack(page, ax, steps, parts)
    else:
        _absent(page, ax, "timing_s/step")
    rate = page.series("perf/throughput")
    ax = _axes(page, lower, None, f"Tokens per second and device · {rate.key}")
    if rate.recorded:
        _single(page, ax, rate, from_zero=True)
    else:
        _absent(page, ax, rate.key, brief=True)


def validation_keys(metrics: Metrics, limit: int | None = 3) -> list[str]:
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
    keys = [*timed, "timing_s/step"] if whole else timed
    seconds = table[keys].to_numpy()
    ran = np.isfinite(seconds).any(axis=1)
    seconds = np.nan_to_num(seconds[ran])
    parts = {key.removeprefix("timing_s/"): seconds[:, i] for i, key in enumerate(timed)}
    if whole:
        parts["rest"] = np.maximum(seconds[:, -1] - seconds[:, :-1].sum(axis=1), 0.0)
    return table.index.to_numpy()[ran], {stage: took for stage, took in parts.items() if took.any()}


# --- drawing ---


def _axes(page: _Page, spec: SubplotSpec, title: str | None, names: str, *, steps: bool = True) -> Axes:
    """Empty axes with the panel's title (which carries the unit) and, in small print, the keys it shows.

    matplotlib's own ticks are hidden: they take a third of a redraw, and a live page is redrawn all the time.
    """
    from matplotlib.ticker import MaxNLocator

    if page.blank:
        ax = page.blank.pop(0)
    else:
        ax = page.fig.add_subplot(spec)
        ax.xaxis.set_visible(False)
        ax.yaxis.set_visible(False)
    ax.set_facecolor(page.theme.surface)
    ax.set_xlim(*page.span)
    ax.spines["bottom"].set_visible(steps)
    ax.spines["bottom"].set_edgecolor(page.theme.rule)
    muted = page.theme.muted
    for step, _ in resumptions(page.metrics) if steps else ():
        ax.axvline(step - 0.5, lw=0.8, ls=(0, (1, 2)), color=muted, zorder=0)
    if title:
        _say(page, ax, 0, 1, title, dy=17, size=HEAD, bold=True)
    _say(page, ax, 0, 1, _plain(names, 66), dy=4, color=muted)
    if steps:
        below = ax.get_xaxis_transform()
        whole = page.along == "step"
        at = [tick for tick in MaxNLocator(nbins=6, integer=whole).tick_values(*page.span) if _inside(tick, page.span)]
        _line(
            ax, at, np.zeros(len(at)), ls="none", marker=3, ms=3, mew=0.8, color=muted, transform=below, clip_on=False
        )
        for step in at:
            shown = f"{step:.0f}" if whole else number(step)
            _say(page, ax, step, 0, shown, within=below, dy=-5, ha="center", va="top", color=muted)
        _say(page, ax, 0, 0, page.along, dx=-12, dy=-5, ha="right", va="top", color=muted)
    return ax


def _say(
    page: _Page,
    ax: Axes | None,
    x: float,
    y: float,
    text: str,
    *,
    within: Transform | None = None,
    dx: float = 0,
    dy: float = 0,
    ha: Literal["left", "center", "right"] = "left",
    va: Literal["bottom", "center", "top"] = "bottom",
    size: float = BODY,
    bold: bool = False,
    color: str | None = None,
    paper: bool = False,
) -> None:
    """Text at a place in fractions of the axes, of the page if there are none, or `within` another transform.

    It is moved by dx, dy points, and it is set at once: the limits of the axes must be final. `paper` puts the surface
    colour behind it.
    """
    fig = page.fig
    inches = np.divide((within or (ax.transAxes if ax else fig.transFigure)).transform((x, y)), fig.dpi)
    lines = text.split("\n")
    step = 1.3 * size
    # Where the last baseline lies, for DejaVu Sans: capitals are 0.73 high, what hangs below the line 0.24 deep.
    rest = (len(lines) - 1) * step
    base = {"bottom": 0.24 * size, "center": -rest / 2 - 0.36 * size, "top": -rest - 0.86 * size}[va]
    words = page.words.setdefault(color or page.theme.text, [])
    for i, line in enumerate(reversed(lines)):
        word = _Word(line, inches + np.divide((dx, dy + base + i * step), 72), ha, size, bold)
        words.append(word)
        if paper:
            width = _outline(line, size, bold)[2]
            left, low = word.anchor - (width * _ANCHORS[ha] + 0.03, 0.04)
            page.paper.append((left, low, width + 0.06, size / 72 + 0.05))


@lru_cache(maxsize=2048)
def _outline(line: str, size: float, bold: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """One line of text from the origin: (vertices, path codes, width), in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not line.strip():
        return np.empty((0, 2)), np.empty(0, dtype=np.uint8), 0.0
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    path = TextPath((0, 0), line, size=size, prop=font)
    return path.vertices / 72, path.codes, float(path.vertices[:, 0].max()) / 72


def _print(page: _Page, *, outlines: bool) -> None:
    """Put all that was said on the page: as one shape for each colour, or (an SVG) as text that can be searched.

    A page says a hundred and thirty things. As matplotlib texts they take two thirds of a redraw (3.11 lays each of
    them out anew); as outlines kept from the redraw before, in few shapes, they take a twentieth.
    """
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    inches = page.fig.dpi_scale_trans
    for x, y, width, height in page.paper:
        box = Rectangle((x, y), width, height, fc=page.theme.surface, alpha=0.85, lw=0, transform=inches)
        page.fig.add_artist(box)
    for color, words in page.words.items():
        if not outlines:
            for word in words:
                weight = "bold" if word.bold else "normal"
                style = {"ha": word.ha, "va": "baseline", "size": word.size, "weight": weight, "color": color}
                page.fig.text(*word.anchor, word.text, transform=inches, **style)
            continue
        vertices, codes = zip(*(word.outline() for word in words), strict=True)
        ink = PathPatch(Outline(np.concatenate(vertices), np.concatenate(codes)), fc=color, lw=0, transform=inches)
        ink.set_zorder(2)
        ink.set_gid("text: " + " | ".join(word.text for word in words))
        page.fig.add_artist(ink)


def _inside(value: float, limits: Sequence[float]) -> bool:
    return min(limits) <= value <= max(limits)


def _height(page: _Page, ax: Axes) -> float:
    """Height of the axes in pixels at 100 dots an inch."""
    return ax.get_position().height * page.fig.get_figheight() * 100


def _scale(page: _Page, ax: Axes, ticks: Sequence[float]) -> None:
    """Rules across the axes at `ticks`, and their numbers at the left."""
    at = [tick for tick in ticks if _inside(tick, ax.get_ylim())]
    across, heights = np.tile([*page.span, np.nan], len(at)), np.repeat(at, 3)
    _line(ax, across, heights, color=page.theme.rule, lw=0.7, solid_capstyle="butt", zorder=0.5)
    for tick in at:
        _say(
            page,
            ax,
            0,
            tick,
            number(tick),
            within=ax.get_yaxis_transform(),
            dx=-5,
            ha="right",
            va="center",
            color=page.theme.muted,
        )


def _linear(page: _Page, ax: Axes, low: float, high: float) -> None:
    """A linear y axis with a little room; a share of one is marked in quarters or halves."""
    from matplotlib.ticker import MaxNLocator

    high = high if high > low else low + 1
    share = (low, high) == (0.0, 1.0)
    room = 0.06 * (high - low)
    ax.set_ylim(low - (0 if low == 0 and not share else room), high + room)
    few = _height(page, ax) < 90
    _scale(
        page,
        ax,
        np.linspace(0, 1, 3 if few else 5) if share else MaxNLocator(2 if few else 4).tick_values(low, high + room),
    )


def _logarithmic(page: _Page, ax: Axes, values: np.ndarray, *, include: Sequence[float] = ()) -> None:
    """A logarithmic y axis over whole decades around the sizes of `values`, at least two."""
    size = np.abs(values)
    size = np.clip(np.concatenate([size[size > 0], include]), 1e-30, 1e30)
    if not len(values) and not len(size):
        return
    low, high = (np.floor(np.log10(size.min())), np.ceil(np.log10(size.max()))) if len(size) else (-6, -1)
    low = min(low, high - 2)
    ax.set_yscale("log")
    ax.set_ylim(10.0**low / 1.5, 2 * 10.0**high)
    stride = int(np.ceil((high - low) / (_height(page, ax) // 22)))
    _scale(page, ax, 10.0 ** np.arange(low, high + 1, stride))


def _line(ax: Axes, x: Any, y: Any, **look: Any) -> None:
    """A line or markers. Not by ax.plot, half of whose time goes into limits, which these axes have of their own."""
    from matplotlib.lines import Line2D

    ax.add_artist(Line2D(x, y, **look))


def _draw(ax: Axes, s: Series, color: str) -> None:
    """A line with its holes, thinned; points without a neighbour as dots, since a line of one point can't be seen.

    Where the steps stand closer than pixels their line is a faint ground, and their mean is the line.
    """
    close = len(s.values) > _BUCKETS
    x, y, alone = _path(s)
    if not len(x):
        return
    _line(ax, x, y, color=color, lw=0.8 if close else 1.6, alpha=0.35 if close else 1, zorder=3)
    _dots(ax, x[alone], y[alone], color)
    if close:
        x, y, _ = _path(s, trailing_mean(s.values, _window(s)))
        _line(ax, x, y, color=color, lw=1.6, zorder=3)


def _dots(ax: Axes, x: np.ndarray, y: np.ndarray, color: str) -> None:
    if len(x):
        _line(ax, x, y, ls="none", marker="o", ms=4, mew=0, color=color, zorder=3)


def _window(s: Series) -> int:
    """Steps to average over: five, or a hundredth of a long run."""
    return max(5, len(s.values) // 100)


def _single(
    page: _Page, ax: Axes, s: Series, *, digits: int = 2, from_zero: bool = False, at_least: float = 0.0
) -> None:
    """One line on a linear axis of its own, with its last value at its end."""
    _draw(ax, s, page.theme.first)
    if len(s.values):
        low, high = _extent(s.values, from_zero=from_zero)
        _linear(page, ax, low, max(high, at_least))
    _end_labels(page, ax, [(v, number(v, digits), page.theme.first) for v in s.values[-1:]])
    _crosses(page, ax, {s.key: s})


def _on_log(ax: Axes, s: Series, color: str, name: str) -> list[Label]:
    """The size of a value on a logarithmic axis; an exact zero is a triangle at its foot. Returns the end label."""
    size = np.abs(s.values)
    positive = size > 0
    _draw(ax, Series(s.key, s.steps[positive], size[positive], s.nonfinite), color)
    if not positive.all():
        zeros, foot = s.steps[~positive], ax.get_xaxis_transform()
        height = np.full(len(zeros), 0.03)
        _line(
            ax, zeros, height, ls="none", marker="v", ms=4, mew=0, color=color, transform=foot, clip_on=False, zorder=3
        )
    return [(v, f"{number(v, 2)} {name}".strip(), color) for v in size[-1:]]


def _smoothed(page: _Page, ax: Axes, mean: Series, stem: str) -> list[Label]:
    """A min–max band, each step's mean as a light point, and the mean of five steps as a line. Returns end labels."""
    color, muted = page.theme.first, page.theme.muted
    low, high = _band(page, stem)
    labels = []
    both = np.intersect1d(low.steps, high.steps)
    if len(both):
        lows = low.values[np.isin(low.steps, both)]
        highs = high.values[np.isin(high.steps, both)]
        kept = np.union1d(thin(lows), thin(highs))
        labels += [(highs[-1], f"{number(highs[-1])} max", muted), (lows[-1], f"{number(lows[-1])} min", muted)]
        if len(both) == 1:
            ax.vlines(both, lows, highs, color=color, lw=6, alpha=0.18)
        elif np.ptp(lows) or np.ptp(highs):  # a band that never moves is a wall of colour: its two labels say it all
            cut = _cuts(Series(low.key, both, lows, low.nonfinite), kept)
            x, y, top = (np.insert(v[kept].astype(float), cut, np.nan) for v in (both, lows, highs))
            ax.fill_between(x, y, top, color=color, alpha=0.12, lw=0)
    if len(mean.values):
        x, y, _ = _path(mean)
        _line(ax, x, y, ls="none", marker="o", ms=3.2 if len(x) <= 200 else 1.6, mew=0, color=color, alpha=0.45)
        window = min(_window(mean), len(mean.values))
        smooth = trailing_mean(mean.values, window)
        x, y, alone = _path(mean, smooth)
        _line(ax, x, y, color=color, lw=2, zorder=3)
        _dots(ax, x[alone], y[alone], color)
        name = f"mean of {window}" if window > 1 else "mean"
        labels.append((smooth[-1], f"{number(smooth[-1])} {name}", color))
    return labels


def _band(page: _Page, stem: str) -> tuple[Series, Series]:
    """Lowest and highest of each step. Not by `page.series`: the heading, not a cross, tells of values lost here."""
    return series(page.metrics, f"{stem}/min"), series(page.metrics, f"{stem}/max")


def _stack(page: _Page, ax: Axes, steps: np.ndarray, parts: dict[str, np.ndarray]) -> None:
    """Seconds of each stage, one on the other, a column as wide as its step. A far outlier is cut off and named."""
    total = sum(parts.values(), start=np.zeros(len(steps)))
    colors = dict(zip(STAGES, page.theme.stages, strict=True))
    kept = thin(total, _BUCKETS // 2)  # a column is a pixel wide, where a line passes its lowest and highest in one
    s = Series("timing_s/step", steps[kept], total[kept])
    hole = holes(s)
    middle = (s.steps[1:] + s.steps[:-1]) / 2
    left = np.concatenate([[s.steps[0] - 0.5], np.where(hole, s.steps[1:] - 0.5, middle)])
    right = np.concatenate([np.where(hole, s.steps[:-1] + 0.5, middle), [s.steps[-1] + 0.5]])
    cut = 2 * (np.flatnonzero(hole) + 1)

    def corners(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.insert(np.column_stack([left, right]).ravel(), cut, np.nan)

    base = np.zeros(len(kept))
    labels = []
    for stage, seconds in parts.items():
        top = base + seconds[kept]
        ax.fill_between(corners(left, right), corners(base, base), corners(top, top), color=colors[stage], lw=0)
        words = f"{number(np.median(seconds[seconds > 0]), 2)} {STAGES[stage]}"
        labels.append(((base[-1] + top[-1]) / 2, words, colors[stage]))
        base = top
    far = total > 4 * np.median(total)
    _linear(page, ax, 0, total[~far].max() * (1.25 if far.any() else 1.0))
    if far.any():
        more = f", and {far.sum() - 1} more" if far.sum() > 1 else ""
        words = f"▲ step {steps[far][0]}: {number(total[far][0])} s{more}"
        _say(page, ax, steps[far][0] + 0.5, 1, words, within=ax.get_xaxis_transform(), dx=3, dy=-2, va="top")
    _end_labels(page, ax, labels, swatch=True)


def _extent(values: np.ndarray, *, from_zero: bool = False) -> tuple[float, float]:
    """Limits for these values. A nearly constant one is not blown up: the axis spans at least 5 % of its size."""
    low, high = float(values.min()), float(values.max())
    if low >= 0 and (from_zero or low < 0.5 * high):
        return 0.0, high
    room = max(0.05 * max(abs(low), abs(high)) - (high - low), 0.0) / 2
    return low - room, high + room


def _end_labels(page: _Page, ax: Axes, labels: list[Label], *, note: Sequence[str] = (), swatch: bool = False) -> None:
    """Names and last values at the right end of their lines, pushed apart until none covers another.

    `note` is a remark on a line that is missing; it takes the widest stretch that the labels leave free.
    """
    to_axes = ax.transScale + ax.transLimits
    floor = ax.get_ylim()[0]
    places = []
    for value, text, color in labels:
        drawable = value if value > 0 or ax.get_yscale() == "linear" else floor
        places.append((float(np.clip(to_axes.transform((0, drawable))[1], 0, 1)), text, color))
    places.sort(key=lambda place: place[0])
    gap = 13.5 / _height(page, ax)
    ys = [y for y, _, _ in places]
    top = 1 - gap / 3
    if note:
        half = (0.6 * len(note) + 0.2) * gap
        ends = [0.0, *ys, 1.0]
        below = int(np.argmax(np.diff(ends)))
        middle = float(np.clip((ends[below] + ends[below + 1]) / 2, half, 1 - half))
        _say(page, ax, 1, middle, "\n".join(note), dx=6, va="center", color=page.theme.muted)
        limit = gap / 2
        ys = apart(ys[:below], gap, 0, middle - half - limit) + apart(ys[below:], gap, middle + half + limit, top)
    else:
        ys = apart(ys, gap, 0, top)
    for y, (_, text, color) in zip(ys, places, strict=True):
        if swatch:
            _say(page, ax, 1, y, "■", dx=6, va="center", size=10, color=color)
        _say(page, ax, 1, y, text, dx=17 if swatch else 6, va="center", color=page.theme.text if swatch else color)


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places, in rising order, moved to lie `gap` apart, not above `high` and, if they all fit, not below `low`."""
    moved = list(places)
    for i, place in enumerate(moved):
        moved[i] = max(place, low if i == 0 else moved[i - 1] + gap)
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], high if i == len(moved) - 1 else moved[i + 1] - gap)
    return moved


def _crosses(page: _Page, ax: Axes, lines: dict[str, Series]) -> None:
    """A cross at the top of the panel at each step whose value was NaN or infinite, and which steps these are."""
    alarm, top = page.theme.alarm, ax.get_xaxis_transform()
    lost: dict[tuple[int, ...], list[str]] = {}
    for name, s in lines.items():
        if s.nonfinite:
            lost.setdefault(s.nonfinite, []).append(name)
    recorded = [name for name, s in lines.items() if s.recorded]
    for i, (steps, names) in enumerate(lost.items()):
        at = np.asarray(steps)[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 60)).astype(int))]
        one = np.ones(len(at))
        _line(ax, at, one, ls="none", marker="x", ms=5, mew=1.4, color=alarm, transform=top, clip_on=False, zorder=5)
        who = "" if names == recorded else f"{' and '.join(_plain(name, 24) for name in names)} "
        words = who + _not_finite(steps)
        # Under its crosses, where there is no line to cover, unless that would leave the panel.
        near = steps[0] < page.span[0] + 0.5 * (page.span[1] - page.span[0])
        x, ha = (steps[0], "left") if near else (page.span[1], "right")
        _say(page, ax, x, 1, words, within=top, dy=-6 - 13 * i, ha=ha, va="top", color=alarm, paper=True)


def _absent(page: _Page, ax: Axes, key: str, *, brief: bool = False) -> None:
    """An empty panel says why it is empty."""
    if not page.training:
        lines = [] if brief else ["waiting for the first training step"]
    elif key in NEEDS:
        lines = ["not recorded; needs", *NEEDS[key][: 1 if brief else None]]
    else:
        lines = ["not recorded, though verl writes", f"{key} at every training step"]
    _say(page, ax, 0.5, 0.5, "\n".join(lines), ha="center", va="center", color=page.theme.muted)


def _folded(setting: str, width: int = 18) -> list[str]:
    """A dotted setting in lines that fit the margin: broken after a dot."""
    lines = [""]
    for part in setting.replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _plain(text: str, limit: int) -> str:
    """Text that is not ours, for a label: in letters our font has, on one line, its middle cut out if too long."""
    text = "".join(c if c.isprintable() and c < "\u2e80" else "�" for c in text)
    return text if len(text) <= limit else text[: limit - limit // 3 - 1] + "…" + text[-(limit // 3) :]


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
    text += [f"Attempt {number} begins at step {step}." for step, number in resumptions(metrics)]
    for head, parts in sentences:
        text.append(f"{head}: {'; '.join(_phrase(series(metrics, key), name) for key, name in parts)}.")
    return " ".join(text)


def _phrase(s: Series, name: str) -> str:
    lost = f" ({_not_finite(s.nonfinite)})" if s.nonfinite else ""
    if not len(s.values):
        if lost:
            return name + lost
        needs = f", needs {' and '.join(NEEDS[s.key])}" if s.key in NEEDS else ""
        return f"{name} not recorded{needs}"
    window = 5 if name == "mean of five steps" else 1
    first, last = s.values[:window].mean(), s.values[-window:].mean()
    digits = (lambda v: f"{v:.5f}") if s.key == _PEARSON else number
    return f"{name} {digits(first)} → {digits(last)}{lost}"
