"""What a run can be resumed from: verl's checkpoints as they lie on disk, the whole ones and the unfinished ones.

verl itself starts from step 0 without a word when its tracker file names a folder that is not there; what is used is
therefore decided here, shown, and given to verl as a path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint import TRACKER
from recipes.errors import RecipeError

# Written last into a checkpoint, by verl from 0.9.1 on; older ones have none.
MANIFEST = "ckpt_contents.json"


@dataclass(frozen=True)
class Checkpoint:
    """A global_step_N directory: its step, what it says it holds, and what it lacks (empty: it is whole)."""

    path: Path
    step: int
    contents: tuple[str, ...] = ()
    lacks: str = ""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run would go on: a checkpoint, or None for step 0; the unfinished ones it passes over, newest first."""

    checkpoint: Checkpoint | None
    unfinished: tuple[Checkpoint, ...] = ()

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    def lines(self, reached: int, steps: int | None) -> list[str]:
        """Say what would be resumed, after `reached` steps of `steps`, as lines of text."""
        if self.checkpoint is None:
            found = ["There is no whole checkpoint: it would start from the model, at step 0."]
        else:
            held = f" ({', '.join(self.checkpoint.contents)})" if self.checkpoint.contents else ""
            found = [f"It would go on after step {self.step}, from {self.checkpoint.path}{held}."]
            if self.checkpoint.contents and "optimizer" not in self.checkpoint.contents:
                found.append("The checkpoint holds no optimizer: its moments and the learning rate start afresh.")
        if reached > self.step:
            again = f"steps {self.step + 1} to {reached}" if reached > self.step + 1 else f"step {reached}"
            found.append(f"{again[0].upper()}{again[1:]} would be made again; the first try of them stays on record.")
        if steps is not None and self.step >= steps:
            found.append(f"Nothing is left to do: trainer.steps is {steps}.")
        found += [f"Passed over: {c.path} {c.lacks}." for c in self.unfinished]
        return found


def resume_point(folder: Path) -> ResumePoint:
    """Return where a run with its checkpoints in `folder` (checkpoint.directory) would go on.

    Raises RecipeError when verl's tracker names a checkpoint that is not there or not whole: verl would start from
    step 0, or fail after loading the model.
    """
    found = sorted((_inspect(p) for p in folder.glob("global_step_*") if _step(p) is not None), key=lambda c: -c.step)
    tracker = folder / TRACKER
    if not tracker.exists():
        whole = next((c for c in found if not c.lacks), None)
        if whole:  # verl writes no tracker while it saves in the background
            return ResumePoint(whole, tuple(c for c in found if c.step > whole.step))
        return ResumePoint(None, tuple(found))
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    named = next((c for c in found if str(c.step) == text), None)
    if named is None:
        raise RecipeError(
            f"{tracker} names step {text!r}, and there is no global_step_{text} beside it: restore it, or write the "
            f"number of one that is there ({', '.join(str(c.step) for c in found) or 'none is'}), or remove the file."
        )
    if named.lacks:
        others = ", ".join(str(c.step) for c in found if not c.lacks) or "none"
        raise RecipeError(
            f"{named.path} {named.lacks}, though verl recorded it as saved. Whole checkpoints here: {others}; write "
            f"the number of one into {tracker}, or remove it to start from step 0."
        )
    return ResumePoint(named, tuple(c for c in found if c.step > named.step))


def _step(path: Path) -> int | None:
    found = re.fullmatch(r"global_step_(\d+)", path.name)
    return int(found[1]) if found and path.is_dir() else None


def _inspect(path: Path) -> Checkpoint:
    step, actor = _step(path), path / "actor"
    assert step is not None
    if not actor.is_dir():
        return Checkpoint(path, step, lacks="has no folder actor/")
    if not (path / "data.pt").is_file():  # written after the weights
        return Checkpoint(path, step, lacks="has no data.pt, so it was not finished")
    manifest = actor / MANIFEST
    if not manifest.is_file():
        whole = any(actor.rglob("metadata.json")) or any(actor.rglob("*.safetensors")) or any(actor.rglob("*.pt"))
        return Checkpoint(path, step, lacks="" if whole else "holds no weights")
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        contents = tuple(map(str, told["save_contents"]))
        parts = {name: actor / part["path"] for name, part in told["contents"].items() if name != "model" or part}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Checkpoint(path, step, lacks=f"has a {MANIFEST} that cannot be read")
    missing = [name for name, part in parts.items() if not part.exists()]
    missing += [f"{part.name}/metadata.json" for part in parts.values() if _is_half(part)]
    missing += [shard for part in set(parts.values()) for shard in _missing_shards(part)]
    return Checkpoint(path, step, contents, f"lacks {', '.join(dict.fromkeys(missing))}" if missing else "")


def _is_half(part: Path) -> bool:
    """Megatron's distributed checkpoint is readable once its metadata.json is there, which is written last."""
    return part.name == "dist_ckpt" and part.is_dir() and not (part / "metadata.json").is_file()


def _missing_shards(part: Path) -> list[str]:
    index = part / "model.safetensors.index.json"
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return []
    return sorted(str(name) for name in files if not (part / str(name)).is_file())
