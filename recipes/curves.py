"""The curves of a run: one page of panels, the same in light and dark, from a table of metrics.

    figure(metrics)            the page: reward, trainer vs rollout, entropy, KL, response length, time
    headline(metrics)          reward and response length only, for a README or a report
    save(metrics, directory)   curves.png, curves-dark.png, curves.svg, curves.csv
    describe(metrics) -> str   the page in words, a sentence per panel

Nothing is dropped in silence. A value that was not computed leaves a hole, and a panel without any says
which parameter turns it on; a value that is not finite is a cross at the top of its panel; a zero on a
logarithmic axis is a triangle at its foot; a spike survives the thinning of a long run.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from recipes.atomic import replace_file
from recipes.drawing import (
    QUICK,
    THEMES,
    TITLE,
    WIDTH,
    Label,
    Page,
    Theme,
    draw_band,
    draw_dots,
    draw_line,
    draw_series,
    emptied,
    extent,
    packed,
    pixels,
    plain,
    png_to_keep,
    recolor,
    settings,
    theme_named,
)
from recipes.metrics import Metrics, as_metrics, write_csv
from recipes.series import (
    BUCKETS,
    Series,
    cuts,
    holes,
    not_finite,
    number,
    path,
    ranges,
    resumptions,
    series,
    thin,
    trailing_mean,
    window_of,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

_MARKED = 60  # points of a line on which marks of five pixels stand apart


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


# --- the page ---


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

    with matplotlib.rc_context(settings(theme_named(theme))):
        page = _page(metrics, theme_named(theme), height=9.4, total_steps=total_steps, over=over)
        cells = page.fig.add_gridspec(3, 2, left=0.05, right=0.85, top=0.888, bottom=0.042, wspace=0.58, hspace=0.42)
        _reward(page, cells[0, 0])
        _mismatch(page, cells[0, 1])
        _entropy(page, cells[1, 0])
        _kl(page, cells[1, 1])
        _length(page, cells[2, 0])
        _time(page, cells[2, 1])
        _heading(page, title, total_steps)
        page.print(outlines=outlines)
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

    with matplotlib.rc_context(settings(theme_named(theme))):
        height = 3.2 if title else 2.95
        page = _page(as_metrics(table), theme_named(theme), height=height, total_steps=total_steps)
        cells = page.fig.add_gridspec(
            1, 2, left=0.05, right=0.875, top=2.3 / height, bottom=0.38 / height, wspace=0.5, width_ratios=(1.25, 1)
        )
        _reward(page, cells[0])
        _length(page, cells[1], strip=False)
        _heading(page, title, total_steps, brief=True)
        page.print(outlines=True)
    return page.fig


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
        return self.begin(table, title=title, total_steps=total_steps, dpi=dpi)()

    def begin(
        self, table: pd.DataFrame | Metrics, *, title: str | None = None, total_steps: int | None = None, dpi: int = 100
    ) -> Callable[[], tuple[bytes, bytes]]:
        """Draw as `pair` does, and return what waits for the two files: packing them leaves Python to others."""
        from concurrent.futures import ThreadPoolExecutor

        over, self._figure = self._figure, None
        fig = _whole(as_metrics(table), "light", title, total_steps, outlines=True, over=over)
        pool = ThreadPoolExecutor(2)
        try:
            light = pool.submit(packed, pixels(fig, dpi), dpi, QUICK)
            recolor(fig, THEMES["light"], THEMES["dark"])
            dark = pool.submit(packed, pixels(fig, dpi), dpi, QUICK)
        finally:
            pool.shutdown(wait=False)
        self._figure = fig
        return lambda: (light.result(), dark.result())


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
    with matplotlib.rc_context(settings(THEMES["light"])):
        fig = _whole(metrics, "light", title, total_steps, outlines=False)
        fig.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Description": words})
    paths["curves.svg"] = replace_file(Path(directory) / "curves.svg", file.getvalue())
    paths["curves.csv"] = write_csv(metrics, Path(directory) / "curves.csv")
    return paths


def _page(
    metrics: Metrics, theme: Theme, *, height: float, total_steps: int | None, over: Figure | None = None
) -> Page:
    from matplotlib.figure import Figure

    steps = metrics.table.index
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    last = max(last, total_steps or 0, first + 3)
    pad = 0.5 + 0.01 * (last - first)
    training = [key for key in metrics.table.columns if not key.startswith("val-")]
    trained = bool(len(steps)) and any(series(metrics, key).recorded for key in training)
    fig = over or Figure(figsize=(WIDTH, height), dpi=100)
    fig.set_facecolor(theme.surface)
    return Page(
        fig=fig,
        metrics=metrics,
        theme=theme,
        span=(first - pad, last + pad),
        training=trained,
        blank=emptied(over) if over else [],
    )


def _heading(page: Page, title: str | None, total_steps: int | None, *, brief: bool = False) -> None:
    """Title, how far the run is, and whatever the panels can't show: other non-finite values, unreadable lines."""
    if title:
        page.say(None, 0.012, 1, plain(title, 70), dy=-8, va="top", size=TITLE, bold=True)
    if title or not brief:
        steps = page.metrics.table.index
        of = f" of {total_steps}" if total_steps else ""
        where = f"step {steps[-1]}{of}" if len(steps) else "no step yet"
        if again := resumptions(page.metrics):
            more = f" (and {len(again) - 1} before)" if len(again) > 1 else ""
            where += f"; attempt {again[-1][1]} from step {again[-1][0]}{more}"
        page.say(None, 0.988, 1, where, dy=-10, ha="right", va="top", color=page.theme.muted)
    notes = []
    others = [key for key in page.metrics.nonfinite if key not in page.drawn]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(f"Not finite, not drawn here: {plain(others[0], 44)}{more}.")
    if page.metrics.broken:
        lines = sorted({broken.line for broken in page.metrics.broken})
        notes.append(f"Unreadable in the metrics file: line {ranges(lines)}.")
    if notes:
        page.say(None, 0.012, 1, " ".join(notes), dy=-27 if title else -8, va="top", color=page.theme.alarm)


