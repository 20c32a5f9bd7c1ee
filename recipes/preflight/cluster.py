"""Rules on runs that are jobs of a Ray cluster (`launch: ray`)."""

from __future__ import annotations

import os

from recipes import cluster, params
from recipes.errors import RecipeError
from recipes.preflight.rules import Subject, rule

# What ray.init takes for a Ray it starts. On one that runs it refuses the first two, and ignores the rest.
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory")
INIT = "ray_kwargs.ray_init"


@rule("launch.address", noticed="launch", source="Ray's job API")
def cluster_is_named(s: Subject):
    if s.recipe.launch == "ray":
        try:
            cluster.address(s.recipe, os.environ)
        except RecipeError as fault:
            yield (
                {"launch": "ray", "ray_address": s.recipe.ray_address},
                str(fault),
                "Or take launch=local.",
            )


@rule("launch.ray_init", noticed="engine start", source="ray.init; verl 0.9.1, run_ppo")
def job_joins_its_cluster(s: Subject):
    """The CPU target sees to it by itself: recipes.cpu.cluster_job."""
    if s.recipe.launch != "ray" or s.hardware.device == "cpu":
        return
    given = {key: value for key, value in params.flatten(s.recipe.verl) if key.startswith(f"{INIT}.")}
    starts = {key: value for key, value in given.items() if key.rpartition(".")[2] in OF_A_NEW_CLUSTER and value}
    if given.get(f"{INIT}.address") not in (None, "auto"):
        starts[f"{INIT}.address"] = given[f"{INIT}.address"]
    if starts:
        yield (
            {f"verl.{key}": value for key, value in starts.items()},
            "a job trains on the cluster it was sent to, and this starts another Ray, or is refused there.",
            "Leave it out: scripts/ray_cluster.sh says it to each node.",
        )
