"""How a training ended, in words: exit code or signal, out-of-memory killer, full disk, its last exception."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from pathlib import Path

# Bytes at the end of a log in which the exception that ended a training is looked for.
WINDOW = 256_000
# What ray.exceptions.ActorDiedError says of an actor that raised as it was made. One that died otherwise ("The actor
# died unexpectedly") is a cause of its own.
IN_CREATION = "error raised in its creation task"
# A disk with less left than this is full: not even a page of the log fits.
FULL = 65_536


def in_words(code: int, log: Path, killed_for_memory: int = 0) -> str:
    """Return the signal's name or the exit code, what explains it, and the last exception the log shows."""
    how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    exception = last_exception(log)
    words = f"{how}: {exception}" if exception else how
    if killed_for_memory:
        words += f"; the kernel's out-of-memory killer ended {killed_for_memory} processes of this machine meanwhile"
    with contextlib.suppress(OSError):  # the run directory is gone, or its file system
        if "No space left on device" not in words and (left := shutil.disk_usage(log.parent).free) < FULL:
            words += f"; the disk of the run directory is full ({left} bytes left)"
    return words


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; of a real-time signal, most of which Python has no name for, `signal 35`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_exception(log: Path, window: int = WINDOW) -> str:
    """Return the last line `SomethingError: words` in the last `window` bytes of a log, or an empty string.

    Not one in which Ray says of an actor that it raised, where there is another: what was raised stands in the lines
    below that one, and the processes of a run write into one log in no order.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - window))
            text = file.read(window).decode("utf-8", errors="replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r" \[repeated \d+x across cluster\][^\n]*", "", text)  # Ray's count of lines it left out
    found = re.findall(
        r"^(?:\([^)\n]*\)\s*)?\s*((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?::[^\n]*)?)$", text, re.M
    )
    own = [line for line in found if IN_CREATION not in line] or found
    return own[-1][:500] if own else ""


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for want of memory since it booted (`oom_kill`; 0 if unknown).

    The count is the machine's, all control groups included: a container cannot ask for its own in the same way with
    both versions of control groups.
    """
    try:
        text = counters.read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(found[1]) if found else 0
