"""Runs against each other: `replay` and `diff`. A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from recipes import completion
from recipes.cli_follow import follow

# What a command needs is imported inside it, so that --help answers at once.


@click.command("replay")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path), shell_complete=completion.run)
@click.option(
    "--run-dir", "target", type=click.Path(path_type=Path), help="Where it goes (default: a new folder in runs/)."
)
@click.option("--dry-run", is_flag=True, help="Say what differs now and print the command; start nothing.")
@click.option("--waive", multiple=True, metavar="RULE", help="Launch in spite of this preflight rule too.")
def replay_command(run_dir: Path, target: Path | None, dry_run: bool, waive: tuple[str, ...]) -> None:
    """Run the same again in a new directory: argv and environment as RUN recorded them, but for its paths.

    Says first what is different now: packages, commits, model, data, hardware, the recipe's files. That stops nothing;
    a missing interpreter, model or data does, and an error of preflight that RUN was not launched in spite of. Secrets
    were not recorded: export them again.
    """
    from recipes import notebook, params, preflight, replay
    from recipes.run import launch
    from recipes.run.directory import default_path, open_run, read_state

    opened = open_run(run_dir)
    state = read_state(opened)
    place = target or default_path(params.home() / "runs", f"replay-{state['recipe']}")
    planned = replay.plan(opened, place.absolute())
    click.echo(planned.text(), err=dry_run)
    if dry_run:
        for variable, text in planned.command.environment.items():
            click.echo(f"{variable}={shlex.quote(text)}")
        click.echo(shlex.join(planned.command.argv))
        return
    notebook.prepare(planned.composed, python=planned.command.python)
    found = preflight.check(planned.composed, python=planned.command.python)
    for finding in found:
        click.echo(f"{finding.severity}: {finding}", err=True)
    # What RUN waived may be a rule that this version no longer has; a rule named now must be there.
    waived = sorted({*waive, *(rule for rule in state.get("waived", ()) if rule in preflight.RULES)})
    preflight.refuse(found, waived)
    started = launch.start(
        planned.composed,
        planned.command,
        on_disconnect=state.get("on_disconnect"),
        deadline_seconds=state.get("deadline_seconds"),
        waived=waived,
    )
    planned.record(started)
    click.echo(f"run directory: {started.path}")
    ended = follow(started.path, stop_on_interrupt=True)
    click.echo(notebook.judge(started.path).text())
    sys.exit(0 if ended["state"] == "finished" else 1)


@click.command("diff")
@click.argument("run_a", type=click.Path(path_type=Path), shell_complete=completion.run)
@click.argument("run_b", type=click.Path(path_type=Path), shell_complete=completion.run)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def diff_command(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Say what differs between two runs: outcome, recipe, verl's configuration, environment, packages, commits, data.

    What is equal is summed up in one line. The paths of the two directories do not count.
    """
    from recipes import differences
    from recipes.run.directory import open_run

    parts = differences.compare(*(differences.of_run(open_run(path)) for path in (run_a, run_b)))
    if as_json:
        click.echo(json.dumps(differences.to_dict(parts), indent=2, ensure_ascii=False))
        return
    a, b = differences.name_of(run_a), differences.name_of(run_b)
    click.echo(f"{a}  →  {b}")
    click.echo(differences.describe(parts, a, b))
