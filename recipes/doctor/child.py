"""A child process with a deadline that also ends what it started itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError

# Bytes of output read at most: what a child writes is foreign, and endless output must not fill our memory.
LARGEST_OUTPUT = 16 * 2**20


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code` is None when the deadline ended it."""

    code: int | None
    output: str
    errors: str

    @property
    def last(self) -> str:
        """The last line of what it complained about, or of what it said."""
        lines = self.errors.strip().splitlines() or self.output.strip().splitlines()
        return lines[-1].strip() if lines else "no message"


def run(argv: Sequence[str], *, environment: Mapping[str, str], deadline: float, folder: Path | None = None) -> Ended:
    """Run `argv` for at most `deadline` seconds and return how it ended.

    Output goes to files, not pipes: a grandchild that keeps a pipe open would hold us beyond the deadline. The child
    leads a session of its own, so that the deadline ends its children too and nobody else's.
    Raises RecipeError when it cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as fault:
            reason = getattr(fault, "strerror", None) or fault
            raise RecipeError(f"{argv[0]} cannot be started: {reason}.") from fault
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=deadline)
        finally:
            # Also after a normal end and after Ctrl-C: what the child left behind is ours to end.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LARGEST_OUTPUT))
            texts.append(file.read().decode("utf-8", "replace"))
    return Ended(code, *texts)
