"""The lines of verl's `file` logger, each flushed at once: `{"step": N, "data": {key: number or null}}`."""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any

from recipes.metrics.growing import GrowingText
from recipes.metrics.table import MAX_STEP, Broken, Metrics, Restart, short


def read_jsonl(path: str | os.PathLike[str]) -> Metrics:
    """Read a metrics file of verl's `file` logger, finished or still being written, packed by gzip or not.

    Lines of the same step are merged key by key (validation and training may come apart); the later line
    wins. A missing or empty file gives an empty table and says so in `Metrics.state`. Raises OSError if the
    file exists and can't be read.
    """
    return JsonLines(path).read()


class JsonLines(GrowingText):
    """A metrics file that grows: each `read()` parses only what was written since the one before."""

    format = "JSON lines"

    def start_over(self) -> None:
        super().start_over()
        self.trainer = "verl"
        self._step = -1

    def take(self, text: bytes, number: int) -> None:
        from orjson import loads  # three times as fast as json; what it refuses, parse_line explains or accepts

        add, last = self.rows.add_object, self._step
        for place, line in enumerate(text.split(b"\n"), number):
            try:
                record = loads(line)
                step, data = record["step"], record["data"]
                if type(step) is int and 0 <= step < MAX_STEP and type(data) is dict:
                    add(step, data)
                    if step < last:
                        self.restarts.append(Restart(place, last, step))
                    last = step
                    continue
            except (ValueError, KeyError, TypeError, struct.error):
                pass
            self._step = last
            self._take(line, place)
            last = self._step
        self._step = last

    def take_tail(self, tail: bytes, number: int) -> bool:
        # A whole object that lacks only its newline is a line like any other; half an object waits for the rest.
        return self._take(tail, number, report=_is_object(tail))

    def _take(self, line: bytes, number: int, *, report: bool = True) -> bool:
        """Merge one line into the rows. False if it is broken and that did not go on record, by `report`."""
        if not line.strip():
            return True
        try:
            step, values, unusable = _parsed(line.strip(_NO_TEXT) or line)
        except ValueError as error:
            if report:
                self.broken.append(Broken(number, str(error)))
            return report
        self.rows.put(step, values)
        if step < self._step:
            self.restarts.append(Restart(number, self._step, step))
        self._step = step
        self.broken.extend(Broken(number, reason) for reason in unusable)
        return True


# Around an object: a file system that was not synced before a crash leaves NUL bytes where nothing was written.
_NO_TEXT = b"\0 \t\r\n"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.strip(_NO_TEXT).decode()), dict)
    except (ValueError, RecursionError):
        return False


def parse_line(line: bytes) -> tuple[int, dict[str, float | None], list[str]]:
    """One line of the `file` logger → step, values (None for a non-finite one), sentences on unusable values.

    Raises ValueError, with a sentence, if the line as a whole can't be used.
    """
    step, values, unusable = _parsed(line)
    return step, {key: value if math.isfinite(value) else None for key, value in values.items()}, unusable


def _parsed(line: bytes) -> tuple[int, dict[str, float], list[str]]:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # of bytes, json would guess the encoding
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object ({short(error)}): {short(line)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
        raise ValueError(f'expected {{"step": N, "data": {{…}}}}, found {short(line)}')
    step = record.get("step")
    if type(step) is not int or not 0 <= step < MAX_STEP:
        raise ValueError(f"the step must be a whole number from 0 up, found {short(json.dumps(step))}")
    values: dict[str, float] = {}
    unusable: list[str] = []
    for key, value in record["data"].items():
        try:
            values[key] = _number(value)
        except (TypeError, OverflowError):
            unusable.append(f"{short(key)} at step {step} is not a number: {short(json.dumps(value))}")
    return step, values, unusable


def _number(value: Any) -> float:
    """A JSON value as a float, null as NaN. Text is refused, even if it looks like a number."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)
