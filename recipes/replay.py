"""The same run again, from what it recorded: argv and environment but for the paths of its directory."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import differences, params, provenance
from recipes.command import Command, quote
from recipes.errors import RecipeError
from recipes.run.directory import Run, read_state, write_json


@dataclass(frozen=True)
class Replay:
    """What a replay would start, and what is different now. Nothing is written yet.

    `parts` is the comparison of then (a) and now (b); `unknown` says why it cannot be made, where it cannot.
    """

    of: Run
    composed: params.Composed
    command: Command
    parts: list[differences.Part]
    unknown: str = ""

    def text(self) -> str:
        """Return what differs now from then, in words."""
        if self.unknown:
            return self.unknown
        changed = differences.describe(self.parts, "the run", "this machine")
        return changed if any(p.differing for p in self.parts) else f"Nothing differs from then.\n{changed}"

    def record(self, run: Run) -> None:
        """Write into the new run what it is a replay of and what differed; a rehearsal stays one."""
        told = {"of": str(self.of.path), "differences": differences.to_dict(self.parts), "unknown": self.unknown}
        write_json(run.path / "replay.json", told)
        if (self.of.path / "rehearsal.json").is_file():
            shutil.copyfile(self.of.path / "rehearsal.json", run.path / "rehearsal.json")


def plan(run: Run, run_dir: Path) -> Replay:
    """Return the replay of `run` in the new directory `run_dir`.

    Raises RecipeError when the run recorded no command, or when its interpreter, model or data are not here (unless
    its recipe makes them itself).
    """
    state = read_state(run)
    try:
        recipe, command = provenance.recorded(run)
        argv, environment = list(command["argv"]), dict(command["environment"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise RecipeError(f"{run.path} cannot be replayed: it has no whole recipe.yaml and command.json.") from fault
    if len(argv) < 4 or argv[1:3] != ["-u", "-m"]:
        raise RecipeError(f"{run.path} cannot be replayed: its command is not `python -u -m MODULE …`.")
    if shutil.which(argv[0]) is None:
        raise RecipeError(f"{run.path} cannot be replayed: its interpreter {argv[0]} is not here.")
    old, new = str(run.path), str(run_dir.absolute())
    moved = Command(
        python=argv[0],
        entry=argv[3],
        groups=(("replayed", tuple(moved_override(text, old, new) for text in argv[4:])),),
        environment={name: moved_path(text, old, new) for name, text in environment.items()},
        verl=command["verl"],
    )
    composed = _compose(recipe, state, old, new)
    _refuse_missing(run, composed)
    parts, unknown = _changes(run, recipe, command)
    return Replay(run, composed, moved, parts, unknown)


def moved_path(text: str, old: str, new: str) -> str:
    """Return a text with the run's directory replaced, and with the first attempt's folder for any attempt's."""
    text = differences.replace_path(text, old, new)
    return re.sub(re.escape(f"{new}/attempts/") + r"\d+(?=/|$|['\"])", lambda _: f"{new}/attempts/1", text)


def moved_override(text: str, old: str, new: str) -> str:
    """The same for a Hydra override: a path stands between quotes there, and a quote in it behind a backslash."""
    return moved_path(text, *(quote(path).removeprefix("'").removesuffix("'") for path in (old, new)))


def _compose(recipe: Mapping[str, Any], state: Mapping[str, Any], old: str, new: str) -> params.Composed:
    """The recorded recipe in its new place, through the schema of today."""
    import yaml

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: moved(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        return moved_path(value, old, new) if isinstance(value, str) else value

    tree = {key: moved(value) for key, value in recipe.items() if key not in ("recipe", "run_dir", "work")}
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, allow_unicode=True, sort_keys=False), encoding="utf-8")
        label = state.get("file") or state["recipe"]
        composed = params.compose(str(path), run_dir=new, work=recipe["work"], label=label)
    files = tuple(params.home() / name for name in differences.told(Run(Path(old))).get("recipe_files", {}))
    return dataclasses.replace(composed, name=state["recipe"], files=files)


def _refuse_missing(run: Run, composed: params.Composed) -> None:
    if composed.recipe.prepare:
        return
    tree = params.to_dict(composed.recipe)
    found = {**provenance.prints(tree, provenance.MODEL), **provenance.prints(tree, provenance.DATA)}
    for key, one in found.items():
        if one["kind"] in ("missing", "unreadable"):
            raise RecipeError(f"{run.path} cannot be replayed: {key}={one['path']} is not here ({one['kind']}).")


def _changes(run: Run, recipe: Mapping[str, Any], command: Mapping[str, Any]) -> tuple[list[differences.Part], str]:
    then = differences.told(run)
    if not then.get("gathered"):
        return [], "What differs now cannot be said: the run's provenance was not gathered."
    files = [params.home() / name for name in then.get("recipe_files", {})]
    now, _ = provenance.gather(recipe, command, files=files)
    sides = [differences.facts({}, {}, command, source, str(run.path)) for source in (then, now)]
    for side in sides:
        side.pop("verl configuration")
        side.pop("recipe")  # replayed as it is; its files are compared
    return differences.compare(*sides), ""
