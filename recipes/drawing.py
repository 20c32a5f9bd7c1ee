"""A page of curves: its look in light and dark, axes and words that cost little, and the page as PNG.

A page is drawn again and again while a run goes on, so that it does without what takes matplotlib's time: ticks, texts
and limits of its own. Only matplotlib's object interface is used: no pyplot, no global figure, no display.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recipes.metrics import Metrics
from recipes.series import BUCKETS, Series, not_finite, number, path, resumptions, series, trailing_mean, window_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.transforms import Transform
    from PIL.Image import Image


# --- the look ---


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


WIDTH = 9.6


def settings(theme: Theme) -> dict[str, Any]:
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


def theme_named(name: str) -> Theme:
    """The colours of THEMES. Raises ValueError for a name that is not there."""
    if name not in THEMES:
        raise ValueError(f"There is no theme {name!r}; curves come in {' and '.join(THEMES)}.")
    return THEMES[name]


# --- a page ---

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
class Page:
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
        """The values of a key, which is thereby one that the page shows."""
        self.drawn.add(key)
        return series(self.metrics, key)

    def axes(self, spec: SubplotSpec, title: str | None, names: str, *, steps: bool = True) -> Axes:
        """Empty axes with the panel's title (which carries the unit) and, in small print, the keys it shows.

        matplotlib's own ticks are hidden: they take a third of a redraw, and a live page is redrawn all the time.
        """
        from matplotlib.ticker import MaxNLocator

        if self.blank:
            ax = self.blank.pop(0)
        else:
            ax = self.fig.add_subplot(spec)
            ax.xaxis.set_visible(False)
            ax.yaxis.set_visible(False)
        ax.set_facecolor(self.theme.surface)
        ax.set_xlim(*self.span)
        ax.spines["bottom"].set_visible(steps)
        ax.spines["bottom"].set_edgecolor(self.theme.rule)
        muted = self.theme.muted
        for step, _ in resumptions(self.metrics) if steps else ():
            ax.axvline(step - 0.5, lw=0.8, ls=(0, (1, 2)), color=muted, zorder=0)
        if title:
            self.say(ax, 0, 1, title, dy=17, size=HEAD, bold=True)
        self.say(ax, 0, 1, plain(names, 66), dy=4, color=muted)
        if steps:
            below = ax.get_xaxis_transform()
            whole = self.along == "step"
            at = [
                tick for tick in MaxNLocator(nbins=6, integer=whole).tick_values(*self.span) if _inside(tick, self.span)
            ]
            draw_line(
                ax,
                at,
                np.zeros(len(at)),
                ls="none",
                marker=3,
                ms=3,
                mew=0.8,
                color=muted,
                transform=below,
                clip_on=False,
            )
            for step in at:
                shown = f"{step:.0f}" if whole else number(step)
                self.say(ax, step, 0, shown, within=below, dy=-5, ha="center", va="top", color=muted)
            self.say(ax, 0, 0, self.along, dx=-12, dy=-5, ha="right", va="top", color=muted)
        return ax

    def say(
        self,
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

        It is moved by dx, dy points, and it is set at once: the limits of the axes must be final. `paper` puts the
        surface colour behind it.
        """
        fig = self.fig
        inches = np.divide((within or (ax.transAxes if ax else fig.transFigure)).transform((x, y)), fig.dpi)
        lines = text.split("\n")
        step = 1.3 * size
        # Where the last baseline lies, for DejaVu Sans: capitals are 0.73 high, what hangs below the line 0.24 deep.
        rest = (len(lines) - 1) * step
        base = {"bottom": 0.24 * size, "center": -rest / 2 - 0.36 * size, "top": -rest - 0.86 * size}[va]
        words = self.words.setdefault(color or self.theme.text, [])
        for i, line in enumerate(reversed(lines)):
            word = _Word(line, inches + np.divide((dx, dy + base + i * step), 72), ha, size, bold)
            words.append(word)
            if paper:
                width = _outline(line, size, bold)[2]
                left, low = word.anchor - (width * _ANCHORS[ha] + 0.03, 0.04)
                self.paper.append((left, low, width + 0.06, size / 72 + 0.05))

    def print(self, *, outlines: bool) -> None:
        """Put all that was said on the page: as one shape for each colour, or (an SVG) as text that can be searched.

        A page says a hundred and thirty things. As matplotlib texts they take two thirds of a redraw (3.11 lays each of
        them out anew); as outlines kept from the redraw before, in few shapes, they take a twentieth.
        """
        from matplotlib.patches import PathPatch, Rectangle
        from matplotlib.path import Path as Outline

        inches = self.fig.dpi_scale_trans
        for x, y, width, height in self.paper:
            box = Rectangle((x, y), width, height, fc=self.theme.surface, alpha=0.85, lw=0, transform=inches)
            self.fig.add_artist(box)
        for color, words in self.words.items():
            if not outlines:
                for word in words:
                    weight = "bold" if word.bold else "normal"
                    style = {"ha": word.ha, "va": "baseline", "size": word.size, "weight": weight, "color": color}
                    self.fig.text(*word.anchor, word.text, transform=inches, **style)
                continue
            vertices, codes = zip(*(word.outline() for word in words), strict=True)
            ink = PathPatch(Outline(np.concatenate(vertices), np.concatenate(codes)), fc=color, lw=0, transform=inches)
            ink.set_zorder(2)
            ink.set_gid("text: " + " | ".join(word.text for word in words))
            self.fig.add_artist(ink)

    def height(self, ax: Axes) -> float:
        """Height of the axes in pixels at 100 dots an inch."""
        return ax.get_position().height * self.fig.get_figheight() * 100

    def scale(self, ax: Axes, ticks: Sequence[float]) -> None:
        """Rules across the axes at `ticks`, and their numbers at the left."""
        at = [tick for tick in ticks if _inside(tick, ax.get_ylim())]
        across, heights = np.tile([*self.span, np.nan], len(at)), np.repeat(at, 3)
        draw_line(ax, across, heights, color=self.theme.rule, lw=0.7, solid_capstyle="butt", zorder=0.5)
        for tick in at:
            self.say(
                ax,
                0,
                tick,
                number(tick),
                within=ax.get_yaxis_transform(),
                dx=-5,
                ha="right",
                va="center",
                color=self.theme.muted,
            )

    def linear(self, ax: Axes, low: float, high: float) -> None:
        """A linear y axis with a little room; a share of one is marked in quarters or halves."""
        from matplotlib.ticker import MaxNLocator

        high = high if high > low else low + 1
        share = (low, high) == (0.0, 1.0)
        room = 0.06 * (high - low)
        ax.set_ylim(low - (0 if low == 0 and not share else room), high + room)
        few = self.height(ax) < 90
        self.scale(
            ax,
            np.linspace(0, 1, 3 if few else 5) if share else MaxNLocator(2 if few else 4).tick_values(low, high + room),
        )

    def logarithmic(self, ax: Axes, values: np.ndarray, *, include: Sequence[float] = ()) -> None:
        """A logarithmic y axis over whole decades around the sizes of `values`, at least two."""
        size = np.abs(values)
        size = np.clip(np.concatenate([size[size > 0], include]), 1e-30, 1e30)
        if not len(values) and not len(size):
            return
        low, high = (np.floor(np.log10(size.min())), np.ceil(np.log10(size.max()))) if len(size) else (-6, -1)
        low = min(low, high - 2)
        ax.set_yscale("log")
        ax.set_ylim(10.0**low / 1.5, 2 * 10.0**high)
        stride = int(np.ceil((high - low) / (self.height(ax) // 22)))
        self.scale(ax, 10.0 ** np.arange(low, high + 1, stride))

    def end_labels(self, ax: Axes, labels: list[Label], *, note: Sequence[str] = (), swatch: bool = False) -> None:
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
        gap = 13.5 / self.height(ax)
        ys = [y for y, _, _ in places]
        top = 1 - gap / 3
        if note:
            half = (0.6 * len(note) + 0.2) * gap
            ends = [0.0, *ys, 1.0]
            below = int(np.argmax(np.diff(ends)))
            middle = float(np.clip((ends[below] + ends[below + 1]) / 2, half, 1 - half))
            self.say(ax, 1, middle, "\n".join(note), dx=6, va="center", color=self.theme.muted)
            limit = gap / 2
            ys = apart(ys[:below], gap, 0, middle - half - limit) + apart(ys[below:], gap, middle + half + limit, top)
        else:
            ys = apart(ys, gap, 0, top)
        for y, (_, text, color) in zip(ys, places, strict=True):
            if swatch:
                self.say(ax, 1, y, "■", dx=6, va="center", size=10, color=color)
            self.say(ax, 1, y, text, dx=17 if swatch else 6, va="center", color=self.theme.text if swatch else color)

    def crosses(self, ax: Axes, lines: dict[str, Series]) -> None:
        """A cross at the top of the panel at each step whose value was NaN or infinite, and which steps these are."""
        alarm, top = self.theme.alarm, ax.get_xaxis_transform()
        lost: dict[tuple[int, ...], list[str]] = {}
        for name, s in lines.items():
            if s.nonfinite:
                lost.setdefault(s.nonfinite, []).append(name)
        recorded = [name for name, s in lines.items() if s.recorded]
        for i, (steps, names) in enumerate(lost.items()):
            at = np.asarray(steps)[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 60)).astype(int))]
            one = np.ones(len(at))
            draw_line(
                ax, at, one, ls="none", marker="x", ms=5, mew=1.4, color=alarm, transform=top, clip_on=False, zorder=5
            )
            who = "" if names == recorded else f"{' and '.join(plain(name, 24) for name in names)} "
            words = who + not_finite(steps)
            # Under its crosses, where there is no line to cover, unless that would leave the panel.
            near = steps[0] < self.span[0] + 0.5 * (self.span[1] - self.span[0])
            x, ha = (steps[0], "left") if near else (self.span[1], "right")
            self.say(ax, x, 1, words, within=top, dy=-6 - 13 * i, ha=ha, va="top", color=alarm, paper=True)


