"""Faults injected into runs that are real but for verl: notebook, papermill, kernel, command line, supervisor, disk.

Each leaves the right state and cause, no process, no file in shared memory or the temporary folder, and every
metric of a finished step. The table in notebooks/book/when_it_fails.md is what was seen here;
RECIPES_WRITE_TABLES=1 writes it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from recipes import metrics
from recipes.errors import RecipeError
from recipes.run import processes, resume
from recipes.run.directory import Run, open_run, read_state

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"
STEPS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Model and data of the smoke recipe, made once."""
    place = tmp_path_factory.mktemp("work")
    words = [sys.executable, "-m", "recipes.cli", "prepare", "cpu/qwen3"]
    subprocess.run(words, check=True, env=os.environ | {"RECIPES_WORK": str(place)}, capture_output=True)
    return place


@pytest.fixture(scope="module")
def seen():
    """Rows of the table: fault → (state, cause, steps kept, how the run went on)."""
    return {}


class Started:
    """A command line or papermill that has a run going."""

    def __init__(self, child: subprocess.Popen, run: Run) -> None:
        self.child, self.run = child, run

    def until_step(self, step: int, seconds: float = 300.0) -> None:
        limit = time.monotonic() + seconds
        while self.steps() < step:
            assert self.child.poll() is None, self.child.communicate()
            assert time.monotonic() < limit, self.child.kill()
            time.sleep(0.05)

    def steps(self) -> int:
        return len(metrics.read_jsonl(self.run.metrics(1)).table)

    def papermill(self) -> psutil.Process:
        """papermill's own process, below the command line that follows it."""
        below = psutil.Process(self.child.pid).children()
        return next(p for p in below if "recipes.headless" in p.cmdline())

    def kernel(self) -> psutil.Process:
        """The kernel papermill has started; what it forks itself for a moment carries the same command line."""
        below = psutil.Process(self.child.pid).children(recursive=True)
        return min((p for p in below if "ipykernel" in " ".join(p.cmdline())), key=lambda p: p.create_time())

    def end(self, seconds: float = 300.0) -> tuple[str, str]:
        out, err = self.child.communicate(timeout=seconds)
        return out, err


@pytest.fixture
def begin(tmp_path, work):
    """Starts `recipes run` or a notebook with the stand-in trainer: begin("train", fails="raise", at=4)."""
    begun = []

    def start(
        does: str = "train", *words: str, run_dir: Path | None = None, notebook: bool = False, step: float = 0.3, **env
    ):
        place = run_dir or tmp_path / "a run's dir"
        fails, at = env.pop("fails", ""), env.pop("at", 0)
        environment = {
            **os.environ,
            "RECIPES_WORK": str(work),
            "RECIPES_PYTHON": str(ROOT / "tests" / "children" / "python"),
            "REAL_PYTHON": sys.executable,
            "TRAINER": does,
            "TRAINER_FAILS": fails,
            "TRAINER_FAILS_AT": str(at),
            "TRAINER_STEP_SECONDS": str(step),
            **env,
        }
        command = [sys.executable, "-m", "recipes.cli"]
        if notebook:
            command += ["notebook", str(NOTEBOOK), "-p", "recipe", "cpu/qwen3", "-p", "steps", str(STEPS)]
            command += ["--run-dir", str(place), *words]
        elif words and words[0] == "--resume":
            command += ["run", *words]
        else:
            command += ["run", "cpu/qwen3", f"steps={STEPS}", "--run-dir", str(place), *words]
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started = Started(child, Run(place))
        begun.append(started)
        return started

    yield start
    for started in begun:
        if started.child.poll() is None:
            started.child.kill()
            started.child.communicate()
        if started.run.state_file.is_file():
            from recipes.run import launch

            launch.stop(started.run)


def settled(run: Run, seconds: float = 120.0) -> dict:
    """The state of a run once it has ended and nothing of it is left."""
    limit = time.monotonic() + seconds
    while True:
        state = read_state(run)
        ended = state["state"] not in ("prepared", "running")
        if ended and not processes.of_run(state["id"]) and not Path(state["ray_folder"]).exists():
            return json.loads(run.state_file.read_text())
        left = processes.of_run(state["id"])
        assert time.monotonic() < limit, (state["state"], left, state.get("ray_folder"))
        time.sleep(0.1)


def goes_on(begin, run: Run) -> str:
    """Resume a run to its end; every step of its curve is there once, and says which attempt made it."""
    kept = metrics.of_run(run.path).table
    again = begin("train", "--resume", str(run.path), run_dir=run.path, step=0.05)
    out, err = again.end()
    assert again.child.returncode in (0, 1), err
    state = settled(run)
    assert state["state"] == "finished", err
    found = metrics.of_run(run.path)
    assert found.table.index.tolist() == list(range(1, STEPS + 1))
    # Nothing an earlier attempt has written is lost: its file is as it was, and its steps are in the curve.
    assert set(kept.index) <= set(found.table.index)
    first = state["attempts"][1].get("from_step", 0) + 1
    assert all(found.attempts[step] == (1 if step < first else 2) for step in found.table.index)
    assert f"go on after step {first - 1}" in out or first == 1
    return f"attempt 2 from step {first}"


# ------------------------------------------------------------ faults of a training

FAULTS = {
    "the trainer raises": ("raise", "failed", "exit code 1: RuntimeError: reward function broke on <b>& $(x)"),
    "the trainer is killed with signal 9": ("die", "failed", "killed by SIGKILL"),
    "the trainer exits with a code of its own": ("exit3", "failed", "exit code 3"),
    "a line of metrics is cut off and the trainer dies": ("broken", "failed", "killed by SIGKILL"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_that_fails(begin, seen, fault):
    how, state, cause = FAULTS[fault]
    if how == "broken":  # the line is written, then the process goes
        started = begin("train", fails=how, at=4, step=0.3)
        started.until_step(3)
        limit = time.monotonic() + 30
        while b'{"critic/rew\n' not in started.run.metrics(1).read_bytes():
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.kill(read_state(started.run)["attempts"][0]["process"]["pid"], signal.SIGKILL)
    else:
        started = begin("train child", fails=how, at=4, step=0.05)
    out, _ = started.end()
    assert started.child.returncode == 1
    ended = settled(started.run)
    assert (ended["state"], ended["cause"]) == (state, cause)
    found = metrics.of_run(started.run.path)
    assert {1, 2, 3} <= set(found.table.index)
    assert [b.line for b in found.broken] == ([4] if how == "broken" else [])
    assert "The run may not be believed" in out
    seen[fault] = (ended["state"], ended["cause"], len(found.table), goes_on(begin, started.run))


def test_a_training_that_hangs(begin, seen):
    limits = ("supervision.hang_minutes=0.05", "supervision.hang_factor=2", "supervision.on_hang=stop")
    started = begin("train child", *limits, fails="hang", at=4, step=0.2)
    started.end()
    ended = settled(started.run)
    assert ended["state"] == "failed"
    assert re.match(
        r"it hangs: no step for \d+ s; the median of the latest steps is 0\.\d s; the stacks of [12] ", ended["cause"]
    )
    (stacks,) = (started.run.attempt(1) / "stacks").iterdir()
    assert "fail (" in stacks.read_text()  # where the stand-in hangs
    cause = re.sub(r"\d+(\.\d+)? s", "… s", ended["cause"].partition("; the stacks")[0])
    seen["no step for too long (supervision.on_hang: stop)"] = (
        "failed",
        f"{cause}; the stacks of 2 processes are in attempts/1/stacks/…",
        3,
        goes_on(begin, started.run),
    )


def test_a_training_that_hangs_for_a_while_goes_on_with_an_alarm(begin):
    limits = ("supervision.hang_minutes=0.05", "supervision.hang_factor=2")
    started = begin("train", *limits, fails="pause", at=4, step=0.2)
    out, err = started.end()
    ended = settled(started.run)
    assert (ended["state"], ended["cause"]) == ("finished", ""), err
    assert ended["alarms"][0]["sentence"].startswith("no step for ")
    assert "warn  HANG: " in out


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(begin, seen, small_disk):
    started = begin("train", fails="full", at=4, step=0.05, run_dir=small_disk / "run")
    started.end()
    ended = settled(started.run)
    assert ended["state"] == "failed"
    assert "No space left on device" in ended["cause"] or "is full" in ended["cause"]
    assert {1, 2, 3} <= set(metrics.of_run(started.run.path).table.index)
    (small_disk / "run" / "filler").unlink()
    seen["the disk is full"] = (
        "failed",
        "exit code 1: OSError: [Errno 28] No space left on device",
        3,
        goes_on(begin, started.run),
    )


def test_the_kernel_kills_for_memory(begin, seen):
    """A control group of 64 MB: a real out-of-memory kill, read from the kernel's own count."""
    group = Path("/sys/fs/cgroup/memory") / f"recipes-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as fault:
        pytest.skip(f"this user may not make a control group: {fault}")
    try:
        started = begin("train", fails="memory", at=4, step=0.05, TRAINER_GROUP=str(group / "cgroup.procs"))
        started.end()
        ended = settled(started.run)
    finally:
        group.rmdir()
    assert ended["state"] == "failed"
    assert (
        ended["cause"]
        == "killed by SIGKILL; the kernel's out-of-memory killer ended 1 processes of this machine meanwhile"
    )
    seen["the kernel's out-of-memory killer"] = ("failed", ended["cause"], 3, goes_on(begin, started.run))


# ----------------------------------------------------------------------------------- faults of those who watch over it


def test_the_supervisor_is_killed(begin, seen, tmp_path):
    shared = Path("/dev/shm") / f"recipes-test-{os.getpid()}"
    started = begin("train shm child sleep", TRAINER_SHM=str(shared), step=0.3)
    started.until_step(STEPS)
    limit = time.monotonic() + 120
    while str(shared) not in processes.recorded(started.run.path)[1]:  # written down with a heartbeat
        assert time.monotonic() < limit
        time.sleep(0.1)
    os.kill(read_state(started.run)["supervisor"]["pid"], signal.SIGKILL)
    started.end()
    assert started.child.returncode == 1
    ended = settled(started.run)
    assert (ended["state"], ended["cause"]) == ("lost", "the supervisor is gone without a word (killed)")
    assert not shared.exists()
    assert len(metrics.of_run(started.run.path).table) == STEPS


def test_the_supervisor_is_killed_in_mid_run(begin, seen):
    started = begin("train child", step=5.0)
    started.until_step(2)
    os.kill(read_state(started.run)["supervisor"]["pid"], signal.SIGKILL)
    started.end()
    ended = settled(started.run)
    assert (ended["state"], ended["cause"]) == ("lost", "the supervisor is gone without a word (killed)")
    kept = len(metrics.of_run(started.run.path).table)
    assert kept >= 2
    how = goes_on(begin, started.run)
    seen["the supervisor is killed with signal 9"] = ("lost", ended["cause"], "all", re.sub(r"\d+$", "…", how))


SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


def test_the_command_line_of_a_notebook_is_asked_to_end(begin):
    """By SIGTERM, which it takes as it takes Ctrl-C."""
    started = begin("train child", notebook=True, step=5.0)  # long enough to be met in mid-run
    started.until_step(2)
    started.child.send_signal(signal.SIGTERM)
    _, err = started.end()
    assert started.child.returncode == 2
    assert "interrupted" in err
    ended = settled(started.run)
    assert ended["state"] == "stopped"
    said(started.run, ended)


@pytest.mark.parametrize("name", SIGNALS)
def test_papermill_is_asked_to_end(begin, seen, name):
    started = begin("train child", notebook=True, step=5.0)  # long enough to be met in mid-run
    started.until_step(2)
    started.papermill().send_signal(SIGNALS[name])
    _, err = started.end()
    assert started.child.returncode != 0, err
    ended = settled(started.run)
    assert ended["state"] == "stopped"
    said(started.run, ended)
    how = goes_on(begin, started.run)
    seen[f"{name} to papermill"] = ("stopped", ended["cause"].partition(";")[0], "all", re.sub(r"\d+$", "…", how))


def test_the_kernel_is_killed(begin, seen):
    started = begin("train child", notebook=True, step=5.0)  # long enough to be met in mid-run
    started.until_step(2)
    started.kernel().kill()
    started.end()
    assert started.child.returncode != 0
    ended = settled(started.run)
    assert ended["state"] == "stopped"
    assert ended["cause"].startswith("the notebook, papermill or shell that launched it went away")
    said(started.run, ended)
    how = goes_on(begin, started.run)
    seen["the kernel is killed with signal 9"] = (
        "stopped",
        ended["cause"].partition(";")[0],
        "all",
        re.sub(r"\d+$", "…", how),
    )


def test_the_kernel_is_killed_and_the_run_goes_on(begin, seen):
    started = begin("train child", "-p", "on_disconnect", "continue", notebook=True, step=2.0)
    started.until_step(2)
    started.kernel().kill()
    started.end()
    assert read_state(started.run)["state"] in ("running", "finished")
    # Running the notebook again attaches: one attempt, one run.
    again = begin("train", "-p", "on_disconnect", "continue", notebook=True, run_dir=started.run.path)
    again.end()
    ended = settled(started.run)
    assert (ended["state"], len(ended["attempts"])) == ("finished", 1)
    assert metrics.of_run(started.run.path).table.index.tolist() == list(range(1, STEPS + 1))
    seen["the kernel is killed, on_disconnect: continue"] = (
        "finished",
        "",
        STEPS,
        "running the notebook again attaches",
    )


def said(run: Run, state: dict) -> None:
    """The executed notebook says what the run says."""
    book = nbformat.read(run.path / "notebook.ipynb", 4)
    assert book.metadata["recipes"]["state"] == state["state"]
    assert book.metadata["papermill"]["exception"] is True
    assert book.cells[0].source.startswith(f"The run is {state['state']}")
    code = {c.source: c.metadata["papermill"]["status"] for c in book.cells if c.cell_type == "code"}
    assert code["notebook.watch(run)"] == "failed"
    assert code["notebook.judge(run)"] == code["notebook.record(run)"] == "pending"


def test_two_starts_in_one_directory(begin, seen, tmp_path):
    first, second = begin("train", step=0.3), begin("train", step=0.3)
    codes = sorted(((s.end()[1], s.child.returncode) for s in (first, second)), key=lambda pair: pair[1])
    assert [code for _, code in codes] in ([0, 2], [1, 2])
    assert "already holds a run" in codes[1][0]
    ended = settled(first.run)
    assert (ended["state"], len(ended["attempts"])) == ("finished", 1)
    seen["two starts in one directory"] = ("finished", "", STEPS, "the second is refused; exit code 2")


def test_two_resume_at_once(begin):
    started = begin("train", fails="raise", at=3, step=0.05)
    started.end()
    two = [begin("train", "--resume", str(started.run.path), run_dir=started.run.path, step=0.3) for _ in "12"]
    ends = [s.end() for s in two]
    assert sum("finished" in out for out, _ in ends) >= 1
    ended = settled(started.run)
    assert (ended["state"], len(ended["attempts"])) == ("finished", 2)
    assert sorted(s.child.returncode for s in two)[1] == 2


def test_a_run_that_ended_is_not_resumed_by_accident(begin):
    started = begin("train", step=0.05)
    started.end()
    run = open_run(started.run.path)
    with pytest.raises(RecipeError, match=r"has made all its 6 steps \(trainer\.steps\)"):
        resume.plan(run)


# ------------------------------------------------------------ the table


def test_the_table_in_the_book_is_what_was_seen(seen, faults_in_the_book):
    """Where this user may not mount a disk or make a control group, the rows of those two are not looked at."""
    rows = {
        f"| {fault} | {state} | {f'`{cause}`' if cause else '–'} | {kept} | {how} |"
        for fault, (state, cause, kept, how) in seen.items()
    }
    faults_in_the_book("faults: written by tests/test_faults.py", rows, 13)
