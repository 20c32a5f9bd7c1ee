"""params/*.yaml → Recipe: layers of settings, coerced by the schema, each value remembering where it came from.

A file says what differs from its bases, named in `defaults`. Scalars are read as the text that was written and
given their type by the schema, so YAML's guesses (off → False, 1:30 → 90, 0012345 → 5349) have no say.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import pickle
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import masking
from recipes.errors import RecipeError, nearest
from recipes.schema import HardwareFacts, ModelFacts, Recipe, metadata

# Folders of params/ that hold facts and lists, not recipes.
FACTS = ("stacks", "models", "hardware", "batches", "baselines")

# What people change most, by the names notebooks and command lines use.
SHORT_NAMES = {
    "stack": "stack",
    "hardware": "hardware",
    "nodes": "nodes",
    "devices": "devices",
    "checkpoint_strict": "checkpoint.strict",
    "tensor_parallel": "parallel.tensor",
    "pipeline_parallel": "parallel.pipeline",
    "context_parallel": "parallel.context",
    "expert_parallel": "parallel.expert",
    "expert_tensor_parallel": "parallel.expert_tensor",
    "pipeline_layout": "parallel.pipeline_layout",
    "external_modules": "external_modules",
    "learning_rate": "optimizer.lr",
    "steps": "trainer.steps",
    "seed": "trainer.seed",
    "model_path": "model.path",
}


@dataclass(frozen=True)
class Setting:
    """One value for one dotted key, and the place that said so (`params/x.yaml:7`, `--set`, `notebook`)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Text:
    """A YAML scalar as written. `quoted` keeps '1' a string where no schema gives the type."""

    text: str
    quoted: bool = False


class NoRecipeError(RecipeError):
    """There is no recipe of that name, nor a file."""


@dataclass(frozen=True)
class Composed:
    """A recipe with its history: for each key all settings, the last of which holds."""

    name: str
    recipe: Recipe
    history: Mapping[str, tuple[Setting, ...]]
    bases: tuple[str, ...]
    files: tuple[Path, ...]

    @property
    def given(self) -> tuple[str, ...]:
        """The keys whose value comes from no file: overrides and a notebook's parameters."""
        last = {
            key: found[-1].origin for key, found in self.history.items() if key not in ("recipe", "run_dir", "work")
        }
        return tuple(key for key, origin in last.items() if ".yaml:" not in origin)


def home() -> Path:
    """Return the checkout that holds params/ (RECIPES_HOME, or the folder above this package).

    Raises RecipeError when there is no params/ there.
    """
    place = Path(os.environ.get("RECIPES_HOME") or Path(__file__).resolve().parent.parent)
    if not (place / "params").is_dir():
        raise RecipeError(f"No params folder in {place}: set RECIPES_HOME to a checkout of the workbook.")
    return place


def work_dir() -> Path:
    """Return where models and data live: RECIPES_WORK, or work/ in the checkout."""
    return Path(os.environ.get("RECIPES_WORK") or home() / "work").absolute()


def names() -> list[str]:
    """Return the names of all recipes, such as `quickstart/grpo`, sorted. Files named base* are no recipes."""
    root = home() / "params"
    found = (p.relative_to(root).with_suffix("") for p in root.glob("*/*.yaml"))
    return sorted(p.as_posix() for p in found if p.parts[0] not in FACTS and not p.name.startswith("base"))


def title(name: str) -> str:
    """Return a recipe's one line, without composing the rest of it. Raises RecipeError for an unknown name."""
    layers, _ = _layers(_recipe_path(name))
    titles = [s.value.text for layer in layers for s in layer if s.key == "title"]
    return titles[-1] if titles else ""


def compose(
    name: str,
    overrides: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    *,
    run_dir: str = "",
    work: str | None = None,
    label: str | None = None,
) -> Composed:
    """Compose a recipe from its file, its bases, `parameters` (typed, from a notebook) and `overrides` (key=value).

    `name` is a name of `names()` or the path of a YAML file. Parameters that are None are as in the recipe.
    `label` is the recipe's name where it is not the file's (recipe.yaml of a run).
    Raises RecipeError for an unknown name or key, a value of the wrong type, a required value that is missing.
    """
    path = _recipe_path(name)
    layers, bases = _layers(path)
    settings = [s for layer in layers for s in layer]
    settings += [
        Setting(_full_name(key), value, f"parameter {key}")
        for key, value in (parameters or {}).items()
        if value is not None
    ]
    settings += [_parse_override(text) for text in overrides]
    refuse_secrets(settings)
    label = label or _recipe_name(path)
    settings.append(Setting("recipe", label, "file name"))
    settings.append(Setting("run_dir", run_dir, "launch"))
    settings.append(Setting("work", work if work is not None else str(work_dir()), "RECIPES_WORK"))
    recipe, history = _build(Recipe, settings, label)
    # Once more: ${…} may have brought something in.
    refuse_secrets(Setting(key, value, f"recipe {label}") for key, value in flatten(to_dict(recipe)))
    return Composed(label, recipe, history, tuple(bases), tuple(dict.fromkeys(_files(path))))


