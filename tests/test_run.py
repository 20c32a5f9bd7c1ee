"""A run: one directory, a state that is right however it ends, and no process left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from recipes import live, params
from recipes.command import build
from recipes.errors import RecipeError
from recipes.run import causes, directory, launch, processes, supervisor
from recipes.run.directory import create, default_path, open_run, read_state, update_state, write_json

CHILDREN = Path(__file__).parent / "children"


def plan(run_dir: Path, does: str):
    """A composed recipe and its command, with our stand-in as the entry in place of verl."""
    composed = params.compose("quickstart/grpo", run_dir=str(run_dir))
    command = build(composed)
    environment = {**command.environment, "PYTHONPATH": str(CHILDREN), "TRAINER": does}
    return composed, dataclasses.replace(command, entry="trainer", environment=environment)


@pytest.fixture
def started(tmp_path):
    """Starts runs and makes sure that none of their processes outlives the test."""
    runs = []

    def start(does: str, **options):
        run = launch.start(*plan(tmp_path / "a run's dir", does), **options)
        runs.append(run)
        return run

    yield start
    for run in runs:
        with contextlib.suppress(RecipeError):
            launch.stop(run)


def until(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "what was waited for did not happen"
        time.sleep(0.05)


def living(run) -> list[psutil.Process]:
    return processes.of_run(read_state(run)["id"])


def test_a_run_that_ends_by_itself_is_finished(started):
    run = started("metrics")
    state = launch.wait(run, timeout=20)
    assert (state["state"], state["cause"]) == ("finished", "")
    assert state["attempts"][0]["exit_code"] == 0
    assert "model_engine=megatron" in run.log().read_text()
    assert [p.name for p in (run.path / "command.json", run.path / "recipe.yaml", run.path / "verl.yaml") if p.exists()]
    assert json.loads(run.command_file.read_text())["argv"][3] == "trainer"
    assert live.look(run).step == 2


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("raise", "exit code 1: RuntimeError: reward function broke on <b>& $(x)"),
        ("exit3", "exit code 3"),
        ("die", "killed by SIGKILL"),
    ],
)
def test_a_run_that_fails_says_how_in_words(started, does, cause):
    state = launch.wait(started(does), timeout=20)
    assert (state["state"], state["cause"]) == ("failed", cause)


@pytest.mark.parametrize("does", ["sleep", "sleep child", "deaf sleep child"])
def test_stop_ends_everything_of_the_run_and_nothing_else(started, does):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    run = started(does, grace_seconds=1.0)
    until(lambda: len(living(run)) == 1 + ("child" in does))
    state = launch.stop(run)
    assert state["state"] == "stopped"
    assert state["cause"].startswith("stopped by request")
    assert living(run) == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_what_a_finished_training_leaves_behind_is_ended(started):
    run = started("child")
    assert launch.wait(run, timeout=20)["state"] == "finished"
    assert living(run) == []


@pytest.fixture
def shared_files():
    """Paths in /dev/shm that are gone after the test: of a shared memory object, another, and one in a folder."""
    folder = Path(processes.SHARED_MEMORY) / f"recipes-test-{os.getpid()}"
    folder.mkdir()
    paths = [Path(f"{folder}.old"), Path(f"{folder}.new"), folder / "model.safetensors"]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)
    folder.rmdir()


def test_only_the_shared_memory_a_run_made_is_swept(shared_files):
    """A model in memory is mapped by a run as its own segments are; it stays."""
    old, new, staged = shared_files
    old.write_bytes(b"data of somebody else")
    time.sleep(0.05)  # more than the kernel's tick, which file times are counted in
    since = time.time()
    time.sleep(0.05)
    new.write_bytes(b"made by the run")
    staged.write_bytes(b"weights")
    code = (
        "import mmap, sys; files = [open(path, 'rb') for path in sys.argv[1:]];"
        "maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files];"
        "print('mapped', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, *map(str, shared_files)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "mapped\n"
    mapped = processes.shared_memory([psutil.Process(child.pid)])
    assert mapped == {str(old), str(new)}
    assert processes.sweep(mapped, since) == []  # it is still in use
    child.communicate("")
    assert processes.sweep({*mapped, str(staged)}, since) == [str(new)]
    assert old.exists()
    assert staged.exists()


def test_a_deadline_ends_the_run_and_says_so(started):
    state = launch.wait(started("sleep", deadline_seconds=1.0), timeout=30)
    assert (state["state"], state["cause"]) == ("stopped", "deadline of 1 s passed")


def test_a_deadline_does_not_count_while_a_job_waits_for_its_devices(tmp_path):
    """A job of a cluster is submitted, and its record written, when the devices are there."""
    run = create(tmp_path / "run", "r", {"deadline_seconds": 1.0})
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    write_json(run.attempt(1) / "command.json", {"argv": waits, "supervised": waits, "environment": {}})
    launch.start_supervisor(run, 1)
    assert launch.wait(run, timeout=3.0)["state"] == "running"
    write_json(run.attempt(1) / "job.json", {})
    state = launch.wait(run, timeout=30)
    assert (state["state"], state["cause"]) == ("stopped", "deadline of 1 s passed")


def launcher(tmp_path, does, rule) -> subprocess.Popen:
    """Another process that starts a run and then does nothing, as a kernel between two cells."""
    code = f"""
        import sys, time; sys.path[:0] = [{str(Path(__file__).parent)!r}]
        from pathlib import Path
        from test_run import plan
        from recipes.run import launch
        print(launch.start(*plan(Path({str(tmp_path / "run")!r}), {does!r}), on_disconnect={rule!r}).path, flush=True)
        time.sleep(600)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


