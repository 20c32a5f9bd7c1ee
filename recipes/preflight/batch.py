"""Rules on batches and lengths: do prompts, responses, mini and micro batches come out even?"""

from __future__ import annotations

from recipes.finding import divisors
from recipes.preflight.rules import Subject, rule


@rule("batch.mini", noticed="configuration, but never with dynamic batches", source="verl 0.9.1, validate_config")
def mini_fits_train(s: Subject):
    b = s.recipe.batch
    if 0 < b.train < b.mini:
        yield (
            {"batch.mini": b.mini, "batch.train": b.train},
            "a mini batch cannot hold more prompts than the step has.",
            f"Take batch.mini ≤ {b.train}.",
        )


@rule("batch.mini_divides", severity="warning", noticed="never: verl pads with empty samples", source="verl 0.9.1")
def mini_divides_train(s: Subject):
    b = s.recipe.batch
    if b.train >= b.mini and b.train % b.mini:
        yield (
            {"batch.train": b.train, "batch.mini": b.mini},
            "the last mini batch of each step is filled up with empty samples.",
            f"{divisors(b.train, limit=1024)} leave none.",
        )


@rule("batch.mini_over_ranks", noticed="first step", source="verl 0.9.1, actor worker")
def mini_is_divisible_over_ranks(s: Subject):
    sequences = s.recipe.batch.mini * s.recipe.rollout.n
    if sequences % s.data_parallel:
        yield (
            {"batch.mini": s.recipe.batch.mini, "rollout.n": s.recipe.rollout.n},
            f"{sequences} sequences of a mini batch are not divisible over {s.data_parallel} data-parallel ranks.",
            f"batch.mini x rollout.n must be a multiple of {s.data_parallel}.",
        )


@rule("batch.micro", noticed="configuration or first step", source="verl 0.9.1, validate_config")
def micro_divides(s: Subject):
    b, n = s.recipe.batch, s.recipe.rollout.n
    if b.dynamic or b.micro is None:
        return
    a_rank = b.mini * n // s.data_parallel
    if a_rank % b.micro:
        yield (
            {"batch.micro": b.micro, "batch.mini": b.mini, "rollout.n": n},
            f"the {a_rank} sequences a rank has of a mini batch are not divisible by {b.micro}.",
            f"{divisors(a_rank, limit=256)} divide them.",
        )


@rule("batch.micro_or_dynamic", noticed="configuration", source="verl 0.9.1, validate_config")
def micro_is_given(s: Subject):
    if s.recipe.batch.micro is None and not s.recipe.batch.dynamic:
        yield {"batch.micro": None}, "verl needs a micro batch size or dynamic batches.", "Set batch.micro."


@rule("lengths.positions", noticed="rollout start, or never", source="the model's max_position_embeddings")
def lengths_fit_the_model(s: Subject):
    d = s.recipe.data
    total = d.max_prompt_length + d.max_response_length
    if total > s.model.max_positions:
        yield (
            {"data.max_prompt_length": d.max_prompt_length, "data.max_response_length": d.max_response_length},
            f"together {total} tokens, and {s.model.name} has {s.model.max_positions} positions.",
            "Shorten one of them.",
        )
