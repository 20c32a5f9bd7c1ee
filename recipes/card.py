"""The verification card of a recipe: what was verified, how, at which versions, and what never was."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import yaml

from recipes import models, params, preflight, stack
from recipes.command import build, compose_verl
from recipes.errors import RecipeError
from recipes.export import file_name, script


@dataclass(frozen=True)
class Item:
    """One thing about a recipe. `state`: verified (now, here), tested (by the test suite), open, or failed."""

    state: str
    what: str
    how: str


@dataclass(frozen=True)
class Card:
    """A recipe's name and title, the versions it was looked at with, the items, and the recipe's own notes."""

    recipe: str
    title: str
    versions: dict[str, str]
    items: tuple[Item, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(item.state != "failed" for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def text(self) -> str:
        """Return the card as text, a line an item."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.recipe}: {self.title}", f"versions: {versions}", ""]
        lines += [f"{item.state:9} {item.what}: {item.how}" for item in self.items]
        return "\n".join([*lines, *(["", "notes:"] if self.notes else []), *(f"  {note}" for note in self.notes)])


def card(name: str, *, python: str) -> Card:
    """Look at a recipe now, add what the test suite holds about it (params/verified.yaml), and what nobody has seen.

    Raises RecipeError for an unknown recipe. A recipe that does not compose is a failed item, not an error.
    """
    composed = params.compose(name, run_dir="/run", work="/work")
    recipe, facts = composed.recipe, params.model_facts(composed.recipe.model.name)
    count = models.parameters(facts)
    items = [
        *_composes(composed, python),
        _checked(composed, python),
        _script(name, python),
        Item(
            "verified",
            "model",
            f"{count.total:,} parameters computed from {recipe.model.name}"
            + (f", {count.mtp:,} more in MTP layers" if count.mtp else "")
            + (f"; source: {facts.source}" if facts.source else ""),
        ),
        *_tested(name),
        *_open(recipe.hardware, name),
    ]
    table = stack.load(recipe.stack)
    versions = {"stack": recipe.stack, "verl": stack.verl_version(recipe.stack), "python": table.python}
    return Card(composed.name, recipe.title, versions, tuple(items), tuple(recipe.notes))


def _composes(composed: params.Composed, python: str) -> list[Item]:
    try:
        command = build(composed, python=python, environment={})
        compose_verl(command, composed)
    except RecipeError as fault:
        return [Item("failed", "composes", str(fault))]
    said = f"{len(command.overrides)} overrides, none unknown to verl {command.verl}'s own configuration"
    return [Item("verified", "composes", said)]


def _checked(composed: params.Composed, python: str) -> Item:
    found = preflight.check(composed, python=python, here=False)
    rules = preflight.looking(here=False)
    errors = [str(f) for f in found if f.severity == "error"]
    said = f"{len(rules)} rules, {len(found)} findings" + (f", such as {errors[0]}" if errors else "")
    return Item("failed" if errors else "verified", "preflight", said)


def _script(name: str, python: str) -> Item:
    path = params.home() / "recipes" / "shell" / file_name(name)
    if not path.is_file():
        return Item("open", "script", f"recipes/shell has none; `recipes export {name}` writes it")
    same = path.read_text(encoding="utf-8") == script(name, python=python)
    said = f"recipes/shell/{path.name} {'is' if same else 'is not'} what this recipe exports"
    return Item("verified" if same else "failed", "script", said)


def verified() -> dict[str, dict[str, Any]]:
    """Return params/verified.yaml: by recipe, the figures the test suite holds."""
    return yaml.safe_load((params.home() / "params" / "verified.yaml").read_text(encoding="utf-8"))


def _tested(name: str) -> list[Item]:
    held, found = verified().get(name, {}), []
    if "published" in held:
        said = (
            f"the published launch {held['published']} sets {held['keys']} keys; of the {held['settings']} settings "
            f"verl then has, {held['differences']} differ from ours, for reasons in tests/fidelity/differences.yaml"
        )
        said += f"; {held['refused']} key our verl no longer has" if held["refused"] else ""
        found.append(Item("tested", "fidelity", said))
    if "rehearsed" in held:
        r = held["rehearsed"]
        said = f"trained {r['steps']} steps on {r['ranks']} gloo ranks with a tiny model of its family, and exported"
        found.append(Item("tested", "rehearsal", said))
    return found


def _open(hardware: str, name: str) -> list[Item]:
    if hardware == "cpu":
        return [Item("tested", "runs", "trained for real by the test suite, on gloo ranks")]
    held, found = verified().get(name, {}), []
    if "published" not in held:
        found.append(Item("open", "fidelity", "no published launch to compare with"))
    if "rehearsed" not in held:
        found.append(Item("open", "rehearsal", f"the suite trains no rehearsal of it: `recipes rehearse {name}`"))
    found.append(Item("open", f"run on {hardware}", "never: memory, speed, kernels and learning are unseen"))
    return found
