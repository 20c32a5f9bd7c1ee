"""Which layers each pipeline stage holds: read from a layout, a first and last stage, or an even split."""

from __future__ import annotations

import re

from recipes.errors import RecipeError
from recipes.schema import Parallel

_SYMBOLS = {"E": "the embedding", "t": "a transformer layer", "m": "an MTP layer", "L": "the loss"}


def read_layout(text: str) -> list[str]:
    """Return a layout's stages, unrolled: `Et*2|(t|)*2tL` gives ["Ett", "t", "t", "tL"].

    The notation is Megatron-Core's (pipeline_model_parallel_layout): E embedding, t transformer layer, m MTP layer, L
    loss, `|` ends a stage, `x*n` and `(…)*n` repeat, commas mean nothing. Raises RecipeError for anything else.
    """
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"([EtmL])\*(\d+)"):
        unrolled = re.sub(repeated, lambda found: found[1] * int(found[2]), unrolled)
    stages = unrolled.split("|")
    odd = sorted(set("".join(stages)) - set(_SYMBOLS))
    if odd:
        known = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in _SYMBOLS.items())
        raise RecipeError(f"parallel.pipeline_layout={text!r}: {odd[0]!r} is none of {known}, |, *n and (…)*n.")
    return stages


def stage_sizes(parallel: Parallel, layers: int) -> list[int]:
    """Return the number of transformer layers of each stage, in pipeline order (with virtual stages, each of them).

    An uneven rest is not judged here: the sizes then do not add up to `layers`. Raises RecipeError for a layout that
    cannot be read.
    """
    if parallel.pipeline_layout:
        return [stage.count("t") for stage in read_layout(parallel.pipeline_layout)]
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    ends = (first is not None) + (last is not None)
    middle = parallel.pipeline - ends
    sizes = [(layers - (first or 0) - (last or 0)) // middle] * middle if middle > 0 else []
    sizes = ([] if first is None else [first]) + sizes + ([] if last is None else [last])
    # Megatron gives a rank's virtual stages an equal share of its layers, and runs all first ones before the second.
    virtual = parallel.virtual_pipeline or 1
    return [size // virtual for size in sizes] * virtual


def stage_starts(parallel: Parallel, layers: int) -> list[int]:
    """Return the first layer of each stage, counted from 0, in pipeline order."""
    sizes = stage_sizes(parallel, layers)
    return [sum(sizes[:stage]) for stage in range(len(sizes))]
