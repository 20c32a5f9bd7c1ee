"""Fixtures of the tests on a node: a fake one below a folder, and nothing of the developer's own."""

from __future__ import annotations

import os

import pytest
from fake_node import FakeNode


@pytest.fixture(autouse=True)
def _no_ascend(monkeypatch):
    """A developer's own node must not answer for the fake one."""
    for name in list(os.environ):
        if name.startswith(("ASCEND", "HCCL", "GLOO", "TP_SOCKET")):
            monkeypatch.delenv(name)


@pytest.fixture
def fake(tmp_path) -> FakeNode:
    return FakeNode(tmp_path / "node")
