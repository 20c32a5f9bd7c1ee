"""A run as a job of a cluster: the same directory, states and words as here, on a real Ray of three nodes."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from recipes import cluster as places
from recipes import notebook, params
from recipes.command import EXTERNAL_MODULES, build
from recipes.errors import RecipeError
from recipes.run import cluster as clusters
from recipes.run import launch, processes, ray_job
from recipes.run.directory import create, read_state, update_state, write_json

CHILDREN = Path(__file__).resolve().parents[1] / "children"


@pytest.fixture(autouse=True)
def _no_cluster_of_the_developer(monkeypatch):
    for name in (*places.ADDRESSES, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


def until(condition, seconds=180.0):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "what was waited for did not happen"
        time.sleep(0.2)
    return found


# ------------------------------------------------------------------------------------------------ what needs no cluster


def node(ip, devices=0, state="ALIVE", why=None, used=0):
    resources = {"NPU": float(devices), "CPU": 8.0} if devices else {"CPU": 8.0}
    told = {"node_id": ip, "node_ip": ip, "node_name": ip, "state": state, "state_message": why, "used": used}
    return told | {"resources_total": resources}


def test_missing_nodes_are_named():
    nodes = [node("10.0.0.1", 16), node("10.0.0.2", 8), node("10.0.0.9"), node("10.0.0.3", 16, "DEAD", "no heartbeat")]
    plan = {"resource": "NPU", "wanted": [[4, 16]], "nodes": ["10.0.0.1", "10.0.0.3", "10.0.0.4"]}
    missing, said = ray_job.survey(nodes, plan)
    assert missing == 3
    assert said == (
        "1 of 4 nodes are up: 10.0.0.1 (16 NPU); with too few: 10.0.0.2 (8); without NPU: 10.0.0.9; "
        "3 with 16 NPU are missing: 10.0.0.3, dead; 10.0.0.4"
    )
    _, said = ray_job.survey(nodes, {**plan, "nodes": []})
    assert said.endswith("missing: 10.0.0.3, dead (no heartbeat)")
    back = [*nodes, node("10.0.0.3", 16)]
    assert ray_job.survey(back, {**plan, "nodes": []})[1].endswith("2 with 16 NPU are missing")


def test_devices_of_others_are_waited_for():
    plan = {"resource": "NPU", "wanted": [[2, 16]], "nodes": []}
    missing, said = ray_job.survey([node("10.0.0.1", 16), node("10.0.0.2", 16, used=16)], plan)
    assert missing == 1
    assert said == "1 of 2 nodes are up: 10.0.0.1 (16 NPU); in use: 10.0.0.2 (16 of 16); 1 with 16 NPU is missing"


@pytest.mark.parametrize(
    ("devices", "wanted", "missing"),
    [
        ([16, 16], [[2, 16]], 0),
        ([16], [[2, 8]], 0),  # a node of 16 holds two of 8
        ([8, 8], [[1, 16]], 1),  # and two of 8 no 16: a rank's neighbours must be on its node
        ([16, 8], [[1, 8], [1, 16]], 0),  # trainer and rollout of different sizes
        ([], [[3, 1]], 3),
    ],
)
def test_devices_are_counted_node_by_node(devices, wanted, missing):
    nodes = [node(f"10.0.0.{i}", count) for i, count in enumerate(devices)]
    assert ray_job.survey(nodes, {"resource": "NPU", "wanted": wanted, "nodes": []})[0] == missing


def test_the_address_is_the_recipes_then_rays_own_variables():
    def address(*overrides, **environment):
        return places.address(params.compose("cpu/qwen3", ["launch=ray", *overrides]).recipe, environment)

    assert address("ray_address=http://head:8265", RAY_ADDRESS="10.0.0.1:6379") == "http://head:8265"
    assert address(RAY_ADDRESS="10.0.0.1:6379", RAY_API_SERVER_ADDRESS="http://a:1") == "http://a:1"
    assert address(RAY_ADDRESS="10.0.0.1:6379") == "10.0.0.1:6379"
    with pytest.raises(RecipeError, match=r"set ray_address .* http://head:8265"):
        address()
    for wrong in ("http://", "ftp://head", "http://head:99999", "head:port", "10.0.0.1"):
        with pytest.raises(RecipeError, match="no address of a cluster"):
            address(f"ray_address='{wrong}'")
    with pytest.raises(RecipeError, match="RAY_AUTH_TOKEN"):
        address(RAY_ADDRESS="http://me:hunter2@head:8265")


def test_a_run_without_an_address_leaves_no_directory(tmp_path):
    composed = params.compose("cpu/qwen3", ["launch=ray"], run_dir=str(tmp_path / "run"))
    with pytest.raises(RecipeError, match="launch=ray needs the address"):
        launch.start(composed, build(composed))
    assert not (tmp_path / "run").exists()


def test_the_command_of_a_job_is_that_of_a_local_run(tmp_path):
    for name in ("cpu/qwen3", "glm5_2/grpo_a3_512", "qwen3/grpo_8b_vllm_a2"):
        here, there = (
            build(params.compose(name, overrides, run_dir=str(tmp_path)), environment={})
            for overrides in ([], ["launch=ray", "ray_address=http://head:8265"])
        )
        assert here.argv == there.argv
        assert here.environment == there.environment
        composed = params.compose(name, run_dir=str(tmp_path))
        assert clusters.supervised(here, composed, None, 1) == list(here.argv)


def test_secrets_stay_out_of_a_jobs_environment():
    given = {"HF_TOKEN": "hf_x", "WANDB_API_KEY": "y", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    variables, kept_back = ray_job.job_environment(given, {"marker": processes.MARKER, "id": "abc"})
    assert kept_back == ["HF_TOKEN", "WANDB_API_KEY"]
    assert set(kept_back).isdisjoint(variables)
    assert variables[processes.MARKER] == "abc"
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_a_driver_that_does_not_see_the_run_directory_says_so_and_trains_nothing(there, tmp_path):
    record = tmp_path / "it's a run" / "job.json"
    if there == "another run":
        record.parent.mkdir()
        record.write_text('{"submission_id": "other-1"}')
    line = ray_job.entrypoint([sys.executable, "-c", "print('trained')"], record, "mine-1", seconds=0)
    environment = {**os.environ, **ray_job.job_environment({}, {"marker": processes.MARKER, "id": "mine"})[0]}
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"RunDirectoryError: {record.parent} is not there, or cannot be written, on ")
    assert "trained" not in done.stdout


def test_a_cluster_that_does_not_answer_is_a_sentence(tmp_path):
    run = by_hand(tmp_path / "run", "metrics", "http://127.0.0.1:9", "ray_wait_minutes=0.02")
    assert attend(run).wait(60) == 1
    last = run.log(1).read_text().splitlines()[-1]
    assert last.startswith("ClusterError: no Ray dashboard answers at http://127.0.0.1:9 (")


def test_a_dashboard_that_vanishes_is_asked_again_then_given_up(tmp_path):
    said, answers = [], iter([ConnectionError("refused"), "here"])

    def question():
        answer = next(answers, ConnectionError("refused"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    plan = {"id": "abc", "wait_seconds": 3.0}
    job = ray_job.Job(tmp_path, 1, plan, said.append)
    job.url = "http://head:8265"
    assert job._ask(question) == "here"
    assert said == ["the dashboard at http://head:8265 does not answer (refused); asks again"]
    with pytest.raises(ray_job.ClusterError, match=r"not answered for 3 s \(refused\).* whether job abc-1 still runs"):
        job._ask(question)


def test_the_supervisor_waits_for_a_job_to_be_stopped(tmp_path):
    """What watches the job ends it and sees that it is gone; killed before, it could not say so."""
    overrides = ["launch=ray", "ray_address=http://head:8265"]
    told = launch.terms(params.compose("cpu/qwen3", overrides, run_dir=str(tmp_path)), grace_seconds=1.0)
    assert told["grace_seconds"] >= ray_job.STOP_GRACE + ray_job.GONE + 5
    assert launch.terms(params.compose("cpu/qwen3", run_dir=str(tmp_path)), grace_seconds=1.0)["grace_seconds"] == 1.0


class Answer:
    """Ray's JobDetails, as far as it is looked at."""

    def __init__(self, status: str) -> None:
        self.status, self.driver_exit_code, self.message, self.job_id = status, None, "", ""


