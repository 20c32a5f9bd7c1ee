"""A verl launch script, or its argument list, as a recipe of this workbook, with a report of what became of each key.

The recipe is held to the script: both are composed against the stack's verl, and what differs is either put right, or
it is in the report with its reason.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from recipes import masking, params, verl_schema
from recipes.command import EXTERNAL_MODULES, Command, build, compose_verl, quote
from recipes.errors import RecipeError
from recipes.migrate import names, shell
from recipes.migrate.fields import Field, Inverse, inverse
from recipes.migrate.text import recipe_text
from recipes.stack import load, verl_version

# Left to the workbook where the script does not say: where a run's files go, what it is called, who writes its metrics.
LEFT_TO_US = ("checkpoint.directory", "trainer.logger", "trainer.project", "trainer.experiment")

# The node's own (facts of each machine, never of a job), and what only extends the caller's environment.
PER_NODE = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_IF_IP")
PER_NODE += ("MASTER_ADDR", "MASTER_PORT", "RANK", "NODE_RANK", "RAY_ADDRESS")
SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")

# Rounds of putting right. Each settles every difference it sees; the second is for what the first one moved.
ROUNDS = 4


class Item(NamedTuple):
    """One key of the script and what became of it."""

    key: str
    value: str
    sentence: str


@dataclass(frozen=True)
class Migration:
    """The recipe's text and the report. `unknown` is what nothing here could carry over or check."""

    recipe: str
    source: str
    stack: str
    verl: str
    module: str
    carried: tuple[Item, ...]  # as they were, under a field or under `verl:`
    changed: tuple[Item, ...]  # carried over or left out, with the reason
    unknown: tuple[Item, ...]
    notes: tuple[shell.Note, ...]  # lines of the script that are not part of the launch
    assumed: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[Item, ...] = ()  # keys verl would see otherwise than with the script

    @property
    def complete(self) -> bool:
        """Whether everything the script tells verl is in the recipe or has a reason not to be."""
        return not self.unknown

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, ready for JSON."""
        tree = asdict(self)
        for name in ("carried", "changed", "unknown", "notes", "differences"):
            tree[name] = [item._asdict() for item in getattr(self, name)]
        return {"complete": self.complete, **tree}


def migrate(
    words: Sequence[str],
    stack: str,
    *,
    python: str,
    variables: Mapping[str, str] | None = None,
    hardware: str | None = None,
    model: str | None = None,
    base: str | None = None,
    line: int | None = None,
    fetch: bool = True,
) -> Migration:
    """Turn a launch into a recipe for `stack`.

    `words` is a script and its arguments, or an argument list (`python -m verl.trainer.main_ppo a=b …`, or `a=b …`).
    `variables` is what is known of the script's environment; nothing is taken from ours. `hardware` and `model` name
    facts under params/ where the launch does not tell; `base` is a recipe to extend; `line` chooses among launches.

    Raises RecipeError for what cannot be read, holds no launch or several, trains with FSDP, or lacks a value that a
    recipe must have.
    """
    source, reading = _read(words, variables)
    launch = _only(source, reading, line)
    given, report = _Given.of(launch, reading), _Report(reading)
    version = verl_version(stack)
    schema = verl_schema.find(version, python, fetch=fetch)
    mode = next((m for m, entry in verl_schema.ENTRIES.items() if entry.module == launch.module), None)
    if mode is None:
        report.change(launch.module, "", "another program than verl's trainer: keys of its own are not known here")
        mode = "sync"
    engine = _engine(given, schema)
    known = verl_schema.defaults(schema, engine, verl_schema.ENTRIES[mode])
    target = _present(given, known, version, report)
    hardware = hardware or _hardware(target, report)
    rollout = str(target.get("actor_rollout_ref.rollout.name", "vllm"))
    asked = _Draft(
        {"stack": stack, "hardware": hardware, "mode": mode, "engine": engine},
        base,
        python,
        inverse(stack, hardware, mode, engine, rollout, python),
        known,
        schema,
        report,
    )
    return asked.settle(target, launch, given, source, model)


# ------------------------------------------------------------------------------------------------------ the launch


def _read(words: Sequence[str], variables: Mapping[str, str] | None) -> tuple[str, shell.Reading]:
    if not words:
        raise RecipeError("Nothing to migrate: give a launch script, or its arguments (key=value …).")
    path = Path(words[0]).expanduser()
    if path.is_dir():
        raise RecipeError(f"{words[0]} is a directory; give the launch script.")
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise RecipeError(f"{words[0]} cannot be read as a script: {fault}.") from fault
        return str(path), shell.read(text, words[1:], variables)
    found = shell.launch_in(words)
    if found is None and all(re.match(r"(\+{1,2}|~)?[\w.@/-]+=|~[\w.]+$|--?\w", word) for word in words):
        found = ("verl.trainer.main_ppo", tuple(words))
    if found is None:
        raise RecipeError(f"{words[0]!r} is neither a script here nor an argument list (key=value …) of verl's.")
    launch = shell.Launch(1, *found, {})
    return "the argument list", shell.Reading((launch,), (), (), {}, {}, ())


def _only(source: str, reading: shell.Reading, line: int | None) -> shell.Launch:
    launches = [launch for launch in reading.launches if line in (None, launch.line)]
    if not launches and reading.launches:
        lines = ", ".join(str(launch.line) for launch in reading.launches)
        raise RecipeError(f"{source} starts no verl at line {line}; it does at line {lines}.")
    if not launches:
        broken = next((n for n in reading.notes if "not understood" in n.reason), None)
        why = f" Line {broken.line} is not understood as bash: {broken.source}" if broken else ""
        raise RecipeError(
            f"{source} starts no verl trainer (python -m verl.trainer.main_ppo …) that can be found.{why}"
        )
    different = {(launch.module, launch.arguments) for launch in launches}
    if len(different) > 1:
        lines = ", ".join(str(launch.line) for launch in launches)
        raise RecipeError(f"{source} starts verl {len(launches)} times, at lines {lines}: choose one with --line.")
    return launches[0]


@dataclass
class _Given:
    """What a launch says, in the order it says it: verl's keys with typed values, options, what could not be parsed."""

    values: dict[str, Any]
    added: set[str]  # keys written with + or ++
    deleted: list[str]
    options: dict[str, str]
    unparsed: list[tuple[str, str]]
    environment: dict[str, str]

    @classmethod
    def of(cls, launch: shell.Launch, reading: shell.Reading) -> _Given:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import Glob, Sweep
        from hydra.errors import HydraException

        made = cls({}, set(), [], {}, [], dict(launch.environment))
        parser = OverridesParser.create()
        words = iter(launch.arguments)
        for word in words:
            if word.startswith("-"):
                name, equals, value = word.partition("=")
                takes = name in (
                    "--config-name",
                    "--config-path",
                    "--config-dir",
                    "-cn",
                    "-cp",
                    "-cd",
                    "--package",
                    "-p",
                )
                made.options[name] = value if equals or not takes else next(words, "")
                continue
            try:
                override = parser.parse_override(word)
                value = override.value()
            except HydraException as fault:
                made.unparsed.append((word, str(fault).splitlines()[0]))
                continue
            if override.is_delete():
                made.deleted.append(override.key_or_group)
            elif isinstance(value, (Sweep, Glob)) or override.package is not None:
                made.unparsed.append((word, "it sets several values, which a single run has no use for"))
            else:
                made.values.pop(override.key_or_group, None)
                made.values[override.key_or_group] = _plain(value)
                if override.is_add() or override.is_force_add():
                    made.added.add(override.key_or_group)
        return made


