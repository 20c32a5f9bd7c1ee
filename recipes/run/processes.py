"""The processes of one run: found by what they carry, ended gently, then firmly. Nobody else's is ever touched."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
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
    """Return the files of /dev/shm that `processes` have mapped and that still have a name there.

    Without those in folders: the name of a shared memory object has no slash (shm_open(3)), so what lies in a folder
    was staged there by somebody, such as a model or the cache of verl's use_shm, and is mapped only to be read.
    """
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= set(re.findall(rf"\s({SHARED_MEMORY}/[^/\n]+)$", maps, re.M))
    return {path for path in found if not path.endswith(" (deleted)")}


def sweep(files: Iterable[str], since: float) -> list[str]:
    """Remove those shared memory files that an ended run made and no living process has mapped. Returns their paths.

    since: when the run began (seconds since the epoch). An older file is not the run's, though it had it mapped: data
    somebody has put into memory. Nor is another user's, or what is no plain file.
    """
    files = {path for path in files if _is_made(Path(path), since)}
    if not files:
        return []
    used = shared_memory(psutil.process_iter())
    removed = []
    for path in sorted(files - used):
        with contextlib.suppress(OSError):
            Path(path).unlink()
            removed.append(path)
    return removed


def _is_made(path: Path, since: float) -> bool:
    """Say whether `path` is a shared memory object that this user made after `since`.

    The file system keeps no time of birth that Python tells; a change of an older file counts as its making.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    return mine and str(path.parent) == SHARED_MEMORY and found.st_ctime >= since


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
