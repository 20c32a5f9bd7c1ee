"""The registry of rules and what they look at."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.errors import RecipeError, nearest
from recipes.finding import Finding
from recipes.params import Composed, hardware_facts, model_facts
from recipes.schema import HardwareFacts, ModelFacts, Recipe


@dataclass(frozen=True)
class Subject:
    """What is checked: the recipe with the facts its rules need. Sizes are counts of devices.

    `inherited` is what the training would take from the environment of the launch; empty where none is launched from.
    """

    composed: Composed
    recipe: Recipe
    model: ModelFacts
    hardware: HardwareFacts
    python: str
    inherited: Mapping[str, str] = field(default_factory=dict)

    def variable(self, name: str) -> tuple[str, str | None]:
        """Return (who says so, value) of a variable of the training: the recipe's, or else one that was exported."""
        if name not in self.recipe.env and name in self.inherited:
            return f"{name} (exported, not in the recipe)", self.inherited[name]
        return f"env.{name}", self.recipe.env.get(name)

    @property
    def end_layers(self) -> dict[str, int]:
        """Layers of the first and the last pipeline stage by their keys, of those that have a size of their own."""
        ends = {key: getattr(self.recipe.parallel, key) for key in ("first_stage_layers", "last_stage_layers")}
        return {f"parallel.{key}": layers for key, layers in ends.items() if layers is not None}

    @property
    def devices_per_node(self) -> int:
        return self.recipe.devices or self.hardware.devices_per_node

    @property
    def world(self) -> int:
        return self.recipe.nodes * self.devices_per_node

    @property
    def rollout_world(self) -> int:
        """Devices that generate: those that train, unless generation has nodes of its own."""
        apart = self.recipe.fully_async
        if self.recipe.mode != "fully_async" or not apart.rollout_nodes:
            return self.world
        return apart.rollout_nodes * (apart.rollout_devices or self.hardware.devices_per_node)

    @property
    def model_parallel(self) -> int:
        p = self.recipe.parallel
        return p.tensor * p.pipeline * p.context

    @property
    def data_parallel(self) -> int:
        """Data-parallel size; 1 at least, so that rules after a broken mesh still make sense."""
        return max(1, self.world // self.model_parallel)


@dataclass(frozen=True)
class Rule:
    """A check. `here` marks rules that look at this machine's files and packages, not at the recipe alone."""

    name: str
    severity: str
    noticed: str
    source: str
    here: bool
    function: Callable[[Subject], Iterator[tuple[Mapping[str, Any], str, str] | Finding]]


RULES: dict[str, Rule] = {}


def rule(name: str, *, severity: str = "error", noticed: str, source: str, here: bool = False) -> Callable:
    """Register a function that yields (keys with values, sentence, remedy) for each fault it finds.

    One that has Findings already, from a module that other commands use too, may yield those.
    """

    def register(function: Callable) -> Callable:
        if name in RULES:
            raise ValueError(f"two rules are called {name}")
        RULES[name] = Rule(name, severity, noticed, source, here, function)
        return function

    return register


def warning(name: str, keys: Mapping[str, Any], sentence: str, remedy: str) -> Finding:
    """A finding of the rule `name` that is only warned of, though the rule's own findings are errors."""
    known = RULES[name]
    return Finding(name, "warning", keys, sentence, remedy, known.noticed, known.source)


def subject(composed: Composed, python: str = sys.executable, *, here: bool = False) -> Subject:
    """Return what the rules look at; `here` adds this process's environment, which a training started here inherits.

    Raises RecipeError when the recipe names unknown facts.
    """
    recipe = composed.recipe
    facts = model_facts(recipe.model.name), hardware_facts(recipe.hardware)
    # A job of a Ray cluster has the cluster's environment, and of ours nothing.
    return Subject(composed, recipe, *facts, python, dict(os.environ) if here and recipe.launch != "ray" else {})


def looking(*, here: bool) -> list[Rule]:
    """Return the rules that look: all of them, or without those on this machine's files and packages."""
    return [r for r in RULES.values() if here or not r.here]


def check(composed: Composed, *, python: str = sys.executable, here: bool = True) -> list[Finding]:
    """Return all findings of a composed recipe, errors first. `here=False` leaves this machine out of it."""
    looked_at = subject(composed, python, here=here)
    found = [
        item
        if isinstance(item, Finding)
        else Finding(r.name, r.severity, dict(item[0]), *item[1:], r.noticed, r.source)
        for r in looking(here=here)
        for item in r.function(looked_at)
    ]
    return sorted(found, key=lambda f: ("error", "warning", "info").index(f.severity))


def refuse(findings: Iterable[Finding], waived: Iterable[str] = ()) -> None:
    """Raise RecipeError when an error is among the findings that is not waived by its rule's name."""
    waived = set(waived)
    unknown = sorted(waived - set(RULES))
    if unknown:
        raise RecipeError(f"waive: there is no rule {unknown[0]!r}{nearest(unknown[0], RULES)}")
    errors = [f for f in findings if f.severity == "error" and f.rule not in waived]
    if errors:
        lines = "\n".join(f"  {f.rule}: {f}" for f in errors)
        raise RecipeError(
            f"Preflight found {len(errors)} error{'s' * (len(errors) > 1)}; nothing was started.\n{lines}"
        )


def junit(findings: Iterable[Finding], *, here: bool, waived: Iterable[str] = ()) -> str:
    """Return findings as a JUnit report: a test case a rule, failed by its errors that are not waived.

    Warnings are in `system-out` of their case. `here`: whether rules on this machine were among those that looked.
    """
    import xml.etree.ElementTree as tree

    found, waived = list(findings), set(waived)
    rules = looking(here=here)
    suite = tree.Element("testsuite", name="preflight", tests=str(len(rules)))
    failures = 0
    for r in rules:
        case = tree.SubElement(suite, "testcase", classname="preflight", name=r.name)
        own = [f for f in found if f.rule == r.name]
        errors = [f for f in own if f.severity == "error" and r.name not in waived]
        if errors:
            failures += 1
            failure = tree.SubElement(case, "failure", message=_printable(errors[0]), type=errors[0].severity)
            failure.text = "\n".join(map(_printable, errors))
        rest = [f for f in own if f not in errors]
        if rest:
            tree.SubElement(case, "system-out").text = "\n".join(f"{f.severity}: {_printable(f)}" for f in rest)
    suite.set("failures", str(failures))
    tree.indent(suite)
    return tree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(finding: Finding) -> str:
    """XML has no place for control characters, and values come from files."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(finding))