def test_a_job_that_is_stopped_for_a_lost_node_is_recorded_as_ended(tmp_path, monkeypatch):
    for name in ("LOOK", "NODES", "LOST_GRACE"):
        monkeypatch.setattr(ray_job, name, 0.0)
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    job = ray_job.Job(tmp_path, 1, {"id": "abc", "wait_seconds": 1.0, "taking_seconds": 0.0}, lambda text: None)
    answers = {"now": Answer("RUNNING")}
    monkeypatch.setattr(job, "info", lambda submission: answers["now"])
    monkeypatch.setattr(job, "_stop", lambda submission: answers.update(now=Answer("STOPPED")))
    monkeypatch.setattr(job, "_see_seats", lambda info: None)
    monkeypatch.setattr(job, "_lost", lambda info: {"n": "node 10.0.0.2 was lost"})
    job._record({"submission_id": "abc-1"})
    log = ray_job.Log(tmp_path / "job.position")
    monkeypatch.setattr(log, "follow", lambda client, submission: None)
    with pytest.raises(ray_job.NodeLostError, match=r"10\.0\.0\.2"):
        job._follow(log)
    assert json.loads(job.file.read_text())["ended"] == "STOPPED"


class Quiet:
    """A client whose job says one line, then nothing; or that cannot connect."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.connected = fault, 0

    async def tail_job_logs(self, submission):
        self.connected += 1
        if self.fault:
            raise self.fault
        yield "step 1\n"
        await asyncio.sleep(600)


@pytest.mark.parametrize("fault", [None, TimeoutError("connecting"), ConnectionError("refused")])
def test_a_job_that_is_silent_for_long_is_no_job_whose_log_cannot_be_read(fault, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ray_job, "LOOK", 0.01)
    monkeypatch.setattr(ray_job, "SILENCE", 0.3)
    client, log = Quiet(fault), ray_job.Log(tmp_path / "job.position")
    reader = threading.Thread(target=log.follow, args=(client, "abc-1"))
    reader.start()
    until(lambda: client.connected > 3)
    log.finish(reader)
    said = capfd.readouterr().out
    assert not reader.is_alive()
    assert said.count("step 1\n") == (fault is None)
    assert ("cannot be read for now" in said) == (fault is not None)


def test_where_the_log_stood_is_never_half_written(tmp_path, monkeypatch, capfd):
    """Whoever attaches reads it; nothing in it would mean the whole log a second time."""
    log = ray_job.Log(tmp_path / "job.position")
    log.file.write_text("3")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(log._tail(Quiet(), "abc-1"))
    assert ray_job.Log(log.file).position == 3
    assert log.position == len("step 1\n")


# ------------------------------------------------------------------------------------------------------------ stand-ins


def plan(run_dir: Path, does: str, address: str, *overrides: str):
    """A recipe for one node of the cluster, with our stand-in as the entry in place of verl."""
    overrides = ("launch=ray", f"ray_address={address}", "devices=1", *overrides)
    composed = params.compose("cpu/qwen3", overrides, run_dir=str(run_dir))
    command = build(composed)
    environment = {**command.environment, "PYTHONPATH": str(CHILDREN), "TRAINER": does}
    return composed, dataclasses.replace(command, entry="trainer", environment=environment)


def by_hand(run_dir: Path, does: str, address: str, *overrides: str):
    """A run that is written down, for a test that plays its supervisor."""
    composed, command = plan(run_dir, does, address, *overrides)
    run = create(run_dir, composed.name, {})
    told = {"argv": list(command.argv), "environment": dict(command.environment)}
    told["supervised"] = clusters.supervised(command, composed, run, 1)
    write_json(run.attempt(1) / "command.json", told)
    return run


def attend(run, *more: str) -> subprocess.Popen:
    argv = json.loads((run.attempt(1) / "command.json").read_text())["supervised"]
    with run.log(1).open("ab") as log:
        return subprocess.Popen([*argv, *more], stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture
def started(cluster, tmp_path, monkeypatch):
    """Starts runs on the cluster and makes sure that none of their processes outlives the test."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell_that_launches")
    runs = []

    def start(does: str, *overrides: str):
        run = launch.start(*plan(tmp_path / f"a run's dir {len(runs)}", does, cluster.address, *overrides))
        runs.append(run)
        return run

    yield start
    for run in runs:
        with contextlib.suppress(RecipeError):
            launch.stop(run)


