"""Start, stop and wait for runs on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from recipes import params
from recipes.command import Command, compose_verl
from recipes.errors import RecipeError
from recipes.run import processes
from recipes.run.directory import ENDED, Run, create, read_state, update_state, write_json, write_text
from recipes.run.supervisor import GRACE

# The write ends of the pipes to our supervisors, by run. They close when this process ends, however it ends: that is
# how a supervisor learns that its launcher is gone.
_LINKS: dict[Path, int] = {}

# Seconds a supervisor may take to start.
START_SECONDS = 30.0


def start(
    composed: params.Composed,
    command: Command,
    *,
    on_disconnect: str = "stop",
    deadline_seconds: float | None = None,
    grace_seconds: float = GRACE,
    waived: Iterable[str] = (),
) -> Run:
    """Create the run directory of `composed` and start its training under a supervisor. Returns at once.

    on_disconnect: "stop" ends the training when this process goes away, "continue" lets it run on.
    waived: names of preflight rules it is launched in spite of, for the record.
    grace_seconds: how long the training may take to end once asked, before it is killed.
    Raises RecipeError when the directory holds a run or cannot be written.
    """
    if on_disconnect not in ("stop", "continue"):
        raise RecipeError(f"on_disconnect={on_disconnect!r} must be stop or continue.")
    from omegaconf import OmegaConf

    verl_config = compose_verl(command, composed)
    details = {
        "title": composed.recipe.title,
        "hardware": composed.recipe.hardware,
        "steps": composed.recipe.trainer.steps,
        "on_disconnect": on_disconnect,
        "deadline_seconds": deadline_seconds,
        "grace_seconds": grace_seconds,
        "waived": sorted(waived),
    }
    run = create(Path(composed.recipe.run_dir), composed.name, details)
    write_json(
        run.command_file,
        {"argv": list(command.argv), "environment": dict(command.environment), "verl": command.verl},
    )
    write_text(run.path / "recipe.yaml", params.dump(composed.recipe))
    write_text(run.path / "verl.yaml", OmegaConf.to_yaml(verl_config))
    _start_supervisor(run)
    return run


def _start_supervisor(run: Run) -> None:
    theirs, ours = os.pipe()
    os.set_inheritable(theirs, True)
    # A session of its own: Ctrl-C in a terminal and the end of a kernel's process group reach us, not the supervisor.
    argv = [sys.executable, "-m", "recipes.run.supervisor", str(run.path), "--link", str(theirs)]
    with (run.path / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    _LINKS[run.path] = ours
    limit = time.monotonic() + START_SECONDS
    while read_state(run)["state"] == "prepared":
        if supervisor.poll() is not None or time.monotonic() > limit:
            words = (run.path / "supervisor.log").read_text(errors="replace").strip().splitlines()[-1:]
            update_state(run, state="failed", cause=f"the supervisor did not start: {' '.join(words)}")
            raise RecipeError(f"The supervisor of {run.path} did not start: {' '.join(words) or 'no message'}")
        time.sleep(0.05)


def stop(run: Run) -> dict:
    """End everything of a run and return its state. A run that has ended is left as it is, but for stray processes.

    Raises RecipeError when processes of the run are still there long after they were asked and killed.
    """
    state = read_state(run)
    if state["state"] == "running":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["supervisor"]["pid"], signal.SIGTERM)
        state = wait(run, timeout=state["grace_seconds"] + 30)
    recorded = _recorded(run)
    if state["state"] in ENDED:
        processes.end(processes.of_run(state["id"], recorded), grace=GRACE)
        if state["state"] == "lost":
            update_state(run, state="lost", cause=state["cause"])
    left = processes.of_run(state["id"], recorded)
    if left or state["state"] not in ENDED:
        raise RecipeError(f"{run.path}: {len(left)} processes are still there: {[p.pid for p in left]}.")
    return state


def wait(run: Run, timeout: float | None = None) -> dict:
    """Wait until a run has ended, at most `timeout` seconds, and return its state."""
    limit = None if timeout is None else time.monotonic() + timeout
    while (state := read_state(run))["state"] not in ENDED:
        if limit is not None and time.monotonic() > limit:
            break
        time.sleep(0.1)
    if state["state"] in ENDED:
        _forget(run)
    return state


def _forget(run: Run) -> None:
    link = _LINKS.pop(run.path, None)
    if link is not None:
        os.close(link)


def _recorded(run: Run) -> list[dict]:
    try:
        return json.loads((run.path / "processes.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []
