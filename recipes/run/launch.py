"""Start, stop and wait for runs on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes import params, provenance
from recipes.command import Command, compose_verl, external_modules
from recipes.errors import RecipeError
from recipes.run import cluster, processes
from recipes.run.directory import (
    ENDED,
    NEVER_STARTED,
    PATIENCE,
    Run,
    create,
    is_here,
    patiently,
    read_state,
    update_state,
    write_json,
    write_text,
)
from recipes.run.supervisor import GRACE, clean_up

# The write ends of the pipes to our supervisors, by run. They close when this process ends, however it ends: that is
# how a supervisor learns that its launcher is gone.
_LINKS: dict[Path, int] = {}

# Seconds a supervisor may take to start.
START_SECONDS = 30.0


def start(
    composed: params.Composed,
    command: Command,
    *,
    on_disconnect: str | None = None,
    deadline_seconds: float | None = None,
    grace_seconds: float = GRACE,
    waived: Iterable[str] = (),
) -> Run:
    """Create the run directory of `composed` and start its training under a supervisor. Returns at once.

    on_disconnect: "stop" ends the training when this process goes away, "continue" lets it run on; None: as the recipe
    says.
    waived: names of preflight rules it is launched in spite of, for the record.
    grace_seconds: how long the training may take to end once asked, before it is killed; a job of a cluster gets no
    less than cluster.GRACE.
    Raises RecipeError when the directory holds a run or cannot be written.
    """
    details = terms(
        composed,
        on_disconnect=on_disconnect,
        deadline_seconds=deadline_seconds,
        grace_seconds=grace_seconds,
        waived=waived,
    )
    config = verl_yaml(command, composed)  # what verl would refuse is refused before anything is written
    run = create(Path(composed.recipe.run_dir), composed.name, details)
    write_down(run, 1, composed, command, config)
    start_supervisor(run, 1)
    return run


def terms(
    composed: params.Composed,
    *,
    on_disconnect: str | None = None,
    deadline_seconds: float | None = None,
    grace_seconds: float = GRACE,
    waived: Iterable[str] = (),
) -> dict[str, Any]:
    """Return what run.json says of how an attempt is watched over. Raises RecipeError for an unknown on_disconnect."""
    recipe = composed.recipe
    rule, watch = on_disconnect or recipe.supervision.on_disconnect, recipe.supervision
    if rule not in ("stop", "continue"):
        raise RecipeError(f"on_disconnect={rule!r} must be stop or continue.")
    startup = watch.startup_minutes
    if recipe.launch == "ray":
        cluster.address(recipe, os.environ)
        grace_seconds = max(grace_seconds, cluster.GRACE)
    return {
        "title": recipe.title,
        "file": recipe.recipe,
        "given": list(composed.given),
        "hardware": recipe.hardware,
        "launch": recipe.launch,
        "steps": recipe.steps,
        "on_disconnect": rule,
        "deadline_seconds": deadline_seconds,
        "grace_seconds": grace_seconds,
        "hang": {
            "on_hang": watch.on_hang,
            "patience": {
                "factor": watch.hang_factor,
                "least": 60 * watch.hang_minutes,
                "startup": None if startup is None else 60 * startup,
            },
        },
        "stop_on": list(watch.stop_on),
        "thresholds": list(watch.thresholds),
        "waived": sorted(waived),
    }


def verl_yaml(command: Command, composed: params.Composed) -> str:
    """Return verl's whole configuration as YAML. Raises RecipeError for what verl would refuse."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(compose_verl(command, composed))


def write_down(run: Run, attempt: int, composed: params.Composed, command: Command, config: str) -> None:
    """Write command.json, recipe.yaml and verl.yaml of an attempt: its own copies, and in the run's folder the latest.

    recipe.yaml names the external modules as they are loaded, but for those this process's environment adds.
    """
    modules = list(external_modules(composed, {}))
    recipe = params.dump(dataclasses.replace(composed.recipe, external_modules=modules))
    told: Mapping[str, Any] = {
        "argv": list(command.argv),
        "environment": dict(command.environment),
        "verl": command.verl,
    }
    if composed.recipe.launch == "ray":
        told = {**told, "supervised": cluster.supervised(command, composed, run, attempt)}
    for folder in (run.attempt(attempt), run.path):
        write_json(folder / "command.json", told)
        write_text(folder / "recipe.yaml", recipe)
        write_text(folder / "verl.yaml", config)
    provenance.start(run, attempt, composed.files)


def start_supervisor(run: Run, attempt: int) -> None:
    """Start the supervisor of an attempt that is written down, and wait until it owns the training.

    Raises RecipeError when it does not start; the run is `failed` then.
    """
    theirs, ours = os.pipe()
    os.set_inheritable(theirs, True)
    # A session of its own: Ctrl-C in a terminal and the end of a kernel's process group reach us, not the supervisor.
    words = ["-m", "recipes.run.supervisor", str(run.path), "--attempt", str(attempt), "--link", str(theirs)]
    with (run.path / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    _forget(run)
    _LINKS[run.path] = ours
    limit, late = time.monotonic() + START_SECONDS, ""
    while patiently(lambda: read_state(run))["state"] == "prepared":
        if time.monotonic() > limit and supervisor.poll() is None:
            supervisor.kill()  # what it has started by now is ended by its guard
            supervisor.wait()
            late = f"not within {START_SECONDS:g} s"
        if supervisor.poll() is not None and read_state(run)["state"] == "prepared":  # not ended in a word of its own
            words = (run.path / "supervisor.log").read_text(errors="replace").strip().splitlines()[-1:]
            said = late or " ".join(words) or "no message"
            update_state(run, state="failed", cause=f"the supervisor did not start: {said}")
            raise RecipeError(f"The supervisor of {run.path} did not start: {said}")
        time.sleep(0.05)


def stop(run: Run) -> dict:
    """End everything of a run and return its state. A run that has ended is left as it is, but for stray processes.

    One that is about to start gets START_SECONDS to do so, to be stopped then; one that never starts is `lost`.
    Raises RecipeError when it runs on another machine, or when processes of it are still there long after they were
    asked and killed.
    """
    state, limit = read_state(run), time.monotonic() + START_SECONDS
    if state["state"] not in ENDED and not is_here(state):
        raise RecipeError(f"{run.path} runs on {state['place']['host']}: `recipes stop` works there.")
    while state["state"] == "prepared":
        if time.monotonic() > limit:
            state = update_state(run, state="lost", cause=NEVER_STARTED)
        else:
            time.sleep(0.1)
            state = read_state(run)
    if state["state"] == "running":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["supervisor"]["pid"], signal.SIGTERM)
        state = wait(run, timeout=state["grace_seconds"] + 30)
    if state["state"] in ENDED:
        cluster.end_left_over(run)
    if not is_here(state):
        return state
    if state["state"] in ENDED:
        clean_up(run, state["id"], state.get("ray_folder"))
    left = processes.of_run(state["id"], processes.recorded(run.path)[0])
    if left or state["state"] not in ENDED:
        raise RecipeError(f"{run.path}: {len(left)} processes are still there: {[p.pid for p in left]}.")
    return read_state(run)


def wait(run: Run, timeout: float | None = None) -> dict:
    """Wait until a run has ended, at most `timeout` seconds, and return its state."""
    limit = None if timeout is None else time.monotonic() + timeout
    patience = PATIENCE if timeout is None else min(timeout, PATIENCE)
    while (state := patiently(lambda: read_state(run), patience))["state"] not in ENDED:
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
