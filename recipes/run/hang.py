"""Is a training still making steps? And if not: where does each of its processes stand?"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# Steps whose median says how long a step takes: enough to forgive a slow one, few enough to follow longer responses.
STEPS = 20
# Seconds py-spy may take for one process; it stops the process only while it reads its stack.
STACK_SECONDS = 20.0


@dataclass(frozen=True)
class Patience:
    """How long a training may go without a step. Seconds; None: for ever.

    startup: for the first step, and for the second, before which nothing tells how long one takes.
    """

    factor: float = 10.0
    least: float = 600.0
    startup: float | None = 7200.0


class Pace:
    """Follows the lines of a metrics file and says when the next one is overdue.

    verl writes a line a step, so a line is a step (the validation before the first step counts as the first one).
    Start-up is judged apart: nothing is known of it beforehand but a limit. It ends with the second line, which alone
    says how long a step takes.
    """

    def __init__(self, path: Path, patience: Patience, began: float) -> None:
        self.path, self.patience = path, patience
        self.last, self.steps, self._offset = began, 0, 0
        self._times: deque[float] = deque(maxlen=STEPS)

    @property
    def median(self) -> float | None:
        """The median of the latest steps in seconds, None before the second line."""
        return statistics.median(self._times) if self._times else None

    @property
    def limit(self) -> float | None:
        """Seconds without a line after which the training is taken to hang, None for never."""
        usual = self.median
        return self.patience.startup if usual is None else max(self.patience.factor * usual, self.patience.least)

    def look(self, at: float) -> str:
        """Take new lines in at time `at` (seconds of a monotonic clock). Returns why it hangs, or an empty string."""
        if new := self._new_lines():
            if self.steps:
                self._times.extend([(at - self.last) / new] * new)
            self.steps, self.last = self.steps + new, at
        limit, silent = self.limit, at - self.last
        if limit is None or silent <= limit:
            return ""
        if self.median is None:
            which = "second" if self.steps else "first"
            return f"no {which} step after {silent:.0f} s (supervision.startup_minutes: {limit / 60:g})"
        return f"no step for {silent:.0f} s; the median of the latest steps is {self.median:.1f} s"

    def _new_lines(self) -> int:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return 0
        self._offset += len(text)
        return text.count(b"\n")


def save_stacks(processes: Iterable[psutil.Process], path: Path) -> int:
    """Write the Python stacks of `processes` to `path`, equal ones once. Returns how many processes gave one.

    What cannot be read (no permission to trace, no Python, gone) is written in its place: a missing stack is
    information too.
    """
    stacks: dict[str, list[str]] = {}
    read = 0
    for process in processes:
        name, text, good = _stack(process)
        read += good
        stacks.setdefault(text, []).append(name)
    blocks = [f"{len(names)} x {', '.join(sorted(names))}\n{text}\n" for text, names in stacks.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(blocks), encoding="utf-8")
    return read


def _stack(process: psutil.Process) -> tuple[str, str, bool]:
    """Return name with pid, stack without what tells equal ones apart, and whether there was one."""
    try:
        name = f"{(process.cmdline() or [process.name()])[0].rpartition('/')[2][:60]} ({process.pid})"
        status = process.status()
    except psutil.NoSuchProcess:
        return f"process {process.pid}", "it has ended", False
    except psutil.Error:
        return f"process {process.pid}", "it cannot be looked at", False
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return name, f"{status}; py-spy is not installed, so its stack was not read", False
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
            timeout=STACK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return name, f"{status}; py-spy had no answer in {STACK_SECONDS:g} s", False
    if done.returncode:
        return name, f"{status}; py-spy: {(done.stderr.strip().splitlines() or ['no words'])[0]}", False
    # Its own heading names pid, command line and version; the thread's number differs from process to process.
    threads = done.stdout[done.stdout.find("\nThread ") + 1 :] if "\nThread " in done.stdout else done.stdout
    return name, re.sub(r"^Thread (?:0x)?\w+ ", "Thread ", threads, flags=re.M).rstrip(), True
