"""Scripts written as people write them, and what bash itself makes of one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

STUBS = ("python", "python3", "ray", "hostname", "awk", "grep", "sleep", "tee", "mkdir")


@pytest.fixture
def bash(tmp_path):
    """Run a script of ours in bash, where every command is a stub that writes its words down."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    for name in STUBS:
        stub = folder / name
        stub.write_text(f'#!/bin/bash\nprintf "%s\\0" "${{0##*/}}" "$@" >>"{record}"\nprintf "\\1" >>"{record}"\n')
        stub.chmod(0o755)
    for name in ("basename", "date", "cat"):
        (folder / name).symlink_to(shutil.which(name))

    def run(path: Path, arguments: Sequence[str] = (), **environment: str) -> list[list[str]]:
        record.unlink(missing_ok=True)
        variables = {"PATH": str(folder), "HOME": "/home/me", **environment}
        command = [shutil.which("bash"), str(path), *arguments]
        subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, timeout=20, check=False)
        text = record.read_text() if record.exists() else ""
        return [words.split("\0")[:-1] for words in text.split("\1") if words]

    return run
