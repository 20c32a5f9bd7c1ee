"""A batch file (params/batches/*.yaml) → its runs: sweeps expanded, each with a name, a notebook and its settings.

    name: seeds
    workers: 2
    runs:
      - recipe: quickstart/grpo
        seeds: 5                                    # or [1, 2, 3]
      - recipe: cpu/qwen3
        overrides: [steps=4]
        grid: {learning_rate: [1e-5, 1e-4], rollout.n: [4, 8]}      # every combination
        list: [{batch.mini: 4, batch.micro: 4}, {batch.mini: 8}]    # each as it stands

A file always expands to the same runs in the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from recipes import cluster, headless, notebook, params, verdict
from recipes.command import Command, quote
from recipes.errors import RecipeError, nearest
from recipes.notebook import Plan
from recipes.params import Setting, Text
from recipes.run.directory import Run, read_state
from recipes.schema import item

# OmegaConf reads annotations at run time and knows typing.Optional better than `X | None` inside containers.
# ruff: noqa: UP045

# The notebook of a recipe whose batch names none, by the folder of the recipe.
NOTEBOOKS = {
    "quickstart": "00_quickstart.ipynb",
    "cpu": "00_quickstart.ipynb",
    "glm5_2": "10_glm5_2_grpo.ipynb",
    "qwen3": "20_qwen3_grpo.ipynb",
}
# The run directory that commands are compared in: none that could be there, so that nothing is resumed or attached to.
NOWHERE = Path("/recipes-batch/run")
# What resuming decides by itself, and is no part of what a run is.
OF_RESUMING = ("trainer.resume_mode", "trainer.resume_from_path")
# Combinations of one entry: more is a mistake, and each is resolved before anything starts.
MOST = 1000


@dataclass
class BatchFile:
    """The keys of a batch file besides `runs`."""

    name: Optional[str] = item(None, "name of the batch; unset: the file's")
    title: str = item("", "what it is for, in a line")
    notebook: Optional[str] = item(None, "notebook of all runs; unset: that of the recipe's folder")
    workers: Optional[int] = item(None, "runs at a time; unset: as many as fit (1 on NPUs of this machine)", minimum=1)
    launch: str = item(
        "auto",
        "ray: each run is a job of the cluster RAY_ADDRESS names, whose scheduler places it; local: here; auto: ray "
        "where the environment names a cluster, else as the recipe says",
        choices=("auto", "local", "ray"),
    )
    overrides: list[str] = item([], "overrides of every run")
    stop_on_failure: bool = item(False, "start nothing more once a run has failed")
    cap_device_hours: Optional[float] = item(None, "refuse what would take more device-hours than this", minimum=0)
    deadline_minutes: Optional[float] = item(None, "end each run after so long", minimum=0)
    thresholds: list[str] = item([], "thresholds of the verdict (NAME=VALUE, see `recipes judge --rules`)")
    on_disconnect: Optional[str] = item(
        None, "what trainings do when the batch is killed; unset: as the recipe says", choices=("stop", "continue")
    )


@dataclass
class Entry:
    """The keys of one entry of `runs` besides its sweep."""

    recipe: str = item("???", "a name from `recipes list`, or the path of a YAML file")
    name: Optional[str] = item(None, "beginning of the runs' names; unset: the recipe's")
    notebook: Optional[str] = item(None, "notebook; unset: the batch's")
    target: Optional[str] = item(None, "cpu: rehearse the recipe on this machine", choices=("npu", "cpu"))
    overrides: list[str] = item([], "overrides of these runs")
    waive: list[str] = item([], "preflight rules to launch in spite of")
    thresholds: list[str] = item([], "thresholds of the verdict of these runs, on top of the batch's")
    deadline_minutes: Optional[float] = item(None, "end each after so long; unset: the batch's", minimum=0)


SWEEP = ("grid", "list", "seeds")


@dataclass(frozen=True)
class Item:
    """One run of a batch: what papermill is given, and what that resolves to."""

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    settings: tuple[tuple[str, str], ...]
    plan: Plan
    fingerprint: str
    thresholds: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return self.plan.composed.name

    @property
    def devices(self) -> int:
        """Devices the run holds: nodes x devices of each, those that only generate included."""
        return sum(count * size for count, size in cluster.wanted(self.plan.composed.recipe))

    @property
    def steps(self) -> int | None:
        return self.plan.composed.recipe.steps

    @property
    def deadline_seconds(self) -> float | None:
        return self.plan.deadline_seconds

    @property
    def on_ray(self) -> bool:
        return self.plan.composed.recipe.launch == "ray"

    @property
    def is_rehearsal(self) -> bool:
        return self.plan.rehearsal is not None


@dataclass(frozen=True)
class Batch:
    """A batch file, expanded."""

    name: str
    file: BatchFile
    items: tuple[Item, ...]


def find(name: str) -> Path:
    """Return the file of a batch: a path, or a name under params/batches. Raises RecipeError when there is none."""
    path = Path(name)
    if path.is_file():
        return path
    root = params.home() / "params" / "batches"
    known = sorted(p.stem for p in root.glob("*.yaml"))
    if name in known:
        return root / f"{name}.yaml"
    raise RecipeError(f"There is no batch {name!r}{nearest(name, known)} Known: {', '.join(known) or 'none'}.")


def load(path: Path) -> Batch:
    """Return the batch in the file at `path`, every run of it resolved.

    Raises RecipeError for a key a batch does not have, a recipe, notebook, parameter or value that is refused, or two
    runs that would be the same.
    """
    settings, bases = params.read_file(path)
    if bases:
        raise RecipeError(f"{path}: a batch has no defaults; name its recipes under `runs`.")
    entries = [s for s in settings if s.key == "runs"]
    if strange := next((s for s in settings if s.key.startswith("runs.")), None):
        raise RecipeError(f"{strange.key} ({strange.origin}): runs must be a list; begin each run with a dash.")
    file: BatchFile = params.build_as(BatchFile, [s for s in settings if s.key != "runs"], path.stem)
    if not entries or not isinstance(entries[0].value, list) or not entries[0].value:
        raise RecipeError(f"{path} names no runs: it needs a list `runs`, each with a `recipe`.")
    items: dict[str, Item] = {}
    marks: dict[str, Item] = {}
    for place, told in enumerate(entries[0].value, 1):
        for made in _expand(file, told, f"{path.name}, run {place}", path.parent):
            if made.name in items:
                raise RecipeError(f"{path}: {made.name} is the name of two runs; give one entry a `name` of its own.")
            if (other := marks.setdefault(made.fingerprint, made)) is not made:
                raise RecipeError(f"{path}: {made.name} and {other.name} are the same run; vary its seed.")
            items[made.name] = made
    return Batch(_folder_name(file.name or path.stem), file, tuple(items.values()))


def _expand(file: BatchFile, told: Any, origin: str, folder: Path) -> Iterator[Item]:
    if not isinstance(told, Mapping):
        raise RecipeError(f"{origin} must be a mapping with a `recipe`, not {_text(told)!r}.")
    for key in told:
        known = [*SWEEP, *Entry.__dataclass_fields__]
        if key not in known:
            raise RecipeError(f"{origin}: unknown key {key!r}{nearest(key, known)}")
    plain = [Setting(key, value, origin) for key, value in told.items() if key not in SWEEP]
    entry: Entry = params.build_as(Entry, plain, origin)
    book = _notebook(entry.notebook or file.notebook, entry.recipe, folder, origin)
    for point in _points(told, origin):
        try:
            yield _item(file, entry, book, point)
        except RecipeError as fault:
            words = f" with {', '.join(f'{key}={text}' for key, text in point)}" if point else ""
            raise RecipeError(f"{origin}{words}: {fault}") from fault


def _points(told: Mapping[str, Any], origin: str) -> list[tuple[tuple[str, str], ...]]:
    """Return the settings of each run of an entry, as (key, text) pairs: list x grid x seeds."""
    listed: list[tuple[tuple[str, str], ...]] = [()]
    if "list" in told:
        if not isinstance(told["list"], list) or not all(isinstance(p, Mapping) and p for p in told["list"]):
            raise RecipeError(f"{origin}: list must be a list of mappings, such as [{{steps: 4}}, {{steps: 8}}].")
        listed = [tuple((key, _text(value)) for key, value in params.flatten(p)) for p in told["list"]]
    axes = []
    if "grid" in told:
        if not isinstance(told["grid"], Mapping):
            raise RecipeError(f"{origin}: grid must map keys to lists, such as {{learning_rate: [1e-5, 1e-4]}}.")
        for key, values in params.flatten(told["grid"]):
            if not isinstance(values, list) or not values:
                raise RecipeError(f"{origin}: grid.{key} must be a list of values.")
            axes.append([(key, _text(value)) for value in values])
    if "seeds" in told:
        axes.append([("seed", seed) for seed in _seeds(told["seeds"], origin)])
    points = len(listed)
    for axis in axes:
        points *= len(axis)
    if points > MOST:
        raise RecipeError(f"{origin} would be {points} runs; {MOST} is the most.")
    return [(*point, *more) for point in listed for more in itertools.product(*axes)]


def _seeds(told: Any, origin: str) -> list[str]:
    texts = [_text(seed) for seed in told] if isinstance(told, list) else [_text(told)]
    if not all(re.fullmatch(r"[0-9]{1,9}", text) for text in texts):
        raise RecipeError(f"{origin}: seeds must be a number of seeds, or a list of whole numbers.")
    if isinstance(told, list):
        return texts
    return [str(seed) for seed in range(1, min(int(texts[0]), MOST + 1) + 1)]


def _item(file: BatchFile, entry: Entry, book: Path, point: Sequence[tuple[str, str]]) -> Item:
    overrides = [*file.overrides, *entry.overrides, *(f"{key}={text}" for key, text in point)]
    where = file.launch
    if where == "auto" and any(os.environ.get(name) for name in cluster.ADDRESSES) and entry.target != "cpu":
        where = "ray"
    if where != "auto":
        overrides.insert(0, f"launch={where}")
    if file.on_disconnect:
        overrides.append(f"supervision.on_disconnect={file.on_disconnect}")
    thresholds = (*file.thresholds, *entry.thresholds)
    verdict.thresholds(thresholds, "thresholds:")
    given = {
        "recipe": entry.recipe,
        "target": entry.target,
        "overrides": overrides or None,
        "waive": ",".join(entry.waive) or None,
        "deadline_minutes": entry.deadline_minutes or file.deadline_minutes,
    }
    given = {key: value for key, value in given.items() if value is not None}
    plan = notebook.resolve(headless.checked(book, given, NOWHERE))
    stem = _folder_name(entry.name or entry.recipe.removesuffix(".yaml"))
    name = "_".join([stem, *(f"{key.rpartition('.')[2]}-{_folder_name(text)}" for key, text in point)])
    mark = fingerprint(plan.composed.name, plan.command, NOWHERE)
    if thresholds:  # for the notebook's own verdict; the recipe's stay, and what is said later holds
        limits = [*plan.composed.recipe.supervision.thresholds, *thresholds]
        given["overrides"] = [*overrides, f"supervision.thresholds=[{','.join(limits)}]"]
    return Item(name[:180], book, given, tuple(point), plan, mark, thresholds)


def _notebook(named: str | None, recipe: str, folder: Path, origin: str) -> Path:
    if named is None:
        family = recipe.partition("/")[0]
        if family not in NOTEBOOKS:
            raise RecipeError(f"{origin}: which notebook runs {recipe}? Name one: notebook: 00_quickstart.ipynb.")
        named = NOTEBOOKS[family]
    for place in (folder / named, params.home() / "notebooks" / named, params.home() / named):
        if place.is_file():
            return place
    known = [p.name for p in (params.home() / "notebooks").glob("*.ipynb")]
    raise RecipeError(f"{origin}: there is no notebook {named!r}{nearest(named, known)}")


def _text(value: Any) -> str:
    """Return a value as it is written in an override: a quoted text stays quoted, a list keeps its brackets."""
    if isinstance(value, Text):
        return json.dumps(value.text, ensure_ascii=False) if value.quoted else value.text
    if isinstance(value, list):
        return f"[{', '.join(_text(inner) for inner in value)}]"
    return "{" + ", ".join(f"{key}: {_text(inner)}" for key, inner in dict(value).items()) + "}"


def _folder_name(text: str) -> str:
    """Return `text` as part of a folder's name that needs no quotes anywhere."""
    return re.sub(r"[^\w.+-]+", "-", text.strip("\"'")).strip("-.") or "run"


