"""Faults that only a cluster has, as tests/test_faults.py has the others: state, cause, steps kept, and going on.

Real: three Ray nodes, job API, command line, supervisor, files. The trainer is the stand-in of tests/children, which
takes its devices as verl does. A real training that loses a node is the last test of test_ray_job.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes import metrics
from recipes.run import launch, processes
from recipes.run.directory import Run, read_state

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen():
    """Rows of the table: fault → (cause, how the run went on)."""
    return {}


@pytest.fixture
def recipes(cluster, tmp_path):
    """Starts `recipes` with these words, on the cluster."""
    children = ROOT / "tests" / "children"
    environment = {
        **os.environ,
        **cluster.environment,
        "RAY_ADDRESS": cluster.address,
        "RECIPES_WORK": str(tmp_path / "work"),
        "RECIPES_PYTHON": str(children / "python"),
        "REAL_PYTHON": sys.executable,
    }

    def start(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipes.cli", *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def begun(recipes, run_dir: Path, nodes: int) -> tuple[subprocess.Popen, Run]:
    """A run that has made two steps."""
    settings = [f"steps={STEPS}", "launch=ray", f"nodes={nodes}", "devices=1", "env.TRAINER='takes train'"]
    settings += [f"env.REAL_PYTHON='{sys.executable}'", "env.TRAINER_STEP_SECONDS='4'"]
    child, run = recipes("run", "cpu/qwen3", *settings, "--run-dir", str(run_dir)), Run(run_dir)
    limit = time.monotonic() + 300
    while len(metrics.read_jsonl(run.metrics(1)).table) < 2:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)
    return child, run


def goes_on(recipes, run: Run) -> str:
    """Resume the run to its end: each step is there once, the file of the first attempt is as it was."""
    kept, first_file = metrics.of_run(run.path).table.index, run.metrics(1).read_bytes()
    again = recipes("run", "--resume", str(run.path), "env.TRAINER_STEP_SECONDS='0.1'")
    out, err = again.communicate(timeout=300)
    assert read_state(run)["state"] == "finished", (out, err)
    table = metrics.of_run(run.path).table
    assert table.index.tolist() == list(range(1, STEPS + 1))
    assert set(kept) <= set(table.index)
    assert run.metrics(1).read_bytes() == first_file
    assert processes.of_run(read_state(run)["id"]) == []
    assert re.search(r"go on after step \d", out)
    return "attempt 2 from step …"


def test_a_job_that_is_stopped_from_outside(recipes, cluster, tmp_path, seen):
    child, run = begun(recipes, tmp_path / "stopped", nodes=1)
    job = json.loads((run.attempt(1) / "job.json").read_text())["submission_id"]
    cluster.ray("job", "stop", job)
    child.communicate(timeout=120)
    assert child.returncode == 1
    state = read_state(run)
    assert state["state"] == "failed"
    assert "was stopped from outside" in state["cause"]
    assert processes.of_run(state["id"]) == []
    cause = state["cause"].replace(job, "…")
    seen["its job is stopped from outside"] = (cause, goes_on(recipes, run))


def test_a_node_is_lost(recipes, cluster, tmp_path, seen):
    child, run = begun(recipes, tmp_path / "lost", nodes=2)
    raylet = next(p for p in psutil.Process(cluster.pid(cluster.second)).children() if p.name() == "raylet")
    os.kill(raylet.pid, signal.SIGKILL)
    child.communicate(timeout=300)
    state = read_state(run)
    cluster.script(cluster.second, "stop")
    cluster.start(cluster.second)
    launch.stop(run)
    assert child.returncode == 1
    assert state["state"] == "failed"
    cause = state["cause"].replace(cluster.second, "ADDRESS")
    said = r"NodeLostError: node ADDRESS was lost with 1 processes of this run: (.*)"
    why = re.search(said, cause)
    assert why, cause
    seen["a node of its cluster is lost"] = (cause.replace(why[1], "…"), goes_on(recipes, run))


def test_the_table_in_the_book_is_what_was_seen(seen, faults_in_the_book):
    # In two backticks: a cause may name a command in one.
    rows = {f"| {fault} | failed | `` {cause} `` | all | {how} |" for fault, (cause, how) in seen.items()}
    faults_in_the_book("faults on a cluster: written by tests/run_ray/test_faults_on_ray.py", rows, 2)