def model_facts(name: str) -> ModelFacts:
    """Return the architecture in params/models/`name`.yaml. Raises RecipeError when there is none."""
    return load_facts(ModelFacts, "models", name)


def hardware_facts(name: str) -> HardwareFacts:
    """Return the node described in params/hardware/`name`.yaml. Raises RecipeError when there is none."""
    return load_facts(HardwareFacts, "hardware", name)


def fact_names(folder: str) -> list[str]:
    """Return the names of the files in params/`folder`, such as models or hardware, sorted."""
    return sorted(path.stem for path in (home() / "params" / folder).glob("*.yaml"))


def load_facts(cls: type, folder: str, name: str) -> Any:
    """Return params/`folder`/`name`.yaml as an object of the dataclass `cls`. Raises RecipeError when there is none."""
    root = home() / "params" / folder
    path = root / f"{name}.yaml"
    if "/" in name or not path.is_file():
        known = fact_names(folder)
        raise RecipeError(
            f"There is no {name!r} under params/{folder}{nearest(name, known)} Known: {', '.join(known)}."
        )
    status = path.stat()
    return copy.deepcopy(_facts(cls, path, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=64)
def _facts(cls: type, path: Path, _changed: int, _size: int) -> Any:
    """Read a file of facts, once for each state of it: the recipes share few models and nodes."""
    settings, _ = read_file(path)
    return _build(cls, [*settings, Setting("name", path.stem, "file name")], path.stem)[0]


def build_as(cls: type, settings: Sequence[Setting], name: str) -> Any:
    """Return `settings` as an object of the dataclass `cls`, as recipes are built.

    Raises RecipeError for an unknown key, a value of the wrong type, a required value that is missing.
    """
    return _build(cls, settings, name)[0]


def explain(composed: Composed, key: str) -> tuple[Any, str, tuple[Setting, ...]]:
    """Return the value of `key`, its meaning, and every setting of it, oldest first; the last one holds.

    Raises RecipeError when the recipe has no such key.
    """
    key = _full_name(key)
    known = dict(flatten(to_dict(composed.recipe)))
    declared = declared_keys()
    if key not in declared and key not in known:
        raise RecipeError(f"A recipe has no key {key!r}{nearest(key, [*SHORT_NAMES, *declared, *known])}")
    history = composed.history.get(key, ())
    return (
        known.get(key, _select(to_dict(composed.recipe), key)),
        declared.get(key, _free_meaning(key)),
        history,
    )


def difference(composed: Composed) -> list[Setting]:
    """Return the settings that make this recipe differ from its bases: its own file and what came on top."""
    own = composed.files[-1]
    label = _label(own)
    last = {key: found[-1] for key, found in composed.history.items() if key not in ("recipe", "run_dir", "work")}
    return [s for s in last.values() if s.origin.startswith(label) or not s.origin.startswith("params/")]


def repeated(path: Path) -> list[Setting]:
    """Return the settings in the file at `path` that only repeat what its bases already say."""
    layers, bases = _layers(path)
    if not bases:
        return []
    below = [s for layer in layers[:-1] for s in layer]
    recipe_below, _ = _build(Recipe, below, _recipe_name(path), partial=True)
    recipe_above, _ = _build(Recipe, below + list(layers[-1]), _recipe_name(path), partial=True)
    before, after = dict(flatten(recipe_below)), dict(flatten(recipe_above))
    keys = {s.key for s in layers[-1]}
    return [s for s in layers[-1] if s.key in keys and before.get(s.key, _ABSENT) == after.get(s.key)]


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain nested dicts, lists and scalars, ready for JSON and YAML."""
    return dataclasses.asdict(recipe)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf of a nested mapping; an empty mapping is a leaf."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


@functools.cache
def declared_keys() -> dict[str, str]:
    """Return every dotted key of the schema with its meaning."""
    return dict(_declared(Recipe))


def comma_separated(text: str) -> list[str]:
    """Return the names in `a, b,,c` without blanks: ["a", "b", "c"]."""
    return [part.strip() for part in text.split(",") if part.strip()]


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(recipe)), sort_keys=False)


# ----------------------------------------------------------------------------------------------- files to layers


def _recipe_path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise NoRecipeError(f"There is no recipe file {name}.")
        return path.resolve()
    path = home() / "params" / f"{name}.yaml"
    if not path.is_file() or name not in names():
        raise NoRecipeError(f"There is no recipe {name!r}{nearest(name, names())} `recipes list` names them all.")
    return path


def _recipe_name(path: Path) -> str:
    root = home() / "params"
    inside = path.resolve().is_relative_to(root.resolve())
    return path.resolve().relative_to(root.resolve()).with_suffix("").as_posix() if inside else path.stem


def _label(path: Path) -> str:
    root = home()
    inside = path.resolve().is_relative_to(root.resolve())
    return path.resolve().relative_to(root.resolve()).as_posix() if inside else str(path)


def _base_path(path: Path, base: str) -> Path:
    for candidate in (path.parent / f"{base}.yaml", home() / "params" / f"{base}.yaml"):
        if candidate.is_file():
            return candidate
    known = [p.relative_to(home() / "params").with_suffix("").as_posix() for p in home().glob("params/*/*.yaml")]
    known += [p.stem for p in path.parent.glob("*.yaml")]
    raise RecipeError(f"{_label(path)}: defaults names {base!r}, which is no file{nearest(base, known)}")


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> tuple[list[list[Setting]], list[str]]:
    """Return the settings of all files below and at `path`, base first, and the names of the direct bases."""
    if path in seen:
        raise RecipeError(f"{_label(path)}: its bases name each other in a circle.")
    own, bases = read_file(path)
    below = [layer for base in bases for layer in _layers(_base_path(path, base), (*seen, path))[0]]
    return [*below, own], bases


def _files(path: Path) -> Iterator[Path]:
    for base in read_file(path)[1]:
        yield from _files(_base_path(path, base))
    yield path


def read_file(path: Path) -> tuple[list[Setting], list[str]]:
    """Return the settings of one YAML file and the bases its `defaults` names.

    Raises RecipeError when the file cannot be read, is not a mapping of keys to values, or repeats a key.
    """
    label = _label(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeError(f"{label} cannot be read: {fault}") from fault
    settings, bases = _parsed(text, label)
    return list(settings), list(bases)


@functools.lru_cache(maxsize=256)  # a base is read once for each recipe above it
def _parsed(text: str, label: str) -> tuple[list[Setting], list[str]]:
    import yaml

    try:
        # libyaml's parser where it is compiled in: ten times as fast.
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        why = getattr(fault, "problem", None) or str(fault).splitlines()[0]
        raise RecipeError(f"{label}{where} cannot be read as YAML: {why}.") from fault
    if node is None:
        return [], []
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{label} must be a mapping of keys to values.")
    bases: list[str] = []
    settings: list[Setting] = []
    for dotted, value, line in _walk(node, label):
        if dotted == "defaults":
            bases = [item.text for item in value]
        else:
            settings.append(Setting(dotted, value, f"{label}:{line}"))
    return settings, bases


def _walk(node: Any, label: str, prefix: str = "") -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of a YAML mapping; values are Text, lists or dicts of Text, or {}."""
    import yaml

    seen: set[str] = set()
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise RecipeError(f"{label}:{line}: the key {prefix}{key} is given twice.")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _walk(value_node, label, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value_node), line


def _plain(node: Any) -> Any:
    import yaml

    if isinstance(node, yaml.MappingNode):
        return {str(k.value): _plain(v) for k, v in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return Text(node.value, quoted=bool(node.style))


def _parse_override(text: str) -> Setting:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"{text!r} is no override: write key=value, such as optimizer.lr=1e-6.")
    try:
        node = yaml.compose(value, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None  # not YAML (a bare * or @): then it is just text
    parsed = Text(value) if node is None else _plain(node)
    # A colon or a comment sign inside free text is not structure: only brackets make lists and mappings here.
    if not value.lstrip().startswith(("[", "{", "'", '"')):
        parsed = Text(value)
    return Setting(_full_name(key.strip()), parsed, f"override {key.strip()}")


def refuse_secrets(settings: Iterable[Setting]) -> None:
    """Raise RecipeError for the first setting whose name is that of a secret or whose value looks like one."""
    secrets = masking.known_secrets()
    for setting in settings:
        if why := masking.reason(setting.key, _written(setting.value), secrets):
            named = setting.key.removeprefix("env.") if setting.key.startswith("env.") else "it as a variable"
            raise RecipeError(
                f"{why} ({setting.origin}), and recipes, notebooks and runs keep what they are given. Export {named} "
                "before the launch, for the training to inherit, or name a file that holds it."
            )


def _written(value: Any) -> Any:
    """The plain texts of a setting's value, as they were written."""
    if isinstance(value, Mapping):
        return {key: _written(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(inner) for inner in value]
    return value.text if isinstance(value, Text) else value


def _full_name(key: str) -> str:
    return SHORT_NAMES.get(key, key)


# ------------------------------------------------------------------------------------------- settings to dataclass

_ABSENT = object()
_NULL = ("", "null", "~", "None")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def _build(cls: type, settings: Sequence[Setting], name: str, *, partial: bool = False) -> tuple[Any, dict]:
    """Merge `settings` in order into the structured config of `cls`; return the object and each key's history."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = pickle.loads(_structured(cls))
    history: dict[str, tuple[Setting, ...]] = {}
    for setting in settings:
        for key, value in _typed(cls, setting):
            try:
                OmegaConf.update(config, key, value, force_add=_free_root(cls, key) is not None, merge=False)
            except OmegaConfBaseException as fault:
                raise RecipeError(_sentence(setting, str(fault).splitlines()[0])) from fault
            history[key] = (*history.get(key, ()), dataclasses.replace(setting, key=key, value=value))
    if partial:
        return OmegaConf.to_container(config, resolve=False), history
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise RecipeError(f"Recipe {name}: no value for {', '.join(missing)}.")
    try:
        OmegaConf.resolve(config)
        built = OmegaConf.to_object(config)
    except OmegaConfBaseException as fault:
        raise RecipeError(f"Recipe {name}: {str(fault).splitlines()[0]}") from fault
    return built, history


@functools.lru_cache(maxsize=16)
def _structured(cls: type) -> bytes:
    """The empty structured config of a class, pickled: a copy of it takes a fifth of the time of making it."""
    from omegaconf import OmegaConf

    return pickle.dumps(OmegaConf.structured(cls))


def _typed(cls: type, setting: Setting) -> Iterator[tuple[str, Any]]:
    """Yield (key, value of the declared type) of a setting. Raises RecipeError with the key, value and reason."""
    free = _free_root(cls, setting.key)
    if free is not None:
        yield from _free(setting, free)
        return
    kind, meta = _field(cls, setting)
    value = setting.value
    if dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            for key, inner in flatten(value):
                yield from _typed(cls, dataclasses.replace(setting, key=f"{setting.key}.{key}", value=inner))
            return
        raise RecipeError(_sentence(setting, f"is a group of keys: write {setting.key}.<key>"))
    optional = type(None) in typing.get_args(kind)
    if optional:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    text = value.text if isinstance(value, Text) else value
    if text is None or (isinstance(value, Text) and not value.quoted and text in _NULL):
        if not optional:
            raise RecipeError(_sentence(setting, "needs a value"))
        yield setting.key, None
        return
    yield setting.key, _convert(setting, kind, text, meta)


def _convert(setting: Setting, kind: Any, value: Any, meta: Mapping[str, Any]) -> Any:
    if typing.get_origin(kind) is list:
        return [_within(setting, item, meta) for item in _string_list(setting, value)]
    if isinstance(value, (list, Mapping)):
        raise RecipeError(_sentence(setting, f"must be one {kind.__name__}, not a {type(value).__name__}"))
    if kind is bool:
        value = _boolean(setting, value)
    elif kind is int:
        if isinstance(value, bool) or not _INT.fullmatch(str(value).strip()):
            raise RecipeError(_sentence(setting, "must be a whole number"))
        value = int(str(value))
    elif kind is float:
        if isinstance(value, bool) or not _FLOAT.fullmatch(str(value).strip()):
            raise RecipeError(_sentence(setting, "must be a finite number, such as 1e-6"))
        value = float(str(value))
        if not math.isfinite(value):
            raise RecipeError(_sentence(setting, "must be a finite number, such as 1e-6"))
    elif not isinstance(value, (str, os.PathLike)):
        # 0012345 has become 12345 and true True before we see them: what was written is lost.
        raise RecipeError(_sentence(setting, f"arrived as a {type(value).__name__}; put it in quotes"))
    else:
        value = os.fspath(value)
        if "\n" in value or "\0" in value:
            raise RecipeError(_sentence(setting, "must be a single line"))
    return _within(setting, value, meta)


def _within(setting: Setting, value: Any, meta: Mapping[str, Any]) -> Any:
    choices, minimum = meta["choices"], meta["minimum"]
    if choices and value not in choices:
        which = f"{value!r} " if isinstance(setting.value, (list, tuple)) else ""
        known = f"{which}must be one of {', '.join(choices)}"
        raise RecipeError(_sentence(setting, known + nearest(str(value), choices)))
    if minimum is not None and value < minimum:
        raise RecipeError(_sentence(setting, f"must be at least {minimum:g}"))
    return value


def _boolean(setting: Setting, value: Any) -> bool:
    known = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
    found = value if isinstance(value, bool) else known.get(str(value).strip().lower())
    if found is None:
        raise RecipeError(_sentence(setting, "must be true or false"))
    return found


def _string_list(setting: Setting, value: Any) -> list[str]:
    if isinstance(value, str):
        value = comma_separated(value)
    if not isinstance(value, (list, tuple)):
        raise RecipeError(_sentence(setting, "must be a list, such as [a, b]"))
    items = [item.text if isinstance(item, Text) else item for item in value]
    wrong = [item for item in items if not isinstance(item, str)]
    if wrong:
        raise RecipeError(_sentence(setting, f"must be a list of strings; {wrong[0]!r} is not one"))
    return items


def _free(setting: Setting, root: str) -> Iterator[tuple[str, Any]]:
    """Settings under a free mapping (verl, env, transformer, …): no type is declared, so what was written counts."""
    value = setting.value
    if root == "env":
        inner = value.text if isinstance(value, Text) else value
        if setting.key == root and not isinstance(inner, Mapping):
            raise RecipeError(_sentence(setting, "must map variable names to texts"))
        if isinstance(inner, Mapping):
            for name, text in inner.items():
                yield from _free(Setting(f"env.{name}", text, setting.origin), root)
            return
        if isinstance(inner, (bool, float)) or inner is None:
            raise RecipeError(_sentence(setting, "is an environment variable: put its value in quotes"))
        yield setting.key, str(inner)
        return
    if setting.key == root:
        inner = _scalars(value)
        if inner == {}:
            return
        if not isinstance(inner, Mapping):
            raise RecipeError(_sentence(setting, "must be a mapping"))
        for key, leaf in flatten(inner):
            yield f"{root}.{key}", leaf
        return
    yield setting.key, _scalars(value)


def _scalars(value: Any) -> Any:
    """Give untyped YAML text the type YAML 1.2's core schema gives it; a quoted text stays a text."""
    if isinstance(value, Mapping):
        return {key: _scalars(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scalars(inner) for inner in value]
    if not isinstance(value, Text) or value.quoted:
        return value.text if isinstance(value, Text) else value
    text = value.text
    if text in _NULL:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    return text


def _sentence(setting: Setting, reason: str) -> str:
    ended = "" if reason.endswith((".", "?")) else "."
    return f"{setting.key}={_written(setting.value)!r} ({setting.origin}): {reason}{ended}"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _field(cls: type, setting: Setting) -> tuple[Any, Mapping[str, Any]]:
    """Return type and metadata of the declared field a key names. Raises RecipeError when there is none."""
    kind, meta, here = cls, {"choices": (), "minimum": None}, cls
    for part in setting.key.split("."):
        if not dataclasses.is_dataclass(here) or part not in _hints(here):
            known = [*declared_keys(), *SHORT_NAMES] if cls is Recipe else list(_hints(cls))
            raise RecipeError(f"Unknown key {setting.key!r} ({setting.origin}){nearest(setting.key, known)}")
        kind, meta = _hints(here)[part], metadata(here, part)
        here = kind
    return kind, meta


def _free_root(cls: type, key: str) -> str | None:
    """Return the free mapping (a dict field) that `key` is or lies in, or None."""
    here, path = cls, []
    for part in key.split("."):
        path.append(part)
        if not dataclasses.is_dataclass(here) or part not in _hints(here):
            return None
        here = _hints(here)[part]
        if typing.get_origin(here) is dict:
            return ".".join(path)
    return None


def _free_meaning(key: str) -> str:
    root = _free_root(Recipe, key)
    return f"{declared_keys().get(root, '')} (under {root})" if root else "a group of keys"


def _declared(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in _hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from _declared(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", metadata(cls, name)["meaning"]


def _select(tree: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree
