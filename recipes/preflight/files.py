"""Rules on this machine's files: model, data, reward, run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from recipes import data
from recipes.checkpoint import TRACKER
from recipes.errors import RecipeError
from recipes.finding import Finding
from recipes.preflight.rules import Subject, rule, warning

START = "engine start"
DEVICES = Path("/dev")


@rule("hardware.present", noticed="launch", source="Ascend's driver names its devices /dev/davinciN", here=True)
def devices_are_here(s: Subject):
    if not present(s):
        yield (
            {"hardware": s.recipe.hardware},
            "this machine has no NPU (there is no /dev/davinci0).",
            "Launch on a node that has: the notebook and `recipes run` work there, or the script of `recipes export`.",
        )


def present(s: Subject) -> bool:
    """Say whether this machine has devices of the recipe's kind, or a cluster is to have them."""
    return s.recipe.launch == "ray" or s.hardware.device != "npu" or any(DEVICES.glob("davinci[0-9]*"))


def _make(s: Subject, otherwise: str) -> str:
    """How a model or data that are missing come about: made here, where a recipe can; else fetched."""
    if s.recipe.prepare:
        return f"`recipes prepare {s.composed.name}` makes the recipe's own, and so does a run; or {otherwise}."
    return f"Put it there (`recipes data` makes data sets), or {otherwise}."


@rule("files.model", noticed=START, source="transformers and safetensors file names", here=True)
def model_has_weights(s: Subject):
    path = Path(s.recipe.model.path)
    if not path.is_dir():
        if path.is_absolute() or s.recipe.model.path.startswith("."):
            yield {"model.path": path}, "there is no such directory.", _make(s, "set model.path")
        return  # a hub id: what it holds shows when it is fetched
    if not (path / "config.json").is_file():
        yield {"model.path": path}, "the directory has no config.json.", "Point it at a Hugging Face checkpoint."
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield (
                {"model.path": path},
                f"its {index.name} cannot be read, or has no weight_map: it names the shards the model is loaded from.",
                "Fetch the model again.",
            )
            return
        missing = sorted(name for name in shards if not (path / name).is_file())
        if missing:
            yield (
                {"model.path": path},
                f"{len(missing)} of {len(shards)} shards are missing, such as {missing[0]}.",
                "Fetch the model again.",
            )
    elif not any(path.glob("*.safetensors")):
        yield {"model.path": path}, "the directory has no weights (*.safetensors).", "Fetch or build the model."


@rule("files.data", noticed=START, source="verl 0.9.1, RLHFDataset", here=True)
def data_is_there(s: Subject):
    for key in ("train_files", "val_files"):
        path = Path(getattr(s.recipe.data, key))
        if not path.is_file():
            yield {f"data.{key}": path}, "there is no such file.", _make(s, "set the key to a parquet file")


@rule("data.schema", noticed="first batch", source="verl 0.9.1, RLHFDataset", here=True)
def data_has_what_verl_reads(s: Subject):
    for path in dict.fromkeys((s.recipe.data.train_files, s.recipe.data.val_files)):
        if Path(path).is_file():
            yield from _schema(path)


def _schema(path: str | Path) -> list[Finding]:
    try:
        return data.check_parquet(path)
    except RecipeError as fault:  # a workbook without what reads parquet; the training interpreter has it
        return [Finding("data.schema", "info", {"file": str(path)}, f"not looked at: {fault}")]


@rule("reward.trial", noticed="never: the reward stays flat", source="tried on rows of the training data", here=True)
def reward_knows_the_truth(s: Subject):
    """Score the truth and nonsense with the recipe's reward function, in the training interpreter."""
    path, reward = Path(s.recipe.data.train_files), s.recipe.reward
    if not path.is_file() or any(f.severity != "warning" for f in _schema(path)):
        return  # said by files.data and data.schema; what is only warned of can be scored
    try:
        trials = data.try_reward(
            path, python=s.python, function=reward.function, name=reward.name, kwargs=reward.kwargs
        )
    except RecipeError as fault:
        yield {"reward.function": reward.function or "verl's"}, str(fault), "Mend it, or name another."
        return
    yield from data.judge_reward(trials)


@rule("files.validation", severity="warning", noticed="never", source="a validation that cannot tell memory from skill")
def validation_is_held_out(s: Subject):
    d = s.recipe.data
    if d.train_files == d.val_files:
        yield {"data.val_files": d.val_files}, "validation uses the training file.", "Hold some problems out."


@rule("trainer.test_freq", severity="warning", noticed="never", source="verl 0.9.1, RayPPOTrainer.fit")
def validation_goes_on(s: Subject):
    """With a test_freq, verl validates after the last step too; without, never again."""
    t = s.recipe.trainer
    if t.val_before_train and t.test_freq is not None and t.test_freq < 1:
        yield (
            {"trainer.test_freq": t.test_freq, "trainer.val_before_train": t.val_before_train},
            "validation runs before the first step and never again, so nothing can be said of what was learnt.",
            "Set trainer.test_freq, or trainer.val_before_train=false.",
        )


@rule("files.run_dir", noticed=START, source="this workbook", here=True)
def run_directory_is_writable(s: Subject):
    if not s.recipe.run_dir:
        return
    place = Path(s.recipe.run_dir)
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield {"run_dir": s.recipe.run_dir}, f"{place} cannot be written.", "Choose another directory."


@rule("checkpoint.found", noticed="never: it starts at an old step, or ends at once", source="verl 0.9.1", here=True)
def resume_finds_this_run_s_checkpoint(s: Subject):
    """A run's own checkpoints are in its directory unless the recipe says another one, where anybody's may be."""
    c = s.recipe.checkpoint
    place = Path(c.directory)
    tracker = place / TRACKER
    if c.resume != "auto" or (s.recipe.run_dir and place.is_relative_to(s.recipe.run_dir)) or not tracker.is_file():
        return
    step, remedy = tracker.read_text(encoding="utf-8", errors="replace").strip()[:20], "Take another directory, or"
    keys = {"checkpoint.resume": c.resume, "checkpoint.directory": c.directory}
    if step.isdigit() and s.recipe.steps and int(step) >= s.recipe.steps:
        yield (
            {**keys, "trainer.steps": s.recipe.steps},
            f"step {step} is there already, so the run would end at once.",
            f"{remedy} more trainer.steps, or checkpoint.resume=disable.",
        )
    else:
        sentence = f"global_step_{step} is there already, and the run goes on from it, whoever's it is."
        yield warning("checkpoint.found", keys, sentence, f"{remedy} checkpoint.resume=disable.")


@rule("logging.file", severity="warning", noticed="never: nothing to plot", source="verl 0.9.1, Tracking")
def metrics_are_written(s: Subject):
    if "file" not in s.recipe.trainer.logger:
        yield (
            {"trainer.logger": s.recipe.trainer.logger},
            "without `file` there is no metrics.jsonl, so no curves and no verdict.",
            "Add file.",
        )
