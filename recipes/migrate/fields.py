"""verl key → recipe field: the inverse of recipes.command, found by asking it.

Recipes with telling values are turned into commands; a key whose value follows a field through every one of them is
that field's. There is no second table of names to keep in step.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes import params
from recipes.command import Command, build, quote
from recipes.errors import RecipeError
from recipes.schema import Recipe, metadata

# So many commands tell 2**PROBES - 2 yes-or-no fields apart; a recipe has about fifty.
PROBES = 7

# A key below a free mapping (transformer, env, …) that no verl has: where it shows up is where the mapping goes.
_PROBE_KEY = "probe_of_the_workbook"

# Not settings of verl's: they name facts, describe, or choose the run's own places.
_NO_VALUES = ("recipe", "title", "notes", "hardware", "stack", "prepare", "extra_args", "work", "run_dir", "model.name")


@dataclass(frozen=True)
class Field:
    """A field of the recipe: its dotted key, its type, what it accepts, and the verl keys that carry its value."""

    key: str
    kind: Any  # bool, int, float, str or list
    optional: bool
    required: bool
    choices: tuple[str, ...]
    minimum: float | None
    verl: tuple[str, ...] = ()

    def takes(self, value: Any) -> bool:
        """Say whether a value of verl's is one this field may have."""
        if self.kind is list:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        fits = {
            bool: isinstance(value, bool),
            int: isinstance(value, int) and not isinstance(value, bool),
            float: isinstance(value, (int, float)) and not isinstance(value, bool),
            str: isinstance(value, str),
        }[self.kind]
        if not fits or (self.choices and value not in self.choices):
            return False
        return self.minimum is None or value >= self.minimum


@dataclass(frozen=True)
class Inverse:
    """Which field a verl key belongs to, which free mapping the keys below a prefix, and what launches decide.

    `choices`: for a field that no key follows, what each of its choices makes of verl's keys. `switches`: the same for
    what a field only turns on.
    """

    fields: Mapping[str, Field]  # by recipe key
    by_verl: Mapping[str, tuple[Field, ...]]
    free: Mapping[str, str]  # prefix of verl keys, with a dot at its end → free mapping of the recipe
    choices: Mapping[str, Mapping[str, Mapping[str, str]]]  # field → choice → {verl key: text}
    switches: Mapping[str, str]  # verl key with a path in the run's directory → the yes-or-no field that asks for it
    own_keys: frozenset[str]  # verl keys whose values name the run's directory
    own_variables: frozenset[str]  # environment variables the command sets by itself


@functools.lru_cache(maxsize=16)
def inverse(stack: str, hardware: str, mode: str, engine: str, rollout: str, python: str) -> Inverse:
    """Return the inverse of `command.build` for one stack, hardware, mode, training engine and rollout engine.

    Raises RecipeError when they cannot be combined at all, as `command.build` says.
    """
    asked = _Asked({"stack": stack, "hardware": hardware, "mode": mode, "engine": engine}, rollout, python)
    fields = dict(_declared(Recipe))
    scalars = [f for f in fields.values() if f.kind is not dict and f.key not in (*_NO_VALUES, *asked.fixed)]
    scalars = [f for f in scalars if f.key not in ("rollout.engine", "external_modules")]
    asked.build({})  # a combination that cannot be is refused here, in the command's own words
    carried = _followers(asked, scalars)
    carried["rollout.engine"] = _switch(asked, fields["rollout.engine"])
    known = {key: dataclasses.replace(fields[key], verl=tuple(verl)) for key, verl in carried.items()}
    by_verl: dict[str, tuple[Field, ...]] = {}
    for field in known.values():
        for key in field.verl:
            by_verl[key] = (*by_verl.get(key, ()), field)
    free = {}
    for field in fields.values():
        if field.kind is dict and field.key != "verl":
            command = _texts(asked.build({field.key: {_PROBE_KEY: "x"}}))
            for key in command:
                if key.endswith(f".{_PROBE_KEY}"):
                    free[key.removesuffix(_PROBE_KEY)] = field.key
    empty = _texts(asked.build({}))
    choices = {
        field.key: {c: _caused(asked, field.key, c, empty) for c in field.choices}
        for field in known.values()
        if field.choices and not field.verl
    }
    switches = {
        name: field.key
        for field in known.values()
        if field.kind is bool and not field.verl
        for name, text in _caused(asked, field.key, True, empty).items()
        if text.startswith(f"'{_RUN}/")
    }
    one, two = (asked.build({"run_dir": place}) for place in ("/one", "/two"))
    first, second = _texts(one), _texts(two)
    own_variables = frozenset(one.environment) | {"VERL_USE_EXTERNAL_MODULES"}
    own_keys = frozenset(key for key in first if first[key] != second.get(key))
    return Inverse(known, by_verl, free, choices, switches, own_keys, own_variables)


