"""Batches: what a file expands to, what it is refused for, and real papermills with a stand-in trainer.

The stand-in takes verl's place as in test_faults: notebook, kernel, supervisor, checkpoints and metrics are real.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from datetime import datetime, timedelta
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from click.testing import CliRunner

from recipes import batch, batch_run, batch_summary, curves, headless, metrics, notebook, params
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.run import launch, processes
from recipes.run.directory import Run, create, read_state, update_state, write_json, write_text
from recipes.verdict import judge

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = sorted((ROOT / "params" / "batches").glob("*.yaml"))


@pytest.fixture
def load(tmp_path):
    """Load a batch from the text of its file."""

    def read(text: str):
        path = tmp_path / "a batch.yaml"
        path.write_text(text)
        return batch.load(path)

    return read


# ------------------------------------------------------------------------------------------------------- what it says


def test_a_sweep_is_list_by_grid_by_seeds_always_in_the_same_order(load):
    text = (
        "runs:\n"
        "- recipe: quickstart/grpo\n"
        "  list: [{batch.mini: 4}, {batch: {mini: 8}, steps: 20}]\n"
        "  grid: {learning_rate: [1e-5, 1e-4]}\n"
        "  seeds: 2\n"
    )
    loaded = load(text)
    assert [i.name for i in loaded.items] == [
        "quickstart-grpo_mini-4_learning_rate-1e-5_seed-1",
        "quickstart-grpo_mini-4_learning_rate-1e-5_seed-2",
        "quickstart-grpo_mini-4_learning_rate-1e-4_seed-1",
        "quickstart-grpo_mini-4_learning_rate-1e-4_seed-2",
        "quickstart-grpo_mini-8_steps-20_learning_rate-1e-5_seed-1",
        "quickstart-grpo_mini-8_steps-20_learning_rate-1e-5_seed-2",
        "quickstart-grpo_mini-8_steps-20_learning_rate-1e-4_seed-1",
        "quickstart-grpo_mini-8_steps-20_learning_rate-1e-4_seed-2",
    ]
    recipes = [i.plan.composed.recipe for i in loaded.items]
    assert [(r.batch.mini, r.steps, r.optimizer.lr, r.trainer.seed) for r in recipes[3:6]] == [
        (4, 30, 1e-4, 2),
        (8, 20, 1e-5, 1),
        (8, 20, 1e-5, 2),
    ]
    assert [i.fingerprint for i in load(text).items] == [i.fingerprint for i in loaded.items]
    assert len({i.fingerprint for i in loaded.items}) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs:\n- {recipe: cpu/qwen3}\nworker: 2", r"Unknown key 'worker' .*did you mean workers"),
        ("runs:\n- {recipe: cpu/qwen3, sead: 2}", r"run 1: unknown key 'sead'; did you mean seeds"),
        ("runs:\n- {recipe: cpu/qwen33}", "did you mean cpu/qwen3"),
        (
            "runs:\n- {recipe: cpu/qwen3, grid: {optimizer.lrr: [1]}}",
            "with optimizer.lrr=1: .*mean optimizer.lr",
        ),
        ("runs:\n- {recipe: cpu/qwen3, grid: {steps: 3}}", "grid.steps must be a list"),
        ("runs:\n- {recipe: cpu/qwen3, seeds: [a]}", "seeds must be"),
        ("runs:\n- {recipe: cpu/qwen3, seeds: 1001}", "1000 is the most"),
        ("runs:\n- {recipe: cpu/qwen3, list: [3]}", "list must be"),
        ("runs:\n- {recipe: cpu/qwen3, thresholds: [minimal_steps=2]}", "did you mean minimum_steps"),
        ("runs:\n- {recipe: cpu/qwen3, notebook: 00_quikstart.ipynb}", "did you mean 00_quickstart.ipynb"),
        ("runs:\n- {recipe: cpu/qwen3}\n- {recipe: cpu/qwen3}", "name of two runs"),
        ("runs:\n- {recipe: cpu/qwen3}\n- {recipe: cpu/qwen3, name: other}", "are the same run; vary its seed"),
        ("runs:\n- cpu/qwen3", "must be a mapping"),
        ("runs: []", "names no runs"),
        ("workers: 0\nruns:\n- {recipe: cpu/qwen3}", "workers.*at least 1"),
        ("workers: many\nruns:\n- {recipe: cpu/qwen3}", "whole number"),
        ("runs:\n- {recipe: cpu/qwen3, overrides: [hf_token=hf_0123456789abcdefghijklmnopqrstuvwxyz]}", "secret|token"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(load, text, words):
    with pytest.raises(RecipeError, match=words):
        load(text)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_every_published_batch_resolves(path):
    loaded = batch.load(path)
    assert loaded.items
    assert loaded.file.title
    assert all(i.deadline_seconds for i in loaded.items)  # a night ends


def test_batches_are_no_recipes():
    assert not [name for name in params.names() if name.startswith("batches")]


def test_plain_papermill_with_the_same_parameters_is_the_same_run(load):
    [item] = load("runs:\n- {recipe: cpu/qwen3, overrides: [steps=3], grid: {learning_rate: [1e-3]}}").items
    by_hand = {"recipe": "cpu/qwen3", "steps": 3, "learning_rate": 0.001, "run_dir": "/elsewhere/it's here"}
    plan = notebook.resolve({**headless.declared(ROOT / "notebooks" / "00_quickstart.ipynb"), **by_hand})
    assert batch.fingerprint("cpu/qwen3", plan.command, Path("/elsewhere/it's here")) == item.fingerprint


def test_a_cluster_that_the_environment_names_gets_the_runs(load, monkeypatch):
    text = "runs:\n- {recipe: cpu/qwen3}\n"
    assert not load(text).items[0].on_ray
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert load(text).items[0].on_ray
    assert not load(text + "launch: local\n").items[0].on_ray
    assert not load("runs:\n- {recipe: qwen3/grpo_0_6b_vllm_a2, target: cpu}\n").items[0].on_ray


# ------------------------------------------------------------------------------------- what is there, and what it costs


def made(root: Path, item: batch.Item, name: str = "", state: str = "finished", seconds: float = 60.0, step: int = 0):
    """A run directory as a launch leaves it, but for what training writes."""
    path = root / (name or item.name)
    given = {**item.parameters, "run_dir": str(path)}
    plan = notebook.resolve({**headless.declared(item.notebook), **given})
    run = create(path, plan.composed.name, {"steps": item.steps})
    for folder in (run.attempt(1), run.path):
        told = {"argv": list(plan.command.argv), "environment": dict(plan.command.environment)}
        write_json(folder / "command.json", {**told, "verl": plan.command.verl})
        write_text(folder / "recipe.yaml", params.dump(plan.composed.recipe))
    if step:
        folder = run.path / "checkpoints" / f"global_step_{step}" / "actor"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder.parent / "data.pt").write_bytes(b"order")
        (folder.parents[1] / "latest_checkpointed_iteration.txt").write_text(str(step))
    update_state(run, state=state, attempts=[{"number": 1, "seconds": seconds, "exit_code": 0}])
    return run


def test_what_the_directories_hold_decides(load, tmp_path):
    [item] = load("runs:\n- {recipe: cpu/qwen3, overrides: [steps=4]}\n").items
    [other] = load("runs:\n- {recipe: cpu/qwen3, overrides: [steps=5]}\n").items
    root = tmp_path / "it's a batch"
    found = batch_run.look(root, item)
    assert (found.what, found.run.path.name) == ("new", "cpu-qwen3")

    made(root, item, state="failed")
    found = batch_run.look(root, item)
    assert (found.what, found.run.path.name) == ("new", "cpu-qwen3@2")  # nothing is overwritten
    made(root, item, "cpu-qwen3@2", state="stopped", step=2)
    found = batch_run.look(root, item)
    assert (found.what, found.run.path.name, found.why) == ("resumable", "cpu-qwen3@2", "stopped; goes on from step 2")
    made(root, item, "cpu-qwen3@3")
    assert batch_run.look(root, item).what == "done"

    # Other settings: said, and beside; back to the earlier ones: their run is still there.
    found = batch_run.look(root, other)
    assert (found.what, found.run.path.name) == ("new", "cpu-qwen3@4")
    assert found.why == "cpu-qwen3@3 has other settings"
    made(root, other, "cpu-qwen3@4")
    assert batch_run.look(root, item).run.path.name == "cpu-qwen3@3"

    # A moved batch is the same batch.
    moved = root.rename(tmp_path / "moved")
    assert batch_run.look(moved, other).what == "done"


def test_a_dry_run_says_how_long_and_a_cap_refuses(load, tmp_path, monkeypatch):
    text = "runs:\n- {recipe: cpu/qwen3, overrides: [devices=2, steps=4], seeds: 3}\n"
    loaded, root = load(text), tmp_path / "runs"
    with pytest.raises(RecipeError, match="is not known"):
        batch_run.refuse_cap(batch_run.forecast(loaded, root), 5.0)
    made(root, loaded.items[0], seconds=900.0)
    told = batch_run.forecast(loaded, root, workers=2)
    assert (told.spent, told.to_come, told.wall) == (0.5, 1.0, 900.0)  # 2 devices a quarter of an hour; 2 more at once
    batch_run.refuse_cap(told, 1.5)
    with pytest.raises(RecipeError, match=r"1\.5 device-hours \(0\.5 spent, 1 to come\), more than its cap of 1\.4"):
        batch_run.refuse_cap(told, 1.4)

    file = str(tmp_path / "a batch.yaml")
    done = CliRunner().invoke(main, ["batch", file, "--dir", str(root), "--dry-run", "--cap-device-hours", "1.4"])
    assert done.exit_code == 2
    assert "cpu-qwen3_seed-2  runs               15 min 00 s  1 earlier run  2        0.5" in done.output
    assert "cap of 1.4" in done.stderr
    assert sorted(p.name for p in root.iterdir()) == ["cpu-qwen3_seed-1"]  # nothing was written

    # By twice the steps, twice the time; a deadline bounds what nobody knows.
    longer = load(text.replace("steps=4", "steps=8"))
    assert batch_run.forecast(longer, root).rows[1][2].seconds == 1800.0
    bounded = load(text.replace("devices=2", "devices=1") + "deadline_minutes: 30\n")
    assert batch_run.forecast(bounded, root).rows[1][2] == batch_run.Estimate(1800.0, "its deadline")


def test_npus_of_one_machine_are_not_shared(load):
    loaded = load("runs:\n- {recipe: qwen3/grpo_0_6b_vllm_a2, seeds: 2}\n")
    with pytest.raises(RecipeError, match="takes the NPUs of this machine"):
        batch_run.forecast(loaded, Path("/nowhere"), workers=2)
    assert batch_run.forecast(loaded, Path("/nowhere")).workers == 1


def test_time_left_is_that_of_the_last_worker():
    assert batch_run.schedule([10, 20, 30, 40], 2) == 60
    assert batch_run.schedule([10, 20], 5) == 20
    assert batch_run.schedule([], 2) == 0


def loop(loaded: batch.Batch, root: Path, **more) -> batch_run.Loop:
    told = batch_run.forecast(loaded, root, 2)
    said: list[str] = []
    made = batch_run.Loop(loaded, root, told, -1, more.get("cap"), False, said.append, said.append)
    made.lines = said
    return made


def test_a_cap_counts_what_runs_once(load, tmp_path):
    """Two runs of a minute, capped at two minutes: half-way through the first one the second still fits."""
    loaded = load("runs: [{recipe: cpu/qwen3, seeds: 2}]\ndeadline_minutes: 1\n")
    one, two = loaded.items
    going = loop(loaded, tmp_path, cap=2.1 * one.devices / 60)
    began = {"attempts": [{"number": 1, "started": (datetime.now().astimezone() - timedelta(seconds=30)).isoformat()}]}
    run = made(tmp_path, one, state="running", seconds=0.0)
    update_state(run, **began)
    going.slots.append(batch_run.Slot(one, run, None, time.monotonic() - 30))
    assert going._held_back(two) == ""
    going.cap = 1.9 * one.devices / 60
    assert "more than its cap" in going._held_back(two)


def test_the_line_says_what_runs_and_how_long_it_takes_still(load, tmp_path):
    loaded = load("runs: [{recipe: cpu/qwen3, seeds: 3}]\ndeadline_minutes: 2\n")
    going = loop(loaded, tmp_path)
    slots = [batch_run.Slot(item, None, None, time.monotonic() - 60) for item in loaded.items[:2]]
    going.slots, going.queue = slots, going.queue[2:]
    slots[0].words, slots[0].left = "step 3 of 10", 30.0
    line = going.line()
    assert line.startswith(f"0 of 3 done · {loaded.items[0].name} step 3 of 10 · {loaded.items[1].name} ")
    assert line.endswith("about 2 min 30 s left")  # the third takes the place of the first, after 30 s


def test_a_run_that_cannot_be_started_or_read_does_not_end_the_others(load, tmp_path, monkeypatch):
    loaded = load("runs: [{recipe: cpu/qwen3, seeds: 2}]\n")
    going = loop(loaded, tmp_path)
    begun = []

    def begin(notebook, parameters, path, keep):
        begun.append(path)
        if len(begun) == 1:
            raise OSError("[Errno 24] Too many open files")
        made(tmp_path, loaded.items[1])
        return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)

    monkeypatch.setattr(headless, "begin", begin)
    monkeypatch.setattr(batch_run, "conclude", lambda *args, **more: 1 / 0)
    going.run()
    assert [(o.what, o.cause) for o in going.in_order()] == [
        ("failed", "OSError: [Errno 24] Too many open files"),
        ("failed", "ZeroDivisionError: division by zero"),
    ]


def test_the_summary_escapes_what_a_log_says(load, tmp_path):
    loaded = load("name: <b>&\nruns:\n- {recipe: cpu/qwen3, seeds: 3}\n")
    bad = "=cmd <script>alert(1)</script> \x1b[31m"
    run = made(tmp_path / "out", loaded.items[0])
    state = read_state(run)
    verdict = judge(metrics.of_run(run.path), state)
    outcomes = [
        batch_run.Outcome(loaded.items[0], "failed", bad, run, state, verdict),
        batch_run.Outcome(loaded.items[1], "failed", bad),
        batch_run.Outcome(loaded.items[2], "not run", "interrupted"),
    ]
    table = metrics.read(ROOT / "tests" / "data" / "verdict" / "quickstart.csv")
    curves.save(table, run.curves)
    batch_summary.write(loaded, outcomes, tmp_path / "out")
    page = (tmp_path / "out" / "summary.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.count("data:image/png;base64,") == 2  # light and dark
    assert re.search(r'<img alt="[^"]{100,}"', page)  # what the curves say, not only whose they are
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert rows[0]["cause"].startswith("'=cmd")
    assert (rows[0]["seconds"], rows[0]["directory"]) == ("60.0", "cpu-qwen3_seed-1")
    suite = tree.parse(tmp_path / "out" / "junit.xml").getroot()
    counts = {kind: suite.get(kind) for kind in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "1", "skipped": "1"}


# ------------------------------------------------------------------------------------- real papermills, kernels, ends


class Going:
    """A `recipes batch` that has been started."""

    def __init__(self, child: subprocess.Popen, root: Path) -> None:
        self.child, self.root = child, root

    def runs(self) -> list[Run]:
        return [Run(p) for p in sorted(self.root.glob("*/")) if Run(p).state_file.is_file()]

    def until(self, condition, seconds: float = 180.0) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert self.child.poll() is None, self.child.communicate()
            assert time.monotonic() < limit, "what was waited for did not happen"
            time.sleep(0.1)


@pytest.fixture
def begin(tmp_path):
    """Starts `recipes batch` on the text of a file, with the stand-in trainer, which needs no model."""
    begun = []

    book = nbformat.read(ROOT / "notebooks" / "00_quickstart.ipynb", 4)
    # Preflight takes longer than all of the rest; what is left is what a batch is about.
    book.cells = [cell for cell in book.cells if not re.search(r"notebook\.(check|judge|record)\(", cell.source)]
    nbformat.write(book, tmp_path / "quick.ipynb")

    def start(text: str, *words: str, step: float = 0.2) -> Going:
        file, root = tmp_path / "night.yaml", tmp_path / "it's a batch"
        file.write_text(f"notebook: quick.ipynb\n{text}")
        environment = {
            **os.environ,
            "RECIPES_PYTHON": str(ROOT / "tests" / "children" / "python"),
            "REAL_PYTHON": sys.executable,
            "TRAINER": "train healthy",
            "TRAINER_STEP_SECONDS": str(step),
        }
        command = [sys.executable, "-m", "recipes.cli", "batch", str(file), "--dir", str(root), *words]
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        begun.append(Going(child, root))
        return begun[-1]

    yield start
    for going in begun:
        if going.child.poll() is None:
            going.child.kill()
            going.child.communicate()
        for run in going.runs():
            launch.stop(run)


def papermills(root: Path) -> list[psutil.Process]:
    """Papermills and kernels of a batch; a kernel's working directory and parent say nothing, its parameters do."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = " ".join(each.info["cmdline"] or ())
        if "recipes.headless" in words and str(root) in words:
            found += [each, *each.children(recursive=True)]
    return found


