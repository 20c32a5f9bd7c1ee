"""What differs between two runs, or between a run and this machine now: recipe, packages, commits, data, outcome."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.masking import mask_tree
from recipes.params import flatten
from recipes.provenance import FILE, recorded
from recipes.run.directory import Run, read_state

# What stands for the run's own directory, so that two runs differ in nothing by being in two places.
PLACE = "RUN"
# Differ from shell to shell and decide nothing.
_IDLE = ("PWD", "OLDPWD", "_", "SHLVL", "HOSTNAME", "TMPDIR")
# Widths of a table: a key, a value.
KEY, VALUE = 46, 60

Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One part of the comparison. `absent` says which side has no record of it: "a", "b", "a and b", or empty.

    `differing` has for each key the two values, None where a side has no such key; `equal` counts the other keys.
    """

    name: str
    differing: Mapping[str, tuple[Any, Any]]
    equal: int
    absent: str = ""


def compare(a: Facts, b: Facts) -> list[Part]:
    """Return what differs, part by part, in the order of `a`."""
    parts = []
    for name in [*a, *(n for n in b if n not in a)]:
        left, right = a.get(name) or {}, b.get(name) or {}
        absent = " and ".join(side for side, facts in (("a", left), ("b", right)) if not facts)
        if absent:
            parts.append(Part(name, {}, 0, absent))
            continue
        keys = sorted({*left, *right})
        differing = {key: (left.get(key), right.get(key)) for key in keys if not _same(left.get(key), right.get(key))}
        parts.append(Part(name, differing, len(keys) - len(differing)))
    return parts


def of_run(run: Run) -> Facts:
    """Return what a run has recorded, outcome first. Missing parts are empty.

    Raises RecipeError when there is no run, or its run.json cannot be read.
    """
    state = read_state(run)
    return {"outcome": outcome(run, state), **facts(*_recorded(run), told(run), str(run.path))}


