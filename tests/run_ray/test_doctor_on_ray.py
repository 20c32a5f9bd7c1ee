"""`recipes doctor` asks the nodes of a real Ray, named by its dashboard as recipes name it."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def doctor(cluster, address: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.cli", "doctor", "cpu/qwen3", f"ray_address={address}", "--json"],
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return [line for line in json.loads(done.stdout)["lines"] if line["section"] == "cluster"]


def test_a_node_with_another_variable_is_named(cluster, monkeypatch):
    """The node is started anew for it, and as it was afterwards: the tests that follow count on three."""
    odd_one = cluster.second
    cluster.script(odd_one, "stop")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "77")
    cluster.start(odd_one)
    try:
        monkeypatch.delenv("HCCL_CONNECT_TIMEOUT")
        lines = doctor(cluster, cluster.address)
    finally:
        cluster.script(odd_one, "stop")
        cluster.start(odd_one)
    [odd] = [line["finding"] for line in lines if line["subject"] == "differences"]
    assert odd["keys"] == {"node": odd_one, "HCCL_CONNECT_TIMEOUT": "77"}
    assert "2 of 3 nodes have unset" in odd["sentence"]
    assert odd["severity"] == "warning"