# --- the panels ---


def _reward(page: Page, cell: SubplotSpec) -> None:
    mean = page.series("critic/rewards/mean")
    stem = "critic/rewards"
    if not mean.recorded and page.series("critic/score/mean").recorded:
        mean, stem = page.series("critic/score/mean"), "critic/score"
    validation = [page.series(key) for key in validation_keys(page.metrics)]
    names = " · ".join([f"{stem}/mean", *(s.key for s in validation[:1])])
    more = len(validation_keys(page.metrics, limit=None)) - 1
    names = f"{plain(names, 57)} +{more} more" if more > 0 else names
    ax = page.axes(cell, "Reward per response", names)
    if not any(s.recorded for s in (mean, *validation)):
        return _absent(page, ax, f"{stem}/mean")
    labels = _smoothed(page, ax, mean, stem)
    marks = [("D", page.theme.second), ("s", page.theme.stages[3]), ("^", page.theme.stages[1])]
    for s, (marker, color) in zip(validation, marks, strict=False):
        x, y, _ = path(s)
        mark = {"lw": 1, "marker": marker, "ms": 5, "mec": page.theme.surface, "mew": 0.7}
        draw_line(ax, x, y, color=color, zorder=4, **(mark if len(x) <= _MARKED else {}))
        if len(s.values):
            name = "validation" if len(validation) == 1 else s.key.split("/")[1]
            labels.append((s.values[-1], f"{number(s.values[-1])} {plain(name, 10)}", color))
    everything = np.concatenate([s.values for s in (mean, *validation, *_band(page, stem))])
    if len(everything) and everything.min() >= 0 and everything.max() <= 1:
        page.linear(ax, 0.0, 1.0)
    elif len(everything):
        page.linear(ax, *extent(everything))
    note = ["no validation yet;", "needs", *_folded(NEEDS["val-core"][0])] if page.training and not validation else []
    page.end_labels(ax, labels, note=note)
    page.crosses(ax, {"reward": mean, **{s.key: s for s in validation}})
    return None


def _mismatch(page: Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    diff, pearson, kl = (page.series(key) for key in (_DIFF, _PEARSON, _CORR_KL))

    ax = page.axes(upper, "Trainer vs rollout: mean probability difference", _DIFF, steps=False)
    if diff.recorded:
        page.logarithmic(ax, diff.values, include=(DIFF_PROBLEM,))
        labels = []
        for level, words, color in (
            (DIFF_NORMAL, f"{DIFF_NORMAL:g} ▼ normal", theme.muted),
            (DIFF_PROBLEM, f"{DIFF_PROBLEM:g} ▲ problem", theme.alarm),
        ):
            ax.axhline(level, color=color, lw=1, ls=(0, (4, 3)), zorder=1.5)
            labels.append((level, words, color))
        labels += _on_log(ax, diff, theme.first, "mean")
        page.end_labels(ax, labels)
        page.crosses(ax, {"mean": diff})
    else:
        _absent(page, ax, _DIFF)

    ax = page.axes(lower, None, f"1 − {_PEARSON.removeprefix('training/')} · |{_CORR_KL}|")
    distance = Series(_PEARSON, pearson.steps, np.maximum(1 - pearson.values, 0), pearson.nonfinite)
    if distance.recorded or kl.recorded:
        page.logarithmic(ax, np.concatenate([distance.values, np.abs(kl.values)]))
        labels = _on_log(ax, distance, theme.first, "(1 − Pearson)") + _on_log(ax, kl, theme.second, "|KL|")
        page.end_labels(ax, labels)
        page.crosses(ax, {"Pearson": distance, "KL": kl})
    else:
        _absent(page, ax, _PEARSON, brief=True)


def _entropy(page: Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.25, 1), hspace=0.36)
    entropy, norm = page.series("actor/entropy"), page.series("actor/grad_norm")
    ax = page.axes(upper, "Entropy, nats per token", entropy.key, steps=False)
    if entropy.recorded:
        _single(page, ax, entropy, digits=3)
    else:
        _absent(page, ax, entropy.key)
    ax = page.axes(lower, None, f"Gradient norm · {norm.key}")
    if norm.recorded:
        positive = norm.values[norm.values > 0]
        if len(positive) and positive.max() > 30 * np.median(positive):
            page.logarithmic(ax, norm.values)
            page.end_labels(ax, _on_log(ax, norm, page.theme.first, ""))
            page.crosses(ax, {"norm": norm})
        else:
            _single(page, ax, norm, from_zero=True)
    else:
        _absent(page, ax, norm.key, brief=True)


