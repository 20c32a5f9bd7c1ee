"""The processes of one run: found by what they carry, ended gently, then firmly. Nobody else's is ever touched."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from recipes.run.directory import identify, is_alive

# Every process of a run inherits this variable; its value is the id in run.json.
MARKER = "RECIPES_RUN_ID"

SHARED_MEMORY = "/dev/shm"


def of_run(run_id: str, recorded: Iterable[dict] = ()) -> list[psutil.Process]:
    """Return the living processes of a run: those that carry its marker and those recorded by its supervisor.

    Ray renames its workers, which may overwrite the environment the kernel shows; `recorded` (identities of
    run.directory.identify) covers those.
    """
    known = {entry["pid"]: entry for entry in recorded}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            named = process.pid in known and is_alive(known[process.pid])
            if named or process.environ().get(MARKER) == run_id:
                found.append(process)
    return found


def descendants(apart_from: int | None = None) -> list[psutil.Process]:
    """Return the living processes below this one, without the child `apart_from` (a pid)."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child, *child.children(recursive=True)] if child.pid != apart_from else []
    return found


def identities(processes: Iterable[psutil.Process]) -> list[dict]:
    """Return run.directory.identify of each; one that has just ended is left out."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(identify(process.pid))
    return found


def recorded(folder: Path) -> tuple[list[dict], set[str]]:
    """Return what a supervisor last wrote down in the run directory `folder`: identities, shared memory files."""
    try:
        told = json.loads((folder / "processes.json").read_text(encoding="utf-8"))
        return list(told["processes"]), set(told["shared_memory"])
    except (OSError, ValueError, KeyError, TypeError):
        return [], set()


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the files of /dev/shm that `processes` have mapped and that still have a name there."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= set(re.findall(rf"\s({SHARED_MEMORY}/.+)$", maps, re.M))
    return {path for path in found if not path.endswith(" (deleted)")}


def sweep(files: Iterable[str]) -> list[str]:
    """Remove those shared memory files of an ended run that no living process has mapped. Returns what was removed."""
    files = {path for path in files if path.startswith(f"{SHARED_MEMORY}/") and Path(path).exists()}
    if not files:
        return []
    used = shared_memory(psutil.process_iter())
    removed = []
    for path in sorted(files - used):
        with contextlib.suppress(OSError):
            Path(path).unlink()
            removed.append(path)
    return removed


def end(processes: Iterable[psutil.Process], grace: float) -> int:
    """Ask processes to end, wait at most `grace` seconds, kill the rest. Returns how many had to be killed."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=grace)
    for process in stubborn:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, timeout=grace)
    return len(stubborn)
