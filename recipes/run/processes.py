"""The processes of one run: found by what they carry, ended gently, then firmly. Nobody else's is ever touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from recipes.run.directory import is_alive

# Every process of a run inherits this variable; its value is the id in run.json.
MARKER = "RECIPES_RUN_ID"


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
