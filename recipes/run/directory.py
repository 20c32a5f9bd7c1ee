"""The run directory: where everything of a run lives, and run.json, the truth about it.

run.json is written by one process at a time (the launcher until the supervisor has started, then the supervisor, which
never reads it again) and always as a whole file, so a reader at any moment sees a consistent state.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from recipes.atomic import replace_file
from recipes.errors import RecipeError

# Seconds without a heartbeat after which a run on another machine, which cannot be looked at, is taken for lost; and
# those after which one that is still `prepared` will not start any more (its supervisor gets launch.START_SECONDS).
SILENCE = 120.0
# Seconds for which whoever follows a run that goes on forgives it that it cannot be read.
PATIENCE = 120.0

STATES = ("prepared", "running", "finished", "failed", "stopped", "lost")
ENDED = ("finished", "failed", "stopped", "lost")
NEVER_STARTED = "it never started: what launched it was ended before its supervisor ran"


@dataclass(frozen=True)
class Run:
    """A run directory. All paths derive from it."""

    path: Path

    @property
    def state_file(self) -> Path:
        return self.path / "run.json"

    @property
    def command_file(self) -> Path:
        return self.path / "command.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves"

    @property
    def verdict_file(self) -> Path:
        return self.path / "verdict.json"

    @property
    def attempts(self) -> tuple[int, ...]:
        """The numbers of its attempts, rising; a resumed run has several."""
        folder = self.path / "attempts"
        return tuple(sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal() and p.is_dir()))

    @property
    def latest(self) -> int:
        return max(self.attempts, default=1)

    def attempt(self, number: int | None = None) -> Path:
        """The folder of attempt `number`, or of the latest."""
        return self.path / "attempts" / str(self.latest if number is None else number)

    def log(self, number: int | None = None) -> Path:
        return self.attempt(number) / "train.log"

    def metrics(self, number: int | None = None) -> Path:
        return self.attempt(number) / "metrics.jsonl"


def default_path(root: Path, recipe: str) -> Path:
    """Return a path for a new run under `root`: recipe and time of day; two at once differ by their last letters."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return root / recipe.replace("/", "-") / f"{stamp}-{secrets.token_hex(2)}"


def create(path: Path, recipe: str, details: Mapping[str, Any]) -> Run:
    """Make the directory of a new run, state `prepared`. `details` go into run.json as they are.

    Raises RecipeError when a run is there already, or the directory cannot be written.
    """
    run = Run(Path(path).absolute())
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        # mkdir without exist_ok is the lock: of two starts in one directory, one gets it.
        run.attempt(1).parent.mkdir(exist_ok=True)
        run.attempt(1).mkdir()
    except FileExistsError as fault:
        raise RecipeError(
            f"run_dir={str(run.path)!r} already holds a run. Choose another directory; nothing was touched."
        ) from fault
    except OSError as fault:
        raise RecipeError(f"run_dir={str(run.path)!r} cannot be written: {fault.strerror}.") from fault
    state = {
        "id": secrets.token_hex(8),
        "recipe": recipe,
        "state": "prepared",
        "cause": "",
        "created": now(),
        "place": here(),
        "attempts": [],
        **details,
    }
    write_json(run.state_file, state)
    return run


def open_run(path: str | Path) -> Run:
    """Return the run at `path`. Raises RecipeError when there is none."""
    run = Run(Path(path).absolute())
    if not run.state_file.is_file():
        there = "is no run directory: it has no run.json" if run.path.exists() else "does not exist"
        raise RecipeError(f"{path} {there}.")
    return run


def begin_attempt(run: Run, number: int) -> None:
    """Make the folder of attempt `number`. Of two that try at once, one gets it; the other gets a RecipeError."""
    try:
        run.attempt(number).mkdir()
    except FileExistsError as fault:
        raise RecipeError(f"{run.path}: attempt {number} was started in the same moment; watch it instead.") from fault
    except OSError as fault:
        raise RecipeError(f"{run.path} cannot be written: {fault.strerror}.") from fault


def read_state(run: Run) -> dict[str, Any]:
    """Return run.json, with the state `lost` in place of `running` or `prepared` when nobody is left to change it."""
    state = _load(run)
    if state["state"] not in ENDED and _gone(state):
        # It may have ended properly between our reading and our looking: only a second reading can tell.
        state = _load(run)
        if state["state"] not in ENDED and (cause := _gone(state)):
            state |= {"state": "lost", "cause": cause}
    return state


def patiently[T](look: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Return look(), tried again for `seconds` where it raises OSError or RecipeError, as read_state does.

    For all who look at a run again and again, and whose own end ends it. A network file system fails a read now and
    then: ESTALE where another machine has just replaced the file, EIO while its server starts anew.
    """
    limit = time.monotonic() + seconds
    while True:
        try:
            return look()
        except (OSError, RecipeError):
            if time.monotonic() > limit:
                raise
        time.sleep(min(1.0, seconds))


def is_here(state: Mapping[str, Any]) -> bool:
    """Say whether the processes of a run can be seen and ended from here."""
    return state.get("place", here()) == here()


def here() -> dict[str, str]:
    """Return what must be equal for a process to be visible: host, boot of its kernel, namespace of process ids."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text(encoding="utf-8").strip() if boot.exists() else "",
        "namespace": os.readlink(namespace) if namespace.exists() else "",  # noqa: PTH115  no path, a name
    }


def _gone(state: Mapping[str, Any]) -> str:
    """Return why a run that says it is running or about to run is not, or an empty string."""
    if state["state"] == "prepared":
        return NEVER_STARTED if _silence(state) > SILENCE else ""
    if is_here(state):
        return "" if is_alive(state["supervisor"]) else "the supervisor is gone without a word (killed)"
    host = state["place"]["host"]
    if host == here()["host"]:
        return "the machine or its container was started again since"
    silent = _silence(state)
    return f"no word from {host} for {silent:.0f} s" if silent > SILENCE else ""


def _silence(state: Mapping[str, Any]) -> float:
    """Seconds since its last heartbeat; before the first, since it was written down."""
    return time.time() - datetime.fromisoformat(state.get("heartbeat") or state["created"]).timestamp()


def _load(run: Run) -> dict[str, Any]:
    try:
        return json.loads(run.state_file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as fault:
        raise RecipeError(f"{run.state_file} cannot be read: {fault}") from fault


def update_state(run: Run, **changes: Any) -> dict[str, Any]:
    """Change fields of run.json atomically and return the new state."""
    state = _load(run) | changes
    write_json(run.state_file, state)
    return state


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old file or the new one, never a part."""
    replace_file(path, text.encode("utf-8"))


def identify(pid: int) -> dict[str, Any]:
    """Return what tells a process from a later one with the same pid: pid, and clock ticks from boot to its start.

    Ticks since boot never change. A time of day would: the kernel corrects the time it says it booted at whenever the
    clock is set right, and a process would then look like another one.
    """
    return {"pid": pid, "started": _ticks(pid)}


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Say whether the very process of `identify` still runs (a zombie does not)."""
    try:
        same = _ticks(identity["pid"]) == identity["started"]
        return same and psutil.Process(identity["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat (proc_pid_stat(5)); the name in field 2 may itself hold spaces and parentheses."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            raise psutil.NoSuchProcess(pid) from None
        return int(psutil.Process(pid).create_time() * 100)  # no /proc: the time of day must do
    return int(stat.rpartition(")")[2].split()[19])


def now() -> str:
    """Return the time as ISO 8601 with its offset, to the second."""
    return datetime.fromtimestamp(time.time()).astimezone().isoformat(timespec="seconds")
