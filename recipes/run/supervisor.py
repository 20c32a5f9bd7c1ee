"""The process that owns a training: its log, its process group, its end, and run.json.

It outlives the kernel that started it just long enough to end the training properly (or to let it go on, if the
recipe says so), and it writes what happened in words. Should it be killed itself, a guard ends what it leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from recipes import masking
from recipes.run import causes, hang, processes
from recipes.run.directory import Run, here, identify, is_alive, now, patiently, read_state, update_state, write_json

# Seconds between looks at the training, and between heartbeats in run.json.
LOOK, HEARTBEAT = 0.25, 5.0
# Seconds the training gets to end by itself once asked. Ray's own shutdown takes two to five here.
GRACE = 15.0
# Seconds for what is left after the training itself has gone: Ray's daemons need no more to notice.
LEFTOVER_GRACE = 2.0
# Seconds the end of a run waits for a full disk to take its last words.
DISK_PATIENCE = 30.0
# Bytes set aside at the start: given back at the end, they make room for run.json where the disk is full.
RESERVE = 131_072
# Exit code of the early watch when a rule has failed (recipes.verdict.early).
EARLY = 3

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def main() -> int:
    """Run one attempt to its end. The exit code is the training's, or 1 when it was stopped or could not start."""
    parser = argparse.ArgumentParser(description="Own one attempt of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--link", type=int, help="read end of a pipe that closes when the launcher is gone")
    given = parser.parse_args()
    run = Run(given.run)
    if (state := read_state(run)["state"]) != "prepared":  # it took too long, and somebody has settled it meanwhile
        print(f"{now()} attempt {given.attempt} is {state} by now: nothing was started", flush=True)
        return 1
    return Supervisor(run, given.attempt).supervise(given.link)


