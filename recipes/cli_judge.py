"""`recipes judge` and `recipes baseline`: verdicts, and the baselines they compare with. Mounted by recipes.cli."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from recipes import completion
from recipes.errors import RecipeError, writing

# What a command needs is imported inside it, so that --help answers at once.


def _rules() -> None:
    import dataclasses

    from recipes.verdict import RULES, Thresholds

    width = max(map(len, RULES))
    for one in RULES.values():
        stops = " [supervision.stop_on]" if one.stops else ""
        click.echo(f"{one.name:{width}}  {one.worst:4}  {one.meaning}{stops}")
    click.echo()
    for one in dataclasses.fields(Thresholds):
        click.echo(f"{one.name} = {one.default:g}   {one.metadata['meaning']} ({one.metadata['source']})")


@click.command("judge")
@click.argument(
    "run_dir", metavar="RUN|FILE", required=False, type=click.Path(path_type=Path), shell_complete=completion.run
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write a JUnit report here, a test case a rule.")
@click.option("--threshold", "thresholds", multiple=True, metavar="NAME=VALUE", help="Set one threshold.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Compare with this file, not the one that fits.")
@click.option("--deterministic", is_flag=True, help="Trainer and rollout must agree but for rounding.")
@click.option("--rules", "list_rules", is_flag=True, help="Name every rule and threshold with its source instead.")
def judge_command(
    run_dir: Path | None,
    as_json: bool,
    junit: Path | None,
    thresholds: tuple[str, ...],
    baseline: Path | None,
    deterministic: bool,
    list_rules: bool,
) -> None:
    """Judge a run, or a bare file of metrics. Exit code 1 when it may not be believed.

    A file may be anything `recipes metrics` reads, such as a console log; what only a run directory knows (how the
    training ended, how many steps were due, what was exported) is then said not to be known.

    \b
        recipes judge runs/quickstart-grpo/… --junit verdict.xml
        recipes judge train.log --threshold grad_factor=20
        recipes judge --rules
    """
    from recipes import notebook, verdict
    from recipes.run.directory import write_text

    if list_rules:
        _rules()
        return
    if run_dir is None:
        raise RecipeError("judge takes a run directory or a file of metrics, or --rules.")
    try:
        judged = notebook.judge(run_dir, thresholds=thresholds, baseline=baseline, deterministic=deterministic)
    except RecipeError as fault:  # a CI that keeps the report must see this in it as well
        if junit is not None:
            with writing("--junit", junit):
                write_text(junit, verdict.junit_of_error(str(fault)))
        raise
    if as_json:
        click.echo(json.dumps(judged.verdict.to_dict(), indent=2, ensure_ascii=False))
    else:
        click.echo(judged.text())
    if junit is not None:
        with writing("--junit", junit):
            write_text(junit, verdict.junit(judged.verdict))
    sys.exit(0 if judged.verdict.passed else 1)


@click.group("baseline")
def baseline_command() -> None:
    """Baselines: where earlier runs of a recipe were, on its stack and hardware."""


@baseline_command.command("make")
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path), shell_complete=completion.run
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to (default: where judge looks for it).")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="First steps to leave out.")
@click.option("--replace", is_flag=True, help="Write over a baseline that is there.")
def make(runs: tuple[Path, ...], output: Path | None, warmup: int, replace: bool) -> None:
    """Make a baseline from three or more runs that differ in their seed alone.

    A band is the 99 % prediction interval of one more run, and never narrower than the metric's tolerance. A run whose
    verdict fails is refused. The default place is params/baselines/<recipe>/<stack>-<hardware>.yaml.
    """
    from recipes import baseline, notebook
    from recipes.run.directory import write_text

    samples = [baseline.sample(path) for path in runs]
    made = baseline.make(samples, warmup=warmup)
    for path in runs:
        verdict = notebook.judge(path).verdict
        # The baseline that is there may be what is to be replaced.
        failed = [j for j in verdict.judgements if j.outcome == "fail" and j.rule not in ("BASELINE", "PERF")]
        if failed:
            raise RecipeError(f"{path} may not be believed ({failed[0].rule}: {failed[0].sentence}): leave it out.")
    target = output or baseline.place(made.recipe, made.stack, made.hardware)
    if target.exists() and not replace:
        raise RecipeError(f"{target} is there already; --replace writes over it.")
    with writing("-o", target):
        write_text(target, baseline.dump(made))
    click.echo("\n".join(baseline.lines(made)))
    click.echo(f"wrote {target}")


@baseline_command.command("show")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def show(file: Path | None) -> None:
    """Show a baseline: its key, age, runs and bands. Without FILE: every baseline of the workbook."""
    from recipes import baseline, params

    files = [file] if file else sorted((params.home() / "params" / "baselines").glob("*/*.yaml"))
    click.echo("\n\n".join("\n".join(baseline.lines(baseline.read(path))) for path in files))
