"""What a node must have before Ray is started on it for a recipe, as shell assignments for scripts/ray_cluster.sh.

    python -m recipes.ray_node RECIPE [KEY=VALUE…] [--head HOST] [--ip ADDRESS] [--interface NAME]

A Ray worker takes its environment from the raylet that starts it, and the raylet from `ray start`: what differs from
node to node, such as the name of a network interface, can be said nowhere else.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping

from recipes import params
from recipes.cluster import resource, wanted
from recipes.command import EXTERNAL_MODULES, external_modules
from recipes.doctor.machine import OPEN_FILES, VERL_BUCKET_MB
from recipes.errors import RecipeError
from recipes.params import Composed, hardware_facts
from recipes.preflight.environment import INTERFACES

# An address nobody has (RFC 5737): the way to it is the default route. Nothing is sent.
ELSEWHERE = "192.0.2.1"
# Bytes in /dev/shm for Ray's objects where the recipe does not say; what verl puts there is small beside weights.
OBJECTS = 2 * 10**9


def facts(composed: Composed, environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what `ray start` is given (NAME: value; empty: left to Ray), and the variables to export before it."""
    recipe, sizes = composed.recipe, wanted(composed.recipe)
    device = hardware_facts(recipe.hardware).device
    devices = max(devices for _, devices in sizes)
    # The CPU target says there what a Ray of the run's own is started with: the same goes for a node of a cluster.
    given = dict(params.flatten(recipe.verl))
    ray = {name: given.get(f"ray_kwargs.ray_init.{name}") for name in ("num_cpus", "object_store_memory")}
    buckets = (recipe.rollout.update_bucket_mb or VERL_BUCKET_MB) * 2**20 * devices
    shared = int(ray["object_store_memory"] or OBJECTS) + (buckets if recipe.rollout.engine == "vllm" else 0)
    told = {
        "RESOURCE": resource(recipe),
        "DEVICES": str(devices),
        "CPUS": str(ray["num_cpus"] or ""),
        "OBJECT_STORE": str(ray["object_store_memory"] or ""),
        "OPEN_FILES": str(OPEN_FILES[device]),
        "SHM_BYTES": str(shared),
    }
    modules = external_modules(composed, environment)
    return told, {**recipe.env, **({EXTERNAL_MODULES: ",".join(modules)} if modules else {})}


def own_address(head: str | None) -> str:
    """Return the address this node has on its way to the head, or on its default route. Raises RecipeError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((head or ELSEWHERE, 9))
            return probe.getsockname()[0]
    except OSError as fault:
        where = f"--head {head} cannot be reached from here" if head else "this machine has no default route"
        raise RecipeError(f"{where} ({fault.strerror or fault}). Give --ip, this node's address.") from fault


def interface(address: str) -> str:
    """Return the network interface that holds `address`, or whose network does. Raises RecipeError."""
    import psutil

    try:
        sought = ipaddress.ip_address(address)
    except ValueError as fault:
        raise RecipeError(f"--ip {address!r} is no address.") from fault
    near = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family not in (socket.AF_INET, socket.AF_INET6) or not each.netmask:
                continue
            held = ipaddress.ip_interface(f"{each.address.partition('%')[0]}/{_prefix(each.netmask)}")
            if held.ip == sought:
                return name
            if sought in held.network:
                near.append(name)
    if not near:
        raise RecipeError(f"no network interface of this machine holds {address}: give --ip, or --interface.")
    return near[0]


def _prefix(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()


def lines(told: Mapping[str, str], variables: Mapping[str, str]) -> Iterable[str]:
    """Yield shell assignments. Raises RecipeError for a variable no shell can set."""
    yield from (f"{name}={shlex.quote(text)}" for name, text in told.items())
    for name, text in sorted(variables.items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise RecipeError(f"env: {name!r} is no name of a variable.")
        yield f"export {name}={shlex.quote(text)}"


def main() -> int:
    """Print the assignments; exit code 2 and one sentence when that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m recipes.ray_node", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--head", help="the head's name or address")
    parser.add_argument("--ip", help="this node's address; default: the one on the way to the head")
    parser.add_argument("--interface", help="network interface of collectives; default: the one with that address")
    given = parser.parse_args()
    try:
        composed = params.compose(given.recipe, given.overrides)
        told, variables = facts(composed, os.environ)
        told["ADDRESS"] = given.ip or own_address(given.head)
        name = given.interface or interface(told["ADDRESS"])
        own = INTERFACES if hardware_facts(composed.recipe.hardware).device == "npu" else ("GLOO_SOCKET_IFNAME",)
        # What the node's own shell says is there for a reason.
        variables |= {variable: os.environ.get(variable) or name for variable in own if variable[:4] != "NCCL"}
        text = "\n".join(lines(told, variables))
    except RecipeError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