# --------------------------------------------------------------------------------------------------- what a run is


def fingerprint(recipe: str, command: Command | Mapping[str, Any], run_dir: Path, attempt: int = 1) -> str:
    """Return what two runs share exactly when they are the same: a hash of recipe name, argv, environment and verl.

    Every key of a recipe that reaches the training is in its argv or environment, so the command stands for it. Left
    out: the run's directory, the number of its attempt, the interpreter's path, and where a resumed attempt goes on.
    `command` is a Command or what command.json holds.
    """
    told = command if isinstance(command, Mapping) else vars(command) | {"argv": command.argv}

    def plain(text: str) -> str:
        # As it is, and as Hydra quotes it inside a longer text.
        for path in dict.fromkeys((str(run_dir), quote(f"{run_dir} ")[1:-2])):
            text = text.replace(path, "RUN")
        return text.replace(f"RUN/attempts/{attempt}", "RUN/attempts/N")

    argv = [plain(t) for t in told["argv"][1:] if t.lstrip("+").partition("=")[0] not in OF_RESUMING]
    environment = {name: plain(text) for name, text in sorted(told["environment"].items())}
    whole = json.dumps([recipe, argv, environment, told["verl"]], ensure_ascii=False)
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def fingerprint_of(run: Run) -> str:
    """Return the fingerprint of a run directory, from what its latest attempt recorded; empty where that is not whole.

    The directory may have been moved since.
    """
    try:
        told = json.loads((run.attempt() / "command.json").read_text(encoding="utf-8"))
        settings, _ = params.read_file(run.attempt() / "recipe.yaml")
        then = next(s.value.text for s in settings if s.key == "run_dir")
        return fingerprint(read_state(run)["recipe"], told, Path(then), run.latest)
    except (OSError, ValueError, KeyError, StopIteration):  # RecipeError is a ValueError
        return ""


