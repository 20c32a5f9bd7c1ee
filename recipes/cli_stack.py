"""`recipes stack …`: show a stack, verify an interpreter against it, write what installs it, find refs that drifted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from recipes import completion

# What a command needs is imported inside it, so that --help answers at once.

STYLES = {
    "same": "green",
    "moved": "yellow",
    "unreachable": "yellow",
    "unasked": "dim",
    "untold": "yellow",
    "not_needed": "dim",
    "warning": "yellow",
}


@click.group(name="stack", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def stack() -> None:
    """The dependency refs and versions of one image generation: show, verify, install, compare."""


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="As JSON.")(function)


def hardware_option(function: Any) -> Any:
    return click.option(
        "--hardware",
        required=True,
        metavar="NAME",
        help="Kind of node, such as atlas_a2 or atlas_a3.",
        shell_complete=completion.hardware,
    )(function)


def needs_option(function: Any) -> Any:
    return click.option(
        "--with",
        "needs",
        multiple=True,
        metavar="REPOSITORY",
        help="An optional repository too, such as MindSpeed-LLM.",
    )(function)


def output_option(function: Any) -> Any:
    return click.option("-o", "--output", type=click.Path(path_type=Path), help="Write here instead of printing.")(
        function
    )


@stack.command()
@click.argument("name", required=False, shell_complete=completion.stack)
@click.option("--remote", is_flag=True, help="Also ask each repository what its ref stands at now.")
@click.option(
    "--deadline", type=click.FloatRange(min=0, min_open=True), default=15.0, help="Seconds for each to answer."
)
@json_option
def show(name: str | None, remote: bool, deadline: float, as_json: bool) -> None:
    """Show the table of a stack, or name all stacks.

    With --remote, exit code 1 when a ref is missing, of another kind, or a tag that was set again. A branch that went
    on is told, and a host that does not answer too; neither is an error.
    """
    from recipes import stack as stacks
    from recipes.stack import remote as remotes

    if name is None:
        titles = {one: stacks.load(one).title for one in stacks.names()}
        width = max(map(len, titles))
        click.echo(
            json.dumps(titles, indent=2)
            if as_json
            else "\n".join(f"{one:{width}}  {title}" for one, title in titles.items())
        )
        return
    table = stacks.load(name)
    checked = remotes.check_all(table, deadline=deadline) if remote else {}
    if as_json:
        plain = {**asdict(table), "remote": {key: asdict(one) for key, one in checked.items()}}
        click.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    else:
        _show(table, checked)
    sys.exit(1 if any(one.wrong for one in checked.values()) else 0)


def _show(table: Any, checked: Any) -> None:
    from recipes import stack as stacks

    click.echo(f"{table.name}: {table.title}")
    if table.why:
        click.echo(table.why)
    facts = {"python": table.python, "CANN": table.cann, "verl": table.verl, "for": ", ".join(table.hardware)}
    click.echo("\n" + "   ".join(f"{key} {value}" for key, value in facts.items() if value))
    if table.repositories:
        rows = []
        for place, one in enumerate((n for n in table.order if n in table.repositories), 1):
            r = table.repositories[one]
            ref = "" if r.kind == "commit" else r.ref
            row = [
                str(place),
                r.name,
                ref,
                r.kind,
                r.commit[:12] or "–",
                "whole" if r.depth == "full" else "",
                r.install,
            ]
            if checked:
                row.append(checked[one].verdict)
            rows.append((row, checked[one].verdict if checked else ""))
        heads = ["", "repository", "ref", "kind", "commit", "history", "install as", *(["remote"] if checked else [])]
        _table(heads, rows)
        for one in (n for n in table.order if n in table.repositories):
            r = table.repositories[one]
            said = f"  ({checked[one].why})" if checked and checked[one].why else ""
            click.echo(f"  {r.name}: {f'[only for: {r.optional}] ' if r.optional else ''}{r.why}{said}")
    _table(["package", "version"], [([package, text], "") for package, text in table.packages.items()])
    for entry in table.conflicts:
        click.echo(f"{entry.package} is in dispute, and settled at {entry.settled}. {entry.how}")
        over = entry.overridden()
        for who, says in entry.wants.items():
            click.echo(f"  {who} wants {says}{': not met' if who in over else ''}")
    for sentence in stacks.warnings(table):
        click.echo(f"warning: {sentence}")
    for package, why in table.absent.items():
        click.echo(f"must not be installed: {package} ({why})")
    if table.order:
        click.echo(f"\ninstalled in this order: {', '.join(table.order)}")


@stack.command()
@click.argument("name", shell_complete=completion.stack)
@click.option("--python", envvar="RECIPES_PYTHON", default=None, help="Interpreter that trains (RECIPES_PYTHON).")
@needs_option
@json_option
def verify(name: str, python: str | None, needs: tuple[str, ...], as_json: bool) -> None:
    """Compare what the interpreter that trains has with a stack. Needs no network.

    Nothing of the stack is imported. Exit code 1 when something is missing, of another version or commit, changed, or
    imported from somewhere else.
    """
    from recipes import stack as stacks
    from recipes.logtext import clean
    from recipes.stack import verify as verifying

    python = python or sys.executable
    table = stacks.load(name)
    checked = verifying.verify(table, python, needs=needs)
    wrong = sum(one.wrong for one in checked)
    if as_json:
        click.echo(json.dumps(verifying.as_json(table, python, checked), indent=2, ensure_ascii=False))
    else:
        rows = [([one.name, one.wanted, one.found, one.verdict.replace("_", " ")], one.verdict) for one in checked]
        _table(["", "wanted", "found", "verdict"], rows)
        for one in checked:
            if one.why and one.verdict != "same":
                click.echo(f"  {one.name}: {clean(one.why)}")
        said = f"{wrong} of {len(checked)} not as stack {name} wants" if wrong else f"all as stack {name} wants"
        click.echo(f"{python}: {said}.")
    sys.exit(1 if wrong else 0)


@stack.command()
@click.argument("name", shell_complete=completion.stack)
@hardware_option
@needs_option
@output_option
def install(name: str, hardware: str, needs: tuple[str, ...], output: Path | None) -> None:
    """Write the shell script that installs a stack on a node. Running it again goes on where it stopped."""
    from recipes import stack as stacks
    from recipes.stack import plan, shell

    print_or_write(shell.script(plan.make(stacks.load(name), hardware, needs=needs)), output, executable=True)


@stack.command()
@click.argument("name", shell_complete=completion.stack)
@hardware_option
@needs_option
@output_option
def dockerfile(name: str, hardware: str, needs: tuple[str, ...], output: Path | None) -> None:
    """Write the Dockerfile of a stack. The base image is named without a registry: see BASE_IMAGE in it."""
    from recipes import stack as stacks
    from recipes.stack import dockerfile as dockerfiles
    from recipes.stack import plan

    print_or_write(
        dockerfiles.dockerfile(plan.make(stacks.load(name), hardware, needs=needs)), output, executable=False
    )


@stack.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--stack",
    "name",
    required=True,
    metavar="NAME",
    help="The stack to compare with.",
    shell_complete=completion.stack,
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out files, such as 'docs/blog/*'.")
@json_option
def drift(directory: Path, name: str, exclude: tuple[str, ...], as_json: bool) -> None:
    """Find refs and versions in a checkout that differ from a stack, or from each other.

    Reads Dockerfiles, shell scripts, requirement files, package metadata and documents (.md, .rst). Files about another
    CANN or another kind of device are left out. Exit code 1 when there is an error.
    """
    from recipes import stack as stacks
    from recipes.stack import drift as drifts

    report = drifts.look(stacks.load(name), directory, exclude)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        sys.exit(1 if report.errors else 0)
    for one in report.drifts:
        click.echo(f"{one.file}:{one.line}: {one.severity}: {drifts.VERDICTS[one.verdict][1]}")
        click.echo(f"    {one.subject}: found {one.found}, wanted {one.wanted}. {one.why}")
    click.echo(
        f"{report.errors} errors and {len(report.drifts) - report.errors} warnings in {report.files} files "
        f"({len(report.elsewhere)} of them about another CANN or device), {report.mentions} mentions compared."
    )
    sys.exit(1 if report.errors else 0)


def _table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
    """Print rows, each with the verdict that colours it. What stands in them is text, not markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from recipes.logtext import clean

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        drawn.add_column(head, no_wrap=True, overflow="ignore")
    for cells, verdict in rows:
        style = STYLES.get(verdict, "red") if verdict else ""
        drawn.add_row(*(Text(clean(cell), style=style) for cell in cells))
    # Rows stay rows: a line that is too long for a terminal wraps there, and in a file it does not.
    Console(markup=False, highlight=False, width=400).print(drawn, crop=False, soft_wrap=True)


def print_or_write(text: str, output: Path | None, *, executable: bool) -> None:
    """Print `text`, or write it to `output` and say where. Raises RecipeError when that cannot be written."""
    from recipes.errors import writing
    from recipes.run.directory import write_text

    if output is None:
        click.echo(text, nl=False)
        return
    with writing("--output", output):
        write_text(output, text)
        output.chmod(0o755 if executable else 0o644)
    click.echo(str(output))
