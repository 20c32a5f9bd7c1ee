"""Planning a run: `layouts`. A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from recipes.errors import RecipeError

# What a command needs is imported inside it, so that --help answers at once.


@click.command("layouts", epilog="Overrides are key=value, such as optimizer.lr=1e-6 or memory.recompute=full.")
@click.argument("name")
@click.argument("overrides", nargs=-1)
@click.option("--nodes", type=int, help="Nodes that train (default: the recipe's).")
@click.option("--hardware", help="Facts under params/hardware, such as atlas_a2 (default: the recipe's).")
@click.option("--length", type=int, metavar="TOKENS", help="Longest prompt + response (default: the recipe's).")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="How many to show.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the first as a recipe that extends NAME.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, in bytes.")
def layouts_command(
    name: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    hardware: str | None,
    length: int | None,
    top: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Rank the parallel layouts of a recipe on the nodes you have, each with its reasons.

    Valid is what preflight accepts; memory, idle pipeline slots and bytes sent are computed, never measured. When
    nothing fits, says how many nodes it takes.

    \b
        recipes layouts glm5_2/grpo_a3_512 --nodes 16 -o mine.yaml
        recipes layouts qwen3/grpo_30b_a3b_vllm_a3 --hardware atlas_a2
    """
    from recipes import layouts, params
    from recipes.run.directory import write_text

    composed = params.compose(name, overrides)
    found = layouts.fitting_plan(composed, nodes=nodes, hardware=hardware, length=length)
    if as_json:
        click.echo(json.dumps(found.to_dict(top), indent=2, ensure_ascii=False))
    else:
        click.echo(layouts.describe(found, top))
    if output is None:
        return
    if output.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--output {output}: a recipe is a YAML file; give it a name that ends in .yaml.")
    try:
        write_text(output, layouts.recipe_text(found, found.layouts[0], layouts.base_name(composed, output)))
    except OSError as fault:
        raise RecipeError(f"--output {output} cannot be written: {fault.strerror}.") from fault
    click.echo(f"written: {output}; see also: recipes check --anywhere {output}", err=True)
