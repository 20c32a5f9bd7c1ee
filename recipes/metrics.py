"""The metrics of a run as one table: a row per training step, a column per metric key, as verl names them.

verl's `file` logger writes one JSON object per line, `{"step": N, "data": {key: number or null}}`, and
flushes each line at once. Three things must not be confused, so they are kept apart here:

- a key that was not computed at a step is **absent** (NaN in the table);
- a value that was computed and is NaN or infinite arrives as `null`; it is **non-finite** (NaN in the
  table, and its step is listed under its key in `Metrics.nonfinite`), so that a later judgement can fail on
  it;
- a line that can't be read is **broken** (listed with its number in `Metrics.broken`); nothing is guessed
  from it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.atomic import replace_file

if TYPE_CHECKING:
    import pandas as pd

Rows = dict[int, dict[str, float | None]]
"""What a source reported so far: step → key → value, None for a value that is not finite."""

# The first line of a real run fits, and its timings differ from one start to the next.
_HEAD_BYTES = 4096
_MAX_STEP = 2**53


class Broken(NamedTuple):
    """A line, or one value of a line, that could not be read."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Metrics:
    """Everything known about a run's numbers at one moment.

    `table` is indexed by `step` (whole numbers, rising, each once) and holds one float64 column per key, in
    the order in which the keys first appeared. `nonfinite` maps a key to the steps at which its value was
    NaN or infinite. `unfinished` is true while the source ends in the middle of a line: it is being
    written, or its writer was killed. `state` is `missing` (no such file), `empty` (no step yet) or `ok`
    (at least one step).
    """

    table: pd.DataFrame
    nonfinite: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    broken: tuple[Broken, ...] = ()
    unfinished: bool = False
    source: Path | None = None
    state: str = "ok"

    def __str__(self) -> str:
        name = "the metrics" if self.source is None else str(self.source)
        if self.state == "missing":
            return f"{name} does not exist yet."
        if self.state == "empty":
            text = f"{name} holds no step yet"
        else:
            steps = self.table.index
            text = f"{name}: {len(steps)} steps ({steps[0]} to {steps[-1]}), {self.table.shape[1]} keys"
        if self.nonfinite:
            text += f"; {sum(map(len, self.nonfinite.values()))} values are not finite"
        if self.broken:
            text += f"; {len(self.broken)} places could not be read (first: {self.broken[0]})"
        if self.unfinished:
            text += "; the last line is unfinished"
        return text + "."


def read_jsonl(path: str | os.PathLike[str]) -> Metrics:
    """Read a metrics file of verl's `file` logger, finished or still being written.

    Lines of the same step are merged key by key (validation and training may come apart); the later line
    wins. A missing or empty file gives an empty table and says so in `Metrics.state`. Raises OSError if the
    file exists and can't be read.
    """
    return JsonLines(path).read()


class JsonLines:
    """A metrics file that grows: each `read()` parses only what was written since the one before.

    verl truncates the file when a training starts on the same path. The reader notices (the file got
    shorter, or begins otherwise) and starts over, so that two trainings are never mixed into one curve.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._start_over()

    def _start_over(self) -> None:
        self._rows: Rows = {}
        self._broken: list[Broken] = []
        self._head = b""
        self._offset = 0
        self._lines = 0
        self._size = -1
        self._latest = _metrics({}, source=self.path, state="missing")

    def read(self) -> Metrics:
        """Everything so far. The same object as the time before if nothing was written in between."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return self._latest
        with file:
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, os.SEEK_END)
            if size < self._offset or not head.startswith(self._head):
                self._start_over()
            if size == self._size:
                return self._latest
            self._head, self._size = head, size
            file.seek(self._offset)
            new = file.read(size - self._offset)

        *lines, tail = new.split(b"\n")
        for line in lines:
            self._lines += 1
            self._take(line, self._lines)
        self._offset += len(new) - len(tail)
        # A whole object that lacks only its newline is a line like any other; half an object waits for the
        # rest.
        unfinished = not self._take(tail, self._lines + 1, report=False)
        if not unfinished:
            self._offset += len(tail)
        self._latest = _metrics(
            self._rows,
            broken=tuple(self._broken),
            unfinished=unfinished,
            source=self.path,
            state="ok" if self._rows else "empty",
        )
        return self._latest

    def _take(self, line: bytes, number: int, *, report: bool = True) -> bool:
        """Merge one line into the rows. False if it is broken, which goes on record if `report` is set."""
        if not line.strip():
            return True
        try:
            step, values, unusable = parse_line(line)
        except ValueError as error:
            if report:
                self._broken.append(Broken(number, str(error)))
            return False
        self._rows.setdefault(step, {}).update(values)
        self._broken.extend(Broken(number, reason) for reason in unusable)
        return True


