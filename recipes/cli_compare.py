"""Runs side by side and what they wrote: `compare`, `report`, `rollouts`. A thin face, mounted by recipes.cli."""

from __future__ import annotations

import json
from pathlib import Path

import click

from recipes import completion

# What a command needs is imported inside it, so that --help answers at once.


@click.command("compare")
@click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]RUN|LOG...", shell_complete=completion.run)
@click.option(
    "--by", type=click.Choice(["step", "tokens", "time"]), default="step", help="What curves are laid over by."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for pictures, CSV and JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a report: one HTML file that needs no network.")
@click.option("--tolerance", type=click.FloatRange(0), help="Of two: largest difference of a value that is none.")
@click.option("--in-a-row", "times", type=click.IntRange(1), default=5, help="Of two: steps that must differ in a row.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def compare_command(
    sources: tuple[str, ...],
    by: str,
    output: Path | None,
    html: Path | None,
    tolerance: float | None,
    times: int,
    as_json: bool,
) -> None:
    """Lay runs and logs over each other: curves, last values, what differs between their recipes.

    A source is anything `recipes metrics` reads. Of three or more, runs that differ in nothing but their seed, and
    sources with the same LABEL, are one group: its mean, and a band from the lowest to the highest.

    Of two, values are also compared step by step: the first step that is not equal, and the first of several in a row
    that differ by more than chance lets them, or than --tolerance. That is what a log of NPUs is held
    against a log of GPUs for.

    \b
        recipes compare npu=train_npu.log gpu=train_gpu.log --html npu_gpu.html
        recipes compare runs/a/… runs/a/… runs/b/… --by tokens -o comparison
    """
    from recipes import compare, compare_view, report
    from recipes.atomic import replace_file
    from recipes.errors import writing

    found = compare.compare(sources, by=by, tolerance=tolerance, times=times)
    written = []
    if output is not None:
        with writing("-o", output):
            written += compare_view.save(found, output)
    if html is not None:
        with writing("--html", html):
            written.append(replace_file(html, report.of_comparison(found).encode()))
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else compare_view.text(found))
    for path in written:
        click.echo(f"wrote {path}", err=as_json)


@click.command("report")
@click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]RUN|LOG...", shell_complete=completion.run)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: report.html in the run, or here.")
@click.option("--by", type=click.Choice(["step", "tokens", "time"]), default="step", help="The axis several share.")
def report_command(sources: tuple[str, ...], output: Path | None, by: str) -> None:
    """Write one HTML file on a run or log, or on the comparison of several: no network, light and dark, at most 2 MB.

    It holds the outcome and its cause, the verdict, the curves, the diagnosis of a failure, what differs from the
    recipe, exports, some rollouts and where everything came from. The notebook itself goes to HTML by
    `jupyter nbconvert --to html RUN/notebook.ipynb`.
    """
    from recipes import report
    from recipes.errors import writing

    if output is None:
        run = Path(sources[0])
        output = run / report.FILE if len(sources) == 1 and (run / "run.json").is_file() else Path(report.FILE)
    with writing("-o", output):
        report.write(sources, output, by=by)
    click.echo(f"wrote {output}")


@click.command("rollouts")
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN|FOLDER|FILE", shell_complete=completion.run)
@click.option("--step", type=int, help="Only this step (default: all, and the last one for responses).")
@click.option("--worst", type=click.IntRange(1), metavar="K", help="Show the K responses with the lowest reward.")
@click.option("--best", type=click.IntRange(1), metavar="K", help="Show the K responses with the highest reward.")
@click.option("--flagged", is_flag=True, help="Show responses with a flag, up to 20.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, texts whole (secrets masked).")
def rollouts_command(
    source: Path, step: int | None, worst: int | None, best: int | None, flagged: bool, as_json: bool
) -> None:
    """Read what the model wrote, step by step: rewards, lengths, and responses that loop, are garbled, empty or cut.

    A run keeps its rollouts with trainer.rollout_dump=true. A folder or file of verl's own dumps does as well.

    \b
        recipes rollouts runs/qwen3-…                     a line a step
        recipes rollouts runs/qwen3-… --step 40 --worst 3
        recipes rollouts dumps/40.jsonl --flagged
    """
    from recipes import rollouts

    shown = rollouts.show(source, step=step, worst=worst or 0, best=best or 0, flagged=20 if flagged else 0)
    click.echo(json.dumps(shown.to_dict(), indent=2, ensure_ascii=False) if as_json else shown.text())
