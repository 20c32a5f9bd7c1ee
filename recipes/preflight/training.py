"""Rules on how a step is computed: recomputation, sequence and context parallelism, virtual stages, token budgets."""

from __future__ import annotations

import math
import os

from recipes import pipeline
from recipes.command import external_modules
from recipes.errors import RecipeError
from recipes.finding import divisors
from recipes.preflight.engines import ADAPTOR, trains_mtp, verbatim
from recipes.preflight.rules import Subject, rule

TRANSFORMER = "Megatron-Core 0.18, TransformerConfig.__post_init__"
MODEL_BUILD = "model build, after the weights are on their way"
FIRST_STEP = "first step"


@rule("memory.recompute", noticed=MODEL_BUILD, source=TRANSFORMER)
def recompute_is_whole(s: Subject):
    m = s.recipe.memory
    keys = {"memory.recompute": m.recompute, "memory.recompute_method": m.recompute_method}
    keys["memory.recompute_layers"] = m.recompute_layers
    if m.recompute == "full":
        if not m.recompute_method or not m.recompute_layers:
            yield (
                keys,
                "full recomputation needs a method and a number of layers.",
                "Set memory.recompute_method=uniform and memory.recompute_layers=1.",
            )
        elif m.recompute_layers > s.model.layers:
            yield keys, f"{s.model.name} has {s.model.layers} layers.", "Set memory.recompute_layers=1."
    elif m.recompute_method or m.recompute_layers:
        yield (
            keys,
            "a method and a number of layers belong to full recomputation.",
            "Set memory.recompute=full, or leave them out.",
        )


def asked_sequence(s: Subject) -> bool | None:
    """Return whether the recipe asks for sequence parallelism; None where it leaves it to verl, which turns it on."""
    return s.recipe.transformer.get("sequence_parallel", s.recipe.parallel.sequence)


@rule("layout.sequence", noticed=MODEL_BUILD, source="Megatron-Core 0.18, ModelParallelConfig.__post_init__")
def sequence_parallel_has_tensor_parallel(s: Subject):
    # verl turns its own setting off where tensor is 1; one in the transformer settings goes past that.
    if s.recipe.parallel.tensor == 1 and s.recipe.transformer.get("sequence_parallel") is True:
        yield (
            {"transformer.sequence_parallel": True, "parallel.tensor": 1},
            "sequence parallelism splits over tensor-parallel ranks, and there is one.",
            "Leave it out: verl turns it on where tensor is above 1.",
        )


@rule("layout.moe_sequence", noticed=FIRST_STEP, source="Megatron-Core 0.18, MoELayer.forward")
def experts_with_tensor_parallel_have_sequence_parallel(s: Subject):
    if s.model.experts and s.recipe.parallel.tensor > 1 and asked_sequence(s) is False:
        key = "transformer.sequence_parallel" if "sequence_parallel" in s.recipe.transformer else "parallel.sequence"
        yield (
            {"parallel.tensor": s.recipe.parallel.tensor, key: False},
            f"{s.model.name} has experts, and Megatron trains them on several tensor-parallel ranks only with sequence "
            "parallelism.",
            f"Set {key}=true, or parallel.tensor=1.",
        )


@rule("layout.dsa", noticed=MODEL_BUILD, source="Megatron-Core 0.18, DSAttention")
def sparse_attention_is_patched(s: Subject):
    if not s.model.index_heads or ADAPTOR in external_modules(s.composed, os.environ):
        return
    asked = {}
    if s.recipe.parallel.context > 1:
        asked["parallel.context"] = s.recipe.parallel.context
    if s.recipe.transformer.get("apply_rope_fusion"):
        asked["transformer.apply_rope_fusion"] = True
    if asked:
        yield (
            asked,
            f"Megatron's own sparse attention, which {s.model.name} needs, does not do that; Ascend's adaptor does.",
            f"Add {ADAPTOR} to external_modules, or leave it out.",
        )


