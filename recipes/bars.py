"""Two bars of a device's memory, training and generation, never summed: recipes.memory as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from recipes import drawing
from recipes.atomic import replace_file
from recipes.memory import Memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIGA = 1e9

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "KV cache",
    "reference",
    "trainer, resident",
    "rollout, resident",
)
"""All parts; the place of a part decides its colour, the same in both bars."""


def parts(memory: Memory) -> dict[str, list[tuple[str, int]]]:
    """Return for `training` (its fullest stage) and `generation` their parts in bytes, in the order they are drawn."""
    stage, g = memory.training.fullest, memory.generation
    training = [
        ("weights", stage.weights),
        ("gradients", stage.gradients),
        ("optimizer", stage.optimizer),
        ("reference", stage.reference),
        # A layer's backward pass and the loss take turns; drawn is the fuller.
        ("activations", stage.activations + (stage.backward if stage.backward >= stage.logits else 0)),
        ("logits", stage.logits if stage.logits > stage.backward else 0),
        ("rollout, resident", memory.training.rollout),
    ]
    generation = [
        ("weights", g.weights),
        ("activations", g.activations),
        ("KV cache", g.kv or 0),
        ("trainer, resident", g.training),
    ]
    return {
        "training": [(name, size) for name, size in training if size],
        "generation": [(name, size) for name, size in generation if size],
    }


def figure(memory: Memory, *, theme: str = "light", title: str = "") -> Figure:
    """Draw both bars in GB (1e9 bytes) against the device's memory. Parts too thin for their name are named beside."""
    import matplotlib
    from matplotlib.figure import Figure as Page

    style = drawing.THEMES[theme]
    with matplotlib.rc_context(drawing.settings(style)):
        page = Page(figsize=(9.6, 3.0), layout="constrained")
        ax = page.add_subplot()
        groups = parts(memory)
        sizes = [sum(size for _, size in found) / GIGA for found in groups.values()]
        longest = max(*sizes, (memory.device or 0) / GIGA, 1e-9)
        for row, (name, found) in enumerate(reversed(groups.items())):
            _bar(ax, row, found, style, longest)
            total = sum(size for _, size in found) / GIGA
            ax.text(-0.01, row, name, transform=ax.get_yaxis_transform(), ha="right", va="center", color=style.text)
            ax.annotate(f"{total:.1f} GB", (total, row), (6, 0), textcoords="offset points", va="center")
        if memory.device:
            line = memory.device / GIGA
            ax.axvline(line, color=style.alarm, linewidth=1.4)
            ax.text(line, 1.62, f"device {line:.0f} GB", color=style.alarm, ha="center", va="bottom", fontsize=9)
        ax.set(xlim=(0, longest * 1.16), ylim=(-0.6, 1.6), yticks=[], xlabel="GB on the fullest device")
        ax.set_title(title or "memory", loc="left", pad=18)
        ax.tick_params(axis="x", colors=style.muted)
        ax.xaxis.label.set_color(style.muted)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
    return page


def save(memory: Memory, path: Path, *, theme: str = "light", title: str = "") -> Path:
    """Write the figure as PNG or SVG, by the suffix of `path`, as a whole file; it carries `describe()`.

    Raises OSError when the file cannot be written.
    """
    return replace_file(path, encoded(memory, path.suffix.removeprefix("."), theme=theme, title=title))


def encoded(memory: Memory, kind: str, *, theme: str = "light", title: str = "", dpi: int = 200) -> bytes:
    """Return the figure as the bytes of a `png` or an `svg`."""
    import matplotlib

    file = io.BytesIO()
    metadata = {"Description": describe(memory)} | ({"Date": None, "Creator": None} if kind == "svg" else {})
    with matplotlib.rc_context(drawing.settings(drawing.THEMES[theme])):
        figure(memory, theme=theme, title=title).savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def _bar(ax, row: int, found: list[tuple[str, int]], style: drawing.Theme, longest: float) -> None:
    left, thin = 0.0, []
    for name, size in found:
        width, fill = size / GIGA, style.stages[PARTS.index(name)]
        ax.barh(row, width, left=left, height=0.5, color=fill, edgecolor=style.surface, linewidth=1.0)
        if width > 0.0125 * len(name) * longest:  # what a letter takes of the axis
            ax.text(left + width / 2, row, name, ha="center", va="center", fontsize=8, color=_ink(fill))
        else:
            thin.append(f"{name} {width:.1f}")
        left += width
    if thin:
        ax.text(0, row - 0.33, "also " + ", ".join(thin), ha="left", va="top", fontsize=8, color=style.muted)


def _ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill` (#rrggbb), by WCAG relative luminance."""
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.18 else "#ffffff"


def describe(memory: Memory) -> str:
    """Return both bars in words."""
    said = []
    for name, found in parts(memory).items():
        total = sum(size for _, size in found)
        said.append(f"{name}: {total / GIGA:.1f} GB (" + ", ".join(f"{n} {s / GIGA:.1f}" for n, s in found) + ")")
    said.append(f"device: {memory.device / GIGA:.0f} GB" if memory.device else "device: memory unknown")
    return "; ".join(said)
