"""What a path is, by what is in it, and its metrics. The one door: `read`."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from recipes.errors import RecipeError
from recipes.metrics.console import read_console
from recipes.metrics.growing import GZIP
from recipes.metrics.jsonl import parse_line, read_jsonl
from recipes.metrics.table import MAX_STEP, Broken, Metrics, Rows, short
from recipes.metrics.tensorboard import event_files, is_event_file, read_tensorboard
from recipes.run.directory import Run

KINDS = (
    "verl's JSON lines, TensorBoard events, a console log of verl, slime or MindSpeed-RL, or CSV as `recipes metrics` "
    "writes it"
)
_HEAD_BYTES = 2**16


def read(path: str | os.PathLike[str]) -> Metrics:
    """Read the metrics at `path`: a run directory, a folder of TensorBoard, or a file of any kind we know.

    What a file is shows in its first bytes, not in its name; gzip is unpacked. Raises RecipeError, a sentence, when
    there is nothing at `path`, or nothing that can be read as metrics.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _read_folder(path)
        head = _head(path)
        if is_event_file(head):
            return read_tensorboard(path)
        if _is_jsonl(head):
            return read_jsonl(path)
        if _is_csv(head):
            return read_csv(path)
        metrics = read_console(path)
    except FileNotFoundError as fault:
        raise RecipeError(f"{path} does not exist.") from fault
    except OSError as fault:
        raise RecipeError(f"{path} cannot be read: {fault.strerror or fault}.") from fault
    if metrics.state == "empty" and (head.strip() or metrics.broken):
        why = f" ({metrics.broken[0]})" if metrics.broken else ""
        raise RecipeError(f"{path} holds no step of a training that can be read{why}; known are {KINDS}.")
    return metrics


def of_run(path: str | os.PathLike[str]) -> Metrics:
    """The metrics of a run directory: `attempts/*/metrics.jsonl` in the order of their numbers, as one curve.

    Where attempts overlap, the values of the later one win, key by key: a resumed training first validates at a step
    that the one before has trained. `Metrics.attempts` says which attempt a step came from: the last one that wrote
    anything but validation there. Raises RecipeError when no attempt is there.
    """
    run = Run(Path(path))
    if not run.attempts:
        raise RecipeError(f"{path} is no run directory: it has no attempts.")
    return one_curve({number: read_jsonl(run.metrics(number)) for number in run.attempts}, run.path)


def one_curve(parts: Mapping[int, Metrics], path: Path) -> Metrics:
    """The attempts of the run at `path`, number → its metrics in rising order, as of_run describes them."""
    attempts: dict[int, int] = {}
    for number, part in parts.items():
        trained = part.table[[key for key in part.table if not str(key).startswith("val-")]].notna().any(axis=1)
        steps = part.table.index.tolist()
        attempts |= {step: number for step in steps if step not in attempts or bool(trained[step])}
    merged = _merge(parts)
    last = parts[max(parts)]
    broken = tuple(
        Broken(b.line, b.reason if len(parts) == 1 else f"of attempts/{number}/metrics.jsonl: {b.reason}")
        for number, part in parts.items()
        for b in part.broken
    )
    states = [part.state for part in parts.values()]
    return Metrics(
        table=merged.table,
        nonfinite=merged.nonfinite,
        broken=broken,
        unfinished=last.unfinished,
        source=last.source if len(parts) == 1 else path,
        state=next((state for state in ("ok", "empty") if state in states), "missing"),
        folded={old: new for part in parts.values() for old, new in part.folded.items()},
        attempts=dict(sorted(attempts.items())),
    )


def _merge(parts: Mapping[int, Metrics]) -> Metrics:
    """Tables laid one over the other, the later on top."""
    import numpy as np

    from recipes.metrics.table import as_metrics

    whole = None
    for part in parts.values():
        raw = part.table.copy()
        for key, steps in part.nonfinite.items():
            raw.loc[list(steps), key] = np.inf
        keys = list(dict.fromkeys([*(whole.columns if whole is not None else ()), *raw.columns]))
        whole = raw if whole is None else raw.combine_first(whole).reindex(columns=keys)
    return as_metrics(whole)


def read_csv(path: str | os.PathLike[str]) -> Metrics:
    """Read CSV as `write_csv` writes it: `step` first, an absent value as an empty field, a non-finite one as `nan`."""
    path = Path(path)
    rows, broken = Rows(), []
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        lines = csv.reader(io.TextIOWrapper(file, newline="", errors="replace"))
        names = tuple(next(lines, ["step"])[1:])
        try:
            for cells in lines:
                if cells:
                    _csv_row(rows, names, cells, lines.line_num, broken)
        except (csv.Error, EOFError, zlib.error) as error:
            broken.append(Broken(lines.line_num, f"not CSV from here on: {short(error)}"))
    return rows.metrics(broken=tuple(broken), source=path, state="ok" if len(rows) else "empty")


def _csv_row(rows: Rows, names: tuple[str, ...], cells: list[str], line: int, broken: list[Broken]) -> None:
    if not cells[0].isdecimal() or int(cells[0]) >= MAX_STEP or len(cells) != len(names) + 1:
        broken.append(Broken(line, f"expected a step and {len(names)} values, found {short(','.join(cells))}"))
        return
    step = int(cells[0])
    try:
        rows.add(step, names, list(map(float, cells[1:])))
    except (ValueError, struct.error):
        values: dict[str, float | None] = {}
        for name, cell in zip(names, cells[1:], strict=True):
            try:
                if cell.strip():
                    number = float(cell)
                    values[name] = number if math.isfinite(number) else None
            except ValueError:
                broken.append(Broken(line, f"{short(name)} at step {step} is not a number: {short(cell)}"))
        rows.put(step, values)


def _read_folder(path: Path) -> Metrics:
    if (path / "attempts").is_dir():
        return of_run(path)
    if (path / "metrics.jsonl").is_file():
        return read(path / "metrics.jsonl")
    if event_files(path):
        return read_tensorboard(path)
    folders = sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})
    if len(folders) == 1:
        return read_tensorboard(folders[0])
    if folders:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders[:5])
        raise RecipeError(f"{path} holds TensorBoard events of {len(folders)} trainings; name one of them: {names}.")
    raise RecipeError(f"{path} holds no run, no metrics.jsonl and no TensorBoard event file.")


def _head(path: Path) -> bytes:
    """The first bytes of a file, unpacked. As much as there is, of a gzip file that is damaged or being written."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not head.startswith(GZIP):
            return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def _is_jsonl(head: bytes) -> bool:
    """Say whether one of the first lines is an object of verl's `file` logger, or the beginning of one."""
    lines = [line for line in head.split(b"\n") if line.strip(b"\0 \r\t")][:20]
    for line in lines:
        try:
            parse_line(line)
            return True
        except ValueError:
            continue
    return bool(lines) and lines[0].lstrip(b"\0 \r\t").replace(b" ", b"").startswith(b'{"step":')


def _is_csv(head: bytes) -> bool:
    """Say whether the first line is the header of our CSV."""
    first = head.split(b"\n", 1)[0].rstrip(b"\r").decode(errors="replace")
    return first == "step" or (first.startswith("step,") and next(csv.reader(io.StringIO(first)), [""])[0] == "step")