def _plain(value: Any) -> Any:
    """Hydra's parsed value without its quoting marks."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _engine(given: _Given, schema: verl_schema.Schema) -> str:
    """Return the training engine the launch names, by itself, by its strategy or by its configuration file."""
    config = given.options.get("--config-name") or given.options.get("-cn") or ""
    said = str(given.values.get("model_engine") or "")
    strategy = str(given.values.get("actor_rollout_ref.actor.strategy") or "")
    named = said or strategy or config
    if "mindspeed" in named:
        if "mindspeed" not in schema.engines:
            verl_schema.defaults(schema, "mindspeed")  # refuses, and says which verl has it
        return "mindspeed"
    if "megatron" in named or "megatron" in config:
        return "megatron"
    raise RecipeError(
        f"This launch trains with {named or 'verl default engine, FSDP'}: recipes here train with Megatron-Core or "
        "MindSpeed (model_engine=megatron, or --config-name=ppo_megatron_trainer)."
    )


# ----------------------------------------------------------------------------------------------------- the keys


class _Report:
    """Collects what became of each key."""

    def __init__(self, reading: shell.Reading) -> None:
        self.reading = reading
        self.changed: list[Item] = []
        self.unknown: list[Item] = []

    def change(self, key: str, value: Any, sentence: str) -> None:
        self.changed.append(Item(key, self.shown(value), sentence))

    def lose(self, key: str, value: Any, sentence: str) -> None:
        self.unknown.append(Item(key, self.shown(value), sentence))

    def shown(self, value: Any) -> str:
        text = value if isinstance(value, str) else quote(value)
        return shell.fill(text, lambda number: self.reading.unknowns[number].source)


def _present(given: _Given, known: Any, version: str, report: _Report) -> dict[str, Any]:
    """Return the launch's keys under the names this verl has; what has none is reported."""
    made: dict[str, Any] = {}
    for key, value in given.values.items():
        if key == "model_engine" or key.startswith("hydra."):
            if key.startswith("hydra."):
                report.change(key, value, "Hydra's folders belong to the run directory")
            continue
        now = names.renamed(known, version, key, added=key in given.added)
        if now and not now.key:
            report.change(key, value, f"left out: {now.sentence}")
            continue
        name = now.key if now else key
        present = names.value_now(key, value)
        if name in made and made[name] != present:
            report.change(key, value, f"left out: {name} says {report.shown(made[name])}")
            continue
        if now or present != value:
            report.change(key, value, now.sentence if now else f"verl {version} calls it {present}")
        made[name] = present
    if made.get("actor_rollout_ref.rollout.mode") == "sync":
        report.change("actor_rollout_ref.rollout.mode", "sync", "left out: rollouts are asynchronous in every verl now")
        del made["actor_rollout_ref.rollout.mode"]
    return made


