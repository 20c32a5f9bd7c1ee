"""The whole path with the real verl and the real Megatron-Core: notebook, papermill and script give one run."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from safetensors.torch import load_file

from recipes import export, params
from recipes.command import build
from recipes.run import processes
from recipes.run.directory import open_run, read_state

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"

pytestmark = pytest.mark.slow


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A place for model and data of this test; a smoke recipe needs a random model only, made in seconds."""
    place = tmp_path / "work's place"
    monkeypatch.setenv("RECIPES_WORK", str(place))
    return place


def start(run_dir: Path, *parameters: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "recipes.cli", "notebook", str(NOTEBOOK), "--run-dir", str(run_dir), *parameters]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_batch_trains_each_recipe_by_papermill_draws_judges_and_records(work, tmp_path):
    """The nightly's own batch, with the real verl; and what papermill launched is what a script launches."""
    place = tmp_path / "a batch's dir"
    words = [sys.executable, "-m", "recipes.cli", "batch", "smoke", "--dir", str(place), "--workers", "2"]
    batch = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert batch.returncode == 0, batch.stdout + batch.stderr
    with (place / "summary.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"cpu-qwen3", "cpu-qwen3_moe", "cpu-glm5_2"}
    assert {(row["result"], row["state"], row["verdict"]) for row in rows.values()} == {("passed", "finished", "pass")}
    assert ElementTree.parse(place / "junit.xml").getroot().get("failures") == "0"

    for name in rows:
        run = open_run(place / name)
        state = read_state(run)
        assert (state["state"], state["attempts"][0]["exit_code"]) == ("finished", 0)
        assert processes.of_run(state["id"]) == []
        steps = [json.loads(line)["step"] for line in run.metrics().read_text().splitlines()]
        assert steps == [1, 2, 3, 4]
        assert {p.name for p in run.curves.iterdir()} == {"curves.png", "curves-dark.png", "curves.svg", "curves.csv"}
        judged = {j["rule"]: j["outcome"] for j in json.loads(run.verdict_file.read_text())["judgements"]}
        assert {judged[rule] for rule in ("ENDED", "NAN", "MISMATCH")} == {"pass"}
        assert list((run.attempt(1) / "tensorboard").rglob("events.*"))
        cells = nbformat.read(run.path / "notebook.ipynb", 4).cells
        (watched,) = [cell.outputs for cell in cells if cell.source == "notebook.watch(run)"]
        assert len(watched) == 1  # one output, redrawn in place
        assert "step 4 of 4" in watched[0]["data"]["text/plain"]
        (told,) = [cell.outputs for cell in cells if cell.source == "notebook.judge(run)"]
        assert "The run may be believed." in told[0]["data"]["text/plain"]  # by the batch's own thresholds
        assert (run.path / "notebook.ipynb").stat().st_size < 2_000_000

    # GLM's export, the last of them: everything but the MTP layer, which is not trained. checkpoint.strict is false.
    assert judged["EXPORT"] == "pass"
    source, exported = work / "cpu" / "glm5_2", run.path / "checkpoints" / "global_step_4"
    before, written = (
        {n: w for f in place.rglob("*.safetensors") for n, w in load_file(f).items()} for place in (source, exported)
    )
    assert before.keys() - written.keys() == {name for name in before if name.startswith("model.layers.2.")}
    assert written.keys() <= before.keys()
    assert not written["lm_head.weight"].float().equal(before["lm_head.weight"])  # it was trained

    run = place / "cpu-qwen3"
    launched = json.loads(open_run(run).command_file.read_text())
    command = build(params.compose("cpu/qwen3", ["steps=4"], run_dir=str(run)))
    assert launched["argv"] == list(command.argv)
    assert launched["environment"] == dict(command.environment)
    script = tmp_path / "run.sh"
    script.write_text(export.script("cpu/qwen3", ["steps=4"], python=sys.executable))
    places = {"PYTHON": sys.executable, "RUN_DIR": str(run), "RECIPES_WORK": str(work)}
    printed = subprocess.run(
        ["bash", str(script), "--print"], env=os.environ | places, capture_output=True, text=True, check=True
    )
    assert shlex.split(printed.stdout.strip().splitlines()[-1]) == launched["argv"]


def test_an_interrupt_in_mid_run_ends_everything_and_says_so(work, tmp_path):
    run_dir = tmp_path / "run"
    child = start(run_dir, "-p", "recipe", "cpu/qwen3")
    limit = time.monotonic() + 300
    # Ray is up and the trainer works: interrupting is hardest now.
    while not (
        (run_dir / "attempts/1/train.log").exists() and b"TaskRunner" in (run_dir / "attempts/1/train.log").read_bytes()
    ):
        assert child.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=120)
    assert child.returncode == 2
    assert "interrupted; the run and everything it started has ended" in words
    state = read_state(open_run(run_dir))
    assert state["state"] == "stopped"
    assert processes.of_run(state["id"]) == []