class Supervisor:
    """One attempt of a run, from its start to the last words in run.json."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.run, self.number = run, attempt
        self.state = json.loads(run.state_file.read_text(encoding="utf-8"))
        self.command = json.loads((run.attempt(attempt) / "command.json").read_text(encoding="utf-8"))
        self.earlier = [a for a in self.state["attempts"] if a["number"] != attempt]
        self.entry = next((a for a in self.state["attempts"] if a["number"] == attempt), {"number": attempt})
        self.entry |= {"started": now(), "ended": None, "seconds": None, "exit_code": None}
        self.asked: list[str] = []
        # Ray's sockets live in its temporary folder and their paths may not exceed 107 bytes: a run directory can be
        # long.
        self.ray_folder = tempfile.mkdtemp(prefix="ray-")
        self.child: subprocess.Popen | None = None
        self.early: subprocess.Popen | None = None
        self.guard: int | None = None
        self.began = time.monotonic()
        self.memory_kills = causes.memory_kills()

    def supervise(self, link: int | None) -> int:
        """Start the attempt, watch it, end everything it leaves, and record how it ended. Returns main()'s exit code.

        `link` is the read end of the launcher's pipe.
        """
        self._listen()
        _adopt_orphans()
        word = self._fork_guard(link)
        (self.run.path / ".reserve").write_bytes(b"\0" * RESERVE)
        try:
            return self._own(link)
        except Exception as fault:
            self._end_all()
            self._record("failed", f"the supervisor itself failed: {type(fault).__name__}: {fault}", None)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.write(word, b"done")

    def _own(self, link: int | None) -> int:
        try:
            self.child = self._start()
        except OSError as fault:
            self._record("failed", f"the training could not be started: {fault}", None)
            shutil.rmtree(self.ray_folder, ignore_errors=True)
            return 1
        self.entry["process"] = identify(self.child.pid)
        self._update(
            state="running",
            cause="",
            attempts=[*self.earlier, self.entry],
            supervisor=identify(os.getpid()),
            place=here(),
            heartbeat=now(),
            ray_folder=self.ray_folder,
        )
        outcome, reason = self._wait(link)
        self.entry["seconds"] = round(time.monotonic() - self.began, 2)
        if self.early:
            self.early.kill()
            self.early.wait()
        if reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.state.get("grace_seconds", GRACE))
        killed = self._end_all()
        code = self.child.wait()
        if reason:
            cause = reason + (f"; {killed} processes had to be killed" if killed else "")
        elif code == 0:
            outcome, cause = "finished", ""
        else:
            kills = causes.memory_kills() - self.memory_kills
            outcome, cause = "failed", causes.in_words(code, self.run.log(self.number), kills)
        self._record(outcome, cause, code)
        return code if outcome in ("finished", "failed") and not reason else 1

    def _start(self) -> subprocess.Popen:
        environment = {
            **os.environ,
            **self.command["environment"],
            processes.MARKER: self.state["id"],
            "RAY_TMPDIR": self.ray_folder,
        }
        with self.run.log(self.number).open("ab") as log:
            return subprocess.Popen(
                self.command.get("supervised") or self.command["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _wait(self, link: int | None) -> tuple[str, str]:
        """Wait for the end of the training. Returns the state and reason to stop it, empty if it ended itself."""
        assert self.child is not None
        deadline, rule = self.state.get("deadline_seconds"), self.state.get("on_disconnect", "stop")
        watch = self.state.get("hang") or {}
        patience = hang.Patience(**watch.get("patience", {}))
        pace = hang.Pace(self.run.metrics(self.number), patience, self.began)
        beat = alarmed = since = self.began
        self.early = self._watch_early(self.state.get("stop_on") or ())
        while self.child.poll() is None:
            if self.asked:
                return "stopped", self.asked[0]
            if self._is_queued():  # neither the deadline nor the start-up has begun
                since = pace.last = time.monotonic()
            if deadline is not None and time.monotonic() - since > deadline:
                return "stopped", f"deadline of {deadline:g} s passed"
            if link is not None and _closed(link):
                os.close(link)
                link = None
                if rule == "stop":
                    return "stopped", "the notebook, papermill or shell that launched it went away"
            elif link is None:
                time.sleep(LOOK)
            at = time.monotonic()
            if (reason := pace.look(at)) and alarmed <= pace.last:
                alarmed = at
                reason = self._alarm(reason, pace.steps)
                if watch.get("on_hang") == "stop":
                    return "failed", f"it hangs: {reason}"
            if self.early and self.early.poll() is not None and (reason := self._early()):
                return "failed", f"stopped early: {reason}"
            if at - beat > HEARTBEAT:
                beat = at
                self._update(heartbeat=now())
                self._remember()
        return "", ""

    def _is_queued(self) -> bool:
        """Say whether a job of a cluster still waits for nodes or devices: its record is written as it is submitted."""
        with contextlib.suppress(OSError):
            return "supervised" in self.command and not (self.run.attempt(self.number) / "job.json").exists()
        return False  # it cannot be seen just now

    def _alarm(self, reason: str, lines: int) -> str:
        """Save the stacks of all processes of the run and put the alarm on record. Returns its sentence."""
        path = self.run.attempt(self.number) / "stacks" / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            read = hang.save_stacks(self._ours(), path)
            reason += f"; the stacks of {read} processes are in {path.relative_to(self.run.path)}"
        except OSError as fault:
            reason += f"; their stacks could not be written: {fault.strerror}"
        if self.state.get("launch") == "ray":
            reason += "; the ranks are on the cluster's nodes, their stacks were not read (`py-spy dump` there does)"
        self._put_on_record(reason, after_lines=lines)
        return reason

    def _watch_early(self, rules: Sequence[str]) -> subprocess.Popen | None:
        """Start the process that judges the metrics as they come, where the recipe asks for it.

        It is named, not imported: what judges runs builds on them, not the other way round.
        """
        if not rules:
            return None
        words = ["-m", "recipes.verdict.early", str(self.run.metrics(self.number)), *rules]
        words += [f"--threshold={text}" for text in self.state.get("thresholds") or ()]
        try:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as fault:
            self._put_on_record(f"the watch of supervision.stop_on could not be started: {fault}")
            return None

    def _early(self) -> str:
        """Why the watch that has ended wants the run to end; empty, and an alarm on record, where it broke itself."""
        assert self.early is not None
        said, code, self.early = (self.early.communicate()[0] or "").strip(), self.early.returncode, None
        if code == EARLY:
            return said
        self._put_on_record(f"the watch of supervision.stop_on ended by itself ({code}): no rule ends the run any more")
        return ""

    def _put_on_record(self, sentence: str, **more: object) -> None:
        alarm = {"attempt": self.number, "at": now(), **more, "sentence": sentence}
        self._update(alarms=[*self.state.get("alarms", []), alarm])

    def _remember(self) -> None:
        """Write down our processes and shared memory: Ray renames its workers, and a killed one tells nothing more."""
        ours = self._ours()
        with contextlib.suppress(OSError):
            write_json(
                self.run.path / "processes.json",
                {"processes": processes.identities(ours), "shared_memory": sorted(processes.shared_memory(ours))},
            )

    def _ours(self) -> list[psutil.Process]:
        return processes.descendants(apart_from=self.guard)

    def _end_all(self) -> int:
        """End what is left of the run, sweep what it leaves on this machine. Returns how many had to be killed."""
        shared = processes.shared_memory(self._ours()) | processes.recorded(self.run.path)[1]
        left = {p.pid: p for p in [*self._ours(), *processes.of_run(self.state["id"])]}
        killed = processes.end(left.values(), LEFTOVER_GRACE)
        processes.sweep(shared, _started(self.entry))
        shutil.rmtree(self.ray_folder, ignore_errors=True)
        return killed

    def _listen(self) -> None:
        """Turn TERM and INT into a request to stop."""
        signal.signal(signal.SIGTERM, lambda *_: self.asked.append("stopped by request"))
        signal.signal(signal.SIGINT, lambda *_: self.asked.append("interrupted"))

    def _fork_guard(self, link: int | None) -> int:
        """Fork a process that cleans up should this one be killed. Returns the pipe over which it hears of our end."""
        theirs, ours = os.pipe()
        self.guard = os.fork()
        if self.guard:
            os.close(theirs)
            return ours
        try:
            os.close(ours)
            if link is not None:
                os.close(link)
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if os.read(theirs, 4) != b"done":
                clean_up(self.run, self.state["id"], self.ray_folder)
        finally:
            os._exit(0)

    def _record(self, state: str, cause: str, code: int | None) -> None:
        """Record the end in run.json, then mask what looks like a secret in the log, which nobody writes any more.

        In this order: a log of many gigabytes takes minutes, and a run that has ended says so at once.
        """
        cause = masking.mask(cause)
        self.entry |= {"ended": now(), "exit_code": code, "state": state, "cause": cause}
        with contextlib.suppress(OSError):
            (self.run.path / ".reserve").unlink(missing_ok=True)
        limit = time.monotonic() + DISK_PATIENCE
        last = {"state": state, "cause": cause, "attempts": [*self.earlier, self.entry], "heartbeat": now()}
        while not self._update(**last) and time.monotonic() < limit:
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            masking.scrub_file(self.run.log(self.number))

    def _update(self, **changes: Any) -> bool:
        """Change run.json, of which this process alone holds what is true: it is written whole and never read again.

        A disk that takes nothing now may do so later: False then, and the training goes on.
        """
        self.state |= changes
        try:
            write_json(self.run.state_file, self.state)
        except OSError as fault:
            with contextlib.suppress(OSError):
                print(f"{now()} run.json could not be written: {fault.strerror}", flush=True)
            return False
        return True


def clean_up(run: Run, run_id: str, ray_folder: str | None) -> None:
    """End every process of a run whose supervisor is gone, sweep what it left, and record the run as lost."""
    recorded, shared = processes.recorded(run.path)
    supervisor, limit = patiently(lambda: read_state(run)).get("supervisor"), time.monotonic() + 5.0
    while supervisor and is_alive(supervisor) and time.monotonic() < limit:  # its pipe closes before it is gone
        time.sleep(0.05)
    for _ in range(3):  # a process that is just starting another one
        left = processes.of_run(run_id, recorded)
        shared |= processes.shared_memory(left)
        processes.end(left, LEFTOVER_GRACE)
    state = patiently(lambda: read_state(run))
    if begun := [attempt for attempt in state["attempts"] if "started" in attempt]:
        processes.sweep(shared, _started(begun[-1]))
    if ray_folder:
        shutil.rmtree(ray_folder, ignore_errors=True)
    (run.path / ".reserve").unlink(missing_ok=True)
    if state["state"] == "lost":
        attempts = state["attempts"]
        if attempts and attempts[-1].get("ended") is None:
            attempts[-1] |= {"ended": now(), "state": "lost", "cause": state["cause"]}
        update_state(run, state="lost", cause=state["cause"], attempts=attempts)
    with contextlib.suppress(OSError):
        masking.scrub_file(run.log())


def _started(attempt: Mapping[str, str]) -> float:
    """When an attempt started, in seconds since the epoch, not later than it did."""
    return datetime.fromisoformat(attempt["started"]).timestamp()


def _closed(link: int) -> bool:
    """Wait one look for the pipe to the launcher to close. Nothing is ever written to it."""
    ready, _, _ = select.select([link], [], [], LOOK)
    return bool(ready) and os.read(link, 1) == b""


def _adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind, so that none escapes the tree (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """In the child: get SIGTERM if the supervisor is killed, so that the training cannot run on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
