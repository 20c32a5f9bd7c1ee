"""What a path is, by what is in it, and its metrics. The one door: `read`."""

from __future__ import annotations

import csv
import gzip
import io
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from recipes.errors import RecipeError
from recipes.metrics.console import read_console
from recipes.metrics.growing import CUT, GZIP, is_utf_16
from recipes.metrics.jsonl import parse_line, read_jsonl
from recipes.metrics.table import MAX_STEP, Broken, Metrics, Restart, Rows, short
from recipes.metrics.tensorboard import event_files, is_event_file, read_tensorboard
from recipes.run.directory import Run

KINDS = (
    "verl's JSON lines, TensorBoard events, a console log of verl, slime or MindSpeed-RL, or CSV or Parquet as "
    "`recipes metrics` writes it"
)
PARQUET = b"PAR1"
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
        if head.startswith(PARQUET):
            return read_parquet(path)
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
    restarts = tuple(
        restart if len(parts) == 1 else restart._replace(place=f"attempts/{number}/metrics.jsonl")
        for number, part in parts.items()
        for restart in part.restarts
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
        infinite=_infinite(parts, merged),
        restarts=restarts,
        rounded=frozenset(key for part in parts.values() for key in part.rounded),
        format=last.format,
        trainer=last.trainer,
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


def _infinite(parts: Mapping[int, Metrics], merged: Metrics) -> dict[str, dict[int, float]]:
    """Which of the non-finite values of the merged table are infinite: the latest part that has one says so."""
    said: dict[str, dict[int, float | None]] = {}
    for part in parts.values():
        for key, steps in part.nonfinite.items():
            said.setdefault(key, {}).update({step: part.infinite.get(key, {}).get(step) for step in steps})
    found = {}
    for key, steps in merged.nonfinite.items():
        endless = {step: value for step in steps if (value := said.get(key, {}).get(step)) is not None}
        if endless:
            found[key] = endless
    return found


def read_parquet(path: str | os.PathLike[str]) -> Metrics:
    """Read Parquet as `recipes metrics -o` writes it: `step` first, an absent value as null.

    Raises RecipeError for another Parquet file, and without pyarrow.
    """
    path = Path(path)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as fault:
        raise RecipeError(f"{path} is Parquet, and pyarrow is not installed: pip install pyarrow.") from fault
    try:
        table = pq.read_table(path)
        steps = table["step"].to_numpy() if table.column_names[:1] == ["step"] else None
    except (pa.ArrowException, ValueError) as fault:
        raise RecipeError(f"{path} cannot be read as Parquet: {short(fault)}.") from fault
    numbers = all(pa.types.is_floating(column.type) or pa.types.is_integer(column.type) for column in table.columns)
    if steps is None or steps.dtype.kind != "i" or not numbers or ((steps < 0) | (steps >= MAX_STEP)).any():
        raise RecipeError(f"{path} is no table of metrics: its first column must be step, whole numbers from 0 up.")
    rows = Rows()
    for name, column in zip(table.column_names[1:], table.columns[1:], strict=True):
        there = column.is_valid().to_numpy()
        values = column.cast(pa.float64()).to_numpy()
        rows.extend(name, steps[there], values[there])
    return rows.metrics(source=path, state="ok" if len(rows) else "empty", format="Parquet")


def read_csv(path: str | os.PathLike[str]) -> Metrics:
    """Read CSV as `write_csv` writes it: `step` first, an absent value as an empty field, others as numbers."""
    path = Path(path)
    rows, broken, restarts, last = Rows(), [], [], -1
    with path.open("rb") as raw:
        head = raw.read(1024)
        packed = head.startswith(GZIP)
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        encoding = "utf-16" if is_utf_16(head) else "utf-8-sig"
        lines = csv.reader(io.TextIOWrapper(file, encoding=encoding, newline="", errors="replace"))
        names = tuple(next(lines, ["step"])[1:])
        try:
            for cells in lines:
                step = _csv_row(rows, names, cells, lines.line_num, broken) if cells else None
                if step is not None:
                    if step < last:
                        restarts.append(Restart(lines.line_num, last, step))
                    last = step
        except EOFError:
            broken.append(Broken(lines.line_num + 1, CUT))
        except (csv.Error, zlib.error) as error:
            broken.append(Broken(lines.line_num, f"not CSV from here on: {short(error)}"))
    return rows.metrics(
        broken=tuple(broken),
        source=path,
        state="ok" if len(rows) else "empty",
        restarts=tuple(restarts),
        format="CSV",
    )


def _csv_row(rows: Rows, names: tuple[str, ...], cells: list[str], line: int, broken: list[Broken]) -> int | None:
    """Add a row; its step, None if the row as a whole is broken."""
    if not cells[0].isdecimal() or int(cells[0]) >= MAX_STEP or len(cells) != len(names) + 1:
        broken.append(Broken(line, f"expected a step and {len(names)} values, found {short(','.join(cells))}"))
        return None
    step = int(cells[0])
    try:
        rows.add(step, names, list(map(float, cells[1:])))
    except (ValueError, struct.error):
        values: dict[str, float | None] = {}
        for name, cell in zip(names, cells[1:], strict=True):
            try:
                if cell.strip():
                    values[name] = float(cell)
            except ValueError:
                broken.append(Broken(line, f"{short(name)} at step {step} is not a number: {short(cell)}"))
        rows.put(step, values)
    return step


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
    """The first bytes of a file, unpacked, as UTF-8. As much as there is, of a gzip file that is damaged or grows."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return b""
    return head.decode("utf-16", errors="replace").encode(errors="replace") if is_utf_16(head) else head


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
    first = head.split(b"\n", 1)[0].rstrip(b"\r").decode("utf-8-sig", errors="replace")
    return first == "step" or (first.startswith("step,") and next(csv.reader(io.StringIO(first)), [""])[0] == "step")
