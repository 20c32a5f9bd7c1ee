"""`recipes …`: the command line. A thin face: each command calls the same functions the notebooks call."""

from __future__ import annotations

import contextlib
import gc
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from recipes import __version__, completion
from recipes.cli_batch import batch_command
from recipes.cli_compare import compare_command, report_command, rollouts_command
from recipes.cli_diagnose import diagnose_command
from recipes.cli_follow import Progress, follow
from recipes.cli_judge import baseline_command, judge_command
from recipes.cli_metrics import metrics_command, plot_command
from recipes.cli_node import doctor
from recipes.cli_plan import layouts_command, simulate_command
from recipes.cli_runs import diff_command, replay_command
from recipes.cli_stack import print_or_write, stack
from recipes.cli_tools import card_command, check_export, data_commands, migrate_command, python_option
from recipes.errors import RecipeError, writing

# What a command needs is imported inside it, so that --help answers at once.

OVERRIDES = "Overrides are key=value, such as optimizer.lr=1e-6 or tensor_parallel=8."


class Sentences(click.Group):
    """A group whose commands end a RecipeError as one sentence on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        # Composing a configuration makes some 100,000 small objects that stay: looking for garbage among them every
        # 700 is an eighth of the time a check takes.
        gc.set_threshold(50_000)
        try:
            return super().invoke(ctx)
        except RecipeError as fault:
            click.echo(f"error: {fault}", err=True)
            sys.exit(2)


@click.group(cls=Sentences, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(version)s")
def main() -> None:
    """Recipes for GRPO with verl and Megatron-Core: compose, check, launch, watch, judge, export.

    \b
    A first run on this machine, no accelerator:
        recipes run quickstart/grpo
    """


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_recipes(as_json: bool) -> None:
    """Name every recipe."""
    from recipes import params

    rows = [(name, params.title(name)) for name in params.names()]
    if as_json:
        click.echo(json.dumps(dict(rows), indent=2, ensure_ascii=False))
        return
    width = max(len(name) for name, _ in rows)
    for name, title in rows:
        click.echo(f"{name:{width}}  {title}")


@main.command(epilog=OVERRIDES)
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("--diff-base", is_flag=True, help="Only what differs from the recipe's bases.")
def show(name: str, overrides: tuple[str, ...], diff_base: bool) -> None:
    """Show a recipe as it resolves."""
    from recipes import params

    composed = params.compose(name, overrides)
    if not diff_base:
        click.echo(params.dump(composed.recipe), nl=False)
        return
    for setting in params.difference(composed):
        click.echo(f"{setting.key} = {setting.value!r}   ({setting.origin})")


@main.command(epilog=OVERRIDES)
@click.argument("name", shell_complete=completion.recipe)
@click.argument("key", shell_complete=completion.key)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
def explain(name: str, key: str, overrides: tuple[str, ...]) -> None:
    """Say what KEY means, its value in recipe NAME, and which file or flag set it."""
    from recipes import params

    value, meaning, history = params.explain(params.compose(name, overrides), key)
    click.echo(f"{params.SHORT_NAMES.get(key, key)} = {value!r}")
    if meaning:
        click.echo(f"  {meaning}")
    if not history:
        click.echo("  set by: the schema's default")
    for place, setting in enumerate(reversed(history)):
        click.echo(f"  {'set by' if place == 0 else 'before'}: {setting.origin} ({setting.value!r})")


@main.command(epilog=OVERRIDES)
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("--here/--anywhere", default=True, help="Also look at this machine's files and packages (default).")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write a JUnit report here, a test case a rule.")
@click.option("--waive", multiple=True, metavar="RULE", help="Do not count this rule's errors.")
@python_option
def check(
    name: str,
    overrides: tuple[str, ...],
    here: bool,
    as_json: bool,
    junit: Path | None,
    waive: tuple[str, ...],
    python: str | None,
) -> None:
    """Look for what would break a run, without starting it. Exit code 1 when there is an error that is not waived."""
    from dataclasses import asdict

    from recipes import memory, params, preflight
    from recipes.command import build, compose_verl, training_python

    python = python or training_python()
    composed = params.compose(name, overrides)
    if composed.recipe.supervision.thresholds:
        from recipes import verdict  # which takes a fifth of the time of a check

        verdict.thresholds(composed.recipe.supervision.thresholds, "supervision.thresholds")
    compose_verl(build(composed, python=python), composed)
    found = preflight.check(composed, python=python, here=here)
    if as_json:
        click.echo(json.dumps([asdict(f) for f in found], indent=2, ensure_ascii=False, default=str))
    for finding in () if as_json else found:
        click.echo(f"{finding.severity}: {finding}\n    rule {finding.rule}; would have shown at: {finding.noticed}")
    if not found and not as_json:
        click.echo(f"{len(preflight.looking(here=here))} rules found nothing.")
    if not as_json and any(preflight.RULES[f.rule].here for f in found):
        click.echo(
            "note: some of it is about this machine; --anywhere leaves that out, for a recipe that runs elsewhere."
        )
    if not as_json:
        with contextlib.suppress(RecipeError):  # stages that do not hold the model: a rule has said so
            for sentence in memory.too_large(memory.estimate(preflight.subject(composed))):
                click.echo(f"note: {sentence} `recipes simulate` and `recipes layouts` look closer.")
    if junit is not None:
        from recipes.run.directory import write_text  # with psutil, which a check needs for nothing else

        with writing("--junit", junit):
            write_text(junit, preflight.junit(found, here=here, waived=waive))
    preflight.refuse([], waive)  # a waiver of a rule that is not there is a mistake
    sys.exit(1 if any(f.severity == "error" and f.rule not in waive for f in found) else 0)


@main.command(epilog=OVERRIDES)
@click.argument("name", required=False, shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option(
    "--resume",
    "resumed",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Go on with this run.",
    shell_complete=completion.run,
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run goes (default: a new folder in runs/).")
@click.option("--dry-run", is_flag=True, help="Print the command and its environment; start nothing.")
@click.option("--waive", multiple=True, metavar="RULE", help="Launch in spite of this preflight rule.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="End the run after so many minutes.")
@python_option
def run(
    name: str | None,
    overrides: tuple[str, ...],
    resumed: Path | None,
    run_dir: Path | None,
    dry_run: bool,
    waive: tuple[str, ...],
    deadline: float | None,
    python: str | None,
) -> None:
    """Train a recipe, watch it, and judge it. Ctrl-C ends the run and everything it started.

    With --resume RUN no recipe is named: the run goes on from its last whole checkpoint as a further attempt, with its
    own recipe and the overrides given; --dry-run shows from where.

    Exit code 0 when the training ended by itself and what it exported is whole; `recipes judge` answers for the rest.
    """
    from recipes import notebook, params, preflight, verdict
    from recipes.command import build, training_python
    from recipes.run import launch, resume
    from recipes.run.directory import default_path, open_run

    python = python or training_python()
    if (name is None or "=" in name) != (resumed is not None):
        raise RecipeError("Give the name of a recipe, or --resume RUN with overrides (key=value) only.")
    if resumed is not None and run_dir is not None:
        raise RecipeError("--run-dir does not go with --resume: a resumed run stays in its directory.")
    resumption = None
    if resumed is not None:
        resumption = resume.plan(open_run(resumed), [w for w in (name, *overrides) if w], python=python)
        composed, command = resumption.composed, resumption.command
        for line in resumption.lines():
            click.echo(line)
    else:
        place = run_dir or default_path(params.home() / "runs", name.removesuffix(".yaml").split("/params/")[-1])
        composed = params.compose(name, overrides, run_dir=str(place.absolute()))
        command = build(composed, python=python)
    verdict.thresholds(composed.recipe.supervision.thresholds, "supervision.thresholds")
    if dry_run:
        for variable, text in command.environment.items():
            click.echo(f"{variable}={shlex.quote(text)}")
        click.echo(shlex.join(command.argv))
        return
    notebook.prepare(composed, python=python)
    found = preflight.check(composed, python=python)
    for finding in found:
        if finding.severity != "error" or finding.rule in waive:  # the others are in the sentence that ends this
            click.echo(f"{finding.severity}: {finding}", err=True)
    preflight.refuse(found, waive)
    watched: dict[str, Any] = {"deadline_seconds": None if deadline is None else 60 * deadline, "waived": waive}
    started = resume.resume(resumption, **watched) if resumption else launch.start(composed, command, **watched)
    click.echo(f"run directory: {started.path}")
    state = follow(started.path, stop_on_interrupt=True)
    judged = notebook.judge(started.path)
    click.echo(judged.text())
    lost = any(j.rule == "EXPORT" and j.outcome == "fail" for j in judged.verdict.judgements)
    sys.exit(0 if state["state"] == "finished" and not lost else 1)


@main.command(epilog=OVERRIDES)
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("--ranks", type=int, default=2, show_default=True, help="Processes to fold the layout to: 1, 2 or 4.")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Steps to train.")
@click.option("--export/--no-export", default=True, help="Write a checkpoint at the end and compare it (default).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run goes (default: a new folder in runs/).")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="End the run after so many minutes.")
@click.option("--dry-run", is_flag=True, help="Say what becomes of each setting; start nothing.")
def rehearse(
    name: str,
    overrides: tuple[str, ...],
    ranks: int,
    steps: int,
    export: bool,
    run_dir: Path | None,
    deadline: float | None,
    dry_run: bool,
) -> None:
    """Train a recipe's stand-in for a few steps, here and without an accelerator.

    A tiny model of the same family, the layout folded to a few processes, the same losses and the same export, by the
    same command. Says what was folded, replaced or not exercised. Exit code 0 when the training ended by itself, every
    number is a number, trainer and rollout agree, and the export is whole.
    """
    from recipes import notebook, params, preflight, rehearsal
    from recipes.command import build
    from recipes.run import launch
    from recipes.run.directory import default_path, write_json

    run_dir = (run_dir or default_path(params.home() / "runs", f"rehearsal-{name}")).absolute()
    told = rehearsal.fold(
        params.compose(name, overrides), ranks=ranks, steps=steps, export=export, run_dir=str(run_dir)
    )
    for line in told.lines():
        click.echo(line)
    command = build(told.composed)
    if dry_run:
        return
    notebook.prepare(told.composed)
    found = preflight.check(told.composed)
    preflight.refuse(found)
    started = launch.start(told.composed, command, deadline_seconds=None if deadline is None else 60 * deadline)
    write_json(started.path / "rehearsal.json", told.to_dict())
    click.echo(f"run directory: {started.path}")
    follow(started.path, stop_on_interrupt=True)
    judgements = notebook.judge(started.path).verdict.judgements
    counted = [j for j in judgements if j.rule in rehearsal.COUNTS]
    for j in counted:
        click.echo(str(j))
    sys.exit(1 if any(j.outcome == "fail" for j in counted) else 0)


@main.command("notebook")
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="A parameter of the notebook.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run goes (default: a new folder in runs/).")
def run_notebook(path: Path, pairs: tuple[tuple[str, str], ...], run_dir: Path | None) -> None:
    """Run a notebook without a browser, by papermill, and show the progress of its training.

    The executed notebook is kept in the run directory. Ctrl-C ends the notebook and everything it started.
    """
    from recipes import headless, params
    from recipes.run.directory import default_path

    parameters = dict(pairs)
    name = parameters.get("recipe", headless.declared(path).get("recipe", path.stem))
    run_dir = (run_dir or default_path(params.home() / "runs", name)).absolute()
    printed = Progress()
    try:
        code = headless.execute(path, parameters, run_dir, printed.say)
    except KeyboardInterrupt:
        printed.close()
        raise RecipeError("interrupted; the run and everything it started has ended.") from None
    printed.close()
    if code:
        last = (run_dir / "papermill.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RecipeError(f"the notebook failed: {' '.join(last)}\n  executed notebook: {run_dir / 'notebook.ipynb'}")
    click.echo(f"notebook: {run_dir / 'notebook.ipynb'}\ncurves:   {run_dir / 'curves' / 'curves.png'}")
    click.echo(f"run:      {run_dir}")


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path), shell_complete=completion.run)
def watch(run_dir: Path) -> None:
    """Watch a run that somebody else started. Ctrl-C ends the watching, not the run."""
    state = follow(run_dir, stop_on_interrupt=False)
    sys.exit(0 if state["state"] == "finished" else 1)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path), shell_complete=completion.run)
def stop(run_dir: Path) -> None:
    """End a run and everything it started."""
    from recipes.run import launch
    from recipes.run.directory import open_run

    state = launch.stop(open_run(run_dir))
    click.echo(f"{state['state']}: {state['cause'] or 'no process of it is left'}")


@main.command(epilog=OVERRIDES)
@click.argument("name", required=False, shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write here and make it executable.")
@click.option("--all", "folder", type=click.Path(path_type=Path), help="Write every recipe into this folder.")
@python_option
def export(
    name: str | None, overrides: tuple[str, ...], output: Path | None, folder: Path | None, python: str | None
) -> None:
    """Write a recipe as a shell script that launches the same run."""
    from recipes import params
    from recipes.command import training_python
    from recipes.export import file_name, script

    if (name is None) == (folder is None):
        raise RecipeError("export takes the name of one recipe, or --all FOLDER.")
    targets = {name: output} if name else {each: folder / file_name(each) for each in params.names()}
    for each, target in targets.items():
        print_or_write(script(each, overrides, python=python or training_python()), target, executable=True)


@main.command(epilog=OVERRIDES)
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@python_option
def prepare(name: str, overrides: tuple[str, ...], python: str | None) -> None:
    """Make the model and the data of a recipe on this machine, if the recipe says how."""
    from recipes import notebook, params

    composed = params.compose(name, overrides)
    if not composed.recipe.prepare:
        raise RecipeError(
            f"Recipe {composed.name} does not make its model and data: it names model.path and data files."
        )
    notebook.prepare(composed, python=python)


for command in (
    batch_command,
    stack,
    layouts_command,
    simulate_command,
    card_command,
    check_export,
    data_commands,
    migrate_command,
    doctor,
    replay_command,
    diff_command,
    judge_command,
    baseline_command,
    diagnose_command,
    metrics_command,
    plot_command,
    compare_command,
    report_command,
    rollouts_command,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
