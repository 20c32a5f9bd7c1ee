"""params/stacks/*.yaml → Stack: one entry a repository, checked when it is read, so that every face can trust it.

A file may name others in `defaults` and then says only what differs from them, as recipes do. Scalars are taken as
the text that was written: a commit of digits alone stays a commit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from recipes import params
from recipes.errors import RecipeError, nearest
from recipes.params import Setting, Text
from recipes.stack import conflict, refs

INSTALLS = ("editable", "path", "wheel")
DEPTHS = ("1", "full")


@dataclass(frozen=True)
class Repository:
    """One source repository of a stack. `commit` is what runs; `ref` and `kind` are how people name it."""

    name: str
    url: str = ""
    ref: str = ""
    kind: str = ""  # tag, branch or commit
    commit: str = ""  # 40 digits; empty only for install: wheel
    depth: str = "1"  # 1, or full where the package's own set-up reads the history
    install: str = "editable"  # editable (pip install -e), path (on PYTHONPATH), wheel (from the package index)
    why: str = ""
    distribution: str = ""  # what pip calls it; empty where it is found by its module
    module: str = ""  # what Python imports
    version: str = ""  # what the package says of itself; empty where that tells nothing
    branches: str = ""  # how this repository names its release branches, as a glob
    tags: str = ""  # and its release tags
    subdirectory: str = ""  # for install: path, what goes on PYTHONPATH
    optional: str = ""  # who needs it, where not every run does
    aliases: tuple[str, ...] = ()  # what documents call it besides its name
    requirements: tuple[str, ...] = ()  # PEP 508, or -r FILE of the checkout; installed first
    options: tuple[str, ...] = ()  # of pip install
    environment: tuple[str, ...] = ()  # NAME=value for its build
    after: tuple[str, ...] = ()  # what must be installed before it


@dataclass(frozen=True)
class Conflict:
    """A package whose dependants' own metadata exclude each other, and how this stack settles it."""

    package: str
    settled: str
    how: str
    wants: Mapping[str, str]  # who → its specifier

    def overridden(self) -> list[str]:
        """Return those whose metadata the settled version does not satisfy."""
        return [who for who, says in self.wants.items() if not conflict.possible([self.settled, says])]


@dataclass(frozen=True)
class Stack:
    """One generation of packages that agree with each other. `verl` names the configuration schema."""

    name: str
    title: str = ""
    python: str = ""
    verl: str = ""
    cann: str = ""
    image: str = ""  # base image, with {cann}, {device} and {python}; no registry host
    hardware: tuple[str, ...] = ()
    why: str = ""
    repositories: Mapping[str, Repository] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)  # name → version, or specifier where any of a range does
    order: tuple[str, ...] = ()  # of installing; names of repositories and packages
    conflicts: tuple[Conflict, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)  # packages that must not be there, and why

    def base_image(self, device: str) -> str:
        """Return the base image for a device tag (`910b`, `a3`), such as ascendhub/cann:9.1.0-a3-ubuntu22.04-py3.12."""
        return self.image.format(cann=self.cann, device=device, python=self.python)


def load(name: str) -> Stack:
    """Return the stack in params/stacks/`name`.yaml, checked.

    Raises RecipeError when there is none, when a key is unknown or missing, a ref is no ref, a commit is not 40 hex
    digits, the order leaves something out or puts it before what it needs, torch_npu is for another torch, or a
    conflict is none.
    """
    paths = _paths(name)
    return _load(name, tuple((path, path.stat().st_mtime_ns) for path in paths))


def names() -> list[str]:
    """Return the names of all stacks, sorted."""
    return sorted(p.stem for p in _folder().glob("*.yaml"))


def verl_version(name: str) -> str:
    """Return the verl version of a stack, such as 0.9.1; it names the configuration schema."""
    return load(name).verl


def wants(stack: Stack) -> dict[str, str]:
    """Return what pip's names should stand at: packages, and repositories that say which distribution they are."""
    found = {r.distribution: r.version for r in stack.repositories.values() if r.distribution and r.version}
    return {**found, **stack.packages}


