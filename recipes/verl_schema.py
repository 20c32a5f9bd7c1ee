"""verl's own configuration files: found in the training interpreter or in the wheel of the stack's version.

verl is never imported. Its YAML files are enough to know every key, every default, and whether an override needs `+`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, nearest

# Groups with keys of their own that still take more, and who reads those. An empty mapping in verl's files is open too.
OPEN_GROUPS = {
    "ray_kwargs.ray_init": "ray.init() takes every key",
    "actor_rollout_ref.rollout.engine_kwargs": "each engine takes its own arguments",
    "reward.custom_reward_function.reward_kwargs": "handed to the user's function",
}
# The same, wherever the group stands: Megatron's own dataclasses decide what these may hold.
OPEN_NAMES = (
    "override_transformer_config",
    "override_ddp_config",
    "override_optimizer_config",
    "mcore_kwargs",
)

# How long pip may take to bring one wheel (about 2 MB), and how long the child that finds verl may take.
FETCH_SECONDS = 120
ASK_SECONDS = 60

_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
spec = u.find_spec("verl")
version = None
try: version = m.version("verl")
except m.PackageNotFoundError: pass
print(json.dumps({"python": sys.version.split()[0], "verl": version,
                  "path": list(spec.submodule_search_locations)[0] if spec else None}))
"""


@dataclass(frozen=True)
class Schema:
    """verl's configuration files of one version. `origin` says in words where they were found."""

    version: str
    directory: Path
    origin: str


@dataclass(frozen=True)
class Interpreter:
    """What the interpreter that trains says of itself; verl is None where it is not installed."""

    python: str
    version: str
    verl: str | None
    verl_path: Path | None


@functools.lru_cache(maxsize=8)
def interpreter(python: str) -> Interpreter:
    """Ask the training interpreter, in a child, for its version and its verl. Nothing heavy is imported there.

    Raises RecipeError when it cannot be started or does not answer.
    """
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise RecipeError(f"The training interpreter {python!r} cannot be asked for its verl: {fault}.") from fault
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RecipeError(f"The training interpreter {python!r} failed with exit code {done.returncode}: {last[0]}.")
    told = json.loads(done.stdout)
    path = Path(told["path"]) if told["path"] else None
    return Interpreter(python, told["python"], told["verl"], path)


def find(version: str, python: str = sys.executable, *, fetch: bool = True) -> Schema:
    """Return verl's configuration files for `version`: from `python` if it has that verl, else from its wheel.

    Wheels come through pip into a cache (RECIPES_CACHE, else the user's cache folder). Raises RecipeError, saying what
    could not be checked, when the version is neither installed nor cached nor to be had.
    """
    found = interpreter(python)
    if found.verl == version and found.verl_path:
        return Schema(version, found.verl_path / "trainer" / "config", f"verl {version} of {python}")
    cached = cache() / version / "verl" / "trainer" / "config"
    if not cached.is_dir():
        if not fetch:
            raise RecipeError(
                f"verl {version} is neither installed in {python} nor cached: its keys could not be checked."
            )
        _fetch(version)
    return Schema(version, cached, f"the wheel of verl {version}")


def cache() -> Path:
    """Return the folder that keeps verl's configuration files by version."""
    place = os.environ.get("RECIPES_CACHE")
    if not place:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-recipes"
    return Path(place) / "verl"


def _fetch(version: str) -> None:
    """Bring the wheel of `version` with pip and keep its YAML files, all or none."""
    target = cache() / version
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{version}-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"verl=={version}", "--dest", scratch]
        reason = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"pip had no answer after {FETCH_SECONDS} s"
        wheels = list(Path(scratch).glob("verl-*.whl"))
        if reason or not wheels:
            raise RecipeError(
                f"verl {version} is not installed and its wheel could not be fetched ({reason or 'no wheel'}): "
                "its keys could not be checked."
            )
        unpacked = Path(scratch) / "unpacked"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                files = [n for n in wheel.namelist() if n.endswith((".yaml", ".yml")) and "/config/" in n]
                wheel.extractall(unpacked, files)
        except zipfile.BadZipFile as fault:
            raise RecipeError(
                f"The wheel of verl {version} is damaged ({fault}); clear pip's cache and try again."
            ) from fault
        if not (unpacked / "verl" / "trainer" / "config").is_dir():
            raise RecipeError(f"The wheel of verl {version} has no trainer/config: this version is not understood.")
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)


def compose(schema: Schema, overrides: Sequence[str], config_name: str = "ppo_trainer") -> Any:
    """Compose verl's configuration with Hydra, as verl itself would. Returns an OmegaConf DictConfig.

    Raises RecipeError with Hydra's reason in one sentence.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with hydra.initialize_config_dir(str(schema.directory), version_base=None):
            return hydra.compose(config_name=config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as fault:
        causes = [str(fault), *([str(fault.__cause__)] if fault.__cause__ else [])]
        reason = " ".join(line.strip() for cause in causes for line in cause.splitlines()[:2] if line.strip())
        raise RecipeError(f"verl {schema.version} refuses the configuration: {reason}") from fault
    finally:
        GlobalHydra.instance().clear()


@functools.lru_cache(maxsize=8)
def defaults(schema: Schema, engine: str, config_name: str = "ppo_trainer") -> Any:
    """Return verl's configuration with nothing but the engine chosen (a DictConfig; treat it as read-only)."""
    return compose(schema, [f"model_engine={engine}"], config_name)


def declares(config: Any, key: str) -> bool:
    """Say whether verl's configuration has `key` (a null value counts)."""
    from omegaconf import DictConfig, ListConfig

    for part in key.split("."):
        if not isinstance(config, DictConfig) or config._is_none() or part not in config.keys():  # noqa: SIM118 (`in` hides ???)
            return False
        config = config._get_node(part)
        if isinstance(config, ListConfig):
            return True
    return True


def is_open(config: Any, key: str) -> bool:
    """Say whether `key` may be added: some group above it is empty in verl's files, or is known to take more."""
    from omegaconf import DictConfig

    parts = key.split(".")
    for count in range(1, len(parts)):
        group = ".".join(parts[:count])
        if group in OPEN_GROUPS or parts[count - 1] in OPEN_NAMES:
            return True
        if not declares(config, group):
            return False
        node = _node(config, group)
        if not isinstance(node, DictConfig) or node._is_none() or len(node) == 0:
            return True
    return False


def unknown(config: Any, key: str, version: str) -> str:
    """Return the sentence for a key this verl does not have, with the nearest keys it has."""
    return f"verl {version} has no key {key!r}{nearest(key, _keys(config))}."


def _node(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config._get_node(part)
    return config


def _keys(config: Any, prefix: str = "") -> list[str]:
    from omegaconf import DictConfig

    found = []
    for part in config:
        node = config._get_node(part)
        found.append(f"{prefix}{part}")
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found += _keys(node, f"{prefix}{part}.")
    return found