def job_of(run) -> str:
    return json.loads(until(lambda: text_of(run.attempt(1) / "job.json")))["submission_id"]


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def drivers(run) -> list[psutil.Process]:
    """The processes of the run's job on any node (all are on this machine), without those that only look after it."""
    found = []
    for process in processes.of_run(read_state(run)["id"]):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            found += [process] if "trainer" in process.cmdline() else []
    return found


@pytest.mark.slow
def test_jobs_end_apart_and_each_says_why(started, cluster, monkeypatch):
    monkeypatch.setattr(clusters, "TAKING", 1.0)  # the stand-in takes no devices
    stopped, outside, broken, few = (
        started("sleep child"),
        started("sleep"),
        started("raise"),
        started("metrics", "nodes=3", f"ray_nodes=[{cluster.first},127.0.0.69]", "ray_wait_minutes=0.05"),
    )
    state = launch.wait(few, timeout=240)  # runs of one machine take turns
    assert state["state"] == "failed"
    assert (
        f"NodesMissingError: 2 of 3 nodes are up: {cluster.first} (1 cpu_rank), {cluster.second} (1 cpu_rank); without "
        "cpu_rank: 127.0.0.61; 1 with 1 cpu_rank is missing: 127.0.0.69; waited 3 s"
    ) in state["cause"]
    assert not (few.attempt(1) / "job.json").exists()

    state = launch.wait(broken, timeout=240)
    assert state["state"] == "failed"
    assert state["cause"].startswith(
        "exit code 1: RuntimeError: reward function broke on <b>& $(x)"
    )  # as it is locally

    until(lambda: drivers(stopped) and drivers(outside))
    environment = drivers(outside)[0].environ()
    told = json.loads((outside.path / "command.json").read_text())["environment"]
    assert told.items() <= environment.items()
    assert environment[EXTERNAL_MODULES] == "recipes.cpu.adaptor"
    assert "HF_TOKEN" not in environment
    state = launch.stop(stopped)
    assert (state["state"], state["cause"]) == ("stopped", "stopped by request")
    assert drivers(stopped) == []
    assert "none of its processes is left on any node" in stopped.log(1).read_text()
    assert read_state(outside)["state"] == "running"

    cluster.ray("job", "stop", job_of(outside))
    state = launch.wait(outside, timeout=120)
    assert state["state"] == "failed"
    assert "was stopped from outside" in state["cause"]
    assert drivers(outside) == []


