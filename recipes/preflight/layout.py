"""Rules on the mesh: do the parallel sizes fit the devices, the model and each other?"""

from __future__ import annotations

from recipes.finding import divisors
from recipes.preflight.rules import Subject, rule

ENGINE_START = "engine start"
MODEL_BUILD = "model build, after the weights are on their way"
MEGATRON = "Megatron-Core 0.18, parallel_state.initialize_model_parallel"
TRANSFORMER = "Megatron-Core 0.18, TransformerConfig.__post_init__"


@rule("layout.world", noticed=ENGINE_START, source=MEGATRON)
def world_is_divisible(s: Subject):
    if s.world % s.model_parallel:
        p = s.recipe.parallel
        yield (
            {"parallel.tensor": p.tensor, "parallel.pipeline": p.pipeline, "parallel.context": p.context},
            f"{s.world} devices ({s.recipe.nodes} x {s.devices_per_node}) are not divisible by "
            f"tensor x pipeline x context = {s.model_parallel}.",
            f"Their product must be {divisors(s.world, limit=1024)}.",
        )


@rule("layout.expert_world", noticed=ENGINE_START, source=MEGATRON)
def expert_world_is_divisible(s: Subject):
    p = s.recipe.parallel
    expert_tensor = p.expert_tensor or p.tensor
    product = expert_tensor * p.expert * p.pipeline
    if p.expert > 1 and s.world % product:
        yield (
            {"parallel.expert": p.expert, "parallel.expert_tensor": expert_tensor, "parallel.pipeline": p.pipeline},
            f"{s.world} devices are not divisible by expert x expert_tensor x pipeline = {product}.",
            "expert_tensor is tensor when it is not set: set parallel.expert_tensor=1 if that was not meant.",
        )


@rule("layout.heads", noticed=MODEL_BUILD, source=TRANSFORMER)
def heads_are_divisible(s: Subject):
    tensor = s.recipe.parallel.tensor
    if s.model.heads % tensor:
        yield (
            {"parallel.tensor": tensor},
            f"{s.model.name} has {s.model.heads} attention heads, which {tensor} does not divide.",
            f"{divisors(s.model.heads)} do." if s.model.heads > 1 else "Only 1 does.",
        )


@rule("layout.kv_heads", noticed=MODEL_BUILD, source=TRANSFORMER)
def kv_heads_are_divisible(s: Subject):
    tensor, groups = s.recipe.parallel.tensor, s.model.kv_heads
    if groups % tensor and tensor % groups:
        yield (
            {"parallel.tensor": tensor},
            f"{s.model.name} has {groups} key-value heads, neither a multiple nor a divisor of {tensor}.",
            f"Take a divisor or a multiple of {groups}.",
        )


@rule("layout.layers", noticed=MODEL_BUILD, source=TRANSFORMER)
def layers_are_divisible(s: Subject):
    """What a first and a last stage of their own size leave is split evenly over the stages between them."""
    p, layers = s.recipe.parallel, s.model.layers
    if p.pipeline_layout:
        return
    ends = s.end_layers
    left, stages = layers - sum(ends.values()), p.pipeline - len(ends)
    keys = {"parallel.pipeline": p.pipeline, **ends}
    if not ends:
        if left % stages:
            yield (
                keys,
                f"{layers} layers cannot be split evenly over {stages} stages.",
                f"Take {divisors(layers)}, or set parallel.pipeline_layout.",
            )
    elif stages < 0 or (stages == 0 and left):
        yield (
            keys,
            f"{p.pipeline} stage{'s hold' if p.pipeline > 1 else ' holds'} all {layers} layers of {s.model.name}, and "
            f"{sum(ends.values())} layers are asked for in {len(ends)}.",
            "Leave them out, or "
            + (f"let them be {layers} together." if stages == 0 else f"take parallel.pipeline={len(ends)} or more."),
        )
    elif stages and (left <= 0 or left % stages):
        key, size = next(iter(ends.items()))
        rest = left + size  # layers of this end and of the stages between
        near = sorted((n for n in range(1, rest) if (rest - n) % stages == 0), key=lambda n: abs(n - size))[:2]
        yield (
            keys,
            f"of {layers} layers {left} are left, which {stages} middle stage{'s' * (stages > 1)} cannot share evenly, "
            "each one or more.",
            f"Take {key}={' or '.join(map(str, sorted(near)))}." if near else "Take smaller ones.",
        )


@rule("layout.experts", noticed=MODEL_BUILD, source=TRANSFORMER)
def experts_are_divisible(s: Subject):
    expert, experts = s.recipe.parallel.expert, s.model.experts
    if expert > 1 and not experts:
        yield {"parallel.expert": expert}, f"{s.model.name} has no experts.", "Set parallel.expert=1."
    elif experts and experts % expert:
        yield (
            {"parallel.expert": expert},
            f"{s.model.name} has {experts} experts, which {expert} does not divide.",
            f"{divisors(experts, limit=512)} do.",
        )


@rule("layout.rollout", noticed="rollout start, AFTER the actor has loaded", source="verl 0.9.1, LLMServerManager")
def rollout_world_is_divisible(s: Subject):
    tensor, data = s.recipe.rollout.tensor or 1, s.recipe.rollout.data or 1
    if s.rollout_world % (tensor * data):
        yield (
            {"rollout.tensor": tensor, "rollout.data": data},
            f"{s.rollout_world} devices that generate are not divisible by the {tensor * data} of one rollout replica.",
            f"Their product must be {divisors(s.rollout_world, limit=1024)}.",
        )
