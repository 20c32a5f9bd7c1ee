"""verl's own configuration files: found in the training interpreter or in the wheel of the stack's version.

verl is never imported. Its YAML files are enough to know every key, every default, and whether an override needs `+`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.atomic import replace_file
from recipes.errors import RecipeError, nearest
from recipes.verl_history import instead, older

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
    "fsdp_kwargs",
)

# In the cache beside a release's files: their sizes, to know a truncated one.
SIZES = "sizes.json"

# How long pip may take to bring one wheel (about 2 MB), and how long the child that finds verl may take.
FETCH_SECONDS = 120
ASK_SECONDS = 60

# Asked of this interpreter directly (a child takes 0.2 s, a fifth of a check), and of another one in a child.
_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
spec = u.find_spec("verl")
version = None
try: version = m.version("verl")
except m.PackageNotFoundError: pass
told = {"python": sys.version.split()[0], "verl": version,
        "path": list(spec.submodule_search_locations)[0] if spec else None}
"""


@dataclass(frozen=True)
class Entry:
    """A program of verl's that trains, and its configuration: the folder within the package, the name of the file."""

    module: str
    folder: str
    config: str


# By a recipe's mode. Both take the engine as model_engine, so the files named *_megatron_trainer are not needed; the
# fully asynchronous one looks for verl/trainer/config in whatever folder it is started from.
ENTRIES = {
    "sync": Entry("verl.trainer.main_ppo", "trainer/config", "ppo_trainer"),
    "fully_async": Entry(
        "verl.experimental.fully_async_policy.fully_async_main",
        "experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
}


@dataclass(frozen=True)
class Schema:
    """verl's configuration files of one version: `directory` is its trainer/config, `origin` where that was found."""

    version: str
    directory: Path
    origin: str

    def folder(self, entry: Entry) -> Path:
        return self.directory.parent.parent / entry.folder

    @property
    def engines(self) -> list[str]:
        """The training engines this verl has (model_engine)."""
        return sorted(path.stem for path in (self.directory / "model_engine").glob("*.yaml"))


@dataclass(frozen=True)
class Interpreter:
    """What the interpreter that trains says of itself; verl is None where it is not installed."""

    python: str
    version: str
    verl: str | None
    verl_path: Path | None


@functools.lru_cache(maxsize=8)
def interpreter(python: str) -> Interpreter:
    """Ask the training interpreter for its version and its verl. Nothing heavy is imported.

    Raises RecipeError when it cannot be started or does not answer.
    """
    if python == sys.executable:
        here: dict[str, Any] = {}
        exec(_ASK, here)
        return _told(python, here["told"])
    script = f"{_ASK}\nprint(json.dumps(told))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise RecipeError(f"The training interpreter {python!r} cannot be asked for its verl: {fault}.") from fault
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RecipeError(f"The training interpreter {python!r} failed with exit code {done.returncode}: {last[0]}.")
    return _told(python, json.loads(done.stdout))


def _told(python: str, told: Mapping[str, Any]) -> Interpreter:
    return Interpreter(python, told["python"], told["verl"], Path(told["path"]) if told["path"] else None)


def find(version: str, python: str = sys.executable, *, fetch: bool = True) -> Schema:
    """Return verl's configuration files for `version`: from `python` if it has that verl, else from its wheel.

    Wheels come through pip into a cache (RECIPES_CACHE, else the user's cache folder). Raises RecipeError, saying what
    could not be checked, when the version is neither installed nor cached nor to be had.
    """
    found = interpreter(python)
    if found.verl == version and found.verl_path:
        return Schema(version, found.verl_path / "trainer" / "config", f"verl {version} of {python}")
    cached = cache() / version
    fault = _fault(cached)
    if fault and not fetch:
        raise RecipeError(
            f"verl {version} is not installed in {python}, and its cached configuration {fault}: its keys could not be "
            "checked."
        )
    if fault:
        if cached.exists():
            warnings.warn(f"The cached configuration of verl {version} {fault}; it is fetched again.", stacklevel=2)
        _fetch(version)
    return Schema(version, cached / "verl" / "trainer" / "config", f"the wheel of verl {version}")


def cache() -> Path:
    """Return the folder that keeps verl's configuration files by version."""
    place = os.environ.get("RECIPES_CACHE")
    if not place:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-recipes"
    return Path(place) / "verl"


def _fault(cached: Path) -> str:
    """Say what is wrong with a folder of the cache, as the end of a sentence; empty when all is there.

    The sizes are those of the files as they came out of the wheel. A folder someone made by hand has no list of them.
    """
    if not (cached / "verl" / "trainer" / "config" / "ppo_trainer.yaml").is_file():
        return "is not there"
    listed = cached / SIZES
    if not listed.is_file():
        return ""
    try:
        sizes = json.loads(listed.read_text(encoding="utf-8"))
    except ValueError:
        return f"is damaged ({SIZES} cannot be read)"
    for name, size in sizes.items():
        found = (cached / name).stat().st_size if (cached / name).is_file() else 0
        if found != size:
            return f"is damaged ({name} has {found} of {size} bytes)"
    return ""


def _fetch(version: str) -> None:
    """Bring the wheel of `version` with pip and keep its YAML files, all or none. A damaged one is fetched anew."""
    target = cache() / version
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{version}-") as scratch:
        unpacked = Path(scratch) / "unpacked"
        try:
            _unpack(_download(version, scratch), unpacked)
        except (zipfile.BadZipFile, zlib.error) as fault:
            warnings.warn(f"The wheel of verl {version} is damaged ({fault}); it is fetched again.", stacklevel=3)
            shutil.rmtree(unpacked, ignore_errors=True)
            try:
                _unpack(_download(version, scratch, "--no-cache-dir"), unpacked)
            except (zipfile.BadZipFile, zlib.error) as again:
                raise RecipeError(
                    f"The wheel of verl {version} is damaged, in pip's cache and where pip gets it from ({again}): its "
                    "keys could not be checked."
                ) from again
        if not (unpacked / "verl" / "trainer" / "config").is_dir():
            raise RecipeError(f"The wheel of verl {version} has no trainer/config: this version is not understood.")
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)


