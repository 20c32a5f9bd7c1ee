"""A run as a job of a Ray cluster: what the supervisor starts in verl's place.

The job itself is recipes.run.ray_job's; a node of such a cluster is started by scripts/ray_cluster.sh.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.cluster import address, resource, wanted
from recipes.command import Command
from recipes.params import Composed
from recipes.run.directory import Run, read_state, write_json
from recipes.run.processes import MARKER
from recipes.schema import Recipe

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


def plan(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what ray_job needs to know of a recipe, as it stands in the attempt's ray.json."""
    return {
        "address": address(recipe, environment),
        "recipe": recipe.recipe,
        "resource": resource(recipe),
        "wanted": wanted(recipe),
        "nodes": list(recipe.ray_nodes),
        "wait_seconds": 60.0 * recipe.ray_wait_minutes,
    }