def warnings(stack: Stack) -> list[str]:
    """Return what is known to go wrong with such a combination of versions, a sentence each.

    Megatron-Core >= 0.16 fails in the post-process of a GPT with MTP layers when labels are None (log probabilities
    at inference); verl >= 0.8.0 hides mtp_num_layers for that call.
    """
    megatron = wants(stack).get("megatron-core", "")
    if megatron and Version(megatron) >= Version("0.16") and Version(stack.verl) < Version("0.8.0"):
        return [f"verl {stack.verl} with Megatron-Core {megatron}: a model with MTP layers fails; take verl >= 0.8.0."]
    return []


# ---------------------------------------------------------------------------------------------------- files to Stack


def _folder() -> Path:
    return params.home() / "params" / "stacks"


def _paths(name: str, seen: tuple[str, ...] = ()) -> list[Path]:
    """Return the files a stack is made of, base first."""
    path = _folder() / f"{name}.yaml"
    if "/" in name or not path.is_file():
        raise RecipeError(f"There is no stack {name!r}{nearest(name, names())} Known: {', '.join(names())}.")
    if name in seen:
        raise RecipeError(f"params/stacks/{name}.yaml: its bases name each other in a circle.")
    _, bases = _read(path, path.stat().st_mtime_ns)
    return [p for base in bases for p in _paths(base, (*seen, name))] + [path]


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> tuple[list[Setting], list[str]]:
    """Return a file's settings and bases; read again only when it has changed. A recipe asks for its stack often."""
    return params.read_file(path)


@functools.lru_cache(maxsize=64)
def _load(name: str, files: tuple[tuple[Path, int], ...]) -> Stack:
    held: dict[str, Setting] = {}
    for path, changed in files:
        for setting in _read(path, changed)[0]:
            held[setting.key] = setting
    top: dict[str, Any] = {"name": name}
    groups: dict[str, dict[str, Setting]] = {"packages": {}, "absent": {}}
    entries: dict[str, dict[str, Setting]] = {}
    for key, setting in held.items():
        head, _, rest = key.partition(".")
        if head == "repositories" and "." in rest:
            repository, _, attribute = rest.rpartition(".")
            entries.setdefault(repository, {})[attribute] = setting
        elif head in groups and rest:
            groups[head][rest] = setting
        elif head == "conflicts" and not rest:
            top["conflicts"] = tuple(_conflict(item, setting) for item in _items(setting))
        elif rest or head in ("name", "repositories", *groups):
            raise RecipeError(f"{setting.origin}: a stack has no key {key!r}.")
        else:
            top[head] = _value(Stack, setting, head)
    stack = Stack(
        **top,
        repositories={entry: _repository(entry, settings) for entry, settings in entries.items()},
        packages={package: _text(setting) for package, setting in groups["packages"].items()},
        absent={package: _text(setting) for package, setting in groups["absent"].items()},
    )
    _check(stack)
    return stack


def _repository(name: str, settings: Mapping[str, Setting]) -> Repository:
    return Repository(name=name, **{key: _value(Repository, s, key) for key, s in settings.items()})


def _value(cls: type, setting: Setting, attribute: str) -> Any:
    """Return the text, or the tuple of texts, that field `attribute` of `cls` takes."""
    declared = {f.name: f for f in dataclasses.fields(cls)}
    if attribute not in declared:
        raise RecipeError(f"{setting.origin}: a stack has no key {setting.key!r}{nearest(attribute, declared)}")
    return _texts(setting) if declared[attribute].default == () else _text(setting)


def _text(setting: Setting) -> str:
    if not isinstance(setting.value, Text):
        raise RecipeError(f"{setting.origin}: {setting.key} must be one text.")
    return setting.value.text


def _texts(setting: Setting) -> tuple[str, ...]:
    items = _items(setting)
    if not all(isinstance(item, Text) for item in items):
        raise RecipeError(f"{setting.origin}: {setting.key} must be a list of texts, such as [a, b].")
    return tuple(item.text for item in items)


def _items(setting: Setting) -> Sequence[Any]:
    if not isinstance(setting.value, (list, tuple)):
        raise RecipeError(f"{setting.origin}: {setting.key} must be a list.")
    return setting.value