def _download(version: str, folder: str, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *options]
    command += [f"verl=={version}", "--dest", folder]
    for earlier in Path(folder).glob("verl-*.whl"):
        earlier.unlink()
    reason = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            # pip reads a wheel's metadata itself, and says so when it cannot.
            if re.search(r"invalid|not a zip|bad zip|do not match the hashes", done.stderr, re.IGNORECASE):
                raise zipfile.BadZipFile(reason)
    except subprocess.TimeoutExpired:
        reason = f"pip had no answer after {FETCH_SECONDS} s"
    wheels = list(Path(folder).glob("verl-*.whl"))
    if reason or not wheels:
        raise RecipeError(
            f"verl {version} is not installed and its wheel could not be fetched ({reason or 'no wheel'}): "
            "its keys could not be checked."
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    """Take the configuration files out of a wheel. Raises BadZipFile or zlib.error when it is truncated or damaged."""
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if n.endswith((".yaml", ".yml")) and "/config/" in n]
        archive.extractall(folder, files)
        sizes = {name: archive.getinfo(name).file_size for name in files}
    (folder / SIZES).write_text(json.dumps(sizes), encoding="utf-8")


def compose(schema: Schema, overrides: Sequence[str], entry: Entry = ENTRIES["sync"]) -> Any:
    """Compose verl's configuration with Hydra, as verl itself would. Returns an OmegaConf DictConfig.

    Files are read once for an engine and entry; settings of single keys are then applied by Hydra's own function in
    Hydra's own order: the same configuration in a fraction of the time. Raises RecipeError with Hydra's reason.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        parsed = [_parsed(override) for override in overrides]
    except HydraException as fault:
        raise RecipeError(f"verl {schema.version} refuses the configuration: {_reason(fault)}") from fault
    own = [o for o in parsed if o.key_or_group != "hydra.run.dir"]  # differs from run to run and decides no key
    chosen = [o for o in own if _chooses_files(schema, o)]
    settings = [o for o in own if o not in chosen]
    config = _read(schema, tuple(o.input_line for o in chosen), entry)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(settings, config)
    except (HydraException, OmegaConfBaseException) as fault:
        raise RecipeError(f"verl {schema.version} refuses the configuration: {_reason(fault)}") from fault
    return config


@functools.lru_cache(maxsize=4096)
def _parsed(override: str) -> Any:
    """Hydra's reading of one override (never to be changed): recipes, and the edits of a form, share most of theirs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    [parsed] = OverridesParser.create().parse_overrides([override])
    return parsed