def test_a_run_is_stopped_when_its_launcher_is_killed(tmp_path):
    kernel = launcher(tmp_path, "sleep child", "stop")
    run = open_run(kernel.stdout.readline().strip())
    until(lambda: len(living(run)) == 2)
    kernel.kill()
    kernel.wait()
    state = launch.wait(run, timeout=30)
    assert state["state"] == "stopped"
    assert "went away" in state["cause"]
    assert living(run) == []


def test_a_run_goes_on_without_its_launcher_if_it_says_so(tmp_path):
    kernel = launcher(tmp_path, "sleep", "continue")
    run = open_run(kernel.stdout.readline().strip())
    kernel.kill()
    kernel.wait()
    time.sleep(4 * supervisor.LOOK)
    assert read_state(run)["state"] == "running"
    assert len(living(run)) == 1
    assert launch.stop(run)["state"] == "stopped"


def test_a_killed_supervisor_leaves_no_training_and_the_run_is_lost(started):
    run = started("sleep child")
    until(lambda: len(living(run)) == 2)
    os.kill(read_state(run)["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: read_state(run)["state"] == "lost")
    state = launch.stop(run)
    assert state["state"] == "lost"
    assert "supervisor is gone" in json.loads(run.state_file.read_text())["cause"]
    assert living(run) == []


def test_a_clock_that_is_set_right_makes_no_run_lost(started, monkeypatch):
    """The kernel moves the boot time it reports with the clock: seen by a run that was `lost` while it ran on."""
    run = started("sleep")
    reported = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: reported + 1)
    assert read_state(run)["state"] == "running"
    assert len(living(run)) == 1


def test_a_run_that_never_starts_is_lost_and_can_be_stopped(tmp_path, monkeypatch):
    """Its launcher was killed between writing it down and the supervisor's first word."""
    run = create(tmp_path / "run", "r", {})
    write_json(run.attempt(1) / "command.json", {"argv": ["true"], "environment": {}})
    assert read_state(run)["state"] == "prepared"
    monkeypatch.setattr(launch, "START_SECONDS", 0.2)
    state = launch.stop(run)
    assert (state["state"], state["cause"]) == ("lost", directory.NEVER_STARTED)
    late = subprocess.run([sys.executable, "-m", "recipes.run.supervisor", str(run.path)], stdout=-1, text=True)
    assert late.returncode == 1
    assert "attempt 1 is lost by now: nothing was started" in late.stdout
    assert json.loads(run.state_file.read_text())["state"] == "lost"


def test_a_run_that_is_long_about_to_start_is_lost_to_all_who_look(tmp_path):
    run = create(tmp_path / "run", "r", {"created": "2026-01-01T00:00:00+00:00"})
    assert launch.wait(run, timeout=0.0)["state"] == "lost"
    assert next(live.follow(run)).ended
    update_state(run, heartbeat=directory.now())  # the next attempt of an old run
    assert read_state(run)["state"] == "prepared"


def test_a_supervisor_that_starts_too_slowly_is_ended(tmp_path, monkeypatch):
    """What was said to have failed must not train later on."""
    monkeypatch.setattr(launch, "START_SECONDS", 0.0)
    with pytest.raises(RecipeError, match="did not start: not within 0 s"):
        launch.start(*plan(tmp_path / "run", "sleep"))
    run = open_run(tmp_path / "run")
    ours = [p.cmdline() for p in psutil.Process().children() if str(run.path) in p.cmdline()]
    assert [words for words in ours if "recipes.run.supervisor" in words] == []
    state = read_state(run)
    assert (state["state"], state["cause"]) == ("failed", "the supervisor did not start: not within 0 s")


def test_a_training_that_cannot_be_started_is_a_failed_run(tmp_path):
    run = create(tmp_path / "run", "r", {})
    write_json(run.attempt(1) / "command.json", {"argv": ["/no/such/python"], "environment": {}})
    assert subprocess.run([sys.executable, "-m", "recipes.run.supervisor", str(run.path)], timeout=20).returncode == 1
    state = read_state(run)
    assert state["state"] == "failed"
    assert "could not be started" in state["cause"]


def test_two_starts_in_one_directory_give_one_run(tmp_path):
    first = create(tmp_path / "run", "r", {})
    before = first.state_file.read_bytes()
    with pytest.raises(RecipeError, match="already holds a run"):
        create(tmp_path / "run", "r", {})
    assert first.state_file.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="needs a place nobody can write")