@dataclass
class _Asked:
    """Builds commands of recipes that differ from an empty one in given values only."""

    fixed: Mapping[str, str]
    rollout: str
    python: str

    def build(self, values: Mapping[str, Any]) -> Command:
        recipe = _with(Recipe(), {**self.fixed, "rollout.engine": self.rollout, **_REQUIRED, **values})
        composed = params.Composed("probe", recipe, {}, (), ())
        return build(composed, python=self.python, environment={})


# What a recipe must have; any value will do.
_RUN = "/run_of_the_probe"
_REQUIRED = {
    "model.name": "probe",
    "model.path": "probe",
    "batch.train": 1,
    "batch.mini": 1,
    "data.train_files": "probe",
    "data.val_files": "probe",
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "optimizer.lr": 1.0,
    "rollout.n": 1,
    "run_dir": _RUN,
}


def _followers(asked: _Asked, fields: Sequence[Field]) -> dict[str, list[str]]:
    """Return the verl keys that follow each field. Fields that cannot be set together are asked about apart."""
    # Those with two values are counted first: their numbers are the bits that tell them apart.
    fields = sorted(fields, key=lambda f: f.kind is not bool and len(f.choices) < 2)
    chosen = [{f.key: _telling(f, number, probe) for number, f in enumerate(fields, 1)} for probe in range(PROBES)]
    try:
        commands = [_texts(asked.build(values)) for values in chosen]
    except RecipeError:
        if len(fields) == 1:
            return {fields[0].key: []}
        middle = len(fields) // 2
        return _followers(asked, fields[:middle]) | _followers(asked, fields[middle:])
    traces = {f.key: tuple(quote(values[f.key]) for values in chosen) for f in fields}
    found: dict[str, list[str]] = {f.key: [] for f in fields}
    for key in commands[0]:
        trace = tuple(texts.get(key) for texts in commands)
        for name, wanted in traces.items():
            if trace == wanted:
                found[name].append(key)
    return found


def _telling(field: Field, number: int, probe: int) -> Any:
    """A value no other field has over all probes. `number` counts from 1, so no yes-or-no field stays the same."""
    if field.kind is bool or len(field.choices) > 1:
        bit = number >> probe & 1
        return bool(bit) if field.kind is bool else field.choices[bit]
    text = f"probe_{number}_{probe}"
    serial = 10_000 + 100 * number + probe
    return {int: serial, float: serial + 0.5, str: field.choices[0] if field.choices else text, list: [text]}[
        field.kind
    ]


def _switch(asked: _Asked, field: Field) -> list[str]:
    """The keys that follow a field which also decides which other keys there are."""
    commands = {choice: _texts(asked.build({field.key: choice})) for choice in field.choices[:2]}
    first = next(iter(commands.values()))
    return [key for key in first if all(texts.get(key) == quote(choice) for choice, texts in commands.items())]


def _caused(asked: _Asked, key: str, choice: Any, empty: Mapping[str, str]) -> dict[str, str]:
    try:
        texts = _texts(asked.build({key: choice}))
    except RecipeError:
        return {}
    return {name: text for name, text in texts.items() if empty.get(name) != text}


def _texts(command: Command) -> dict[str, str]:
    """Return {verl key: text of its value} of a command."""
    pairs = (text.partition("=") for text in command.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _declared(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    hints = typing.get_type_hints(cls)
    for declared in dataclasses.fields(cls):
        kind, key, meta = hints[declared.name], f"{prefix}{declared.name}", metadata(cls, declared.name)
        if dataclasses.is_dataclass(kind):
            yield from _declared(kind, f"{key}.")
            continue
        optional = type(None) in typing.get_args(kind)
        kind = next(t for t in typing.get_args(kind) if t is not type(None)) if optional else kind
        kind = typing.get_origin(kind) or kind
        yield key, Field(key, kind, optional, declared.default == "???", meta["choices"], meta["minimum"])


def _with(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass tree with dotted keys replaced."""
    changes: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, tail = key.partition(".")
        if dot:
            below.setdefault(head, {})[tail] = value
        else:
            changes[head] = value
    changes |= {head: _with(getattr(node, head), inner) for head, inner in below.items()}
    return dataclasses.replace(node, **changes)
