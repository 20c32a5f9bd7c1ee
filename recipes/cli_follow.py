"""What the commands that watch a run share: its progress on one line, and its last words."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

# What a command needs is imported inside it, so that --help answers at once.


def follow(path: Path, *, stop_on_interrupt: bool) -> dict[str, Any]:
    """Print the progress of a run until it has ended; returns its state (run.json)."""
    from recipes import diagnosis, live, notebook
    from recipes.run import launch
    from recipes.run.directory import open_run

    opened, printed = open_run(path), Progress()
    try:
        for moment in live.follow(opened):
            printed.say(notebook.status(moment))
    except KeyboardInterrupt:
        printed.close()
        if not stop_on_interrupt:
            sys.exit(130)
        click.echo("ending the run …", err=True)
        launch.stop(opened)
    printed.close()
    click.echo(notebook.try_to_record(opened), err=True, nl=False)
    state = launch.read_state(opened)
    click.echo(f"{state['state']}{': ' + state['cause'] if state['cause'] else ''}")
    if state["state"] in ("failed", "lost") and (said := diagnosis.brief(opened)):
        click.echo(said)
    click.echo(f"curves: {opened.curves / 'curves.png'}\nlog: {opened.log()}")
    return state


class Progress:
    """One line on stderr that is rewritten in a terminal; in a file, a line every ten seconds at most."""

    def __init__(self) -> None:
        self.in_place, self.said, self.last = sys.stderr.isatty(), 0.0, ""

    def say(self, line: str) -> None:
        self.last = line
        if self.in_place:
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            click.echo(f"\r\x1b[K{line[:width]}", err=True, nl=False)
        elif time.monotonic() - self.said > 10:
            self.said, self.last = time.monotonic(), ""
            click.echo(line, err=True)

    def close(self) -> None:
        """End the line, or say the last one if it was held back."""
        if self.in_place:
            click.echo("", err=True)
        elif self.last:
            click.echo(self.last, err=True)
