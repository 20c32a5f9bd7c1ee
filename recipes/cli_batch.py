"""`recipes batch`: many runs at once. A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from recipes.cli_follow import Progress

# What a command needs is imported inside it, so that --help answers at once.

# Seconds between lines of progress where they are not rewritten in place: a night is long, and a log is read.
MINUTE = 60.0


@click.command("batch")
@click.argument("file")
@click.option(
    "--dir", "root", type=click.Path(path_type=Path), help="The batch's directory (default: runs/batches/NAME)."
)
@click.option("--workers", type=click.IntRange(min=1), help="Runs at a time (default: as the file says, or as fit).")
@click.option("--dry-run", is_flag=True, help="Say what would run, how long, at how many device-hours; start nothing.")
@click.option("--stop-on-failure", is_flag=True, help="Start nothing more once a run has failed.")
@click.option("--cap-device-hours", type=click.FloatRange(min=0), help="Refuse what would take more than this.")
def batch_command(
    file: str,
    root: Path | None,
    workers: int | None,
    dry_run: bool,
    stop_on_failure: bool,
    cap_device_hours: float | None,
) -> None:
    """Run the runs and sweeps of a batch FILE, or of a name under params/batches.

    Each is executed by papermill, in a process and a directory of its own. The same command again goes on: what has
    finished is skipped, what was interrupted resumes from its last checkpoint. Ctrl-C ends everything. Where
    RAY_ADDRESS names a cluster, its scheduler places the runs.

    Exit code 0 when every run has finished and its verdict, and its baseline where there is one, passed; 1 when one
    has not; 130 after an interrupt. The directory then holds summary.html, summary.csv and junit.xml.
    """
    from recipes import batch, batch_run, batch_summary, params
    from recipes.errors import writing

    loaded = batch.load(batch.find(file))
    root = (root or params.home() / "runs" / "batches" / loaded.name).absolute()
    cap = loaded.file.cap_device_hours if cap_device_hours is None else cap_device_hours
    if dry_run:
        told = batch_run.forecast(loaded, root, workers)
        click.echo(batch_summary.plan_text(loaded, told, cap))
        batch_run.refuse_cap(told, cap)
        return
    printed, said = Progress(), time.monotonic()

    def event(line: str) -> None:
        if printed.in_place and printed.last:
            click.echo("\r\x1b[K", err=True, nl=False)
        click.echo(line, err=True)

    def progress(line: str) -> None:
        nonlocal said
        if printed.in_place or time.monotonic() - said > MINUTE:
            said = time.monotonic()
            printed.say(line)

    with writing("--dir", root):
        outcomes, interrupted = batch_run.run(
            loaded,
            root,
            workers=workers,
            stop_on_failure=stop_on_failure or loaded.file.stop_on_failure,
            cap=cap,
            event=event,
            progress=progress,
        )
        printed.close()
        batch_summary.write(loaded, outcomes, root)
    click.echo(batch_summary.text(outcomes))
    click.echo(f"{batch_summary.verdict_line(outcomes)}\nsummary: {root / batch_summary.HTML}")
    if interrupted:
        sys.exit(130)
    sys.exit(0 if all(o.what == "passed" for o in outcomes) else 1)
