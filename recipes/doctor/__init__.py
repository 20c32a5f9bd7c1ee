"""Is this node ready for the run? Looks at the machine itself, where preflight looks at the recipe and its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from recipes import cluster as clusters
from recipes.doctor import cluster, data, devices, machine, model, network, node, software, versions
from recipes.doctor.lines import STATES, Line, Section
from recipes.errors import RecipeError
from recipes.params import Composed

__all__ = ["STATES", "Line", "as_json", "examine"]

# Seconds a child may take: importing the external modules, counting the rows of one file, or asking a cluster.
# Importing torch and transformers takes a minute on a cold disk.
DEADLINE = 180.0


def examine(
    composed: Composed | None,
    *,
    python: str,
    environment: Mapping[str, str] | None = None,
    address: str | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Line]:
    """Yield what can be said of this node before a run of `composed` (None: in general), section by section.

    `python` is the interpreter that trains, `environment` the caller's (default: this process's), `address` a Ray
    cluster that runs already (default: the recipe's, then what the environment names), `deadline` the seconds one child
    may take. What cannot be looked at is said so.
    Raises RecipeError when the recipe names facts, a stack or external modules that do not exist.
    """
    looked_at = node.make(composed, python, environment)
    sections: dict[str, Callable[[], Iterable[Line]]] = {
        "versions": lambda: versions.look(looked_at),
        "devices": lambda: devices.look(looked_at),
        "machine": lambda: machine.look(looked_at),
        "network": lambda: network.look(looked_at),
        "software": lambda: software.look(looked_at, deadline),
        "model": lambda: model.look(looked_at),
        "data": lambda: data.look(looked_at, deadline),
        "cluster": lambda: cluster.look(looked_at, address or _named(looked_at), deadline),
    }
    for name, look in sections.items():
        try:
            yield from look()
        except (RecipeError, OSError) as fault:
            yield Section(name).unseen("the rest", f"{type(fault).__name__}: {fault}")


def _named(looked_at: node.Node) -> str | None:
    """The cluster a launch would take: the recipe's, or the environment's. None: neither names one."""
    recipe = looked_at.subject.recipe if looked_at.subject else None
    names = [recipe.ray_address if recipe else None, *map(looked_at.environment.get, clusters.ADDRESSES)]
    if not any(name and name.strip() for name in names):
        return None
    if recipe is None:
        return next(name for name in names if name and name.strip())
    return clusters.address(recipe, looked_at.environment)


def as_json(lines: Iterable[Line], *, recipe: str, python: str) -> dict[str, Any]:
    """Return the lines as plain data with the count of each state; `ready` says that no line is an error."""
    listed = list(lines)
    counts = {state: sum(line.state == state for line in listed) for state in STATES}
    return {
        "recipe": recipe,
        "python": python,
        "ready": counts["error"] == 0,
        "counts": counts,
        "lines": [line.to_dict() for line in listed],
    }