def _hardware(target: Mapping[str, Any], report: _Report) -> str:
    """Choose the node by what the launch uses of it: the device type, and at least as many devices."""
    device, count = target.get("trainer.device"), target.get("trainer.n_gpus_per_node")
    known = [params.hardware_facts(name) for name in params.fact_names("hardware")]
    wanted = "cpu" if device == "cpu" else "npu"
    fit = [h for h in known if h.device == wanted and (not isinstance(count, int) or h.devices_per_node >= count)]
    if not fit:
        raise RecipeError(
            f"trainer.device={device}, trainer.n_gpus_per_node={count}: no hardware under params/hardware fits; "
            f"name one with --hardware ({', '.join(h.name for h in known)})."
        )
    chosen = min(fit, key=lambda h: h.devices_per_node)
    if device not in (None, chosen.device):
        report.change("trainer.device", device, f"hardware {chosen.name} is of type {chosen.device}")
    return chosen.name


@dataclass
class _Draft:
    """A recipe on its way: the settings so far, and what they are held to."""

    head: Mapping[str, str]
    base: str | None
    python: str
    inverse: Inverse
    known: Any
    schema: verl_schema.Schema
    report: _Report
    settings: dict[str, Any] = field(default_factory=dict)  # by recipe key; free mappings as prefix.key
    extra: list[str] = field(default_factory=list)
    idle: Mapping[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)  # settings that only say what the base says
    given_by_us: set[str] = field(default_factory=set)
    read_later: dict[str, list[str]] = field(default_factory=dict)  # environment variable → keys that hold it

    def settle(
        self, target: dict[str, Any], launch: shell.Launch, given: _Given, source: str, model: str | None
    ) -> Migration:
        target = self.certain(target, given)
        self.report.unknown += [Item(word, "", reason) for word, reason in given.unparsed]
        for key in given.deleted:
            self.extra.append(f"~{key}")
            self.report.change(key, "", "taken out of verl's configuration, as in the script (extra_args)")
        self.environment(given)
        wanted = self.wanted(target)
        target = {key: self.referred(key, value, wanted) for key, value in target.items()}
        self.idle = names.idle(wanted)
        target = self.effective(target)
        self.propose(target, wanted)
        self.missing(target)
        self.settings["model.name"] = model or self.model(target)
        self.prepare()
        self.adaptor()
        differences = self.put_right(target, wanted)
        for variable, keys in self.read_later.items():
            self.report.change(
                ", ".join(dict.fromkeys(keys)), f"${variable}…", "read from the environment when composed"
            )
        return Migration(
            self.text(source),
            source,
            self.head["stack"],
            self.schema.version,
            launch.module,
            tuple(self.carried(target)),
            tuple(self.report.changed),
            tuple(self.report.unknown),
            tuple(_notes(launch, self.report.reading)),
            {name: self.report.shown(text) for name, text in self.report.reading.assumed.items()},
            tuple(differences),
        )

    # ---- what the launch wants

    def certain(self, target: Mapping[str, Any], given: _Given) -> dict[str, Any]:
        """Return the keys whose values are known and which this verl takes; report the others."""
        made: dict[str, Any] = {}
        for key, value in target.items():
            declared = verl_schema.declares(self.known, key)
            text = quote(value) if not isinstance(value, str) else value
            unknowns = [self.report.reading.unknowns[n] for n in shell.marks(text)]
            if not declared and not verl_schema.is_open(self.known, key):
                if key in given.added:
                    self.extra.append(f"++{key}={quote(value)}")
                    self.report.lose(
                        key, value, "kept in extra_args, as the script adds it: verl's files do not know it"
                    )
                else:
                    self.report.lose(key, value, verl_schema.unknown(self.known, key, self.schema.version))
                continue
            group = next((g for g in _groups(key) if _raw(self.known, g) is not None), None)
            if group and not unknowns:
                # Only ++ puts a key into a group that is a reference to another one.
                self.extra.append(f"++{key}={quote(value)}")
                self.report.change(key, value, f"kept in extra_args: verl takes the whole of {group} from elsewhere")
                continue
            if re.search(r"\$\{[\w.]+:", text):
                self.report.lose(key, value, "only Hydra can tell what this stands for, when the run starts")
                continue
            if unknowns and not self.fits_text(key):
                self.report.lose(key, value, f"not known from the script alone: {_how(unknowns[0])}")
                continue
            for unknown in unknowns:
                if unknown.variable in shell.PLACES:
                    continue
                if unknown.variable:
                    self.read_later.setdefault(unknown.variable, []).append(key)
                else:
                    self.report.lose(key, value, f"holds {unknown.source} as it is written: {_how(unknown)}")
            made[key] = value
        return made

    def fits_text(self, key: str) -> bool:
        """Whether verl's key holds a text, so that a variable's value may be filled in later."""
        fields = self.inverse.by_verl.get(key, ())
        if fields:
            return fields[0].kind in (str, list)
        found = _select(self.known, key)
        return found is None or isinstance(found, (str, list))

    def wanted(self, target: Mapping[str, Any]) -> dict[str, Any]:
        """Return verl's whole configuration as the launch makes it, by dotted key."""
        overrides = [f"model_engine={self.head['engine']}"]
        overrides += [f"++{key}={quote(value)}" for key, value in target.items()]
        overrides += self.extra
        entry = verl_schema.ENTRIES[self.head["mode"]]
        return _resolved(verl_schema.compose(self.schema, overrides, entry))

    def referred(self, key: str, value: Any, wanted: Mapping[str, Any]) -> Any:
        """Return the text that verl's ${…} in a value stand for: in a recipe they would mean the recipe's own keys."""
        if "${" not in str(value) or "${" in str(wanted.get(key)):
            return value
        self.report.change(key, value, f"verl's references are filled in: {self.report.shown(wanted[key])}")
        return wanted[key]

    def effective(self, target: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out, and report, what has no effect in this run."""
        made: dict[str, Any] = {}
        counts: dict[str, list[str]] = {}
        for key, value in target.items():
            group = self.idle_group(key)
            if group:
                counts.setdefault(group, []).append(key)
            else:
                made[key] = value
        for group, keys in counts.items():
            name, value = (keys[0], target[keys[0]]) if len(keys) == 1 else (f"{group}.*", f"({len(keys)} keys)")
            self.report.change(name, value, f"left out, without effect: {self.idle[group]}")
        return made

    def idle_group(self, key: str) -> str | None:
        return next((p for p in self.idle if key == p or key.startswith(f"{p}.")), None)

    def environment(self, given: _Given) -> None:
        """Variables of the script's own go under env; those a recipe decides otherwise are reported."""
        for name, text in given.environment.items():
            unknowns = [self.report.reading.unknowns[n] for n in shell.marks(text)]
            if name == EXTERNAL_MODULES:
                self.settings["external_modules"] = params.comma_separated(text)
            elif name in self.inverse.own_variables:
                self.report.change(name, text, "the workbook sets it for each attempt")
            elif masking.reason(name, text):
                self.report.change(name, "…", "a secret stays in the environment; it is never written into a recipe")
            elif name in PER_NODE:
                self.report.change(name, text, "differs from node to node: set it on each before Ray starts")
            elif name in SEARCH_PATHS:
                self.report.change(name, text, "extends what is there: set it where the run is launched from")
            elif any(not u.variable for u in unknowns):
                self.report.lose(name, text, f"not known from the script alone: {_how(unknowns[0])}")
            else:
                self.settings[f"env.{name}"] = text

    def propose(self, target: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Give each field the value the launch has for its keys, if that leaves less to say than leaving it unset."""
        for field_ in self.inverse.fields.values():
            said = [key for key in field_.verl if key in target]
            values = [target[key] for key in said if field_.takes(_text_for(field_, target[key]))]
            if not values and not field_.required:
                continue
            value = values[0] if values else _first(target, wanted, field_)
            others = sum(_effective(wanted, key) != value for key in field_.verl)
            alone = sum(target[key] != _effective_default(self.known, key) for key in said)
            if field_.required or others <= alone:
                self.settings[field_.key] = _text_for(field_, value)
        for name, choices in self.inverse.choices.items():
            for choice, caused in choices.items():
                texts = {key: quote(wanted.get(key)) for key in caused}
                if caused and texts == dict(caused) and any(key in target for key in caused):
                    self.settings[name] = choice
        for key, name in self.inverse.switches.items():
            if target.get(key):
                self.settings[name] = True
                if not str(target[key]).startswith(self.run_dir()):
                    self.report.change(key, target[key], f"kept with each attempt instead ({name})")
        devices, nodes = self.settings.pop("devices", None), self.settings.get("nodes")
        if devices is not None and devices != params.hardware_facts(self.head["hardware"]).devices_per_node:
            self.settings["devices"] = devices
        if nodes is None:
            self.settings.pop("nodes", None)
        for key, value in target.items():
            prefix = next((p for p in self.inverse.free if key.startswith(p)), None)
            if prefix and key not in self.inverse.by_verl:
                self.free(prefix, key, value)
            elif key not in (*self.inverse.by_verl, *self.inverse.switches) and _raw(self.known, key) is not None:
                self.settings[f"verl.{key}"] = value

    def free(self, prefix: str, key: str, value: Any) -> None:
        mapping, name = self.inverse.free[prefix], key.removeprefix(prefix)
        if mapping == "env" and name == EXTERNAL_MODULES:
            self.settings.setdefault("external_modules", params.comma_separated(str(value)))
        elif mapping == "env":
            self.settings[f"env.{name}"] = str(value)
        else:
            self.settings[f"{mapping}.{name}"] = value

    def model(self, target: Mapping[str, Any]) -> str:
        """Return the facts the model's path or hub id names, or a name for facts that are still to be written."""
        path = str(target.get("actor_rollout_ref.model.path", ""))
        last = path.rstrip("/").rsplit("/", 1)[-1]
        known = {name: params.model_facts(name) for name in params.fact_names("models")}
        for name, facts in known.items():
            hub = (facts.hub or "").rsplit("/", 1)[-1]
            if last and _simple(last) in (_simple(hub), _simple(name)):
                return name
        made = re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")
        if not made or shell.marks(last):
            raise RecipeError(f"The model is not told by its path {self.report.shown(path)!r}: name it with --model.")
        self.report.lose(
            "model.name",
            made,
            f"there are no facts of this model: write params/models/{made}.yaml from its config.json, or name one with "
            f"--model ({', '.join(known)})",
        )
        return made

    def prepare(self) -> None:
        if self.report.reading.prepare:
            self.settings["prepare"] = list(self.report.reading.prepare)

    def adaptor(self) -> None:
        """What images set and scripts therefore do not: Megatron runs on NPUs only once the adaptor has patched it."""
        from recipes.preflight.engines import ADAPTOR

        device = params.hardware_facts(self.head["hardware"]).device
        here = any(r.module == ADAPTOR for r in load(self.head["stack"]).repositories.values())
        wanted = here and device == "npu" and self.head["engine"] == "megatron" and not self.base
        if wanted and "external_modules" not in self.settings:
            self.settings["external_modules"] = [ADAPTOR]
            self.report.change(EXTERNAL_MODULES, ADAPTOR, "added: without it Megatron is not patched for NPUs")

    # ---- holding the recipe to it

    def put_right(self, target: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Item]:
        """Compose the recipe, compare, and settle what differs; return what cannot be settled."""
        differing = self.differing(target, wanted)
        for _ in range(ROUNDS):
            if not [key for key, values in differing.items() if self.fix(key, values[0], target, wanted)]:
                break
            differing = self.differing(target, wanted)
        self.shorten()
        self.logger()
        return [
            Item(key, self.report.shown(_told(ours)), f"with the script {self.report.shown(_told(theirs))}")
            for key, (theirs, ours) in differing.items()
            if key not in self.given_by_us
        ]

    def shorten(self) -> None:
        """Unset what only repeats the base, and what a recipe takes from its neighbour with the same value anyway."""
        if self.base:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "migrated.yaml"
                path.write_text(self.text(""), encoding="utf-8")
                self.repeated = {setting.key for setting in params.repeated(path)}
        whole = self.command()[1].argv
        for name, value in list(self.settings.items()):
            field_, group = self.inverse.fields.get(name), name.rpartition(".")[0]
            twins = [
                n for n, v in self.settings.items() if n != name and n.rpartition(".")[0] == group and _same(v, value)
            ]
            if field_ and field_.optional and twins and not isinstance(value, (bool, str)):
                del self.settings[name]
                if self.command()[1].argv != whole:
                    self.settings[name] = value

    def missing(self, target: Mapping[str, Any]) -> None:
        """Refuse what has no value for a field that needs one."""
        lost = {item.key: item for item in self.report.unknown}
        for field_ in self.inverse.fields.values():
            item = next((lost[key] for key in field_.verl if key in lost), None)
            if field_.required and item:
                raise RecipeError(f"{item.key}={item.value} is {item.sentence}; a recipe needs it ({field_.key}).")
            if field_.required and self.settings.get(field_.key) is None and not self.base:
                key = field_.verl[0] if field_.verl else field_.key
                raise RecipeError(f"The launch gives no {key}, and verl has no default for it ({field_.key}).")

    def differing(self, target: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return {verl key: (as the script has it, as the recipe has it)}."""
        composed, command = self.command()
        found = _resolved(compose_verl(command, composed))
        both = [*wanted, *(key for key in found if key not in wanted)]
        differing = {k: (wanted.get(k, _ABSENT), found.get(k, _ABSENT)) for k in both}
        return {
            k: v
            for k, v in differing.items()
            if not _same(*v) and not self.ours(k, target) and self.idle_group(k) is None
        }

    def ours(self, key: str, target: Mapping[str, Any]) -> bool:
        """Whether the workbook decides a key: the run's places and names where the script is silent, and the device."""
        fields = self.inverse.by_verl.get(key, ())
        left = key not in target and (any(f.key in LEFT_TO_US for f in fields) or self.follows_ours(key, target))
        return (
            left
            or key in self.inverse.own_keys
            or key in ("trainer.device",)
            or key.startswith("ray_kwargs.ray_init.runtime_env")
        )

    def follows_ours(self, key: str, target: Mapping[str, Any]) -> bool:
        """Whether verl takes a key from another one, and that one is the workbook's to decide."""
        raw = str(_raw(self.known, key))
        if "${" not in raw:
            return False
        decided = [v for name in LEFT_TO_US for v in self.inverse.fields[name].verl if v not in target]
        return any(verl in raw for verl in decided)

    def fix(self, key: str, value: Any, target: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        """Say what the launch has for a key: in its field, or under verl. Returns whether that is anything new."""
        if value is _ABSENT or key in self.given_by_us:
            return False
        if any(_raw(self.known, group) is not None for group in _groups(key)):
            return False  # it follows the group it refers to
        if value is None and key not in target:
            self.given_by_us.add(key)
            self.report.change(
                key, value, "verl has no default for it, and the recipe gives it one from its neighbours"
            )
            return True
        prefix = next((p for p in self.inverse.free if key.startswith(p)), None)
        fields = [f for f in self.inverse.by_verl.get(key, ()) if f.takes(_text_for(f, value))]
        for field_ in fields:
            agreed = all(_same(_effective(wanted, other), value) for other in field_.verl)
            if field_.key not in self.settings and (agreed or field_.required):
                self.settings[field_.key] = _text_for(field_, value)
                if key not in target:
                    self.report.change(key, value, "verl's default, said because a recipe's is another")
                return True
        name = f"verl.{key}"
        if prefix and not fields and f"{self.inverse.free[prefix]}.{key.removeprefix(prefix)}" not in self.settings:
            self.free(prefix, key, value)
            return True
        if name in self.settings and _same(self.settings[name], value):
            return False
        if key not in target:
            self.report.change(key, value, "verl's default, said because a recipe's is another")
        # The value as the script wrote it, interpolations and all, where it wrote one.
        self.settings[name] = target.get(key, value)
        return True

    def logger(self) -> None:
        logger = self.settings.get("trainer.logger")
        if isinstance(logger, list) and "file" not in logger:
            self.settings["trainer.logger"] = [*logger, "file"]
            self.report.change("trainer.logger", logger, "`file` is added: curves and verdict are made from it")

    def command(self) -> tuple[params.Composed, Command]:
        """Compose the recipe as it stands, from a file, as anybody will, and build its command."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "migrated.yaml"
            path.write_text(self.text("", final=False), encoding="utf-8")
            composed = params.compose(str(path), run_dir=self.run_dir(), work=self.place("work"))
            return composed, build(composed, python=self.python, environment={})

    def run_dir(self) -> str:
        return self.place("run_dir")

    def place(self, name: str) -> str:
        """The mark of one of the workbook's places, where the script uses it."""
        unknowns = enumerate(self.report.reading.unknowns)
        return next((f"__unknown_{n}__" for n, u in unknowns if shell.PLACES.get(u.variable) == name), f"/{name}")

    def text(self, source: str, *, final: bool = True) -> str:
        """Return the recipe file. Until it is final, unknown pieces stay marks, which compose like any text."""
        settings = {k: v for k, v in {**self.head, **self.settings}.items() if k not in self.repeated}
        settings = {k: v for k, v in settings.items() if not self.says_default(k, v)}
        ordered = {key: settings.pop(key) for key in self.head if key in settings}

        # As the schema orders them; a free mapping keeps the script's order.
        declared = list(params.declared_keys())

        def place(key: str) -> int:
            return next((n for n, k in enumerate(declared) if key == k or key.startswith(f"{k}.")), len(declared))

        ordered |= {key: settings[key] for key in sorted(settings, key=place)}
        if self.extra:
            ordered["extra_args"] = self.extra
        comments = [f"Migrated from {source} by `recipes migrate`."] if source else []
        if final:
            comments += [f"Open: {_key_value(i)}: {i.sentence}" for i in self.report.unknown]
        made = recipe_text(ordered, bases=[self.base] if self.base else [], comments=comments)
        return shell.fill(made, self.piece) if final else made

    def piece(self, number: int) -> str:
        unknown = self.report.reading.unknowns[number]
        if unknown.variable in shell.PLACES:
            return f"${{{shell.PLACES[unknown.variable]}}}"
        if unknown.variable:
            return f"${{oc.env:{unknown.variable}}}"
        # ${…} would be taken for the recipe's own.
        plain = re.sub(r"\$\{(\w*)[^}]*\}", r"$\1", unknown.source)
        return json.dumps(plain, ensure_ascii=False)[1:-1]

    def says_default(self, key: str, value: Any) -> bool:
        """Whether a setting only repeats what the schema says anyway (with a base, that may be something else)."""
        default = _schema_default(key)
        value = shell.fill(value, self.piece) if isinstance(value, str) else value
        return not self.base and default is not _ABSENT and _same(default, value) and key not in ("model.name",)

    def carried(self, target: Mapping[str, Any]) -> Iterator[Item]:
        reported = {item.key for item in self.report.unknown}
        for key, value in target.items():
            if key in reported:
                continue
            fields = [f.key for f in self.inverse.by_verl.get(key, ()) if f.key in self.settings]
            free = next((self.inverse.free[p] for p in self.inverse.free if key.startswith(p)), None)
            where = f"verl.{key}" if f"verl.{key}" in self.settings else (fields or [free or "verl's own default"])[0]
            yield Item(key, self.report.shown(value), where)


# ------------------------------------------------------------------------------------------------------- values

_ABSENT = object()


def _notes(launch: shell.Launch, reading: shell.Reading) -> Iterator[shell.Note]:
    if launch.condition:
        yield shell.Note(
            launch.line, launch.condition, "the launch stands in this block; whether it runs is not known here"
        )
    yield from reading.notes
    for name, line in reading.doubtful.items():
        yield shell.Note(line, f"${name}", "the launch uses it, and a block that was not followed may change it")


def _key_value(item: Item) -> str:
    return f"{item.key}={item.value}" if item.value else item.key


def _told(value: Any) -> Any:
    return "not set" if value is _ABSENT else value


def _how(unknown: shell.Unknown) -> str:
    if unknown.variable:
        return f"the script does not set ${unknown.variable}; pass --set {unknown.variable}=…"
    return f"{unknown.source} would have to be run (line {unknown.line})"


def _same(one: Any, two: Any) -> bool:
    """Equal values; 1 and 1.0 are, True and 1 are not."""
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    return one == two


def _text_for(field_: Field, value: Any) -> Any:
    """The value as the field has it: a number where a text is wanted is what was written."""
    if field_.kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return quote(value)
    if field_.kind is list and isinstance(value, str):
        return [value]
    if field_.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _first(target: Mapping[str, Any], wanted: Mapping[str, Any], field_: Field) -> Any:
    """A value for a field that must have one: of a list its first item, else verl's default."""
    for key in field_.verl:
        value = target.get(key, wanted.get(key))
        value = value[0] if isinstance(value, list) and value else value
        if value is not None and field_.takes(_text_for(field_, value)):
            return value
    return None


def _effective(wanted: Mapping[str, Any], key: str) -> Any:
    return wanted.get(key)


def _effective_default(known: Any, key: str) -> Any:
    return _select(known, key)


def _select(config: Any, key: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def _groups(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _raw(config: Any, key: str) -> Any:
    """Return verl's default for a key as its file says it, interpolation and all; None where there is none."""
    from omegaconf import DictConfig, OmegaConf

    *groups, leaf = key.split(".")
    group = OmegaConf.select(config, ".".join(groups)) if groups else config
    if not isinstance(group, DictConfig) or leaf not in group or not OmegaConf.is_interpolation(group, leaf):
        return None
    return OmegaConf.to_container(group, resolve=False)[leaf]


def _resolved(config: Any) -> dict[str, Any]:
    """Return a configuration by dotted key, interpolations resolved where they can be."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        tree = OmegaConf.to_container(config, resolve=False)
    return dict(params.flatten(tree))


def _schema_default(key: str) -> Any:
    from recipes.schema import Recipe

    here: Any = Recipe()
    for part in key.split("."):
        if isinstance(here, dict) or not hasattr(here, part):
            return _ABSENT
        here = getattr(here, part)
    return here


def _simple(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def describe(found: Migration) -> str:
    """Return the report as text: what changed, what is unknown, what of the script was not followed."""
    lines = [f"{found.source}: {found.module}, stack {found.stack} (verl {found.verl})"]
    lines.append(f"carried over: {len(found.carried)} keys")
    for title, items in (("changed", found.changed), ("unknown", found.unknown)):
        if items:
            lines.append(f"{title}:")
            lines += [f"  {_key_value(i)}: {i.sentence}" for i in items]
    if found.differences:
        lines.append("verl sees otherwise than with the script:")
        lines += [f"  {i.key}={i.value}: {i.sentence}" for i in found.differences]
    if found.assumed:
        lines.append("taken as unset, with the script's own default:")
        lines += [f"  {name}={text}" for name, text in found.assumed.items()]
    if found.notes:
        lines.append("not part of the launch:")
        lines += [f"  line {n.line}: {n.source}  ({n.reason})" for n in found.notes]
    if not found.differences and found.complete:
        lines.append("verl sees the same configuration, but for what changed and the run's own places and names.")
    return "\n".join(lines)