def parse_line(line: bytes) -> tuple[int, dict[str, float | None], list[str]]:
    """One line of the `file` logger → step, values (None for a non-finite one), sentences on unusable values.

    Raises ValueError, with a sentence, if the line as a whole can't be used.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object ({_short(error)}): {_short(line)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
        raise ValueError(f'expected {{"step": N, "data": {{…}}}}, found {_short(line)}')
    step = record.get("step")
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        raise ValueError(f"the step must be a whole number from 0 up, found {_short(json.dumps(step))}")
    values: dict[str, float | None] = {}
    unusable: list[str] = []
    for key, value in record["data"].items():
        try:
            values[key] = _number(value)
        except (TypeError, OverflowError):
            unusable.append(f"{_short(key)} at step {step} is not a number: {_short(json.dumps(value))}")
    return step, values, unusable


def _number(value: Any) -> float | None:
    """A JSON value as a float, None if it is not finite. Text is refused, even if it looks like a number."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _short(value: object, limit: int = 80) -> str:
    """Untrusted text, bytes or an error for a message: on one line, printable, bounded."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _metrics(rows: Rows, **about: Any) -> Metrics:
    """The rows of any source → a Metrics."""
    import numpy as np
    import pandas as pd

    steps = sorted(rows)
    column = {key: i for i, key in enumerate(dict.fromkeys(key for step in steps for key in rows[step]))}
    values = np.full((len(steps), len(column)), np.nan)
    nonfinite: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        for key, value in rows[step].items():
            if value is None:
                nonfinite.setdefault(key, []).append(step)
            else:
                values[i, column[key]] = value
    index = pd.Index(steps, dtype="int64", name="step")
    table = pd.DataFrame(values, index=index, columns=pd.Index(list(column), dtype=object))
    return Metrics(table, {key: tuple(at) for key, at in nonfinite.items()}, **about)


def as_metrics(table: pd.DataFrame | Metrics) -> Metrics:
    """A Metrics as it is; a bare table (index: steps, columns: keys, NaN: absent, ±inf: non-finite) as one.

    Raises ValueError if a step comes twice, TypeError if a column is not numeric.
    """
    if isinstance(table, Metrics):
        return table
    import numpy as np
    import pandas as pd

    if table.index.has_duplicates:
        twice = table.index[table.index.duplicated()].unique().tolist()[:5]
        raise ValueError(f"A step comes once in a table of metrics; these come more often: {twice}.")
    for key in table.columns:
        if not pd.api.types.is_numeric_dtype(table[key]):
            raise TypeError(f"Column {key!r} of a table of metrics must hold numbers, not {table[key].dtype}.")
    table = table.astype("float64").sort_index().rename_axis(index="step")
    infinite = np.isinf(table.to_numpy())
    nonfinite = {
        key: tuple(table.index[infinite[:, i]].tolist()) for i, key in enumerate(table.columns) if infinite[:, i].any()
    }
    return Metrics(table.mask(infinite), nonfinite, state="ok" if len(table) else "empty")


def write_csv(table: pd.DataFrame | Metrics, path: str | os.PathLike[str]) -> Path:
    """Write the table as CSV: first column `step`, absent values as empty fields, non-finite ones as `nan`.

    Numbers are written in full (they read back equal). The file is replaced as a whole.
    """
    metrics = as_metrics(table)
    lost = {(step, key) for key, steps in metrics.nonfinite.items() for step in steps}
    keys = list(metrics.table.columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *keys])
    for step, row in zip(metrics.table.index.tolist(), metrics.table.to_numpy().tolist(), strict=True):
        cells = (
            repr(value) if math.isfinite(value) else "nan" if (step, key) in lost else ""
            for key, value in zip(keys, row, strict=True)
        )
        writer.writerow([step, *cells])
    return replace_file(path, text.getvalue().encode())