def _chooses_files(schema: Schema, override: Any) -> bool:
    """Say whether an override names a group of files (model_engine=…) or a setting of Hydra's, not a key of verl's."""
    key = override.key_or_group
    return override.package is not None or key.startswith("hydra.") or (schema.directory / key).is_dir()


def _read(schema: Schema, choices: tuple[str, ...], entry: Entry) -> Any:
    """Compose verl's files with nothing but groups chosen: a DictConfig of the caller's own."""
    return pickle.loads(_pickled(schema, choices, entry))


@functools.lru_cache(maxsize=16)
def _pickled(schema: Schema, choices: tuple[str, ...], entry: Entry) -> bytes:
    """What `_read` returns, pickled: a copy takes 10 ms that way, by `copy.deepcopy` 70, and building it anew 120.

    Reading some thirty YAML files takes most of a `recipes check`, so what comes out is kept in the cache, under a name
    made of all that it depends on.
    """
    kept = _kept(schema, choices, entry)
    with contextlib.suppress(Exception):  # a damaged pickle raises nearly anything: composed anew
        if _ours(kept):
            content = kept.read_bytes()
            pickle.loads(content)
            return content
    content = pickle.dumps(_composed(schema, choices, entry))
    with contextlib.suppress(OSError):  # a cache that cannot be written
        replace_file(kept, content).chmod(0o600)
    return content


def _ours(path: Path) -> bool:
    """Say whether nobody else can have written a file: a pickle can run anything, and a cache may be a shared one."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _kept(schema: Schema, choices: tuple[str, ...], entry: Entry) -> Path:
    """The file of the cache for a composed configuration. Another verl, Hydra, file or choice has another name."""
    import hydra
    import omegaconf

    folders = dict.fromkeys((schema.directory, schema.folder(entry)))
    files = sorted(path for folder in folders for path in folder.rglob("*.yaml"))
    stats = [(str(path), status.st_size, status.st_mtime_ns) for path in files if (status := path.stat())]
    libraries = [sys.version, hydra.__version__, omegaconf.__version__]
    told = json.dumps([*libraries, schema.version, choices, entry.config, stats])
    return cache().parent / "composed" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.pickle"


def _composed(schema: Schema, choices: tuple[str, ...], entry: Entry) -> Any:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # The other entry looks for these files by importing verl, which takes seconds and may not be installed here.
    beside = [] if entry == ENTRIES["sync"] else [f"hydra.searchpath=[file://{schema.directory}]"]
    try:
        with hydra.initialize_config_dir(str(schema.folder(entry)), version_base=None):
            return hydra.compose(config_name=entry.config, overrides=[*choices, *beside])
    except (HydraException, OmegaConfBaseException) as fault:
        raise RecipeError(f"verl {schema.version} refuses the configuration: {_reason(fault)}") from fault
    finally:
        GlobalHydra.instance().clear()


def _reason(fault: Exception) -> str:
    """Return Hydra's reason in one line, and what became of a key that verl once had."""
    causes = [str(fault), *([str(fault.__cause__)] if fault.__cause__ else [])]
    lines = [line.strip() for cause in causes for line in cause.splitlines()[:2] if line.strip()]
    named = re.search(r"Could not override '([^']+)'|Error merging override \+*([^\s=]+)", str(fault))
    return " ".join(lines) + (instead(named[1] or named[2]) if named else "")


def defaults(schema: Schema, engine: str, entry: Entry = ENTRIES["sync"]) -> Any:
    """Return verl's configuration with nothing but the engine chosen: a DictConfig of the caller's own.

    Raises RecipeError when this verl has no such engine.
    """
    if engine not in schema.engines:
        raise RecipeError(
            f"engine={engine}: verl {schema.version} has no such training engine; it has {', '.join(schema.engines)}."
            + (" MindSpeed's was in verl 0.8.0 and 0.9.0: choose a stack with one of those." * (engine == "mindspeed"))
        )
    return _read(schema, (f"model_engine={engine}",), entry)


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
    known = instead(key)
    said = f"{known}." if known else nearest(key, _keys(config))
    return f"verl {version} has no key {key!r}{said}"


def spelled(config: Any, key: str) -> str:
    """Return `key` as this verl spells it: the older name where only that one is declared."""
    known = older(key)
    return known if known and not declares(config, key) and declares(config, known) else key


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
