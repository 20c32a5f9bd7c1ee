"""Stack → the steps that install it, in order. The shell script and the Dockerfile are two spellings of these."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement

from recipes import params
from recipes.errors import RecipeError
from recipes.schema import HardwareFacts
from recipes.stack.table import Repository, Stack

_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[A-Za-z0-9._/:+-]*")
_OPTION = re.compile(r"--[a-z][a-z-]*")
_FILE = re.compile(r"-r [A-Za-z0-9._][A-Za-z0-9._/-]*")


@dataclass(frozen=True)
class Fetch:
    """Bring one checkout to one commit. `full` keeps the whole history."""

    repository: Repository

    @property
    def full(self) -> bool:
        return self.repository.depth == "full"


@dataclass(frozen=True)
class Pip:
    """One `pip install`. `inside` is the checkout it runs in; requirement files are relative to it."""

    arguments: tuple[str, ...]
    inside: str = ""
    environment: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnPath:
    """Put a folder of a checkout on PYTHONPATH, by a .pth file, so that no shell has to remember it."""

    repository: Repository


@dataclass(frozen=True)
class Uninstall:
    """Take out what must not be there, in case something brought it along."""

    names: tuple[str, ...]


Action = Fetch | Pip | OnPath | Uninstall


@dataclass(frozen=True)
class Step:
    """One thing installed: a name, why it is as it is, and what is done. Its key changes when any of that does."""

    name: str
    why: str
    actions: tuple[Action, ...]

    def key(self, context: str = "") -> str:
        """Return a short hash of what this step does, on top of `context`; a finished step has it in its mark."""
        text = json.dumps([context, self.name, [repr(action) for action in self.actions]])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Plan:
    """Everything the two spellings need: the stack, the hardware, the pins pip must hold to, and the steps."""

    stack: Stack
    hardware: HardwareFacts
    image: str
    constraints: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def platform(self) -> str:
        return f"{self.stack.name} on {self.hardware.name}"


def make(stack: Stack, hardware: str, *, needs: tuple[str, ...] = ()) -> Plan:
    """Return the plan for one kind of node. `needs` names the optional repositories to install too.

    Raises RecipeError for hardware the stack is not made for, an unknown name in `needs`, a stack that is installed
    from pyproject.toml, and anything in the table that could not be quoted safely.
    """
    if not stack.repositories:
        raise RecipeError(
            f"Stack {stack.name} has no repositories to install: scripts/setup.sh installs it from pyproject.toml."
        )
    if hardware not in stack.hardware:
        raise RecipeError(f"Stack {stack.name} is not made for {hardware!r}: it knows {', '.join(stack.hardware)}.")
    unknown = [name for name in needs if name not in stack.repositories]
    if unknown:
        known = [r.name for r in stack.repositories.values() if r.optional]
        raise RecipeError(
            f"Stack {stack.name} has no {', '.join(unknown)}; optional in it: {', '.join(known) or 'nothing'}."
        )
    facts = params.hardware_facts(hardware)
    if not (facts.image and facts.soc):
        raise RecipeError(f"params/hardware/{hardware}.yaml has no image or no soc: no image can be named for it.")
    disputed = {entry.package for entry in stack.conflicts}
    constraints = tuple(_pin(name, text) for name, text in stack.packages.items() if name not in disputed)
    steps = tuple(_steps(stack, needs))
    return Plan(stack, facts, stack.base_image(facts.image), constraints, steps)


def _steps(stack: Stack, needs: tuple[str, ...]):
    disputed = {entry.package: entry.how for entry in stack.conflicts}
    settled: tuple[str, ...] = ()

    def kind(name: str) -> str:
        return name if name in stack.repositories else "disputed" if name in disputed else "packages"

    for group, members in itertools.groupby(stack.order, key=kind):
        names = list(members)
        if group == "packages":
            pins = tuple(_pin(name, stack.packages[name]) for name in names)
            yield Step("packages", "Exact versions, before anything asks for others.", (Pip(pins),))
        elif group == "disputed":
            for name in names:
                # Its dependants' metadata exclude each other, so it is in no constraint; pip warns and obeys.
                pin = _pin(name, stack.packages[name])
                settled += (pin,)
                yield Step(f"package {name}", disputed[name], (Pip((pin,)),))
        else:
            repository = stack.repositories[group]
            if not repository.optional or repository.name in needs:
                yield Step(repository.name, repository.why, tuple(_actions(repository, settled)))
    if stack.absent:
        why = "; ".join(dict.fromkeys(stack.absent.values()))
        yield Step("absent", f"What must not be there: {why}.", (Uninstall(tuple(stack.absent)),))


def _actions(r: Repository, settled: tuple[str, ...]):
    options = tuple(_safe(_OPTION, option, r) for option in r.options)
    environment = tuple(_safe(_ENVIRONMENT, text, r) for text in r.environment)
    files = tuple(_safe(_FILE, text, r) for text in r.requirements if text.startswith("-r "))
    named = tuple(_requirement(text, r) for text in r.requirements if not text.startswith("-r "))
    if r.install != "wheel":
        yield Fetch(r)
    # A file of a checkout may pin what is in dispute (transformers==…): the constraints say nothing of that.
    for file in files:
        yield Pip(("-r", file.removeprefix("-r ")), inside=r.name)
    if named:
        # With what is settled by now beside it, so that none of these moves that again.
        yield Pip((*named, *settled))
    if r.install == "wheel":
        yield Pip((*options, _pin(r.distribution, r.version)), environment=environment)
    elif r.install == "editable":
        yield Pip((*options, "--editable", "."), inside=r.name, environment=environment)
    else:
        yield OnPath(r)


def _pin(name: str, text: str) -> str:
    return f"{name}{text if text[0] in '<>=!~' else f'=={text}'}"


def _safe(pattern: re.Pattern, text: str, r: Repository) -> str:
    if not pattern.fullmatch(text):
        raise RecipeError(f"Repository {r.name}: {text!r} cannot go into a script: it must match {pattern.pattern}.")
    return text


def _requirement(text: str, r: Repository) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement as fault:
        raise RecipeError(f"Repository {r.name}: {text!r} is no requirement (PEP 508).") from fault
