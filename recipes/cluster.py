"""The Ray cluster a recipe wants: where it is, and what it must have."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from recipes.errors import RecipeError
from recipes.params import hardware_facts
from recipes.schema import Recipe

# Ray's own variables for the same, in its own order.
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


def address(recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Return the cluster a recipe names, or the environment: the dashboard's URL, or host:port of the head (GCS).

    Raises RecipeError when neither says one, or it has no host.
    """
    named = [("ray_address", recipe.ray_address), *((name, environment.get(name)) for name in ADDRESSES)]
    key, found = next(((key, text.strip()) for key, text in named if text and text.strip()), ("", ""))
    if not found:
        raise RecipeError(
            "launch=ray needs the address of a cluster: set ray_address to its dashboard, such as http://head:8265, or "
            f"export {ADDRESSES[0]}."
        )
    try:
        parts = urlsplit(found if "://" in found else f"//{found}")
        known = parts.scheme in ("", "http", "https", "ray") and bool(parts.hostname) and parts.port != 0
        known = known and bool(parts.scheme or parts.port)  # a bare host says neither who is asked nor where
    except ValueError:  # no port is so large
        known = False
    if not known and found != "auto":
        raise RecipeError(f"{key}={found!r} is no address of a cluster: http://HOST:8265, the dashboard, is one.")
    if parts.username or parts.password:
        raise RecipeError(f"{key} holds a name or password, which would end in the run's files. Use RAY_AUTH_TOKEN.")
    return found


def resource(recipe: Recipe) -> str:
    """Return what Ray calls a device of the recipe: what verl asks a cluster for."""
    if hardware_facts(recipe.hardware).device == "npu":
        return "NPU"
    from recipes.cpu.ranks import RANK_RESOURCE

    return RANK_RESOURCE


def wanted(recipe: Recipe) -> list[list[int]]:
    """Return [[nodes, devices on each], …] the recipe takes: those that train, then those that only generate."""
    whole, apart = hardware_facts(recipe.hardware).devices_per_node, recipe.fully_async
    sizes = [[recipe.nodes, recipe.devices or whole]]
    if recipe.mode == "fully_async" and apart.rollout_nodes:
        sizes.append([apart.rollout_nodes, apart.rollout_devices or whole])
    return sizes