@pytest.mark.slow
def test_who_comes_again_attaches_and_no_line_is_lost_or_said_twice(started, cluster, tmp_path):
    run = by_hand(tmp_path / "run", "count", cluster.address)
    first = attend(run)
    until(lambda: "count 3\n" in text_of(run.log(1)))
    first.kill()
    first.wait()
    assert drivers(run)  # nobody watches it, and it goes on
    assert attend(run).wait(90) == 0
    log = run.log(1).read_text()
    assert f"attaches to job {job_of(run)}" in log
    assert re.findall(r"^count (\d+)$", log, re.M) == [str(n) for n in range(12)]
    assert cluster.ray("job", "list").count(f"submission_id='{job_of(run)}'") == 1


@pytest.mark.slow
def test_stop_ends_a_job_that_outlived_what_watched_it(started, cluster, tmp_path):
    run = by_hand(tmp_path / "run", "sleep", cluster.address)
    watcher = attend(run)
    until(lambda: drivers(run))
    watcher.kill()
    watcher.wait()
    update_state(run, state="lost")
    launch.stop(run)
    assert drivers(run) == []
    assert json.loads((run.attempt(1) / "job.json").read_text())["ended"] == "STOPPED"


# ------------------------------------------------------------------------------------------------------- real trainings


def training(started, cluster, run_dir: Path, *overrides: str):
    more = ("launch=ray", f"ray_address={cluster.address}", "nodes=2", "devices=1", "rollout.agent_workers=1")
    composed = params.compose("cpu/qwen3", (*more, *overrides), run_dir=str(run_dir))
    notebook.prepare(composed)
    return launch.start(composed, build(composed), deadline_seconds=600)


def metrics(run) -> list[dict]:
    return [json.loads(line) for line in text_of(run.metrics(1)).splitlines()]


@pytest.mark.slow
def test_a_training_over_two_nodes_is_as_one_here_and_names_the_node_it_loses(started, cluster, tmp_path):
    """The last test of this file: the node stays away. That a job ends well is seen in test_batch_on_ray.py."""
    run = training(started, cluster, tmp_path / "lost", "trainer.steps=500")
    try:
        until(lambda: len(metrics(run)) >= 2 or read_state(run)["state"] != "running", 500)
        assert [line["step"] for line in metrics(run)][:2] == [1, 2], run.log(1).read_text(errors="replace")[-3000:]
        assert (run.attempt(1) / "tensorboard").is_dir()
        actors = json.loads(cluster.ray("list", "actors", "--format", "json", "--limit", "1000"))
        ranks = {actor["node_id"] for actor in actors if actor["class_name"].endswith("WorkerDict")}
        assert len(ranks) == 2, actors

        raylet = next(p for p in psutil.Process(cluster.pid(cluster.second)).children() if p.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        state = launch.wait(run, timeout=400)
        assert state["state"] == "failed"
        assert re.search(
            rf"NodeLostError: node {cluster.second} was lost with \d+ processes of this run", state["cause"]
        )
        until(lambda: processes.of_run(state["id"]) == [], 120)
    finally:
        launch.stop(run)
