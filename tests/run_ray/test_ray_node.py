"""scripts/ray_cluster.sh without starting anything: what a node is told, and that nobody else's process is ended."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from recipes import params, ray_node
from recipes.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]
HERE = ("--ip", "127.0.0.7")


@pytest.fixture
def script(tmp_path):
    """Runs the script with a folder and a home of its own, so that neither Ray nor a token of the developer matters."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "HCCL_", "GLOO_", "TP_SOCKET"))}
    environment |= {"RECIPES_RAY_DIR": str(tmp_path / "ray"), "HOME": str(tmp_path)}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [ROOT / "scripts" / "ray_cluster.sh", *words],
            env=environment | {"RECIPES_PYTHON": sys.executable} | more,
            capture_output=True,
            text=True,
        )

    return run


def test_a_head_is_told_devices_environment_and_its_own_interface(script, tmp_path):
    done = script("head", "glm5_2/grpo_a3_512", *HERE, "--print", GLOO_SOCKET_IFNAME="bond0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "export HCCL_SOCKET_IFNAME=lo" in lines
    assert "export GLOO_SOCKET_IFNAME=bond0" in lines  # the node's own word
    assert "export VERL_USE_EXTERNAL_MODULES=megatron_adaptor" in lines
    assert "export HCCL_CONNECT_TIMEOUT=3600" in lines
    assert "ulimit -n 32768" in lines
    assert "--node-ip-address=127.0.0.7" in lines[-1]
    assert r"--resources=\{\"NPU\":\ 16\}" in lines[-1]
    assert "--dashboard-host=127.0.0.7" in lines[-1]
    assert "everybody who reaches 127.0.0.7:8265 can run code here" in done.stderr
    assert not (tmp_path / "ray").exists()


def test_a_worker_joins_the_head_with_the_token_that_is_there(script, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    done = script("worker", "cpu/qwen3", *HERE, "--head", "10.9.8.7:6380", "--print", "--", "--min-worker-port=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].rstrip().endswith("--address=10.9.8.7:6380 --min-worker-port=0")
    assert r"--resources=\{\"cpu_rank\":\ 1\}" in done.stdout
    assert "export RAY_AUTH_MODE=token" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["worker", "cpu/qwen3"], "a worker needs --head"),
        (["head"], "which recipe"),
        (["head", "cpu/qwen3", "--head", "10.0.0.1"], "for a worker"),
        (["head", "cpu/qwen3", "--port", "x"], "'x' is no whole number"),
        (["head", "cpu/qwen3", "--force"], "unknown option --force"),
        (["head", "cpu/qwenx", *HERE], "qwenx"),
        (["head", "cpu/qwen3", "--ip", "203.0.113.9"], "no network interface of this machine holds 203.0.113.9"),
    ],
)
def test_what_is_wrong_is_one_sentence(script, words, error, tmp_path):
    done = script(*words)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert error in line
    assert not (tmp_path / "ray").exists()


def test_stop_ends_nobody_elses_process(script, tmp_path):
    assert script("stop").stderr == "no Ray of ours runs here\n"
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "node").write_text(f"{stranger.pid} {uuid.uuid4()}\n")  # its pid is taken by now
    assert script("stop").returncode == 0
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_shell_reads_back_what_the_recipe_says(tmp_path):
    odd = """it's $(touch pwned) "quoted" `x` \\"""
    composed = params.compose("cpu/qwen3", parameters={"env": {"ODD": odd}})
    text = "\n".join(ray_node.lines(*ray_node.facts(composed, {})))
    done = subprocess.run(
        ["bash", "-c", 'eval "$1"; printf %s "$ODD"', "bash", text], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == odd
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecipeError, match="no name of a variable"):
        list(ray_node.lines({}, {"A;B": "1"}))


def test_modules_the_node_names_come_first():
    composed = params.compose("glm5_2/grpo_a3_512")
    _, variables = ray_node.facts(composed, {"VERL_USE_EXTERNAL_MODULES": "its_own"})
    assert variables["VERL_USE_EXTERNAL_MODULES"] == "its_own,megatron_adaptor"


def test_the_interface_is_the_one_that_holds_the_address():
    assert ray_node.interface("127.0.0.1") == "lo"
    assert ray_node.own_address("127.0.0.1") == "127.0.0.1"
    assert re.fullmatch(r"[\d.]+", ray_node.own_address("127.0.0.9"))