# --- as a picture ---


def png(fig: Figure, *, dpi: int = 100) -> bytes:
    """The figure as PNG. 100 dots an inch give 960 pixels; use 200 where the page is shown at half its size."""
    return packed(pixels(fig, dpi), dpi, QUICK)


def png_to_keep(fig: Figure, description: str) -> bytes:
    """The figure as PNG for a file: 1920 pixels wide, packed small, with its description in words."""
    return packed(pixels(fig, 200), 200, SMALL, description)


QUICK, SMALL = 3, 9
"""Levels of zlib: for a page that is drawn again and again, and for a file that is kept."""


def pixels(fig: Figure, dpi: int) -> Image:
    """Draw the figure. Not by fig.savefig: that draws everything twice, first for layouts this page does not use."""
    import PIL.Image
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    usual = fig.dpi
    fig.set_dpi(dpi)
    try:
        canvas = FigureCanvasAgg(fig)
        canvas.draw()
        # Without the page's opacity, which is 1 everywhere: packing it would take as long as drawing.
        return PIL.Image.frombytes("RGB", canvas.get_width_height(), bytes(canvas.buffer_rgba()), "raw", "RGBX")
    finally:
        fig.set_dpi(usual)


def packed(image: Image, dpi: int, compress_level: int, description: str = "") -> bytes:
    """The image as PNG, its resolution and a description in it, at a level of zlib."""
    from PIL.PngImagePlugin import PngInfo

    file, info = io.BytesIO(), PngInfo()
    if description:
        info.add_text("Description", description)
    image.save(file, "png", pnginfo=info, dpi=(dpi, dpi), compress_level=compress_level)
    return file.getvalue()


