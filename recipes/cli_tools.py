"""The commands around a run: `check-export`, `data` and `migrate`. Thin faces, as in recipes.cli, which mounts them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from recipes import completion
from recipes.errors import RecipeError, writing

# What a command needs is imported inside it, so that --help answers at once.


def python_option(function: Any) -> Any:
    return click.option(
        "--python",
        envvar="RECIPES_PYTHON",
        default=None,
        help="Interpreter that trains, if not this one (RECIPES_PYTHON).",
    )(function)


@click.command("check-export")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("export", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every name.")
def check_export(source: Path, export: Path, as_json: bool) -> None:
    """Compare an exported checkpoint with its SOURCE: names, shapes and dtypes; no tensor is loaded.

    Only the tensors of MTP layers may be missing. EXPORT may be a global_step_N directory. Exit code 1 when the export
    must not be used. A change between floating dtypes is a warning.
    """
    from recipes import checkpoint

    check = checkpoint.compare(source, export)
    click.echo(json.dumps(check.to_dict(), indent=2, ensure_ascii=False) if as_json else checkpoint.describe(check))
    sys.exit(0 if check.passed else 1)


@click.command("card")
@click.argument("name", shell_complete=completion.recipe)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@python_option
def card_command(name: str, as_json: bool, python: str | None) -> None:
    """Show the verification card of a recipe: what was verified, how, at which versions, and what never was.

    Exit code 1 when something that should hold does not.
    """
    from recipes import card
    from recipes.command import training_python

    found = card.card(name, python=python or training_python())
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else found.text())
    sys.exit(0 if found.passed else 1)


@click.group("data")
def data_commands() -> None:
    """Make the parquet files verl reads, and check them."""


def _task_command(name: str, text: str) -> None:
    @data_commands.command(name, help=text)
    @click.argument("source", required=False)
    @click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory of the two files.")
    @click.option("--validation", metavar="SOURCE", help="Problems for validation; default: the test split.")
    @click.option(
        "--hold-out",
        type=click.IntRange(min=2),
        default=20,
        show_default=True,
        help="Where there is no test split: keep one problem in N for validation.",
    )
    @click.option("--deadline", type=click.FloatRange(min=1), default=1800, show_default=True, help="Seconds to fetch.")
    @click.option("--try/--no-try", "trial", default=True, help="Try verl's reward function on it (default).")
    @python_option
    def command(
        source: str | None,
        out: Path,
        validation: str | None,
        hold_out: int,
        deadline: float,
        trial: bool,
        python: str | None,
    ) -> None:
        from recipes import data
        from recipes.command import training_python

        python = python or training_python()
        made = data.make(
            data.TASKS[name],
            out,
            source=source,
            validation=validation,
            hold_out=hold_out,
            python=python,
            deadline=deadline,
        )
        click.echo(f"train:      {made.train} ({made.train_rows} problems)")
        click.echo(f"validation: {made.validation} ({made.validation_rows} problems)")
        if made.repeated or made.shared:
            click.echo(f"left out:   {made.repeated} repeated, {made.shared} that are in validation")
        _report([made.train, made.validation], trial, python)


_task_command(
    "gsm8k", "GSM8K from SOURCE: a file, a directory or a hub id (default openai/gsm8k); train and test splits."
)
_task_command(
    "dapo-math",
    "DAPO-Math-17k from SOURCE: a file, a directory or a hub id (default BytedTsinghua-SIA/DAPO-Math-17k). It repeats "
    "each problem a hundred times and has no test split: problems are counted once, some held out.",
)


@data_commands.command("check")
@click.argument("train", type=click.Path(path_type=Path))
@click.argument("validation", type=click.Path(path_type=Path), required=False)
@click.option("--function", help="Reward function: pkg://module or a file; default: verl's by data source.")
@click.option("--name", help="Its name; default compute_score.")
@click.option("--try/--no-try", "trial", default=True, help="Try the reward function (default).")
@python_option
def check_data(
    train: Path, validation: Path | None, function: str | None, name: str | None, trial: bool, python: str | None
) -> None:
    """Check parquet files for verl: columns, rows, problems in both, and the reward function on their answers."""
    from recipes import data
    from recipes.command import training_python

    files = [train, *([validation] if validation else [])]
    shared = 0
    if validation and not any(data.check_parquet(file) for file in files):
        shared = data.shared_prompts(train, validation)
        if shared:
            click.echo(f"error: {shared} problems of {validation} are in {train} too: validation would be memory.")
    _report(files, trial, python or training_python(), function=function, name=name, failed=bool(shared))


def _report(files: list[Path], trial: bool, python: str, *, failed: bool = False, **reward: Any) -> None:
    """Print what is wrong with the files and how their reward function scores; exit 1 when something is an error."""
    from recipes import data

    found = [finding for file in files for finding in data.check_parquet(file)]
    if trial and not any(f.severity == "error" for f in found):
        trials = data.try_reward(files[0], python=python, **reward)
        for t in trials[:1]:
            click.echo(f"reward:     {t.response!r} scores {t.truth:g}, wrong {t.wrong:g}, nonsense {t.nonsense:g}")
        found += data.judge_reward(trials)
    for finding in found:
        click.echo(f"{finding.severity}: {finding}")
    sys.exit(1 if failed or any(f.severity == "error" for f in found) else 0)


@click.command("migrate", context_settings={"ignore_unknown_options": True})
@click.argument(
    "launch", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGUMENTS]... | KEY=VALUE..."
)
@click.option(
    "--stack",
    required=True,
    help="The stack the recipe is for; its verl decides which keys there are.",
    shell_complete=completion.stack,
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the recipe here.")
@click.option("--set", "pairs", multiple=True, metavar="NAME=TEXT", help="A variable of the script's environment.")
@click.option(
    "--hardware",
    help="Facts under params/hardware; default: by device type and count.",
    shell_complete=completion.hardware,
)
@click.option("--model", help="Facts under params/models; default: by the model's path.")
@click.option(
    "--defaults",
    "base",
    metavar="RECIPE",
    help="A recipe to extend instead of starting from nothing.",
    shell_complete=completion.recipe,
)
@click.option("--line", type=int, help="The line of the launch, where a script has several.")
@click.option("--json", "as_json", is_flag=True, help="Recipe and report as JSON.")
@python_option
def migrate_command(
    launch: tuple[str, ...],
    stack: str,
    output: Path | None,
    pairs: tuple[str, ...],
    hardware: str | None,
    model: str | None,
    base: str | None,
    line: int | None,
    as_json: bool,
    python: str | None,
) -> None:
    """Turn a verl launch script, or its arguments, into a recipe, and report what became of each key.

    The script is read, never run; what follows it are its own arguments. Exit code 1 when something is left open: the
    recipe is written all the same, and names it.

    \b
        recipes migrate --stack ascend-9.1.0 -o mine.yaml run_qwen3.sh
        recipes migrate --stack ascend-9.1.0 python3 -m verl.trainer.main_ppo model_engine=megatron ...
    """
    from recipes import migrate
    from recipes.command import training_python
    from recipes.run.directory import write_text

    odd = [pair for pair in pairs if not re.match(r"[A-Za-z_]\w*=", pair)]
    if odd:
        raise RecipeError(f"--set {odd[0]!r} is no variable: write NAME=TEXT.")
    variables = dict(pair.split("=", 1) for pair in pairs)
    python = python or training_python()
    found = migrate.migrate(
        launch, stack, python=python, variables=variables, hardware=hardware, model=model, base=base, line=line
    )
    if output is not None:
        with writing("--output", output):
            write_text(output, found.recipe)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        if output is None:
            click.echo(found.recipe, nl=False)
        click.echo(migrate.describe(found), err=True)
    sys.exit(0 if found.complete else 1)
