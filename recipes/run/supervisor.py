"""The process that owns a training: its log, its process group, its end, and run.json.

It outlives the kernel that started it just long enough to end the training properly (or to let it go on, if the
run says so), and it writes what happened in words.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from recipes.run import processes
from recipes.run.directory import Run, identify, now, update_state, write_json

# Seconds between looks at the training, and between heartbeats in run.json.
LOOK, HEARTBEAT = 0.25, 5.0
# Seconds the training gets to end by itself once asked. Ray's own shutdown takes two to five here.
GRACE = 15.0
# Seconds for what is left after the training itself has gone: Ray's daemons need no more to notice.
LEFTOVER_GRACE = 2.0

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def main() -> int:
    """Run one attempt to its end. The exit code is the training's, or 1 when it was stopped or could not start."""
    parser = argparse.ArgumentParser(description="Own one attempt of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--link", type=int, help="read end of a pipe that closes when the launcher is gone")
    given = parser.parse_args()
    return supervise(Run(given.run), given.attempt, given.link)


def supervise(run: Run, attempt: int, link: int | None) -> int:
    """Start the command of command.json, watch it, end everything it leaves, and record how it ended."""
    command = json.loads(run.command_file.read_text(encoding="utf-8"))
    state = json.loads(run.state_file.read_text(encoding="utf-8"))
    asked = _listen()
    _adopt_orphans()
    # Ray's sockets live in its temporary folder and their paths may not exceed 107 bytes: a run directory can be long.
    ray_folder = tempfile.mkdtemp(prefix="ray-")
    environment = {
        **os.environ,
        **command["environment"],
        processes.MARKER: state["id"],
        "RAY_TMPDIR": ray_folder,
    }
    began = time.monotonic()
    entry = {"number": attempt, "started": now(), "ended": None, "seconds": None, "exit_code": None}
    try:
        with run.log(attempt).open("ab") as log:
            child = subprocess.Popen(
                command["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
    except OSError as fault:
        _record(run, entry, "failed", f"the training could not be started: {fault}", None)
        shutil.rmtree(ray_folder, ignore_errors=True)
        return 1
    entry["process"] = identify(child.pid)
    update_state(run, state="running", attempts=[entry], supervisor=identify(os.getpid()), heartbeat=now())

    reason = _wait(run, child, asked, link, state.get("on_disconnect", "stop"), state.get("deadline_seconds"))
    entry["seconds"] = round(time.monotonic() - began, 2)
    if reason:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(state.get("grace_seconds", GRACE))
    left = {p.pid: p for p in [*_descendants(), *processes.of_run(state["id"])]}
    killed = processes.end(left.values(), LEFTOVER_GRACE)
    code = child.wait()
    shutil.rmtree(ray_folder, ignore_errors=True)

    if reason:
        outcome, cause = "stopped", reason + (f"; {killed} processes had to be killed" if killed else "")
    elif code == 0:
        outcome, cause = "finished", ""
    else:
        outcome, cause = "failed", _words(code, run.log(attempt))
    _record(run, entry, outcome, cause, code)
    return code if outcome != "stopped" else 1


def _listen() -> list[str]:
    """Turn TERM and INT into a request to stop; the returned list holds its words once it came."""
    asked: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("stopped by request"))
    signal.signal(signal.SIGINT, lambda *_: asked.append("interrupted"))
    return asked


def _wait(
    run: Run, child: subprocess.Popen, asked: list[str], link: int | None, rule: str, deadline: float | None
) -> str:
    """Wait for the end of the training. Returns the reason to stop it, or an empty string when it ended by itself."""
    started = beat = time.monotonic()
    while child.poll() is None:
        if asked:
            return asked[0]
        if deadline is not None and time.monotonic() - started > deadline:
            return f"deadline of {deadline:g} s passed"
        if link is not None and _closed(link):
            os.close(link)
            link = None
            if rule == "stop":
                return "the notebook, papermill or shell that launched it went away"
        elif link is None:
            time.sleep(LOOK)
        if time.monotonic() - beat > HEARTBEAT:
            beat = time.monotonic()
            update_state(run, heartbeat=now())
            write_json(run.path / "processes.json", _identities())
    return ""


def _closed(link: int) -> bool:
    """Wait one look for the pipe to the launcher to close. Nothing is ever written to it."""
    ready, _, _ = select.select([link], [], [], LOOK)
    return bool(ready) and os.read(link, 1) == b""


def _identities() -> list[dict]:
    alive = []
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            alive.append(identify(process.pid))
    return alive


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind, so that none escapes the tree (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """In the child: get SIGTERM if the supervisor is killed, so that the training cannot run on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _record(run: Run, entry: dict, state: str, cause: str, code: int | None) -> None:
    entry |= {"ended": now(), "exit_code": code, "state": state, "cause": cause}
    update_state(run, state=state, cause=cause, attempts=[entry], heartbeat=now())


def _words(code: int, log: Path) -> str:
    """Say how the training ended: the signal's name or the exit code, and the last exception its log shows."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    exception = last_exception(log)
    return f"{how}: {exception}" if exception else how


def last_exception(log: Path, window: int = 256_000) -> str:
    """Return the last line `SomethingError: words` in the last `window` bytes of a log, or an empty string."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - window))
        text = file.read().decode("utf-8", errors="replace")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r" \[repeated \d+x across cluster\][^\n]*", "", text)  # Ray's count of lines it left out
    found = re.findall(
        r"^(?:\([^)\n]*\)\s*)?\s*((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?::[^\n]*)?)$", text, re.M
    )
    return found[-1][:500] if found else ""


if __name__ == "__main__":
    sys.exit(main())