def steps(run: Run) -> list[int]:
    return metrics.of_run(run.path).table.index.tolist()


@pytest.mark.slow
def test_a_batch_that_is_killed_goes_on_with_nothing_run_twice_and_nothing_lost(begin, tmp_path):
    """8 runs, 2 at a time, one fails for good. SIGKILL to the batch in the middle, then the same command again."""
    text = (
        "thresholds: [minimum_steps=2]\nworkers: 2\noverrides: [steps=5, 'prepare=[]']\n"
        "runs:\n- {recipe: cpu/qwen3, seeds: [1, 2, 4, 5, 6, 7, 8]}\n"
        "- {recipe: cpu/qwen3, name: broken, overrides: ['env.TRAINER_FAILS=raise', 'env.TRAINER_FAILS_AT=\"1\"']}\n"
    )
    going = begin(text, step=3.0)  # a kernel looks once a second whether its papermill is there; a busy one later

    def in_the_middle() -> bool:
        states = [read_state(run)["state"] for run in going.runs()]
        half = [run for run in going.runs() if read_state(run)["state"] == "running" and len(steps(run)) == 1]
        return states.count("finished") >= 2 and bool(half)

    going.until(in_the_middle)
    assert len([run for run in going.runs() if read_state(run)["state"] in ("running", "prepared")]) <= 2
    before = {run.path.name: read_state(run)["state"] for run in going.runs()}
    finished = [name for name, state in before.items() if state == "finished"]
    going.child.kill()
    going.child.communicate()
    limit = time.monotonic() + 60
    while (
        papermills(going.root)
        or any(processes.of_run(read_state(run)["id"]) for run in going.runs())
        or any(read_state(run)["state"] == "running" for run in going.runs())  # recorded after the last process
    ):
        assert time.monotonic() < limit, "the batch was killed, and something of it lives on"
        time.sleep(0.2)
    kept = {name: (going.root / name / "run.json").read_bytes() for name in finished}
    # Stopped (on_disconnect: stop), or not started yet when its launcher went.
    cut = {run.path.name: steps(run) for run in going.runs() if read_state(run)["state"] not in ("finished", "failed")}
    assert any(read_state(run)["state"] == "stopped" for run in going.runs())

    again = begin(text, step=0.1)
    out, err = again.child.communicate(timeout=400)
    assert again.child.returncode == 1, err  # one run is broken, and stopped nobody
    assert "7 of 8 passed, 1 failed" in out
    assert {name: (going.root / name / "run.json").read_bytes() for name in finished} == kept
    for run in again.runs():
        state, name = read_state(run), run.path.name
        if name == "broken":
            assert (state["state"], steps(run)) == ("failed", [])
            continue
        if cut.get(name) == []:  # cut off before its first checkpoint: begun afresh, in a directory beside
            assert read_state(Run(again.root / f"{name}@2"))["state"] == "finished"
            continue
        assert (state["state"], steps(run)) == ("finished", [1, 2, 3, 4, 5]), name
        # Each training was started once, or once more where it was cut off, and then went on from its checkpoint.
        starts = [run.log(n).read_text().count("argv:") for n in run.attempts]
        assert starts == [1] * len(state["attempts"]), name
        if name in cut and len(cut[name]) > 0:
            assert len(state["attempts"]) == 2, name
            assert state["attempts"][1]["from_step"] >= len(cut[name]) - 1, name
    assert len(again.runs()) == 8 + list(cut.values()).count([])

    rows = {row["run"]: row for row in csv.DictReader((again.root / "summary.csv").open())}
    assert [row["result"] for row in rows.values()].count("failed") == 1
    assert "reward function broke on <b>& $(x)" in rows["broken"]["cause"]
    suite = tree.parse(again.root / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("8", "0", "1")
    page = (again.root / "summary.html").read_text()
    assert page.count("data:image/png;base64,") >= 7
    assert "broke on <b>" not in page

    # A third time there is nothing to do but what failed for good, and a cap below what was spent refuses that too.
    third = begin(text, "--dry-run", "--cap-device-hours", "0")
    out, err = third.child.communicate(timeout=90)
    assert (third.child.returncode, out.count("finished: skipped")) == (2, 7), err
    assert "cap of 0" in err


@pytest.mark.slow
def test_an_interrupt_ends_everything_and_a_second_batch_is_refused_meanwhile(begin):
    text = "workers: 2\noverrides: [steps=50, 'prepare=[]']\nruns:\n- {recipe: cpu/qwen3, seeds: 3}\n"
    going = begin(text, step=1.0)
    going.until(lambda: sum(len(steps(run)) > 0 for run in going.runs()) == 2)
    other = begin(text)
    _, err = other.child.communicate(timeout=60)
    assert other.child.returncode == 2
    assert "is taken: a batch runs in it" in err
    going.child.send_signal(signal.SIGINT)
    out, err = going.child.communicate(timeout=120)
    assert going.child.returncode == 130, err
    assert papermills(going.root) == []
    for run in going.runs():
        state = read_state(run)
        assert state["state"] == "stopped"
        assert processes.of_run(state["id"]) == []
        cells = json.loads((run.path / "notebook.ipynb").read_text())["cells"]
        assert "The run is stopped" in "".join(cells[0]["source"])
    assert "0 of 3 passed, 2 failed, 1 not run" in out
    suite = tree.parse(going.root / "junit.xml").getroot()
    assert (suite.get("errors"), suite.get("skipped")) == ("2", "1")


# -------------------------------------------------------------------------------------------------------- nightly CI


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("nightly-*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_nightly_gates_on_the_exit_code_of_a_batch_alone(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps_of = [step for job in jobs.values() for step in job["steps"]]
    scripts = [step["run"] for step in steps_of if "run" in step]
    calls = [line for script in scripts for line in script.splitlines() if "recipes batch" in line]
    assert ["--dry-run" in line for line in calls] == [True, False]
    for script in scripts:
        assert not {"|", "||", "grep", "tee", "sleep"} & set(script.split()), script
    assert not any(step.get("continue-on-error") for step in steps_of)
    [kept] = [step for step in steps_of if "upload-artifact" in step.get("uses", "")]
    assert kept["if"] == "always()"
    assert shlex.split(calls[0])[:-1] == shlex.split(calls[1])  # what was announced is what runs
    [named] = {value for job in jobs.values() for key, value in job["env"].items() if key == "BATCH"}
    assert batch.find(re.search(r"'(\w+)'", named)[1]).is_file()


def test_the_workflows_are_what_github_takes():
    """By GitHub's own schema of workflows, which check-jsonschema brings along."""
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
