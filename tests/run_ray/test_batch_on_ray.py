"""A batch on a real Ray of three nodes: its scheduler places the runs, none is refused, none waits for ever."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from recipes.run.directory import Run, read_state

ROOT = Path(__file__).resolve().parents[2]

BATCH = """
notebook: quick.ipynb
workers: 4
thresholds: [minimum_steps=2]
overrides:
  - steps=2
  - devices=1
  - prepare=[]
  - env.TRAINER=takes train healthy
  - env.TRAINER_STEP_SECONDS="1"
  - env.REAL_PYTHON=PYTHON
runs:
  - {recipe: cpu/qwen3, name: both, overrides: [nodes=2], seeds: 2}
  - {recipe: cpu/qwen3, name: one, seeds: 6}
"""


@pytest.mark.slow
def test_runs_of_one_and_of_both_nodes_at_once(cluster, tmp_path):
    """Eight, four at a time, which is more than fits. The stand-in takes its devices as verl does, or is refused."""
    (tmp_path / "night.yaml").write_text(BATCH.replace("=PYTHON", f"={sys.executable}"))
    book = nbformat.read(ROOT / "notebooks" / "00_quickstart.ipynb", 4)
    book.cells = [cell for cell in book.cells if not re.search(r"notebook\.(check|judge|record)\(", cell.source)]
    nbformat.write(book, tmp_path / "quick.ipynb")
    environment = {
        **os.environ,
        **cluster.environment,
        "RAY_ADDRESS": cluster.address,
        "RECIPES_PYTHON": str(ROOT / "tests" / "children" / "python"),
        "REAL_PYTHON": sys.executable,
    }
    words = [sys.executable, "-m", "recipes.cli", "batch", str(tmp_path / "night.yaml"), "--dir", str(tmp_path / "out")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert [(row["result"], row["steps"]) for row in rows] == [("passed", "2")] * 8
    assert [row["devices"] for row in rows] == ["2", "2", *["1"] * 6]
    logs = ""
    for row in rows:
        run = Run(tmp_path / "out" / row["directory"])
        assert len(read_state(run)["attempts"]) == 1
        assert json.loads((run.attempt(1) / "job.json").read_text())["ended"] == "SUCCEEDED"
        logs += run.log(1).read_text()
    assert "waits for its turn" in logs or "in use" in logs
