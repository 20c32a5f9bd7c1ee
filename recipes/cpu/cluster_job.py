"""A driver that is a job of a Ray cluster trains on that cluster.

params/cpu/base.yaml has a run make a Ray of its own (`address: local`), never one that somebody else has started; and a
run on a cluster has the very command of a run on this machine. As a job it was sent to one cluster, and means that one.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import wraps
from types import ModuleType

from recipes.cpu.import_hook import after
from recipes.cpu.replace import expect_attribute

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable Ray sets for the driver of a submitted job (ray._private.ray_constants)."""

OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard")
"""What ray.init takes for a Ray it starts, and refuses, or ignores with a warning, where one is there."""


def is_one(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the driver of a submitted job."""
    try:
        return "job_submission_id" in json.loads(environment.get(JOB, "{}")).get("metadata", {})
    except (ValueError, AttributeError):
        return False


def install() -> None:
    """In the driver of a submitted job, have ray.init join the job's cluster; elsewhere, do nothing."""
    if is_one():
        after("ray")(join)


def join(ray: ModuleType) -> None:
    """Replace `address="local"` by the cluster, and leave out what belongs to starting one."""
    expect_attribute(ray, "init")
    known = ray.init

    @wraps(known)
    def init(*args, **kwargs):
        if kwargs.get("address") == "local":
            kwargs = {name: value for name, value in kwargs.items() if name not in OF_A_NEW_CLUSTER}
            kwargs["address"] = "auto"
            print(f"{__name__}: this is a job of a Ray cluster, and trains there.", file=sys.stderr)
        return known(*args, **kwargs)

    ray.init = init
