"""`recipes doctor`: is this node ready for a run? A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import click

from recipes import completion

# What a command needs is imported inside it, so that --help answers at once.

STYLES = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
    "ok": {"fg": "green"},
    "unseen": {"dim": True},
}

# Columns: the state, the subject, and where the text begins.
SUBJECT = 24
INDENT = 2 + 8 + 1 + SUBJECT + 1


@click.command("doctor", epilog="Overrides are key=value, such as optimizer.lr=1e-6 or tensor_parallel=8.")
@click.argument("name", required=False, shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option(
    "--address",
    help="A Ray cluster that runs: compare its nodes. Its dashboard, http://HEAD:8265, or HEAD:PORT of Ray itself "
    "(default: the recipe's ray_address, then RAY_ADDRESS).",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    default=180.0,
    show_default=True,
    help="Seconds for one child: importing modules, counting rows, asking a cluster.",
)
@click.option("--run-dir", metavar="PATH", help="Where the run would go (default: a new folder in runs/).")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--python",
    envvar="RECIPES_PYTHON",
    default=None,
    help="Interpreter that trains, if not this one (RECIPES_PYTHON).",
)
def doctor(
    name: str | None,
    overrides: tuple[str, ...],
    address: str | None,
    deadline: float,
    run_dir: str | None,
    as_json: bool,
    python: str | None,
) -> None:
    """Look at this node before a run of recipe NAME, or, without NAME, in general. Starts and changes nothing.

    Devices, driver, CANN, limits, disk, memory, ports, packages, model and data. What cannot be looked at is said,
    and is no pass. Exit code 1 when something is an error.
    """
    from recipes import doctor as doctors
    from recipes import params
    from recipes.command import training_python
    from recipes.run.directory import default_path

    python = python or training_python()
    composed = None
    if name:
        place = run_dir or str(default_path(params.home() / "runs", name.removesuffix(".yaml").split("/params/")[-1]))
        composed = params.compose(name, overrides, run_dir=place)
    lines = doctors.examine(composed, python=python, address=address, deadline=deadline)
    if as_json:
        told = doctors.as_json(lines, recipe=composed.name if composed else "", python=python)
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
        sys.exit(0 if told["ready"] else 1)
    counts = dict.fromkeys(doctors.STATES, 0)
    _draw(lines, counts)
    unseen = f"; {counts['unseen']} not looked at, which says nothing of them" if counts["unseen"] else ""
    said = ", ".join(f"{counts[state]} {state}{'s' * (counts[state] != 1)}" for state in ("error", "warning"))
    click.echo(f"\n{said}, {counts['ok']} in order{unseen}.")
    sys.exit(1 if counts["error"] else 0)


def _draw(lines: Iterable[Any], counts: dict[str, int]) -> None:
    """Print each line as it is found, under its section, and count it. What stands in it is text, not markup."""
    wide = min(shutil.get_terminal_size((160, 24)).columns, 200)
    section = ""
    for line in lines:
        counts[line.state] += 1
        if line.section != section:
            section = line.section
            click.echo(f"\n{click.style(section, bold=True)}")
        word = click.style(f"{'–' if line.state == 'unseen' else line.state:8}", **STYLES[line.state])
        # A text that fits is not broken, and one that does not keeps its column.
        room = max(40, wide - INDENT)
        first, *more = textwrap.wrap(line.text, room, break_on_hyphens=False) or [""]
        if len(line.subject) > SUBJECT:
            more, first = [first, *more], ""
        click.echo(f"  {word} {line.subject:{SUBJECT}} {first}".rstrip())
        for rest in more:
            click.echo(f"{'':{INDENT}}{rest}")