def emptied(fig: Figure) -> list[Axes]:
    """Take everything off a page but its axes, and return them: they are as new, whatever was drawn in them."""
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

    with matplotlib.rc_context(settings(new)):
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


def _inside(value: float, limits: Sequence[float]) -> bool:
    return min(limits) <= value <= max(limits)


# --- lines ---


def draw_line(ax: Axes, x: Any, y: Any, **look: Any) -> None:
    """A line or markers. Not by ax.plot, half of whose time goes into limits, which these axes have of their own."""
    from matplotlib.lines import Line2D

    ax.add_artist(Line2D(x, y, **look))


def draw_band(ax: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, **look: Any) -> None:
    """The ground between two lines, parted where x is NaN. Not by ax.fill_between, which finds units and limits."""
    from matplotlib.collections import PolyCollection

    parts = np.split(np.arange(len(x)), np.flatnonzero(np.isnan(x)))
    runs = [part[np.isfinite(x[part])] for part in parts]
    there = [
        np.column_stack([np.concatenate([x[r], x[r][::-1]]), np.concatenate([low[r], high[r][::-1]])])
        for r in runs
        if len(r)
    ]
    ax.add_collection(PolyCollection(there, lw=0, **look), autolim=False)


def draw_series(ax: Axes, s: Series, color: str) -> None:
    """A line with its holes, thinned; points without a neighbour as dots, since a line of one point can't be seen.

    Where the steps stand closer than two pixels their line is a faint ground, and their mean is the line.
    """
    close = len(s.values) > BUCKETS // 2
    x, y, alone = path(s)
    if not len(x):
        return
    draw_line(ax, x, y, color=color, lw=0.8 if close else 1.6, alpha=0.35 if close else 1, zorder=3)
    draw_dots(ax, x[alone], y[alone], color)
    if close:
        x, y, _ = path(s, trailing_mean(s.values, window_of(s)))
        draw_line(ax, x, y, color=color, lw=1.6, zorder=3)


def draw_dots(ax: Axes, x: np.ndarray, y: np.ndarray, color: str) -> None:
    if len(x):
        draw_line(ax, x, y, ls="none", marker="o", ms=4, mew=0, color=color, zorder=3)


def extent(values: np.ndarray, *, from_zero: bool = False) -> tuple[float, float]:
    """Limits for these values. A nearly constant one is not blown up: the axis spans at least 5 % of its size."""
    low, high = float(values.min()), float(values.max())
    if low >= 0 and (from_zero or low < 0.5 * high):
        return 0.0, high
    room = max(0.05 * max(abs(low), abs(high)) - (high - low), 0.0) / 2
    return low - room, high + room


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places, in rising order, moved to lie `gap` apart, not above `high` and, if they all fit, not below `low`."""
    moved = list(places)
    for i, place in enumerate(moved):
        moved[i] = max(place, low if i == 0 else moved[i - 1] + gap)
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], high if i == len(moved) - 1 else moved[i + 1] - gap)
    return moved


def plain(text: str, limit: int) -> str:
    """Text that is not ours, for a label: in letters our font has, on one line, its middle cut out if too long."""
    text = "".join(c if c.isprintable() and c < "\u2e80" else "�" for c in text)
    return text if len(text) <= limit else text[: limit - limit // 3 - 1] + "…" + text[-(limit // 3) :]
