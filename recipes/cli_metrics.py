"""`recipes metrics`: the numbers of any run or log, summed up, as CSV, Parquet or JSON. Mounted by recipes.cli."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recipes import completion
from recipes.errors import RecipeError, nearest, writing

if TYPE_CHECKING:
    from recipes.metrics import Metrics

# What a command needs is imported inside it, so that --help answers at once.

_SHOWN = 12  # keys, broken places and folded names a summary lists; JSON has them all


@click.command("metrics")
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN|FILE", shell_complete=completion.run)
@click.option("-o", "--output", type=click.Path(path_type=Path, allow_dash=True), help=".csv, .parquet, or - for CSV.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, with all keys.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only keys like this: a name, or a pattern with * or ?.")
def metrics_command(source: Path, output: Path | None, as_json: bool, keys: tuple[str, ...]) -> None:
    """Read the metrics of a run directory, or of a file, and say what is in them.

    A file may be verl's JSON lines, TensorBoard events (or their folder), a console log of verl 0.1 to 0.9, slime or
    MindSpeed-RL, or CSV or Parquet from here; packed by gzip or not, finished or still being written. Names of older
    versions of verl, of slime and of MindSpeed-RL are folded into verl's of today where they mean the same. Where the
    step goes back, another training or a resumption is in the file: it is named. What could not be read is listed with
    its line; nothing is guessed.

    \b
        recipes metrics train.log
        recipes metrics train.log.gz --keys 'critic/rewards/*' -o rewards.csv
        recipes metrics runs/quickstart-grpo/… -o curves.parquet
    """
    from recipes import metrics

    found = select(metrics.read(source), keys)
    if output is not None:
        write(found, output)
    if as_json:
        click.echo(json.dumps(summary(found), indent=2, ensure_ascii=False))
    elif output is None or str(output) != "-":
        click.echo("\n".join(describe(found)))
        if output is not None:
            click.echo(f"wrote {output}")


def select(metrics: Metrics, patterns: tuple[str, ...]) -> Metrics:
    """The metrics with only the keys that match a pattern. Raises RecipeError for a pattern that matches none."""
    from dataclasses import replace

    if not patterns:
        return metrics
    names = [str(key) for key in metrics.table]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(f"--keys {pattern!r} matches none of the {len(names)} keys{nearest(pattern, names)}")
    kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    table = metrics.table[kept]
    lost = {key: steps for key, steps in metrics.nonfinite.items() if key in kept}
    at = {step for steps in lost.values() for step in steps}
    table = table[table.notna().any(axis=1) | table.index.isin(list(at))]
    return replace(
        metrics,
        table=table,
        nonfinite=lost,
        folded={old: new for old, new in metrics.folded.items() if new in kept},
        attempts={step: number for step, number in metrics.attempts.items() if step in table.index},
        infinite={key: endless for key, endless in metrics.infinite.items() if key in kept},
        rounded=metrics.rounded & set(kept),
    )


def write(metrics: Metrics, output: Path) -> None:
    """Write the table as CSV or Parquet, by the ending of `output`; `-` is CSV to stdout. Raises RecipeError."""
    from recipes.atomic import replace_file
    from recipes.metrics.table import csv_text, write_csv

    if str(output) == "-":
        click.echo(csv_text(metrics), nl=False)
        return
    if output.suffix not in (".csv", ".parquet"):
        raise RecipeError(f"-o {output} must end in .csv or .parquet, or be - for CSV on stdout.")
    with writing("-o", output):
        if output.suffix == ".csv":
            write_csv(metrics, output)
        else:
            replace_file(output, parquet(metrics))


def parquet(metrics: Metrics) -> bytes:
    """The table as Parquet, `step` first: absent is null, others are numbers, NaN or ±inf. Raises RecipeError."""
    import io

    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as fault:
        raise RecipeError(
            "Parquet needs pyarrow, which is not installed: pip install pyarrow, or write CSV."
        ) from fault
    table = metrics.table
    columns: dict[str, Any] = {"step": pa.array(table.index.to_numpy())}
    for key in table:
        values = table[key].to_numpy(copy=True)
        for step, value in metrics.infinite.get(key, {}).items():
            values[table.index.get_loc(step)] = value
        absent = table[key].isna().to_numpy() & ~table.index.isin(list(metrics.nonfinite.get(key, ())))
        columns[str(key)] = pa.array(values, mask=absent, from_pandas=False)
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def summary(metrics: Metrics) -> dict[str, Any]:
    """What is in the metrics, as plain data."""
    steps = [int(step) for step in metrics.table.index]
    attempts: dict[int, int] = {}
    for step, number in metrics.attempts.items():
        attempts.setdefault(number, step)
    return {
        "source": str(metrics.source),
        "format": metrics.format,
        "trainer": metrics.trainer,
        "state": metrics.state,
        "steps": {"count": len(steps), "first": steps[0], "last": steps[-1]} if steps else {"count": 0},
        "keys": {str(key): _numbers(metrics, str(key)) for key in metrics.table},
        "nonfinite": {key: list(at) for key, at in metrics.nonfinite.items()},
        # JSON has no infinite numbers, so these are words: key → step → "inf" or "-inf". The other ones are NaN.
        "infinite": {key: {str(step): repr(v) for step, v in at.items()} for key, at in metrics.infinite.items()},
        "rounded": sorted(metrics.rounded),
        "restarts": [restart._asdict() for restart in metrics.restarts],
        "broken": [{"line": b.line, "reason": b.reason} for b in metrics.broken],
        "folded": dict(metrics.folded),
        "unfinished": metrics.unfinished,
        "attempts": {str(number): step for number, step in attempts.items()},
    }


def _numbers(metrics: Metrics, key: str) -> dict[str, float | int | None]:
    values = metrics.table[key].dropna()
    if not len(values):
        return {"count": 0}
    numbers = {"first": values.iloc[0], "last": values.iloc[-1], "min": values.min(), "max": values.max()}
    return {"count": len(values), **{name: float(value) for name, value in numbers.items()}}


def describe(metrics: Metrics) -> list[str]:
    """The summary for people: what was read, the keys with their first and last numbers, and what is not in order."""
    from recipes.metrics.table import short

    told = summary(metrics)
    lines = [str(metrics)]
    if metrics.format:
        whose = f" of {metrics.trainer}" if metrics.trainer else ""
        lines.append(f"read as {metrics.format}{whose}")
    if len(told["attempts"]) > 1:
        parts = ", ".join(f"attempt {number} from step {step}" for number, step in told["attempts"].items())
        lines.append(f"one curve of {len(told['attempts'])} attempts: {parts}")
    keys: Mapping[str, Mapping[str, Any]] = told["keys"]
    if keys:
        names = {key: short(key, 60) for key in keys}
        width = max(map(len, names.values()))
        lines += ["", f"{'key':{width}}  {'steps':>7}  {'first':>12}  {'last':>12}  {'min':>12}  {'max':>12}"]
        for key, numbers in keys.items():
            cells = (_shown(numbers.get(part)) for part in ("first", "last", "min", "max"))
            lines.append(f"{names[key]:{width}}  {numbers['count']:>7}  " + "  ".join(f"{cell:>12}" for cell in cells))
    lines += _listed("not finite", [f"{short(key)}: {_which(metrics, key)}" for key in metrics.nonfinite])
    lines += _listed(
        "the step went back: a resumption or another training is in it, and the later values lie over the earlier",
        [str(restart) for restart in metrics.restarts],
    )
    lines += _listed("printed as 0.000, which is rounded and may not be zero", sorted(map(short, metrics.rounded)))
    lines += _listed("could not be read", [str(b) for b in metrics.broken])
    lines += _listed(
        "names folded into today's of verl", [f"{short(old)} → {short(new)}" for old, new in told["folded"].items()]
    )
    return lines


def _listed(title: str, entries: list[str]) -> list[str]:
    more = [f"  … and {len(entries) - _SHOWN} more (--json lists all)"] if len(entries) > _SHOWN else []
    return ["", f"{title}:", *(f"  {entry}" for entry in entries[:_SHOWN]), *more] if entries else []


def _shown(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.6g}"


def _which(metrics: Metrics, key: str) -> str:
    """What a key was where it was not finite, and at which steps."""
    endless = metrics.infinite.get(key, {})
    found: dict[str, list[int]] = {}
    for step in metrics.nonfinite[key]:
        found.setdefault(repr(endless.get(step, math.nan)), []).append(step)
    return ", ".join(f"{value} at {_steps(at)}" for value, at in found.items())


def _steps(at: list[int]) -> str:
    many = f" and {len(at) - 5} more" if len(at) > 5 else ""
    return f"step{'s' if len(at) > 1 else ''} {', '.join(map(str, at[:5]))}{many}"


@click.command("plot")
@click.argument(
    "sources",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="RUN|FILE...",
    shell_complete=completion.run,
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the curves (default: see above).")
def plot_command(sources: tuple[Path, ...], output: Path | None) -> None:
    """Draw the curves of runs, or of any files `recipes metrics` reads (PNG light and dark, SVG, CSV).

    Those of a run go to its own folder `curves`, those of a file to NAME-curves in the current folder. With -o they go
    to that folder; of several sources, each to a folder of its own in it.
    """
    from recipes import notebook
    from recipes.run.directory import open_run

    names = _folders(sources)
    for source, name in zip(sources, names, strict=True):
        if output is None and (source / "run.json").is_file():
            run = open_run(source)
            notebook.record(run)
            folder = run.curves
        else:
            folder = Path(f"{name}-curves") if output is None else output if len(sources) == 1 else output / name
            _draw(source, folder)
        for path in sorted(folder.glob("curves*.*")):
            click.echo(str(path))


def _draw(source: Path, folder: Path) -> None:
    from recipes import curves, metrics

    found = metrics.read(source)
    if not len(found.table):
        raise RecipeError(f"{found} There is nothing to draw.")
    with writing("-o", folder):
        curves.save(found, folder, title=source.absolute().name)
    if found.broken or found.unfinished:
        click.echo(str(found), err=True)


def _folders(sources: tuple[Path, ...]) -> list[str]:
    """A name for each source, all different: its own, or with those of the folders above it as far as it needs them."""
    parts = [[p for p in source.absolute().parts if p != source.absolute().anchor] for source in sources]
    names = []
    for mine in parts:
        depth = 1
        while depth < len(mine) and sum(other[-depth:] == mine[-depth:] for other in parts) > 1:
            depth += 1
        name = "-".join(mine[-depth:])
        while name in names:  # the very same source twice
            name += "-again"
        names.append(name)
    return names
