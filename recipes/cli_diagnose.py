"""`recipes diagnose`: why did a run fail? A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import click

from recipes import completion
from recipes.errors import RecipeError

# What a command needs is imported inside it, so that --help answers at once.

# Columns: the head of a row, and where its words begin.
HEAD = 9


@click.command("diagnose")
@click.argument(
    "path", metavar="RUN|LOG", type=click.Path(path_type=Path), required=False, shell_complete=completion.run
)
@click.option("--attempt", type=click.IntRange(min=1), help="Attempt of a run; default: the last.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--list", "listing", is_flag=True, help="List every known cause with its texts and remedy, as Markdown.")
def diagnose_command(path: Path | None, attempt: int | None, as_json: bool, listing: bool) -> None:
    """Say why a run failed: the first cause in its log, the lines that say so, the remedy and the recipe's keys.

    RUN is a run directory; LOG is any log of verl on Ascend, plain or gzip, of any size. What follows from the cause is
    listed apart, and so is noise. A failure nobody knows is said to be unknown, with the lines that say most.

    Exit code 0 when nothing was found but noise or somebody ended it, 1 when there is something to act on, 2 for a path
    that cannot be read.
    """
    from recipes import diagnosis

    if listing:
        click.echo(diagnosis.table(), nl=False)
        return
    if path is None:
        raise RecipeError("diagnose takes a run directory or a log file, or --list.")
    found = diagnosis.diagnose(path, attempt)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        for head, words in found.rows():
            click.echo(row(head, words))
    sys.exit(1 if found.found else 0)


def row(head: str, words: str, width: int = 100) -> str:
    """Return a row of a head and words, the words wrapped under themselves; a quoted line is left in one piece."""
    if words.startswith("| "):
        return " " * HEAD + words
    indent = " " * HEAD if head else ""
    lines = textwrap.wrap(words, width - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{head:{len(indent)}}{lines[0]}", *(indent + line for line in lines[1:])])
