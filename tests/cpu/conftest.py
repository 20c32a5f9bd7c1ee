"""Tiny models, processes of their own for what patches torch, and real verl runs that leave nothing behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes import notebook, params
from recipes.command import EXTERNAL_MODULES, build
from recipes.run import launch, processes


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
    recipe = params.compose("cpu/qwen3").recipe
    named = {EXTERNAL_MODULES: ",".join(recipe.external_modules)}
    environment = os.environ | recipe.env | named | changes
    return {name: value for name, value in environment.items() if value is not None}


@pytest.fixture(scope="session")
def child():
    """Runs Python in a process of its own, with the environment of the CPU target: patches stay in there."""

    def run(*arguments: str, timeout: float = 240, **environment: str | None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=_environment(**environment), capture_output=True, text=True, timeout=timeout)

    return run


@dataclass(frozen=True)
class Trained:
    """A training that has ended: its run.json, its log, the metrics of each step."""

    state: dict[str, Any]
    log: str
    metrics: list[dict[str, float]]
    folder: Path


@pytest.fixture
def train(tmp_path):
    """Trains a smoke recipe for real, under the supervisor a user's run has: train("cpu/qwen3", "devices=2", ...)."""
    runs = []

    def run(name: str, *overrides: str, deadline: float = 600) -> Trained:
        composed = params.compose(name, overrides, run_dir=str(tmp_path / f"run {len(runs)}"))
        notebook.prepare(composed)
        started = launch.start(composed, build(composed), deadline_seconds=deadline)
        runs.append(started)
        state = launch.wait(started)
        lines = started.metrics().read_text().splitlines() if started.metrics().exists() else []
        metrics = [json.loads(line)["data"] for line in lines]
        return Trained(state, started.log().read_text(errors="replace"), metrics, started.path)

    yield run
    for started in runs:
        launch.stop(started)
        assert processes.of_run(launch.read_state(started)["id"]) == []
