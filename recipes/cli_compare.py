"""Runs side by side and what they wrote: `compare`, `report`, `rollouts`. A thin face, mounted by recipes.cli."""

from __future__ import annotations

import json
from pathlib import Path

import click

# What a command needs is imported inside it, so that --help answers at once.


@click.command("rollouts")
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN|FOLDER|FILE")
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