def test_a_run_directory_that_cannot_be_written_is_named():
    with pytest.raises(RecipeError, match="cannot be written"):
        create(Path("/proc/sys/run"), "r", {})


def test_a_path_that_is_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"file.*cannot be written"):
        create(tmp_path / "file" / "run", "r", {})
    with pytest.raises(RecipeError, match="no run directory"):
        open_run(tmp_path)


def test_two_default_paths_in_one_second_differ(tmp_path):
    assert default_path(tmp_path, "a/b") != default_path(tmp_path, "a/b")


def test_a_reader_never_sees_half_a_state(tmp_path):
    run = create(tmp_path / "run", "r", {})
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(run.path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while writer.poll() is None:
        assert read_state(run)["recipe"] == "r"
    assert writer.returncode == 0, writer.stderr.read()
    assert list(run.path.glob(".*")) == []


_WRITE = """
import sys
from pathlib import Path
from recipes.run.directory import Run, update_state
for n in range(300): update_state(Run(Path(sys.argv[1])), filler="x" * 20_000, n=n)
"""


class Flaky:
    """Path.read_text of run.json as a network file system may have it: fails `times` times, then reads."""

    def __init__(self, monkeypatch, times: int) -> None:
        self.left, real = times, Path.read_text

        def read_text(path, *args, **kwargs):
            if path.name == "run.json" and self.left > 0:
                self.left -= 1
                raise OSError(116, "Stale file handle")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)


def test_a_read_that_fails_ends_neither_the_watching_nor_the_waiting(tmp_path, monkeypatch):
    run = create(tmp_path / "run", "r", {})
    update_state(run, state="finished")
    for follows in (lambda: next(live.follow(run)).state, lambda: launch.wait(run)):
        flaky = Flaky(monkeypatch, 1)
        assert follows()["state"] == "finished"
        assert flaky.left == 0
    Flaky(monkeypatch, 1000)
    with pytest.raises(RecipeError, match="Stale file handle"):
        launch.wait(run, timeout=0.5)


