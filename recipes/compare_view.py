"""A comparison to look at: one page of panels as recipes.drawing lays them out, and the tables beside it as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recipes import compare, curves, differences, drawing, page
from recipes.atomic import replace_file
from recipes.compare import Comparison, Line
from recipes.drawing import Theme
from recipes.masking import mask
from recipes.metrics import as_metrics
from recipes.series import BUCKETS, Series, cuts, number, thin, trailing_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SMOOTHED = 15  # steps of a line from which a mean of five is drawn over it


@dataclass(frozen=True)
class Panel:
    """A panel: its title with the unit, the keys of which the first that anybody recorded is drawn, and its axis."""

    title: str
    keys: tuple[str, ...]
    log: bool = False
    from_zero: bool = False
    smooth: bool = False
    marked: bool = False


def panels(found: Comparison) -> list[Panel]:
    """What a page of several runs shows: every panel has one key, so that lines differ by their run alone."""
    return [
        Panel("Reward per response", compare.REWARD, smooth=True),
        Panel("Validation", tuple(compare.validation_keys(found.sources)), marked=True),
        Panel("Trainer vs rollout: mean probability difference", ("training/rollout_probs_diff_mean",), log=True),
        Panel("Entropy, nats per token", ("actor/entropy",)),
        Panel("KL, nats per token", ("actor/kl_loss", "actor/ppo_kl"), log=True),
        Panel("Gradient norm", ("actor/grad_norm",), from_zero=True, smooth=True),
        Panel("Response length, tokens", ("response_length/mean",), from_zero=True, smooth=True),
        Panel("Time per step, seconds", ("timing_s/step",), from_zero=True),
    ]


def _color(theme: Theme, i: int) -> tuple[str, Any]:
    """Colour and dash of the i-th group: seven colours that can be told apart, then the same with broken lines."""
    stages = theme.stages
    palette = (theme.first, theme.second, stages[3], stages[1], stages[6], stages[7], stages[4])
    return palette[i % len(palette)], "-" if i < len(palette) else (0, (4, 2))


def figure(found: Comparison, *, theme: Literal["light", "dark"] = "light", title: str | None = None) -> Figure:
    """All groups over each other, 960 pixels wide at 100 dots an inch. Raises ValueError for an unknown theme."""
    import matplotlib
    from matplotlib.figure import Figure

    look, legend = drawing.theme_named(theme), found.legend()
    scale, along = _scale(found)
    head = 0.62 + 0.19 * len(legend)
    height = 10.6 + head
    ends = [compare.positions(source, found.by) / scale for source in found.sources]
    first, last = min(float(x[0]) for x in ends), max(float(x[-1]) for x in ends)
    room = 0.01 * (last - first) + (0.5 if found.by == "step" else 1e-9)
    with matplotlib.rc_context(drawing.settings(look)):
        sheet = drawing.Page(
            fig=Figure(figsize=(drawing.WIDTH, height), dpi=100),
            metrics=as_metrics(_nothing()),
            theme=look,
            span=(first - room, last + room),
            training=True,
            along=along,
        )
        top = 1 - (head + 0.42) / height
        cells = sheet.fig.add_gridspec(
            4, 2, left=0.07, right=0.885, top=top, bottom=0.4 / height, wspace=0.42, hspace=0.46
        )
        for i, panel in enumerate(panels(found)):
            _panel(sheet, found, panel, cells[divmod(i, 2)], scale)
        _heading(sheet, title or " against ".join(one.name for one in found.groups), legend)
        sheet.print(outlines=True)
    return sheet.fig


def _nothing() -> Any:
    import pandas as pd

    return pd.DataFrame(index=pd.Index([], dtype="int64"))


def _scale(found: Comparison) -> tuple[float, str]:
    """(divisor, name with unit) of the axis."""
    end = max(float(compare.positions(source, found.by)[-1]) for source in found.sources)
    units = {
        "tokens": ((1e9, "G tokens"), (1e6, "M tokens"), (1e3, "k tokens"), (0.0, "tokens")),
        "time": ((3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds")),
        "step": ((0.0, "step"),),
    }
    return next((size or 1.0, words) for size, words in units[found.by] if end >= 2 * size)


def _heading(sheet: drawing.Page, title: str, legend: Sequence[tuple[str, str]]) -> None:
    sheet.say(None, 0.012, 1, drawing.plain(title, 90), dy=-8, va="top", size=drawing.TITLE, bold=True)
    for i, (letter, words) in enumerate(legend):
        color, dash = _color(sheet.theme, i)
        down = -32 - 13.7 * i
        line = "▬" if dash == "-" else "╍"
        sheet.say(None, 0.012, 1, f"{line} {letter}", dy=down, va="top", color=color, bold=True)
        sheet.say(None, 0.055, 1, drawing.plain(words, 130), dy=down, va="top")


def _panel(sheet: drawing.Page, found: Comparison, panel: Panel, cell: Any, scale: float) -> None:
    key, lines = chosen(found, panel)
    drawn = [line for line in lines if line is not None and len(line.x)]
    names = f"|{key}|" if any((line.low < 0).any() for line in drawn) and panel.log else key
    longest = max((len(line.x) for line in drawn), default=0)
    if longest > BUCKETS or (panel.smooth and longest >= _SMOOTHED):
        names += f", mean of {max(5, longest // 100)} steps over it"
    ax = sheet.axes(cell, panel.title, names)
    if not drawn:
        needs = curves.NEEDS.get((panel.keys or ("val-core",))[0], ())[:1]
        words = "\n".join(["nobody recorded it", *(f"needs {one}" for one in needs)])
        sheet.say(ax, 0.5, 0.5, words, ha="center", va="center", color=sheet.theme.muted)
        return
    size = np.abs if panel.log else np.asarray
    values = np.concatenate([size(v) for line in drawn for v in (line.low, line.high)])
    if panel.log and (values > 0).any():
        include = (curves.DIFF_PROBLEM,) if key == "training/rollout_probs_diff_mean" else ()
        sheet.logarithmic(ax, values[values > 0], include=include)
        if include:
            ax.axhline(curves.DIFF_PROBLEM, color=sheet.theme.alarm, lw=1, ls=(0, (4, 3)), zorder=1.5)
    elif key and values.min() >= 0 and values.max() <= 1 and (key in compare.REWARD or key.startswith("val-")):
        sheet.linear(ax, 0.0, 1.0)
    else:
        sheet.linear(ax, *drawing.extent(values, from_zero=panel.from_zero))
    problem = panel.log and key == "training/rollout_probs_diff_mean"
    labels = [(curves.DIFF_PROBLEM, "▲ problem", sheet.theme.alarm)] if problem else []
    for i, line in enumerate(lines):
        if line is None or not len(line.x):
            continue
        end = _draw(sheet, ax, line, i, panel, scale)
        labels.append((end, f"{number(end, 3)} {found.letters[i]}", _color(sheet.theme, i)[0]))
        if line.nonfinite:
            at = np.asarray(line.nonfinite, dtype=float)
            top = ax.get_xaxis_transform()
            drawing.draw_line(
                ax,
                at,
                np.ones(len(at)),
                ls="none",
                marker="x",
                ms=5,
                mew=1.4,
                color=_color(sheet.theme, i)[0],
                transform=top,
                clip_on=False,
                zorder=5,
            )
    sheet.end_labels(ax, labels)


def chosen(found: Comparison, panel: Panel) -> tuple[str, list[Line | None]]:
    """The key a panel shows and each group's line of it; an empty key when nobody recorded any."""
    for key in panel.keys:
        lines = [compare.line(one, key, found.by) for one in found.groups]
        if any(lines):
            return key, lines
    return "", []