@rule("layout.virtual", noticed="engine start, model build, or first step", source="Megatron-Core 0.18, schedules")
def virtual_stages_come_out_even(s: Subject):
    p, b = s.recipe.parallel, s.recipe.batch
    if not p.virtual_pipeline:
        return
    keys = {"parallel.virtual_pipeline": p.virtual_pipeline, "parallel.pipeline": p.pipeline}
    if p.pipeline == 1:
        yield keys, "virtual stages interleave pipeline stages, and there is one.", "Leave it out."
        return
    uneven = _stages_not_divisible(s)
    if uneven:
        yield {**keys, **uneven[0]}, *uneven[1:]
    if b.micro and not b.dynamic:
        micro_batches = b.mini * s.recipe.rollout.n // s.data_parallel // b.micro
        if micro_batches % p.pipeline:
            yield (
                {**keys, "batch.micro": b.micro},
                f"an update has {micro_batches} micro batches a rank, and the interleaved schedule takes them "
                f"{p.pipeline} at a time.",
                f"Make it a multiple of {p.pipeline}: with batch.micro or batch.mini.",
            )


def _stages_not_divisible(s: Subject) -> tuple[dict[str, object], str, str] | None:
    """What is wrong where the layers of a rank are not divisible over its virtual stages: keys, sentence, remedy."""
    p, layers = s.recipe.parallel, s.model.layers
    virtual, chunks = p.virtual_pipeline, p.pipeline * p.virtual_pipeline
    if p.pipeline_layout:
        try:
            written = len(pipeline.read_layout(p.pipeline_layout))
        except RecipeError:
            return None  # layout.stages says so
        if written == chunks or written % p.pipeline:
            return None
        fits = written // p.pipeline
        return (
            {"parallel.pipeline_layout": p.pipeline_layout},
            f"the layout has {written} stages, and pipeline x virtual_pipeline is {chunks}.",
            f"Take parallel.virtual_pipeline={fits}." if fits > 1 else "Leave virtual_pipeline out.",
        )
    ends = s.end_layers
    if not ends:
        if layers % chunks == 0:
            return None
        return (
            {},
            f"{layers} layers cannot be split evenly over {chunks} virtual stages.",
            f"Their product must be {divisors(layers, limit=256)}, or set parallel.pipeline_layout.",
        )
    left, stages = layers - sum(ends.values()), p.pipeline - len(ends)
    if stages < 0 or left < 0 or (stages and left % stages):
        return None  # layout.layers says so
    sizes = [*ends.values(), *([left // stages] if stages else [])]
    if not any(size % virtual for size in sizes):
        return None
    common = math.gcd(*sizes)
    return (
        ends,
        f"ranks have {', '.join(map(str, sizes))} layers (first and last as given, then the middle), and {virtual} "
        "virtual stages cannot share them evenly.",
        f"parallel.virtual_pipeline must divide {common}." if common > 1 else "Leave virtual_pipeline out.",
    )


@rule("layout.context", noticed="engine start or model build", source="Ascend's ulysses context parallelism")
def heads_are_split_over_context(s: Subject):
    p = s.recipe.parallel
    ulysses = s.recipe.transformer.get("context_parallel_algo") == "ulysses_cp_algo"
    if p.context > 1 and ulysses and s.model.heads % (p.context * p.tensor):
        yield (
            {"parallel.context": p.context, "parallel.tensor": p.tensor},
            f"ulysses splits {s.model.heads} heads over context x tensor = {p.context * p.tensor} ranks, which do "
            "not divide them.",
            f"Their product must be {divisors(s.model.heads, limit=256)}.",
        )


@rule("layout.reference_context", noticed="never", source="verl 0.9.1: groups are made once, by the actor")
def reference_has_the_actors_context(s: Subject):
    key = "actor_rollout_ref.ref.megatron.context_parallel_size"
    asked = dict(verbatim(s)).get(key)
    if asked is not None and str(asked) != str(s.recipe.parallel.context):
        yield (
            {key: asked, "parallel.context": s.recipe.parallel.context},
            "the reference policy would be configured for other groups than the actor made.",
            "Leave it out: the reference takes the actor's.",
        )


@rule("lengths.budget", noticed=FIRST_STEP, source="verl 0.9.1, prepare_micro_batches")
def longest_sequence_fits_the_budget(s: Subject):
    b, d = s.recipe.batch, s.recipe.data
    longest = d.max_prompt_length + d.max_response_length
    if b.dynamic and b.max_tokens and b.max_tokens * s.recipe.parallel.context < longest:
        least = -(-longest // s.recipe.parallel.context)
        yield (
            {"batch.max_tokens": b.max_tokens, "parallel.context": s.recipe.parallel.context},
            f"a packed micro batch must hold the longest sequence, {longest} tokens.",
            f"Take {least} or more; twice the longest packs well.",
        )


@rule("batch.dynamic_agrees", noticed="engine start: a bare assertion", source="verl 0.9.1, ActorRolloutRefWorker")
def log_probs_are_batched_as_updates(s: Subject):
    said = dict(verbatim(s))
    for key in (
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.actor.use_dynamic_bsz",
    ):
        if key in said and str(said[key]).lower() != str(bool(s.recipe.batch.dynamic)).lower():
            yield (
                {key: said[key], "batch.dynamic": s.recipe.batch.dynamic},
                "updates and log-prob passes must both be packed by tokens, or both not.",
                "Leave it out: batch.dynamic sets them all.",
            )


@rule("batch.train_over_ranks", noticed="configuration", source="verl 0.9.1, validate_config")
def step_is_divisible(s: Subject):
    b, n = s.recipe.batch, s.recipe.rollout.n
    if b.dynamic or not b.micro or not b.train:
        return
    least = s.data_parallel * b.micro
    if b.train * n % least:
        yield (
            {"batch.train": b.train, "rollout.n": n, "batch.micro": b.micro},
            f"{b.train * n} sequences of a step are not divisible by {s.data_parallel} data-parallel ranks x "
            f"{b.micro} sequences.",
            f"batch.train x rollout.n must be a multiple of {least}.",
        )


@rule("algorithm.router_replay", noticed="configuration", source="verl 0.9.1, validate_config")
def replay_needs_the_old_log_probs(s: Subject):
    bypass = dict(verbatim(s)).get("algorithm.rollout_correction.bypass_mode")
    if s.recipe.algorithm.router_replay == "R2" and str(bypass).lower() == "true":
        yield (
            {"algorithm.router_replay": "R2", "algorithm.rollout_correction.bypass_mode": bypass},
            "R2 replays the experts of the old log-prob pass, which bypass mode leaves out.",
            "Take R3, or leave bypass mode.",
        )


@rule("algorithm.router_replay_padding", noticed=FIRST_STEP, source="verl 0.9.1, set_router_replay_data")
def replayed_routes_line_up(s: Subject):
    """verl packs the routes of a micro batch; padded sequences then line up with them only one at a time, unpadded."""
    said, b = dict(verbatim(s)), s.recipe.batch
    padded = s.recipe.model.remove_padding is False
    padded |= str(said.get("actor_rollout_ref.model.use_remove_padding")).lower() == "false"
    if s.recipe.algorithm.router_replay not in ("R2", "R3") or not s.model.experts or not padded:
        return
    key = "actor_rollout_ref.actor.megatron.pad_bshd_to_minibatch_max"
    alone = b.micro == 1 and not b.dynamic and (b.log_prob_micro or 1) == 1
    if not alone or str(said.get(key)).lower() != "false":
        yield (
            {"algorithm.router_replay": s.recipe.algorithm.router_replay, "batch.micro": b.micro, key: said.get(key)},
            "routes are packed and these sequences are padded, so the two do not line up.",
            f"Set batch.micro=1 and verl.{key}=false, or pack the sequences (model.remove_padding=true).",
        )


@rule("algorithm.router_replay_experts", severity="warning", noticed="never", source="verl 0.9.1, RouterReplay")
def replay_needs_a_router(s: Subject):
    replay = s.recipe.algorithm.router_replay
    if replay in ("R2", "R3") and not s.model.experts:
        yield {"algorithm.router_replay": replay}, f"{s.model.name} has no router to replay.", "Leave it out."


@rule("model.mtp", noticed=MODEL_BUILD, source="verl 0.9.1, check_mtp_config")
def model_has_the_mtp_layer(s: Subject):
    if trains_mtp(s) and not s.model.mtp_layers:
        yield (
            {"actor_rollout_ref.model.mtp.enable": True},
            f"{s.model.name} has no MTP layer.",
            "Leave it out, or choose a model that has one.",
        )
