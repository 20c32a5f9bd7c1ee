"""What a watcher sees of a run at one moment: state, step, time left, the tail of the log. For every face alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.masking import mask
from recipes.metrics import JsonLines, Metrics, one_curve
from recipes.run.directory import ENDED, Run, patiently, read_state

TAIL_LINES, TAIL_BYTES, LINE_WIDTH = 8, 32_768, 160


@dataclass(frozen=True)
class Moment:
    """A snapshot. Times are seconds; `left` is None until two steps have shown how long one takes."""

    state: dict[str, Any]
    metrics: Metrics
    step: int
    steps: int | None
    elapsed: float
    left: float | None
    tail: tuple[str, ...]

    @property
    def ended(self) -> bool:
        return self.state["state"] in ENDED


def follow(run: Run, every: float = 1.0) -> Iterator[Moment]:
    """Yield a moment whenever a step was added or the state changed, and at least every 5 seconds, until the end.

    Raises OSError or RecipeError for a run that cannot be read for longer than a network file system may be away.
    """
    reader, seen, said = Reader(run), None, 0.0
    while True:
        moment = patiently(lambda: look(run, reader))
        mark = (moment.state["state"], moment.step, len(moment.metrics.table))
        if mark != seen or moment.ended or time.monotonic() - said > 5.0:
            seen, said = mark, time.monotonic()
            yield moment
        if moment.ended:
            return
        time.sleep(every)


class Reader:
    """The metrics of a run that goes on, all attempts as one curve; reads what is new since the time before."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._readers: dict[int, JsonLines] = {}
        self._parts: dict[int, Metrics] = {}
        self._latest: Metrics | None = None

    def read(self) -> Metrics:
        """Return the metrics as they are now. Raises OSError if a file is there and can't be read."""
        for number in self.run.attempts or (1,):
            self._readers.setdefault(number, JsonLines(self.run.metrics(number)))
        parts = {number: reader.read() for number, reader in self._readers.items()}
        # A reader returns the same object where nothing was written since.
        if self._latest is None or any(part is not self._parts.get(number) for number, part in parts.items()):
            self._parts = parts
            self._latest = one_curve(parts, self.run.path) if len(parts) > 1 else parts[min(parts)]
        return self._latest


def look(run: Run, reader: Reader | None = None) -> Moment:
    """Return what can be seen of a run now."""
    # State first: what is read after a run has ended is complete.
    state = read_state(run)
    metrics = (reader or Reader(run)).read()
    step = _step(metrics, state)
    return Moment(state, metrics, step, state.get("steps"), _elapsed(state), _left(metrics, state), tail(run.log()))


def _step(metrics: Metrics, state: dict[str, Any]) -> int:
    """The last step made; of a resumed run, the last one of the latest attempt: earlier ones may have got farther."""
    attempt = (state["attempts"] or [{}])[-1]
    latest = attempt.get("number", 1)
    made = [int(s) for s in metrics.table.index if s > 0 and (latest == 1 or metrics.attempts.get(int(s)) == latest)]
    return max([attempt.get("from_step", 0), *made[-1:]])


def tail(path: Path) -> tuple[str, ...]:
    """Return the last lines of a log, secrets masked, cleaned of colours and cut to a width.

    Untrusted text: escape it to show it.
    """
    from recipes.logtext import clean

    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    lines = deque((line for line in mask(clean(text)).splitlines() if line.strip()), maxlen=TAIL_LINES)
    return tuple(line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 1] + "…" for line in lines)


def duration(seconds: float) -> str:
    """Return seconds as people read them: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


RECENT = 10  # steps in a median of how fast a run is now


def pace(metrics: Metrics) -> list[tuple[str, str]]:
    """How fast a run is and what it holds, as (name, words): medians of its last steps, peaks, and a sum.

    Tokens are prompts and responses over all devices; verl counts memory in GiB. What was not recorded is left out, and
    so is a peak of 0: verl writes that where there is no accelerator.
    """
    columns = {str(key): metrics.table[key].dropna() for key in _PACE if key in metrics.table}
    last = {key: float(values.iloc[-RECENT:].median()) for key, values in columns.items() if len(values)}
    said = []
    if "timing_s/step" in last:
        said.append(("seconds/step", f"{last['timing_s/step']:.3g}"))
    if "perf/throughput" in last:
        said.append(("tokens/s/device", f"{last['perf/throughput']:,.0f}"))
    if "perf/total_num_tokens" in last:
        said.append(("tokens so far", f"{columns['perf/total_num_tokens'].sum():,.0f}"))
    names = zip(_PACE[3:], ("allocated", "reserved", "of the host"), strict=True)
    peaks = [(float(columns[key].max()), name) for key, name in names if key in last]
    if peaks := [f"{peak:.1f} {name}" for peak, name in peaks if peak > 0]:
        said.append(("memory, peak GiB", ", ".join(peaks)))
    return said


_PACE = (
    "timing_s/step",
    "perf/throughput",
    "perf/total_num_tokens",
    "actor/perf/max_memory_allocated_gb",
    "actor/perf/max_memory_reserved_gb",
    "actor/perf/cpu_memory_used_gb",
)


def _elapsed(state: dict[str, Any]) -> float:
    attempts = state.get("attempts") or [{}]
    started = attempts[-1].get("started")
    if not started:
        return 0.0
    ended = attempts[-1].get("ended")
    until = datetime.fromisoformat(ended) if ended else datetime.now().astimezone()
    return max(0.0, (until - datetime.fromisoformat(started)).total_seconds())


def _left(metrics: Metrics, state: dict[str, Any]) -> float | None:
    total = state.get("steps")
    if not total or "timing_s/step" not in metrics.table or state["state"] in ENDED:
        return None
    times = metrics.table["timing_s/step"].dropna()
    # The first step compiles and warms up; it says nothing about the others.
    return float(times.iloc[1:][-10:].mean()) * (total - _step(metrics, state)) if len(times) > 1 else None
