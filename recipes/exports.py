"""What a run exported, compared with the model it started from: an export that drops a shard exits 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from recipes import checkpoint
from recipes.errors import RecipeError
from recipes.run.directory import Run

CHECKS = "exports.json"


@dataclass(frozen=True)
class Exported:
    """The exports of a run.

    `due`: whether the run was told to export. `checks`: by path of the export, its comparison. `trouble`: by path, why
    there is no comparison.
    """

    due: bool
    checks: dict[str, checkpoint.ExportCheck]
    trouble: dict[str, str]

    def to_dict(self) -> dict:
        checks = {path: check.to_dict() for path, check in self.checks.items()}
        return {"due": self.due, "checks": checks, "trouble": self.trouble}


def of_run(run: Run) -> Exported:
    """Compare every Hugging Face export below the run's checkpoint directory with the run's model.

    What the run was told is read from its own verl.yaml. An export without a single weight file (configuration and
    tokenizer alone, which verl writes with every checkpoint) counts only where the run was to export weights.
    """
    if not (run.path / "verl.yaml").is_file():
        return Exported(False, {}, {})
    told = OmegaConf.load(run.path / "verl.yaml")
    actor = OmegaConf.select(told, "actor_rollout_ref.actor.checkpoint.save_contents", default=None) or []
    due = "hf_model" in actor and (OmegaConf.select(told, "trainer.save_freq", default=-1) or -1) > 0
    source = str(OmegaConf.select(told, "actor_rollout_ref.model.path", default=""))
    checks, trouble = {}, {}
    for path in exports_below(Path(str(OmegaConf.select(told, "trainer.default_local_dir", default="")))):
        if not due and not any(path.glob("*.safetensors")):
            continue
        try:
            checks[str(path)] = checkpoint.compare(source, path)
        except RecipeError as fault:
            trouble[str(path)] = str(fault)
    return Exported(due, checks, trouble)


def exports_below(folder: Path) -> list[Path]:
    """The `huggingface` directories of the actor below a checkpoint directory, in the order of their steps."""
    # verl has put it at the step's, the actor's and the actor's model folder, by engine and release.
    places = ("huggingface", "actor/huggingface", "actor/model/huggingface")
    found = [path for place in places for path in folder.glob(f"global_step_*/{place}")]

    def step(path: Path) -> int:
        [name] = [part for part in path.parts[::-1] if part.startswith("global_step_")][:1]
        number = name.removeprefix("global_step_")
        return int(number) if number.isdigit() else -1

    return sorted((path for path in found if path.is_dir()), key=lambda path: (step(path), path))
