"""Tiny models, processes of their own for what patches torch, and real verl runs that leave nothing behind."""

import itertools
import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from recipes.cpu import settings

MARKER = "RECIPES_TEST_RUN"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Matrices this small only get slower by being shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Builds a tiny model once a session: tiny("glm5_2", shards=2) is its directory."""
    from recipes.cpu.tiny_models import tiny_model

    root = tmp_path_factory.mktemp("models")

    def build(name: str, **options) -> Path:
        return tiny_model(
            name, root / "-".join([name, *(f"{key}{value}" for key, value in options.items())]), **options
        )

    return build


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    from recipes.cpu import tiny_models

    return tiny_models.tiny_data(tmp_path_factory.mktemp("data") / "say")


def _environment(**changes: str | None) -> dict[str, str]:
    first = os.pathsep.join(filter(None, [settings.PYTHONPATH, os.environ.get("PYTHONPATH")]))
    environment = os.environ | settings.ENVIRONMENT | {"PYTHONPATH": first} | changes
    return {name: value for name, value in environment.items() if value is not None}


@pytest.fixture(scope="session")
def child():
    """Runs Python in a process of its own, with the environment of the CPU target: patches stay in there."""

    def run(*arguments: str, timeout: float = 240, **environment: str | None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=_environment(**environment), capture_output=True, text=True, timeout=timeout)

    return run


@dataclass(frozen=True)
class Run:
    """A finished run of verl: exit code (None when the deadline ended it), log, metrics of each step."""

    exit_code: int | None
    log: str
    metrics: list[dict[str, float]]
    folder: Path


@pytest.fixture
def train(tmp_path, tiny_data):
    """Runs verl.trainer.main_ppo on a tiny model and ends every process it leaves.

    The run is the leader of a session of its own; Ray moves some of its processes out of it, so they are found by a
    variable that they inherit.
    """
    marker, count = uuid.uuid4().hex, itertools.count()

    def run(model: Path, ranks: int, steps: int, deadline: float = 420, **overrides) -> Run:
        folder = tmp_path / f"run{next(count)}"
        folder.mkdir()
        kind = json.loads((model / "config.json").read_text())["model_type"]
        keys = settings.verl_keys(ranks, kind) | _task(model, tiny_data, steps, folder)
        keys |= {key.replace("__", "."): value for key, value in overrides.items()}
        engine = keys.pop("model_engine")
        command = [sys.executable, "-m", "verl.trainer.main_ppo", f"model_engine={engine}"]
        command += [f"++{key}={value}" for key, value in keys.items()]
        metrics, log = folder / "metrics.jsonl", folder / "train.log"
        environment = _environment(**{MARKER: marker, "VERL_FILE_LOGGER_PATH": str(metrics)})
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                exit_code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                exit_code = None
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return Run(exit_code, log.read_text(errors="replace"), [json.loads(line)["data"] for line in lines], folder)

    yield run
    _end_processes(marker)


def _task(model: Path, data: Path, steps: int, folder: Path) -> dict[str, object]:
    """GRPO on `say 7`, small: 8 prompts × 4 responses of 8 tokens, two updates a step."""
    from recipes.cpu import tiny_reward

    return {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.seed": 0,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,  # two ranks of expert parallel halve the mini batch
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "reward.custom_reward_function.path": tiny_reward.__file__,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": folder / "checkpoints",
    }


def _end_processes(marker: str) -> None:
    """End every process that carries the marker in its environment, and wait until it is gone."""
    ours = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker:
                ours.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    for process in ours:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(ours, timeout=10)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=10)


def _signal(end) -> None:
    try:
        end()
    except psutil.NoSuchProcess:
        return