def _conflict(item: Any, setting: Setting) -> Conflict:
    try:
        wants = {want["by"].text: want["says"].text for want in item["wants"]}
        return Conflict(item["package"].text, item["settled"].text, item["how"].text, wants)
    except (KeyError, TypeError, AttributeError) as fault:
        raise RecipeError(
            f"{setting.origin}: an entry of conflicts is {{package, settled, how, wants: [{{by, says}}, …]}}."
        ) from fault


# ------------------------------------------------------------------------------------------------------------- checks


def _check(stack: Stack) -> None:
    where = f"Stack {stack.name}"
    for key in ("title", "python", "verl"):
        if not getattr(stack, key):
            raise RecipeError(f"{where}: no value for {key}.")
    for repository in stack.repositories.values():
        _check_repository(repository, f"{where}, repository {repository.name}")
    for package, text in stack.packages.items():
        conflict.specifier(text, f"{where}, package {package}")
    _check_order(stack, where)
    _check_torch(stack, where)
    for entry in stack.conflicts:
        if conflict.possible([*entry.wants.values(), entry.settled]):
            raise RecipeError(f"{where}: {entry.package} is called a conflict, but one version satisfies all it names.")
    own = stack.repositories.get("verl")
    if own and own.version != stack.verl:
        raise RecipeError(f"{where}: verl is {stack.verl}, but its repository says {own.version or 'no version'}.")


def _check_repository(r: Repository, where: str) -> None:
    for key, known in (("kind", refs.KINDS), ("install", INSTALLS), ("depth", DEPTHS)):
        if getattr(r, key) not in known:
            raise RecipeError(f"{where}: {key}={getattr(r, key)!r} must be one of {', '.join(known)}.")
    if not r.url.startswith("https://") or not r.url.endswith(f"/{r.name}.git"):
        raise RecipeError(f"{where}: url={r.url!r} must be https://…/{r.name}.git.")
    refs.check(r.ref, where)
    if r.commit and not refs.is_commit(r.commit):
        raise RecipeError(f"{where}: commit={r.commit!r} must be 40 hexadecimal digits.")
    if not r.commit and r.install != "wheel":
        raise RecipeError(f"{where}: no commit. A ref alone can move; a commit is what was run.")
    if r.kind == "commit" and r.ref != r.commit:
        raise RecipeError(f"{where}: kind is commit, but ref {r.ref} is not the commit {r.commit}.")
    read = refs.kind_of(r.ref, branches=r.branches, tags=r.tags)
    if read and read != r.kind:
        raise RecipeError(f"{where}: {r.ref} is called a {r.kind} but named like a {read} of this repository.")
    if r.install == "wheel" and not (r.distribution and r.version):
        raise RecipeError(f"{where}: install: wheel needs distribution and version.")
    if not (r.distribution or r.module):
        raise RecipeError(f"{where}: name its distribution or its module, or nothing can find it.")
    if not r.why:
        raise RecipeError(f"{where}: no why.")


def _check_order(stack: Stack, where: str) -> None:
    place = {name: index for index, name in enumerate(stack.order)}
    if len(place) != len(stack.order):
        raise RecipeError(f"{where}: order names something twice.")
    unknown = [name for name in stack.order if name not in stack.repositories and name not in stack.packages]
    if unknown:
        raise RecipeError(f"{where}: order names {', '.join(unknown)}, which the stack does not have.")
    left_out = [name for name in stack.repositories if name not in place]
    if left_out:
        raise RecipeError(f"{where}: order leaves out {', '.join(left_out)}.")
    for repository in stack.repositories.values():
        for earlier in repository.after:
            if place.get(earlier, len(place)) > place[repository.name]:
                raise RecipeError(f"{where}: {repository.name} must come after {earlier}: {repository.why}")


def _check_torch(stack: Stack, where: str) -> None:
    torch, npu = stack.packages.get("torch"), stack.packages.get("torch_npu")
    if not npu:
        return
    try:
        same = Version(torch or "0").release[:2] == Version(npu).release[:2]
    except InvalidVersion as fault:
        raise RecipeError(f"{where}: torch and torch_npu must be exact versions.") from fault
    if not same:
        raise RecipeError(f"{where}: torch_npu {npu} is built for torch of the same major.minor, not {torch}.")