def _kl(page: Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    theme = page.theme
    ppo, loss, clip = (page.series(f"actor/{key}") for key in ("ppo_kl", "kl_loss", "pg_clipfrac"))
    ax = page.axes(
        upper,
        "KL, nats per token",
        "|actor/ppo_kl| (old policy) · actor/kl_loss (reference)",
        steps=False,
    )
    if ppo.recorded or loss.recorded:
        page.logarithmic(ax, np.concatenate([ppo.values, loss.values]))
        labels = _on_log(ax, ppo, theme.first, "|ppo_kl|") + _on_log(ax, loss, theme.second, "kl_loss")
        note = [] if loss.recorded else ["kl_loss needs", *_folded(NEEDS[loss.key][0])]
        page.end_labels(ax, labels, note=note)
        page.crosses(ax, {"ppo_kl": ppo, "kl_loss": loss})
        if len(ppo.values) and not ppo.values.any():
            words = "ppo_kl is 0 with one update a batch:\nppo_mini_batch_size = train_batch_size"
            page.say(ax, 0.5, 0.5, words, ha="center", va="center", color=theme.muted)
    else:
        _absent(page, ax, ppo.key)
    ax = page.axes(lower, None, f"Clip fraction of tokens · {clip.key}")
    if clip.recorded:
        _single(page, ax, clip, from_zero=True, at_least=0.01)
    else:
        _absent(page, ax, clip.key, brief=True)


def _length(page: Page, cell: SubplotSpec, *, strip: bool = True) -> None:
    mean, clip = page.series("response_length/mean"), page.series("response_length/clip_ratio")
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36) if strip else (cell, None)
    ax = page.axes(upper, "Response length, tokens", "response_length/mean, min, max", steps=not strip)
    if mean.recorded:
        labels = _smoothed(page, ax, mean, "response_length")
        everything = np.concatenate([s.values for s in (mean, *_band(page, "response_length"))])
        if len(everything):
            page.linear(ax, *extent(everything, from_zero=True))
        page.end_labels(ax, labels)
        page.crosses(ax, {"mean": mean})
    else:
        _absent(page, ax, mean.key)
    if lower is None:
        return
    ax = page.axes(lower, None, f"Share cut at the limit · {clip.key}")
    if clip.recorded:
        _single(page, ax, clip, from_zero=True, at_least=0.05)
    else:
        _absent(page, ax, clip.key, brief=True)


def _time(page: Page, cell: SubplotSpec) -> None:
    upper, lower = cell.subgridspec(2, 1, height_ratios=(1.7, 1), hspace=0.36)
    ax = page.axes(
        upper, "Time per step, seconds", "timing_s/… (figures: median of the steps that ran it)", steps=False
    )
    steps, parts = time_parts(page.metrics)
    if parts:
        _stack(page, ax, steps, parts)
    else:
        _absent(page, ax, "timing_s/step")
    rate = page.series("perf/throughput")
    ax = page.axes(lower, None, f"Tokens per second and device · {rate.key}")
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


def _single(
    page: Page, ax: Axes, s: Series, *, digits: int = 2, from_zero: bool = False, at_least: float = 0.0
) -> None:
    """One line on a linear axis of its own, with its last value at its end."""
    draw_series(ax, s, page.theme.first)
    if len(s.values):
        low, high = extent(s.values, from_zero=from_zero)
        page.linear(ax, low, max(high, at_least))
    page.end_labels(ax, [(v, number(v, digits), page.theme.first) for v in s.values[-1:]])
    page.crosses(ax, {s.key: s})


