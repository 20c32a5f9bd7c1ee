"""Workers as forks: the client's arguments, environment, folder and files reach the fork, and nothing outlives it."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.cpu import fork_server

SERVER = """
import os, socket, sys
from recipes.cpu import fork_server
fork_server.MODULES = ("json", "no_such_module")
marker = "imported ahead"
fork_server.main()
"""

SCRIPT = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "folder": os.getcwd(), "given": os.environ.get("GIVEN"),
    "path": os.environ.get("PATH"), "ahead": "recipes.cpu.fork_server" in sys.modules, "name": __name__,
    "group": os.getpgid(0) == os.getpid()}), flush=True)
print("to stderr", file=sys.stderr)
if "--wait" in sys.argv:
    sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "a worker's script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server that imports next to nothing ahead, started as the driver starts its own."""
    words = []
    popen = subprocess.Popen

    def start(command, **options):
        words.extend(command)
        return popen([command[0], "-c", SERVER, *command[3:]], **options)

    monkeypatch.setattr(fork_server.subprocess, "Popen", start)
    address = fork_server.start()
    monkeypatch.setattr(fork_server.subprocess, "Popen", popen)
    process = fork_server.start.servers.pop()
    yield address, process
    process.stdin.close()
    assert process.wait(20) == 0


def client(script: Path, *words: str, address: str, **options) -> subprocess.Popen:
    environment = {**os.environ, fork_server.ADDRESS: address, "GIVEN": "it's 1", "RAY_JOB_ID": fork_server.FIRST_JOB}
    command = [*fork_server.client_command(), str(script), *words]
    environment |= options.pop("environment", {})
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_fork_is_the_process_that_was_asked_for(server, script, tmp_path):
    asked = client(script, "a b", "$HOME", address=server[0], cwd=tmp_path)
    out, err = asked.communicate(timeout=60)
    said = json.loads(out)
    assert asked.returncode == 0
    assert said == {
        "argv": [str(script), "a b", "$HOME"],
        "folder": str(tmp_path),
        "given": "it's 1",
        "path": os.environ["PATH"],
        "ahead": True,
        "name": "__main__",
        "group": True,
    }
    assert "to stderr" in err


def test_the_client_lives_as_long_as_the_fork(server, script):
    asked = client(script, "--wait", address=server[0])
    assert json.loads(asked.stdout.readline())["ahead"]
    time.sleep(0.5)
    assert asked.poll() is None
    asked.stdin.close()
    assert asked.wait(10) == 0


def test_a_worker_of_another_job_is_a_plain_interpreter(server, script):
    """What Ray reads once, when it is loaded, holds for the first job only."""
    asked = client(script, address=server[0], environment={"RAY_JOB_ID": "02000000"})
    assert json.loads(asked.communicate(timeout=60)[0])["ahead"] is False


def test_without_a_server_the_client_is_the_interpreter(script):
    asked = client(script, "x", address="nobody")
    said = json.loads(asked.communicate(timeout=60)[0])
    assert (said["ahead"], said["argv"], said["given"]) == (False, [str(script), "x"], "it's 1")


RAYS_OWN = """
import json, sys
print(json.dumps({"rays own": sys.argv[1:]}))
"""


def set_up(script: Path, context: dict, *words: str, address: str) -> dict:
    """What becomes of a worker that Ray starts by the client in place of its setup_worker.py, as raylets do."""
    (script.parent / "setup_worker.py").write_text(RAYS_OWN)
    told = [str(script), *words, "--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    words = [sys.executable, fork_server.client_command()[-1], *told]
    own = {fork_server.ADDRESS: address, fork_server.CLIENT: "the client", "RAY_JOB_ID": fork_server.FIRST_JOB}
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_client_sets_a_worker_up_as_ray_does(server, script):
    context = {"py_executable": "the client", "env_vars": {"GIVEN": "it's 2"}, "command_prefix": []}
    said = set_up(script, context, "--worker-id=1", address=server[0])
    assert (said["ahead"], said["argv"], said["given"]) == (True, [str(script), "--worker-id=1"], "it's 2")


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"py_executable": "/usr/bin/python3"},
        {"py_executable": "the client", "env_vars": {"A": "${HOME}"}},
        {"py_executable": "the client", "command_prefix": ["nice"]},
        {"py_executable": "the client", "override_worker_entrypoint": "/other.py"},
    ],
)
def test_whatever_else_a_worker_needs_is_left_to_rays_own_script(server, script, context):
    said = set_up(script, context, "--worker-id=1", address=server[0])["rays own"]
    assert said[:3] == [str(script), "--worker-id=1", "--language=PYTHON"]
    assert json.loads(said[3].partition("=")[2]) == context


def test_a_request_of_another_user_is_not_answered(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(fork_server, "peer_user", lambda connection: os.getuid() + 1)
    theirs.sendall(b"{}")
    assert fork_server.read_request(ours) is None


def test_only_the_driver_of_a_trainer_starts_a_server(monkeypatch):
    monkeypatch.setattr(fork_server, "start", lambda: pytest.fail("started"))
    monkeypatch.setenv(fork_server.SWITCH, "1")
    fork_server.install()  # this is pytest
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "verl.trainer.main_ppo"])
    monkeypatch.setenv(fork_server.SWITCH, "0")
    fork_server.install()  # switched off
    monkeypatch.setenv(fork_server.SWITCH, "1")
    monkeypatch.setenv(fork_server.ADDRESS, "somewhere")
    fork_server.install()  # a worker of a driver that has one


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"address": "local", "runtime_env": {"env_vars": {}, "py_executable": None}}, True),
        ({"address": "local", "runtime_env": {"py_executable": "mine"}}, False),
        ({"address": "192.0.2.1:6379", "runtime_env": {}}, False),
        ({}, False),
    ],
)
def test_ray_is_told_where_it_starts_a_cluster_of_its_own(given, changed):
    class Ray:
        @staticmethod
        def init(**options):
            return options

    fork_server.start_workers_as_forks(Ray)
    found = Ray.init(**given)
    assert (found != given) == changed
    if changed:
        assert found["runtime_env"]["py_executable"].endswith("fork_client.py")
        assert found["runtime_env"]["env_vars"] == {}


IDS = """
from contextlib import nullcontext
from recipes.cpu import fork_server
with {context}:
    fork_server.preload(fork_server.MODULES)
print("differ:", fork_server.forks_differ())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "differ"), [("fork_server.fresh_actor_class_ids()", "True"), ("nullcontext()", "False")]
)
def test_forks_number_their_tasks_differently(child, context, differ):
    """Two agent loop workers with the same numbers made a server abort, in one run of five."""
    done = child("-c", IDS.format(context=context), RAY_JOB_ID=fork_server.FIRST_JOB)
    assert f"differ: {differ}" in done.stdout, done.stderr[-3000:]


def test_a_node_that_is_slow_to_start_is_asked_again(monkeypatch):
    """Ray asks for 30 s, and its first unanswered question may take all of them."""
    from types import ModuleType

    asked = []

    def get_node(gcs_address, node_id):
        asked.append((gcs_address, node_id))
        if len(asked) < 3:
            raise RuntimeError("RPC error: Deadline Exceeded")
        return {"labels": {}}

    services = ModuleType("ray._private.services")
    services.get_node = get_node
    fork_server.wait_for_a_slow_node(services)
    assert services.get_node("gcs", "node") == {"labels": {}}
    assert asked == [("gcs", "node")] * 3
    monkeypatch.setattr(fork_server, "NODE_SECONDS", 0.0)
    asked.clear()
    with pytest.raises(RuntimeError, match="Deadline"):
        services.get_node("gcs", "node")
