"""A real Ray of three nodes on this machine, each with an address, a log and a folder of its own."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "ray_cluster.sh"
# The whole of 127/8 is this machine: addresses that differ, as those of nodes do, and need no rights to be used.
HEAD, FIRST, SECOND = "127.0.0.61", "127.0.0.62", "127.0.0.63"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HEAD, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True)
class Cluster:
    """Nodes that scripts/ray_cluster.sh has started, for `cpu/qwen3` on two nodes; the head has no device."""

    folder: Path
    port: int
    dashboard: int
    client_port: int
    first: str = FIRST
    second: str = SECOND

    @property
    def address(self) -> str:
        return f"http://{HEAD}:{self.dashboard}"

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_AUTH_TOKEN_PATH": str(self.folder / "token"), "RAY_AUTH_MODE": "token"}

    def script(self, ip: str, *words: str) -> subprocess.CompletedProcess:
        """Run the script for the node of that address."""
        environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        environment["RECIPES_RAY_DIR"] = str(self.folder / ip.rpartition(".")[2])
        done = subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
        return done

    def start(self, ip: str) -> None:
        # Nodes of one machine share its ports, and each would count from the same number.
        ray = ["--", "--min-worker-port=0", "--max-worker-port=0"]
        where = ["cpu/qwen3", "nodes=2", "--ip", ip, "--wait", "150"]
        if ip == HEAD:
            where += ["--port", str(self.port), "--dashboard-port", str(self.dashboard), "--devices", "0"]
            self.script(ip, "head", *where, *ray, f"--ray-client-server-port={self.client_port}")
        else:
            self.script(ip, "worker", *where, "--head", f"{HEAD}:{self.port}", *ray)

    def pid(self, ip: str) -> int:
        return int((self.folder / ip.rpartition(".")[2] / "node").read_text().split()[0])

    def ray(self, *words: str) -> str:
        """What somebody else does at the cluster, with Ray's own command line."""
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words, "--address", self.address],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=240,  # it imports all of Ray beside a training that takes every core
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def cluster():
    # Short, because the paths of Ray's sockets may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    (folder / "token").write_text(secrets.token_hex(16))
    (folder / "token").chmod(0o600)
    made = Cluster(folder, *free_ports(3))
    try:
        for ip in (HEAD, FIRST, SECOND):
            made.start(ip)
        yield made
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda ip: made.script(ip, "stop"), (SECOND, FIRST, HEAD)))
        left = [line for line in _processes() if str(folder) in line]
        shutil.rmtree(folder, ignore_errors=True)
        assert left == []


def _processes() -> list[str]:
    return subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
