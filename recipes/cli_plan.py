"""Planning a run: `layouts` and `simulate`. A thin face, as in recipes.cli, which mounts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from recipes import completion
from recipes.errors import RecipeError, writing

# What a command needs is imported inside it, so that --help answers at once.


@click.command("layouts", epilog="Overrides are key=value, such as optimizer.lr=1e-6 or batch.micro=1.")
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("--nodes", type=int, help="Nodes that train (default: the recipe's).")
@click.option(
    "--hardware",
    help="Facts under params/hardware, such as atlas_a2 (default: the recipe's).",
    shell_complete=completion.hardware,
)
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
    with writing("--output", output):
        write_text(output, layouts.recipe_text(found, found.layouts[0], layouts.base_name(composed, output)))
    click.echo(f"written: {output}; see also: recipes check --anywhere {output}", err=True)


@click.command("simulate", epilog="Overrides are key=value, such as tensor_parallel=8 or batch.micro=1.")
@click.argument("name", shell_complete=completion.recipe)
@click.argument("overrides", nargs=-1, shell_complete=completion.override)
@click.option("--figure", type=click.Path(path_type=Path), help="Draw both memory bars into this PNG or SVG file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, in bytes and elements.")
@click.option("--python", default=None, help="Interpreter with the `cpu` extra, if not this one.")
def simulate_command(
    name: str, overrides: tuple[str, ...], figure: Path | None, as_json: bool, python: str | None
) -> None:
    """Build every stage of a full-size model with the real Megatron-Core, without a weight, and weigh it.

    Megatron's own validation speaks: what it refuses here, it would refuse on the devices. Weights, gradients and
    optimizer state are read off what it builds; activations, KV cache and rollout are computed. Exit code 1 when it
    refuses, or when the parameters are not the model's.
    """
    from recipes import bars, params, simulate

    if figure is not None and figure.suffix not in (".png", ".svg"):
        raise RecipeError(f"--figure {figure}: give it a name that ends in .png or .svg.")
    found = simulate.simulate(params.compose(name, overrides), **({"python": python} if python else {}))
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else simulate.describe(found))
    if figure is not None:
        with writing("--figure", figure):
            bars.save(found.memory, figure, title=f"{found.recipe} on {found.world} devices")
        click.echo(f"written: {figure}", err=True)
    sys.exit(0 if found.passed else 1)