def directories(root: Path, name: str) -> list[Path]:
    """Return the directories of a run of a batch, oldest first: NAME, then those made beside it, NAME@2, NAME@3, …"""
    beside = {p: p.name.removeprefix(f"{name}@") for p in root.glob(f"{name}@*")}
    numbered = sorted((p for p, number in beside.items() if number.isdecimal()), key=lambda p: int(beside[p]))
    return [p for p in (root / name, *numbered) if p.is_dir()]


def next_directory(root: Path, name: str) -> Path:
    """Return a directory for a run that does not exist yet: NAME, or the next one beside it."""
    made = directories(root, name)
    if not made:
        return root / name
    return root / f"{name}@{int(made[-1].name.rpartition('@')[2]) + 1 if '@' in made[-1].name else 2}"


def durations(places: Iterable[Path]) -> dict[tuple[str, str], list[tuple[int | None, float]]]:
    """Return, by recipe and size, (steps, seconds) of the runs under `places` that finished in one attempt."""
    found: dict[tuple[str, str], list[tuple[int | None, float]]] = {}
    for path in places:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            attempts = state["attempts"]
            if state["state"] == "finished" and len(attempts) == 1 and attempts[0]["seconds"]:
                argv = json.loads((path.parent / "command.json").read_text(encoding="utf-8"))["argv"]
                key = (state["recipe"], size(argv))
                found.setdefault(key, []).append((state.get("steps"), float(attempts[0]["seconds"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def size(argv: Sequence[str]) -> str:
    """Return the words of a command that say how many devices it takes."""
    return " ".join(t for t in argv if t.lstrip("+").startswith(("trainer.nnodes=", "trainer.n_gpus_per_node=")))