def _draw(sheet: drawing.Page, ax: Axes, line: Line, i: int, panel: Panel, scale: float) -> float:
    """A group's line, thinned; its band if it has one. Returns the last value drawn.

    A noisy line is drawn faintly, and the mean of five steps, or of a hundredth of a long run, over it.
    """
    color, dash = _color(sheet.theme, i)
    x = line.x / scale
    mean, low, high = (np.abs(v) if panel.log else v for v in (line.mean, line.low, line.high))
    low, high = np.minimum(low, high), np.maximum(low, high)
    if panel.log:
        keep = mean > 0
        x, mean, low, high = x[keep], mean[keep], np.maximum(low[keep], 1e-30), high[keep]
        if not len(x):
            return 0.0
    if line.sources > 1 and len(x) > 1:
        kept = np.union1d(thin(low), thin(high))
        drawing.draw_band(ax, x[kept], low[kept], high[kept], color=color, alpha=0.16)
    s = Series("", x, mean)
    smooth = len(x) > BUCKETS or (panel.smooth and len(x) >= _SMOOTHED)
    _line(ax, s, mean, color, dash, lw=0.8 if smooth else 1.6, alpha=0.35 if smooth else 1.0)
    if len(x) <= (60 if panel.marked else 1):
        drawing.draw_line(ax, x, mean, ls="none", marker="o", ms=4, mew=0, color=color, zorder=3)
    if smooth:
        mean = trailing_mean(mean, max(5, len(x) // 100))
        _line(ax, s, mean, color, dash, lw=1.7, alpha=1.0)
    return float(mean[-1])


def _line(ax: Axes, s: Series, values: np.ndarray, color: str, dash: Any, *, lw: float, alpha: float) -> None:
    kept = thin(values)
    cut = cuts(s, kept) if len(s.steps) > 1 else np.empty(0, dtype=int)
    x, y = (np.insert(v[kept].astype(float), cut, np.nan) for v in (s.steps, values))
    drawing.draw_line(ax, x, y, color=color, ls=dash, lw=lw, alpha=alpha, zorder=3)


def describe(found: Comparison) -> str:
    """The page in words: an alternative text."""
    said = ["; ".join(f"{letter}: {words}" for letter, words in found.legend()) + "."]
    for panel in panels(found):
        key, lines = chosen(found, panel)
        ends = [
            f"{letter} {number(float(line.mean[0]))} → {number(float(line.mean[-1]))}"
            for letter, line in zip(found.letters, lines, strict=False)
            if line is not None and len(line.x)
        ]
        said.append(f"{panel.title}{f' ({key})' if key else ''}: {', '.join(ends) or 'not recorded'}.")
    return " ".join(said)


def save(found: Comparison, folder: Path, *, title: str | None = None) -> list[Path]:
    """Write compare.png, compare-dark.png, compare.csv, compare.json, and alignment.csv of two; returns the paths."""
    written = []
    for theme, name in (("light", "compare.png"), ("dark", "compare-dark.png")):
        drawn = figure(found, theme=theme, title=title)  # type: ignore[arg-type]
        content = drawing.png_to_keep(drawn, describe(found))
        written.append(replace_file(folder / name, content))
    texts = {"compare.csv": compare.curves_csv(found)}
    texts["compare.json"] = json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n"
    if found.alignment:
        texts["alignment.csv"] = compare.alignment_csv(found)
    return written + [replace_file(folder / name, text.encode()) for name, text in texts.items()]


# --- as HTML ---


@dataclass(frozen=True)
class Piece:
    """A part of a comparison, for a cell: HTML where there is a browser, and the same as text."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": page.block(self.html), "text/plain": self.text}


def numbers(found: Comparison) -> Piece:
    """The table of metrics with its legend."""
    html = page.table(("", ""), found.legend()) + page.paragraph(found.caption())
    legend = "\n".join(f"{letter}  {words}" for letter, words in found.legend())
    text = f"{legend}\n\n{found.caption()}\n{compare.columns([found.header(), *found.cells()])}"
    return Piece(html + page.table(found.header(), found.cells()), text)


def recipes(found: Comparison) -> Piece:
    """What differs between the first group's recipe, machine and outcome, and those of each other."""
    first, html, text = found.letters[0], [], []
    for letter, parts in found.recipes:
        html += [page.paragraph(f"What differs between {first} and {letter}:"), recipe_table(parts, first, letter)]
        text.append(f"what differs, {first}  →  {letter}\n{differences.describe(parts, first, letter)}")
    if not text:
        words = "Two recorded runs are needed to compare recipes; a log tells nothing of its own."
        return Piece(page.paragraph(words), words)
    return Piece("".join(html), "\n\n".join(text))


def steps(found: Comparison) -> Piece:
    """Where two sources part, key by key and step by step, and what may be expected of that."""
    notes = "".join(map(page.paragraph, found.notes))
    if not found.alignment:
        words = "Two sources alone, with keys in common, are compared step by step."
        return Piece(page.paragraph(words) + notes, "\n".join([words, *found.notes]))
    head, body = found.aligned()
    html = [page.table(head, body), page.paragraph(found.parting())]
    text = [f"{compare.columns([head, *body])}\n{found.parting()}"]
    for one in found.alignment_shown():
        names = ["step", *found.letters, "delta", "relative"]
        shown = page.table(names, map(compare.row_text, one.rows(40)))
        html.append(page.folded(f"{one.key}, {len(one.steps)} steps", shown))
        text.append(f"{one.key}\n{compare.columns([names, *map(compare.row_text, one.rows(8))])}")
    return Piece("".join(html) + notes, "\n\n".join([*text, *found.notes]))


def rollouts(found: Comparison, step: int | None = None) -> Piece:
    """What the sources wrote at a step, or the last one of each: of every group the first that keeps rollouts."""
    from recipes import rollouts as dumps
    from recipes.errors import RecipeError

    html, text = [], []
    for letter, one in zip(found.letters, found.groups, strict=True):
        for source in one.sources:
            try:
                shown = dumps.show(source.path, step=step, worst=2, best=1, flagged=2)
            except RecipeError as fault:
                words = f"{letter}, {source.name}: {fault}"
                html.append(page.paragraph(words))
                text.append(words)
                continue
            html += [page.paragraph(f"{letter}, {source.name}:"), shown.html()]
            text.append(f"{letter}, {source.name}:\n{shown.text()}")
            break
    return Piece("".join(html), "\n\n".join(text))


def text(found: Comparison) -> str:
    """All of it as people read it in a terminal."""
    last = steps(found).text if found.alignment else "\n".join(found.notes)
    parts = [numbers(found).text, recipes(found).text if found.recipes else "", last]
    return "\n\n".join(filter(None, parts))


def tables(found: Comparison) -> str:
    """Everything but the picture, as HTML: legend, metrics, recipes, step by step, notes."""
    parts = [numbers(found), *([recipes(found)] if found.recipes else [])]
    if found.alignment:
        return "".join([*(part.html for part in parts), page.paragraph("Step by step:"), steps(found).html])
    return "".join([*(part.html for part in parts), *map(page.paragraph, found.notes)])


def recipe_table(parts: Sequence[differences.Part], a: str, b: str) -> str:
    """What differs between two runs: what somebody set first; verl's own configuration and packages folded."""
    shown, equal = [], []
    for part in parts:
        rows = [(key, *(mask(differences._short(value)) for value in pair)) for key, pair in part.differing.items()]
        if rows:
            drawn = page.table((part.name, a, b), rows)
            title = f"{part.name}: {len(rows)} of {len(rows) + part.equal} differ"
            shown.append(drawn if part.name in ("outcome", "recipe", "hardware") else page.folded(title, drawn))
        elif not part.absent:
            equal.append(f"{part.name} ({part.equal})")
    if equal:
        shown.append(page.paragraph(f"Equal: {', '.join(equal)}."))
    absent = [part.name for part in parts if part.absent]
    return "".join(shown) + (page.paragraph(f"Not recorded by one of them: {', '.join(absent)}.") if absent else "")


@dataclass(frozen=True)
class Compared:
    """A comparison in a notebook: the picture; its parts are cells of their own."""

    found: Comparison

    def numbers(self) -> Piece:
        return numbers(self.found)

    def recipes(self) -> Piece:
        return recipes(self.found)

    def steps(self) -> Piece:
        return steps(self.found)

    def rollouts(self, step: int | None = None) -> Piece:
        return rollouts(self.found, step)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        images = [drawing.png(figure(self.found, theme=theme)) for theme in ("light", "dark")]  # type: ignore[arg-type]
        words = describe(self.found)
        return {"text/html": page.block(page.picture(*images, words)), "text/plain": words}
