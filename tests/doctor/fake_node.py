"""A fake node: a folder laid out like / with Ascend's files, and a fake npu-smi on its PATH. No real one is asked."""

from __future__ import annotations

import copy
import functools
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

from recipes import params
from recipes.doctor import node as nodes

SAMPLES = Path(__file__).parent / "samples"


@functools.cache
def compose(recipe: str, *overrides: str):
    """A composed recipe whose run directory does not exist yet. Shared between tests: they must not change it."""
    return params.compose(recipe, overrides, run_dir="/no-such-folder/run")


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def states(lines, subject):
    """The states of the lines about a subject."""
    return [line.state for line in lines if line.subject == subject]


def only(lines, subject):
    """The one line about a subject."""
    lines = list(lines)
    found = [line for line in lines if line.subject == subject]
    assert len(found) == 1, [line.text for line in lines]
    return found[0]


class FakeNode:
    """Builds a Node step by step below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "fake-bin"
        self.bin.mkdir(parents=True)
        (root / "dev").mkdir()
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin"}

    def devices(self, count: int) -> FakeNode:
        for number in range(count):
            (self.root / "dev" / f"davinci{number}").touch()
        (self.root / "dev" / "davinci_manager").touch()
        return self

    def script(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def npu_smi(self, info: str, board: str | None = "npu_smi_board_a2.txt") -> FakeNode:
        """Install the fake npu-smi: it prints a sample, and fails for a board nobody gave."""
        shown = f"cat {SAMPLES / board}" if board else "echo 'This device does not support querying board.'; exit 1"
        self.script(
            "npu-smi",
            f"#!/bin/sh\n# A fake npu-smi.\n"
            f'case "$*" in\n  "info") cat {SAMPLES / info} ;;\n  "info -t board"*) {shown} ;;\n  *) exit 2 ;;\nesac\n',
        )
        return self

    def put(self, place: str, text: str) -> Path:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def cann(self, text: str | None = None) -> FakeNode:
        home = self.root / "opt" / "cann"
        self.put(
            f"opt/cann/{os.uname().machine}-linux/ascend_toolkit_install.info",
            text or sample("ascend_toolkit_install.info"),
        )
        self.environment["ASCEND_HOME_PATH"] = str(home)
        return self

    def node(self, recipe: str | None = None, *overrides: str, python: str = sys.executable, **environment: str):
        composed = (
            compose(recipe, *(text for text in overrides if not text.startswith("model.path="))) if recipe else None
        )
        path = next((text.partition("=")[2] for text in overrides if text.startswith("model.path=")), None)
        if path is not None:
            # Composing takes a tenth of a second, and every test has another folder.
            composed = replace(composed, recipe=copy.deepcopy(composed.recipe))
            composed.recipe.model.path = path
        made = nodes.make(composed, python, {**self.environment, **environment})
        folder = self.root / "launched-from"
        folder.mkdir(exist_ok=True)
        return replace(made, root=self.root, folder=folder)