def test_a_supervisor_that_cannot_read_or_write_its_state_for_a_while_goes_on(tmp_path, monkeypatch):
    """What it says later is all of it: alarms too, which nothing but its memory holds by then."""
    run = create(tmp_path / "run", "r", {"alarms": [{"sentence": "of attempt 0"}]})
    write_json(run.attempt(1) / "command.json", {"argv": [], "environment": {}})
    owner = supervisor.Supervisor(run, 1)
    Path(owner.ray_folder).rmdir()
    Flaky(monkeypatch, 1)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert not owner._update(state="running", heartbeat="then")
        owner._put_on_record("it hangs")
    assert owner._update(heartbeat="now")
    monkeypatch.undo()
    state = json.loads(run.state_file.read_text())
    assert (state["state"], state["heartbeat"]) == ("running", "now")
    assert [alarm["sentence"] for alarm in state["alarms"]] == ["of attempt 0", "it hangs"]


def test_a_full_disk_keeps_the_old_state(tmp_path, monkeypatch):
    run = create(tmp_path / "run", "r", {})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        update_state(run, state="running")
    monkeypatch.undo()
    assert read_state(run)["state"] == "prepared"
    assert list(run.path.glob(".*")) == []


def test_the_last_exception_of_a_log_is_the_cause(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "\x1b[36m(TaskRunner pid=1)\x1b[0m ValueError: first\n"
        "(WorkerDict pid=2) ray.exceptions.RayTaskError(KeyError): not this shape\n"
        "torch.cuda.OutOfMemoryError: the last one\nend\n"
    )
    assert causes.last_exception(log) == "torch.cuda.OutOfMemoryError: the last one"


def test_an_actor_that_raised_as_it_was_made_is_called_by_what_it_raised(tmp_path):
    log, died = tmp_path / "log", "ray.exceptions.ActorDiedError: The actor died"
    made = f"{died} because of an error raised in its creation task, ray::WorkerDict.__init__() (pid=1)\n"
    log.write_text(f'{made}  File "a.py", line 1\nValueError: heads\n(TaskRunner pid=2) {made}')
    assert causes.last_exception(log) == "ValueError: heads"
    log.write_text(f"ValueError: of another time\n{died} unexpectedly before finishing this task.\n")
    assert causes.last_exception(log).startswith(f"{died} unexpectedly")
    log.write_text(made)
    assert causes.last_exception(log) == made.strip()


def test_an_end_is_put_in_words_whatever_the_signal_and_though_the_directory_is_gone(tmp_path):
    gone = tmp_path / "gone" / "train.log"
    assert causes.in_words(-35, gone) == "killed by signal 35"  # real-time signals have no names
    assert causes.in_words(-9, gone) == "killed by SIGKILL"
    assert causes.in_words(2, gone) == "exit code 2"


def test_a_log_line_is_shown_clean_and_short(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\rsecond\x1b[31m red\x1b[0m\x00\n" + b"x" * 500 + b"\nbad \xff utf8\n\n")
    shown = live.tail(log)
    assert shown[0:2] == ("first", "second red")
    assert len(shown[2]) == live.LINE_WIDTH
    assert live.tail(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_read_as_people_say_them(seconds, words):
    assert live.duration(seconds) == words


def test_time_left_comes_from_the_steps_and_not_from_the_first(tmp_path):
    run = create(tmp_path / "run", "r", {"steps": 10})
    times = [60.0, 2.0, 4.0]
    lines = [json.dumps({"step": n + 1, "data": {"timing_s/step": t}}) for n, t in enumerate(times)]
    run.metrics().write_text("\n".join(lines) + "\n")
    moment = live.look(run)
    assert (moment.step, moment.left) == (3, 3.0 * 7)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    write_json(tmp_path / "a" / "x.json", {"b": "é"})
    assert json.loads((tmp_path / "a" / "x.json").read_text()) == {"b": "é"}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a" / "x.json", {"b": object()})
    assert json.loads((tmp_path / "a" / "x.json").read_text()) == {"b": "é"}