def _on_log(ax: Axes, s: Series, color: str, name: str) -> list[Label]:
    """The size of a value on a logarithmic axis; an exact zero is a triangle at its foot. Returns the end label."""
    size = np.abs(s.values)
    positive = size > 0
    # Cut at zeros as at values that are not finite: no line runs through what it cannot show.
    cut = tuple(sorted({*s.nonfinite, *s.steps[~positive].tolist()}))
    draw_series(ax, Series(s.key, s.steps[positive], size[positive], cut), color)
    if not positive.all():
        zeros, foot = s.steps[~positive], ax.get_xaxis_transform()
        height = np.full(len(zeros), 0.03)
        draw_line(
            ax, zeros, height, ls="none", marker="v", ms=4, mew=0, color=color, transform=foot, clip_on=False, zorder=3
        )
    return [(v, f"{number(v, 2)} {name}".strip(), color) for v in size[-1:]]


def _smoothed(page: Page, ax: Axes, mean: Series, stem: str) -> list[Label]:
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
            cut = cuts(Series(low.key, both, lows, low.nonfinite), kept)
            x, y, top = (np.insert(v[kept].astype(float), cut, np.nan) for v in (both, lows, highs))
            draw_band(ax, x, y, top, color=color, alpha=0.12)
    if len(mean.values):
        x, y, _ = path(mean)
        draw_line(ax, x, y, ls="none", marker="o", ms=3.2 if len(x) <= 200 else 1.6, mew=0, color=color, alpha=0.45)
        window = min(window_of(mean), len(mean.values))
        smooth = trailing_mean(mean.values, window)
        x, y, alone = path(mean, smooth)
        draw_line(ax, x, y, color=color, lw=2, zorder=3)
        draw_dots(ax, x[alone], y[alone], color)
        name = f"mean of {window}" if window > 1 else "mean"
        labels.append((smooth[-1], f"{number(smooth[-1])} {name}", color))
    return labels


def _band(page: Page, stem: str) -> tuple[Series, Series]:
    """Lowest and highest of each step. Not by `page.series`: the heading, not a cross, tells of values lost here."""
    return series(page.metrics, f"{stem}/min"), series(page.metrics, f"{stem}/max")


def _stack(page: Page, ax: Axes, steps: np.ndarray, parts: dict[str, np.ndarray]) -> None:
    """Seconds of each stage, one on the other, a column as wide as its step. A far outlier is cut off and named."""
    total = sum(parts.values(), start=np.zeros(len(steps)))
    colors = dict(zip(STAGES, page.theme.stages, strict=True))
    kept = thin(total, BUCKETS // 2)  # a column is a pixel wide, where a line passes its lowest and highest in one
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
        draw_band(ax, corners(left, right), corners(base, base), corners(top, top), color=colors[stage])
        words = f"{number(np.median(seconds[seconds > 0]), 2)} {STAGES[stage]}"
        labels.append(((base[-1] + top[-1]) / 2, words, colors[stage]))
        base = top
    far = total > 4 * np.median(total)
    page.linear(ax, 0, total[~far].max() * (1.25 if far.any() else 1.0))
    if far.any():
        more = f", and {far.sum() - 1} more" if far.sum() > 1 else ""
        words = f"▲ step {steps[far][0]}: {number(total[far][0])} s{more}"
        page.say(ax, steps[far][0] + 0.5, 1, words, within=ax.get_xaxis_transform(), dx=3, dy=-2, va="top", paper=True)
    page.end_labels(ax, labels, swatch=True)


def _absent(page: Page, ax: Axes, key: str, *, brief: bool = False) -> None:
    """An empty panel says why it is empty."""
    if not page.training:
        lines = [] if brief else ["waiting for the first training step"]
    elif key in NEEDS:
        needed = [line for setting in NEEDS[key][: 1 if brief else None] for line in _folded(setting, 40)]
        lines = ["not recorded; needs", *needed]
    else:
        lines = ["not recorded, though verl writes", f"{key} at every training step"]
    page.say(ax, 0.5, 0.5, "\n".join(lines), ha="center", va="center", color=page.theme.muted)


def _folded(setting: str, width: int = 18) -> list[str]:
    """A dotted setting in lines that fit the margin: broken after a dot."""
    lines = [""]
    for part in setting.replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


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
    lost = f" ({not_finite(s.nonfinite)})" if s.nonfinite else ""
    if not len(s.values):
        if lost:
            return name + lost
        needs = f", needs {' and '.join(NEEDS[s.key])}" if s.key in NEEDS else ""
        return f"{name} not recorded{needs}"
    window = 5 if name == "mean of five steps" else 1
    first, last = s.values[:window].mean(), s.values[-window:].mean()
    digits = (lambda v: f"{v:.5f}") if s.key == _PEARSON else number
    return f"{name} {digits(first)} → {digits(last)}{lost}"
