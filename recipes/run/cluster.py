"""A run as a job of a Ray cluster: what the supervisor starts in verl's place.

The job itself is recipes.run.ray_job's; a node of such a cluster is started by scripts/ray_cluster.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.cluster import address, resource, wanted
from recipes.command import Command
from recipes.errors import RecipeError
from recipes.params import Composed
from recipes.run.directory import Run, read_state, write_json
from recipes.run.processes import MARKER
from recipes.schema import Recipe

# Seconds to end a job: its grace, its processes on all nodes, and a dashboard that is slow to answer.
STOP_SECONDS = 150.0
# Seconds the supervisor leaves what watches a job to end it: more than that waits for it (ray_job.STOP_GRACE, GONE).
GRACE = 40.0
JOB_SCRIPT = Path(__file__).with_name("ray_job.py")


def supervised(command: Command, composed: Composed, run: Run, attempt: int) -> list[str]:
    """Return the argv the supervisor of a run starts: verl's own, or, where `launch` is ray, what runs it as a job.

    For the latter writes ray.json of the attempt: where the cluster is and what it must have. The training interpreter
    runs it, because its Ray must be the cluster's. Raises RecipeError when no cluster is named.
    """
    recipe = composed.recipe
    if recipe.launch != "ray":
        return list(command.argv)
    identity = {"id": read_state(run)["id"], "marker": MARKER}
    write_json(run.attempt(attempt) / "ray.json", {**plan(recipe, os.environ), **identity})
    return [command.python, "-u", str(JOB_SCRIPT), str(run.path), "--attempt", str(attempt)]


def end_left_over(run: Run) -> None:
    """End jobs of a run that has ended but for them: what watched one was killed. Raises RecipeError when it cannot be.

    A job that is known to have ended is not asked for: its cluster may be long gone.
    """
    for number in run.attempts:
        record = run.attempt(number) / "job.json"
        if not record.exists() or json.loads(record.read_text(encoding="utf-8")).get("ended"):
            continue
        told = json.loads((run.attempt(number) / "command.json").read_text(encoding="utf-8"))
        try:
            done = subprocess.run([*told["supervised"], "--stop"], capture_output=True, text=True, timeout=STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise RecipeError(f"{run.path}: the job of attempt {number} may still run: {fault}.") from fault
        if done.returncode:
            last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]])[-1]
            raise RecipeError(f"{run.path}: the job of attempt {number} may still run: {last}.")


# Seconds a job may take from its submission to its devices, before the next run of this machine is looked at all the
# same.
TAKING = 600.0


def plan(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what ray_job needs to know of a recipe, as it stands in the attempt's ray.json."""
    return {
        "address": address(recipe, environment),
        "recipe": recipe.recipe,
        "resource": resource(recipe),
        "wanted": wanted(recipe),
        "nodes": list(recipe.ray_nodes),
        "wait_seconds": 60.0 * recipe.ray_wait_minutes,
        "taking_seconds": TAKING,
    }