def told(run: Run) -> dict[str, Any]:
    """Return provenance.json, empty where there is none."""
    try:
        return json.loads((run.path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def facts(
    recipe: Mapping[str, Any], verl: Mapping[str, Any], command: Mapping[str, Any], source: Mapping[str, Any], run: str
) -> Facts:
    """Return a run's comparable facts by part. `source` is its provenance, `run` its directory."""
    environment = {**source.get("environment", {}), **command.get("environment", {})}
    hardware = dict(flatten(_listed(source.get("hardware", {}))))
    found = {
        "recipe": {k: v for k, v in flatten(recipe) if k != "run_dir"},
        "verl configuration": dict(flatten(verl)),
        "environment": {k: v for k, v in environment.items() if k not in _IDLE},
        "packages": {"python": source["interpreter"]["python"], **source["packages"]} if source.get("packages") else {},
        "commits": _commits(source.get("repositories", {})),
        "recipe files": source.get("recipe_files", {}),
        "hardware": hardware,
        "data": _prints(source.get("data", {})),
        "model": _prints(source.get("model", {})),
    }
    if command.get("argv"):
        found["recipe"] |= {
            "(interpreter)": command["argv"][0],
            "(entry)": command["argv"][3],
            "(verl)": command["verl"],
        }
    placed = {name: {k: _placed(v, run) for k, v in part.items()} for name, part in found.items()}
    # Packages have names such as google-auth, and versions are no secrets.
    return {**mask_tree(placed), "packages": found["packages"]}


def outcome(run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run ended: state, cause, steps made, seconds of its attempts, last reward, last validation."""
    from recipes import live

    attempts = [a for a in state.get("attempts", ()) if a.get("seconds") is not None]
    ended: dict[str, Any] = {"state": state["state"], "cause": state.get("cause", ""), "attempts": len(run.attempts)}
    ended["seconds"] = round(sum(a["seconds"] for a in attempts), 1)
    moment = live.look(run)
    ended["steps"] = moment.step
    for name in moment.metrics.table.columns:
        if name in ("critic/rewards/mean", "critic/score/mean") or name.startswith("val-core/"):
            values = moment.metrics.table[name].dropna()
            if len(values):
                ended[f"last {name}"] = float(f"{float(values.iloc[-1]):.4g}")
    return ended


def _recorded(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        recipe, command = recorded(run)
    except (OSError, ValueError):
        recipe, command = {}, {}
    try:
        verl = yaml.load((run.path / "verl.yaml").read_text(encoding="utf-8"), loader) or {}
    except (OSError, ValueError, yaml.YAMLError):
        verl = {}
    return recipe, verl, command


def _commits(repositories: Mapping[str, Any]) -> dict[str, str]:
    said = {}
    for name, git in repositories.items():
        words = f"{git['commit'][:12]}{' on ' + git['branch'] if git['branch'] else ''}"
        if git["dirty"]:
            words += f", {len(git['dirty'])} files changed (diff {git.get('diff', {}).get('sha256', '')[:8]})"
        said[name] = words
    return said


def _prints(found: Mapping[str, Any]) -> dict[str, Any]:
    """The comparable part of fingerprints. Times are left out: a copy is the same data."""
    said: dict[str, Any] = {}
    for key, one in found.items():
        if one["kind"] not in ("file", "directory"):
            said[key] = one.get("revision") or (one["path"] if one["kind"] != "missing" else "missing")
            continue
        said[f"{key} (path)"] = one["path"]
        said[key] = f"{one.get('files', 1)} files, {one['bytes']} bytes, sample {one['sample'][:12]}"
        for name, part in one.get("parts", {}).items():
            said[f"{key}/{name}"] = f"{part['bytes']} bytes, sample {part['sample'][:12]}"
    return said


def _listed(tree: Any) -> Any:
    """Lists of mappings as mappings by number, so that one device of sixteen shows alone."""
    if isinstance(tree, list) and tree and all(isinstance(item, Mapping) for item in tree):
        return {str(number): item for number, item in enumerate(tree)}
    return {key: _listed(inner) for key, inner in tree.items()} if isinstance(tree, Mapping) else tree


def _placed(value: Any, run: str) -> Any:
    if isinstance(value, str):
        return replace_path(value, run, PLACE)
    if isinstance(value, list):
        return [_placed(item, run) for item in value]
    return value


def replace_path(text: str, old: str, new: str) -> str:
    """Return `text` with the path `old`, and paths below it, moved to `new`; a longer name is another path."""
    parts = text.split(old)
    joined = parts[0]
    for before, after in itertools.pairwise(parts):
        ends = not after or not (after[0].isalnum() or after[0] in "-_.")
        starts = not before or before.endswith("://") or not (before[-1].isalnum() or before[-1] in "-_./")
        joined += (new if ends and starts else old) + after
    return joined


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


# ---------------------------------------------------------------------------------------------------------- as text


def describe(parts: list[Part], a: str = "A", b: str = "B") -> str:
    """Return the comparison as text: a table a part, then one line for what is equal and one for what is unknown."""
    blocks = []
    for part in (p for p in parts if p.differing):
        rows = [(key, _short(left), _short(right)) for key, (left, right) in part.differing.items()]
        width = min(KEY, max(len(key) for key, _, _ in rows))
        first = max(len(left) for _, left, _ in rows)
        lines = [f"{part.name}: {len(rows)} of {len(rows) + part.equal} differ"]
        for key, left, right in rows:
            lead = f"  {key:{width}}  " if len(key) <= width else f"  {key}\n  {'':{width}}  "
            lines.append(f"{lead}{left:{first}}  →  {right}")
        blocks.append("\n".join(lines))
    equal = [f"{p.name} ({p.equal})" for p in parts if not p.differing and not p.absent]
    if equal:
        blocks.append(f"equal: {', '.join(equal)}")
    names = {"a": a, "b": b, "a and b": f"{a} and {b}"}
    for absent in dict.fromkeys(p.absent for p in parts if p.absent):
        unknown = ", ".join(p.name for p in parts if p.absent == absent)
        blocks.append(f"not recorded by {names[absent]}: {unknown}")
    return "\n".join(blocks)


def to_dict(parts: list[Part]) -> dict[str, Any]:
    """Return the comparison as plain data: {part: {differing: {key: {a, b}}, equal: count, absent: which side}}."""
    return {
        part.name: {
            "differing": {key: {"a": a, "b": b} for key, (a, b) in part.differing.items()},
            "equal": part.equal,
            "absent": part.absent,
        }
        for part in parts
    }


def _short(value: Any) -> str:
    from recipes.logtext import clean

    text = "–" if value is None else clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    text = text.replace("\n", " ") or "''"
    return text if len(text) <= VALUE else f"{text[: VALUE // 2 - 1]}…{text[-VALUE // 2 :]}"


def name_of(path: str | Path) -> str:
    """Return the last two parts of a run's path: its recipe and its time of day."""
    return "/".join(Path(path).absolute().parts[-2:])
