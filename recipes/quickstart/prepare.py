"""Everything a quickstart run starts from, in one directory: the warm-started model, training and validation data.

``python -m recipes.quickstart.prepare DIR [--seed N]`` makes ``DIR/model``, ``DIR/train.parquet`` and
``DIR/val.parquet``. What is there and right is kept, so a second call is quick; a call that finds another one at
work in the same directory waits for it.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.quickstart.data import write_data
from recipes.quickstart.warm_start import Settings, add_arguments, progress_line, summary, write_warm_start


@dataclass(frozen=True)
class Prepared:
    """Where the parts are, and the warm start's record."""

    model: Path
    train: Path
    validation: Path
    record: dict[str, Any]


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for this process. The kernel lets go when the process ends, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is preparing {directory}: waiting for it.", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(
    directory: Path,
    settings: Settings,
    *,
    remake: bool = False,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Prepared:
    """Make what is missing in ``directory``; see ``write_warm_start`` for what is refused."""
    with alone_in(directory):
        # Nobody else is at work here, so what a killed process left unfinished can go.
        for leftover in directory.glob(".model.*.partial"):
            shutil.rmtree(leftover)
        record = write_warm_start(directory / "model", settings, remake=remake, progress=progress)
        train, validation = write_data(directory)
    return Prepared(directory / "model", train, validation, record)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.quickstart.prepare", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="where model and data go")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        settings = Settings(seed=options.seed, steps=options.steps)
        prepared = prepare(options.directory, settings, remake=options.remake, progress=progress_line(settings))
    except (ValueError, OSError) as error:
        print(f"Nothing prepared: {error}", file=sys.stderr)
        return 2
    print(f"Prepared {options.directory}: the model {summary(prepared.record)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
