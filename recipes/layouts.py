"""Recipe, nodes, hardware → the layouts that would work there, ranked. Preflight's rules say what is valid.

Memory comes from recipes.memory. The order comes from a rough time per step: arithmetic, idle pipeline slots and bytes
sent, weighed by the rates assumed below. It orders layouts and predicts no step time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import memory, models, preflight
from recipes.errors import RecipeError
from recipes.params import Composed, flatten, hardware_facts
from recipes.preflight.rules import RULES, Rule, Subject
from recipes.schema import ModelFacts, Parallel, Recipe

# Kept free of what recipes.memory counts: the allocator's gaps, communication buffers, the runtime.
RESERVE = 0.10

# Planning assumptions, no measurements; only their ratios matter here. A second's arithmetic of a device; the bytes it
# sends within its node; and beyond it, by hardware: the nodes of an A3 supernode are joined by links of their own.
FLOPS, INSIDE = 120e12, 80e9
OUTSIDE, OUTSIDE_ELSEWHERE = {"atlas_a3": 60e9}, 20e9
# Seconds a layer takes whatever it computes, each pass of a micro batch: kernel launches, first bytes of collectives.
LAUNCH = 1e-3

# How unevenly tokens are routed: standard deviation over mean of the tokens an expert gets. Assumed.
ROUTING_SPREAD = 0.5

MOST_DEVICES = 4096


@dataclass(frozen=True)
class Traffic:
    """Bytes a device sends in a training step, by what they are for."""

    tensor: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        return self.tensor + self.pipeline + self.context + self.expert + self.data


@dataclass(frozen=True)
class Rollout:
    """How an engine is split, and what of it fits: `sequences` of the longest length on one engine rank."""

    tensor: int
    data: int
    expert: int
    share: float
    sequences: int
    waves: int  # turns until the sequences of a step are generated, at the longest length
    weights: int
    own: bool


@dataclass(frozen=True)
class Layout:
    """One way to lay the training out. Sizes in bytes a device.

    `spent` is what a step goes into, in seconds at the assumed rates: good for comparing layouts, for nothing else.
    """

    parallel: Parallel
    data: int
    max_tokens: int | None
    micro_batches: int
    bubble: float
    experts: int
    peak: int
    stage: int
    generation: int
    fits: bool
    own: bool
    spent: dict[str, float]
    traffic: Traffic
    rollout: Rollout | None
    reasons: tuple[str, ...]

    @property
    def cost(self) -> float:
        return sum(self.spent.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        return {**dataclasses.asdict(self), "cost": self.cost, "traffic_total": self.traffic.total}


@dataclass(frozen=True)
class Plan:
    """All valid layouts of a recipe on some nodes, best first. `usable` is a device's memory without the reserve."""

    subject: Subject
    name: str
    nodes: int
    hardware: str
    device: int
    usable: int
    layouts: tuple[Layout, ...]

    @property
    def fitting(self) -> int:
        return sum(layout.fits for layout in self.layouts)

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return plain dicts, lists and numbers, of the `top` first layouts."""
        return {
            "recipe": self.name,
            "nodes": self.nodes,
            "hardware": self.hardware,
            "device_bytes": self.device,
            "usable_bytes": self.usable,
            "valid": len(self.layouts),
            "fitting": self.fitting,
            "layouts": [{**layout.to_dict(), "changes": changes(self, layout)} for layout in self.layouts[:top]],
        }


# ------------------------------------------------------------------------------------------------------------- plan


def plan(
    composed: Composed, *, nodes: int | None = None, hardware: str | None = None, length: int | None = None
) -> Plan:
    """Return the valid layouts of a recipe on `nodes` of `hardware`, for prompt + response of `length` tokens.

    What is not given is as in the recipe. In a fully asynchronous run the nodes are those that train. Raises
    RecipeError when the hardware's memory is unknown, when a length leaves no room for a response, or when no layout
    passes preflight.
    """
    subject = target(composed, nodes=nodes, hardware=hardware, length=length)
    device = _device(subject)
    usable = int(device * (1 - RESERVE))
    found, refused, rules = [], Counter(), _rules(of="mesh")
    for candidate in candidates(subject):
        fault = _fault(candidate, rules)
        if fault:
            refused[fault] += 1
        else:
            found.append(candidate)
    why = _fault(subject, _rules(of="recipe")) or (refused.most_common(1)[0][0] if not found else None)
    if why:
        raise RecipeError(
            f"nodes={subject.recipe.nodes}: no layout of {composed.name} on {subject.recipe.hardware} passes "
            f"preflight; {why}"
        )
    engines = _Engines(subject)
    layouts = [_layout(candidate, subject, usable, engines) for candidate in found]
    ranked = sorted(layouts, key=lambda one: (not one.fits, one.cost if one.fits else one.peak, -one.experts))
    return Plan(subject, composed.name, subject.recipe.nodes, subject.recipe.hardware, device, usable, tuple(ranked))


def fitting_plan(
    composed: Composed, *, nodes: int | None = None, hardware: str | None = None, length: int | None = None
) -> Plan:
    """Return plan(…) when at least one layout fits. Raises RecipeError, naming the fewest nodes that would, if not."""
    found = plan(composed, nodes=nodes, hardware=hardware, length=length)
    if found.fitting:
        return found
    least = min(max(one.peak, one.generation) for one in found.layouts)
    enough = fewest_nodes(found.subject)
    raise RecipeError(
        f"nodes={found.nodes}: no layout of {composed.name} fits {found.hardware}, the smallest needs "
        f"{least / 1e9:.1f} GB a device and {found.usable / 1e9:.1f} GB are usable; "
        + (
            f"take {enough} node{'s' * (enough > 1)}, the fewest that would do."
            if enough
            else f"no number of nodes up to {MOST_DEVICES} devices would do: recompute, offload, or shorten responses."
        )
    )


def fewest_nodes(subject: Subject) -> int | None:
    """Return the fewest nodes on which some layout fits, or None when none up to 4096 devices does."""
    usable = int(_device(subject) * (1 - RESERVE))
    least, rules = _least_states(subject), _rules(of="mesh")
    for nodes in range(1, MOST_DEVICES // subject.devices_per_node + 1):
        there = _with(subject, nodes=nodes)
        if least / there.world > usable:
            continue
        engines = _Engines(there)
        smallest_first = sorted(candidates(there), key=lambda one: -_shards(one.recipe.parallel))
        for candidate in smallest_first:
            if _fault(candidate, rules):
                continue
            _, training = _budgeted(candidate, usable)
            if training.peak <= usable and _rollout(candidate, training, usable, engines)[1] <= usable:
                return nodes
    return None


def target(
    composed: Composed, *, nodes: int | None = None, hardware: str | None = None, length: int | None = None
) -> Subject:
    """Return the recipe as it would stand on other nodes, hardware and lengths; nothing is composed again.

    Raises RecipeError for unknown hardware, fewer than one node, or a length that leaves no room for a response.
    """
    subject = preflight.subject(composed)
    recipe = subject.recipe
    if nodes is not None and nodes < 1:
        raise RecipeError(f"nodes={nodes}: it takes at least one node; give a larger number.")
    changed: dict[str, Any] = {"nodes": nodes or recipe.nodes}
    facts = subject.hardware
    if hardware and hardware != recipe.hardware:
        facts = hardware_facts(hardware)
        changed |= {"hardware": hardware, "devices": None}
        if recipe.fully_async.rollout_devices:
            changed["fully_async"] = dataclasses.replace(recipe.fully_async, rollout_devices=None)
    if length is not None:
        response = length - recipe.data.max_prompt_length
        if response < 1:
            raise RecipeError(
                f"length={length}: data.max_prompt_length={recipe.data.max_prompt_length} leaves no room for a "
                "response; take a larger length."
            )
        changed |= _lengths(recipe, length, response)
    return dataclasses.replace(subject, recipe=dataclasses.replace(recipe, **changed), hardware=facts)


def _lengths(recipe: Recipe, length: int, response: int) -> dict[str, Any]:
    """Every key that repeats the longest length follows it."""
    was = _longest(recipe)
    changed: dict[str, Any] = {"data": dataclasses.replace(recipe.data, max_response_length=response)}
    if recipe.batch.max_tokens and not recipe.batch.dynamic:
        changed["batch"] = dataclasses.replace(recipe.batch, max_tokens=length)
    if recipe.rollout.max_model_len:
        changed["rollout"] = dataclasses.replace(recipe.rollout, max_model_len=length)
    if recipe.mindspeed.mcore_kwargs.get("seq_length") == was:
        kwargs = {**recipe.mindspeed.mcore_kwargs, "seq_length": length}
        changed["mindspeed"] = dataclasses.replace(recipe.mindspeed, mcore_kwargs=kwargs)
    return changed


def _device(subject: Subject) -> int:
    if subject.hardware.memory_gb is None:
        raise RecipeError(
            f"hardware={subject.recipe.hardware}: its facts under params/hardware name no memory_gb, so nothing can be "
            "said to fit; give --hardware atlas_a2 or atlas_a3."
        )
    return int(subject.hardware.memory_gb * 1e9)


# ------------------------------------------------------------------------------------------------------- candidates


def candidates(subject: Subject) -> Iterator[Subject]:
    """Yield the subject with every mesh its world can be cut into; whether one is valid is preflight's to say.

    Tensor parallelism stays within a node. Pipeline stages are the recipe's own where their number is, else
    `stages(…)`. Experts are split by `expert`, each whole (expert_tensor 1) or over the tensor ranks. Micro batches of
    one sequence; no virtual stages.
    """
    recipe, model = subject.recipe, subject.model
    for tensor in _divisors(subject.devices_per_node):
        for pipeline in _divisors(subject.world // tensor):
            split = _stages_of(recipe, model, pipeline)
            if split is None:
                continue
            for context in _divisors(subject.world // (tensor * pipeline)):
                for expert, expert_tensor in _expert_splits(subject, tensor, pipeline):
                    parallel = dataclasses.replace(
                        recipe.parallel,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor,
                        virtual_pipeline=None,
                        **split,
                    )
                    yield _with(subject, parallel=parallel)


def _expert_splits(subject: Subject, tensor: int, pipeline: int) -> Iterator[tuple[int, int | None]]:
    own = subject.recipe.parallel.expert_tensor
    if not subject.model.experts:
        yield 1, own
        return
    for expert_tensor in sorted({1, tensor}):
        said = None if own is None and expert_tensor == tensor else expert_tensor
        for expert in _divisors(subject.world // (expert_tensor * pipeline)):
            if subject.model.experts % expert == 0:
                yield expert, said


def _with(subject: Subject, *, parallel: Parallel | None = None, **changes: Any) -> Subject:
    """Replace fields of the subject's recipe; tensor 1 also takes back a sequence_parallel that Megatron would refuse.

    A fixed micro batch becomes one sequence.
    """
    recipe = subject.recipe
    if parallel is not None:
        changes["parallel"] = parallel
        if parallel.tensor == 1 and recipe.transformer.get("sequence_parallel"):
            changes["transformer"] = {**recipe.transformer, "sequence_parallel": False}
        if not recipe.batch.dynamic and recipe.batch.micro != 1:
            changes["batch"] = dataclasses.replace(recipe.batch, micro=1)
    return dataclasses.replace(subject, recipe=dataclasses.replace(recipe, **changes))


def _fault(subject: Subject, rules: list[Rule]) -> str | None:
    """Return what the first of the rules that refuses the recipe says, or None."""
    for rule in rules:
        for keys, sentence, remedy in rule.function(subject):
            said = ", ".join(f"{key}={value}" for key, value in keys.items())
            return f"{said}: {sentence} {remedy}"
    return None


# Rules on how the rollout is split are asked when it is; those that look at no mesh are asked once for all of them.
_OF_ROLLOUT = ("layout.rollout", "rollout.")
_OF_NO_MESH = ("stack.", "hardware.", "engine.", "checkpoint.", "data.", "reward.", "files.", "software.", "logging.")


def _rules(*, of: str) -> list[Rule]:
    """Return preflight's errors that do not look at this machine: those of the rollout, of no mesh, or of the mesh."""
    errors = [r for r in RULES.values() if r.severity == "error" and not r.here]
    if of == "rollout":
        return [r for r in errors if r.name.startswith(_OF_ROLLOUT)]
    if of == "recipe":
        return [r for r in errors if r.name.startswith(_OF_NO_MESH)]
    return [r for r in errors if not r.name.startswith((*_OF_ROLLOUT, *_OF_NO_MESH))]


def stages(model: ModelFacts, number: int) -> dict[str, Any] | None:
    """Return the keys of `parallel` that split a model's layers over `number` stages, or None when they cannot be.

    Evenly where that comes out; else with a smaller first and last stage around equal ones. Where layers share a
    sparse-attention index (GLM-5.2) every stage must start on one that computes it: of those splits the one whose
    slowest stage is fastest, and among them the most even. A stage's time is that of the parameters a token visits,
    the head included.
    """
    none = {"pipeline_layout": None, "first_stage_layers": None, "last_stage_layers": None}
    computing = models.index_layers(model)
    if number == 1:
        return none
    if number > model.layers:
        return None
    if computing and len(computing) < model.layers:
        sizes = _shared_index_split(memory.facts_key(model), number)
        if sizes is None:
            return None
        runs = "|".join("t" if size == 1 else f"t*{size}" for size in sizes)
        return {**none, "pipeline_layout": f"E{runs}L"}
    if model.layers % number == 0:
        return none
    options = []
    for middle in (model.layers // number, model.layers // number + 1):
        ends = model.layers - middle * (number - 2)
        if ends >= 2:
            options.append((max(middle * (number > 2), -(-ends // 2)), -(-ends // 2), ends // 2))
    _, first, last = min(options)
    return {**none, "first_stage_layers": first, "last_stage_layers": last}


def _stages_of(recipe: Recipe, model: ModelFacts, number: int) -> dict[str, Any] | None:
    own = recipe.parallel
    if number == own.pipeline and not own.virtual_pipeline:
        keys = ("pipeline_layout", "first_stage_layers", "last_stage_layers")
        return {key: getattr(own, key) for key in keys}
    return stages(model, number)


@functools.lru_cache(maxsize=256)
def _shared_index_split(fields: tuple, number: int) -> tuple[int, ...] | None:
    """Cut layers into `number` runs that start on computing layers: least largest load, then least sum of squares."""
    model = ModelFacts(*fields)
    starts = [*models.index_layers(model), model.layers]
    if number > len(starts) - 1:
        return None
    loads = [0.0, *itertools.accumulate(_layer_work(model, layer) for layer in range(model.layers))]
    head = model.vocab * model.hidden
    # best[i]: the best cut of the layers before starts[i] into the stages so far.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())] + [None] * (len(starts) - 1)
    for stage in range(number):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * len(starts)
        for begin, before in enumerate(best):
            if before is None:
                continue
            for end in range(begin + 1, len(starts)):
                load = loads[starts[end]] - loads[starts[begin]] + (head if stage == number - 1 else 0)
                cut = (max(before[0], load), before[1] + load**2, (*before[2], starts[end] - starts[begin]))
                if following[end] is None or cut < following[end]:
                    following[end] = cut
        best = following
    return best[-1][2] if best[-1] else None


# ------------------------------------------------------------------------------------------------------------ a row


def _layout(candidate: Subject, subject: Subject, usable: int, engines: _Engines) -> Layout:
    chosen, training = _budgeted(candidate, usable)
    p = chosen.recipe.parallel
    rollout, generation = _rollout(chosen, training, usable, engines)
    sent = traffic(chosen, training)
    bubble = (p.pipeline - 1) / (training.micro_batches + p.pipeline - 1)
    row = Layout(
        parallel=p,
        data=chosen.data_parallel,
        max_tokens=chosen.recipe.batch.max_tokens,
        micro_batches=training.micro_batches,
        bubble=bubble,
        experts=chosen.model.experts // p.expert,
        peak=training.peak,
        stage=training.fullest.stage,
        generation=generation,
        fits=rollout is not None and training.peak <= usable and generation <= usable,
        own=p == subject.recipe.parallel,
        spent=_spent(chosen, sent, bubble, training.micro_batches),
        traffic=sent,
        rollout=rollout,
        reasons=(),
    )
    return dataclasses.replace(row, reasons=tuple(_reasons(row, chosen, subject, training, usable)))


def _budgeted(subject: Subject, usable: int) -> tuple[Subject, memory.Training]:
    """Halve the token budget of dynamic batches until training fits, or the longest sequence would not."""
    recipe = subject.recipe
    if not recipe.batch.dynamic:
        return subject, memory.train(subject)
    longest = _longest(recipe)
    least = math.ceil(longest / recipe.parallel.context)
    budget = recipe.batch.max_tokens or longest
    if budget < least:
        budget = least
    while True:
        batch = dataclasses.replace(recipe.batch, max_tokens=budget)
        subject = dataclasses.replace(subject, recipe=dataclasses.replace(recipe, batch=batch))
        training = memory.train(subject)
        if training.peak <= usable or budget == least:
            return subject, training
        budget = max(least, budget // 2)


def traffic(subject: Subject, training: memory.Training) -> Traffic:
    """Return the bytes a device of the largest stage sends in a step. bf16 activations; passes = forwards + 1.

    Forwards: the update's, its recomputation, the log-probs, and the reference's if there is one; the backward pass
    sends what a forward does. A step has M micro batches of T tokens on a device; h is the hidden size.
    tensor: an all-reduce of 2·T·h after attention and after a dense or shared FFN, 2(t−1)/t of it sent each (K22,
    section 4.2.2: sequence parallelism sends the same as reduce-scatter and all-gather). expert: dispatch and combine
    of k·T/t rows of 2h, (e−1)/e of them to other ranks; with expert_tensor the rows once more to its other ranks.
    context: keys and values (or latents) of T tokens to each other rank, twice in the backward pass. pipeline: 2·T·h/t
    a pass to the next stage. data: each update a reduce-scatter of the gradients and an all-gather of the bf16 weights
    over the ranks that share them, (d−1)/d of them sent (Z20, section 7).
    """
    r, model, p = subject.recipe, subject.model, subject.recipe.parallel
    updates, tokens = _updates(r), _step_tokens(subject)
    split = p.tensor if memory.sequence_parallel(r) else 1
    passes = _forwards(r) + 1
    layers = max(memory.rank_layers(model, p), key=len)
    moe = sum(has_experts for has_experts, _ in layers)
    reduces = 2 * len(layers) - (0 if model.shared_experts else moe)
    row = 2 * model.hidden
    whole = memory.expert_tensor(p)
    rows = model.experts_per_token * tokens / split
    routed = 2 * moe * passes * rows * row * ((p.expert - 1) / p.expert + (whole - 1))
    kept = 2 * len(layers) * memory.kv_elements(model, p.tensor) / model.layers
    fullest = max(training.stages, key=lambda s: s.weights)
    a_parameter = (fullest.weights + fullest.gradients) / max(1, fullest.dense_parameters + fullest.expert_parameters)
    dense_ranks = max(1, subject.world // (p.tensor * p.pipeline))
    expert_ranks = max(1, subject.world // (whole * p.expert * p.pipeline))
    return Traffic(
        tensor=reduces * passes * 2 * (p.tensor - 1) / p.tensor * tokens * row,
        pipeline=passes * tokens * row / split if p.pipeline > 1 else 0.0,
        context=(passes + 1) * (p.context - 1) * tokens * kept,
        expert=routed,
        data=updates
        * a_parameter
        * (
            fullest.dense_parameters * (dense_ranks - 1) / dense_ranks
            + fullest.expert_parameters * (expert_ranks - 1) / expert_ranks
        ),
    )


def _spent(subject: Subject, sent: Traffic, bubble: float, micro_batches: int) -> dict[str, float]:
    """Weigh a step: what it goes into, in seconds. Nothing overlaps.

    arithmetic: 2 floating-point operations a parameter and token forward, 4 backward (K22, appendix A), of the slowest
    stage. uneven experts: the fullest of e ranks with n experts each gets 1 + spread · sqrt(2 ln e / n) times its even
    share, the largest of e normal variables; so do the ranks that send to it. idle: all of it once more by
    bubble / (1 − bubble). data: gradients and weights, after the last micro batch. Groups are laid out
    tensor-context-data-pipeline, experts apart expert_tensor-expert-data-pipeline (Megatron-Core 0.18); what spans more
    than a node is sent at the slower rate.
    """
    r, model, p = subject.recipe, subject.model, subject.recipe.parallel
    node, whole = subject.devices_per_node, memory.expert_tensor(p)
    beyond = OUTSIDE.get(r.hardware, OUTSIDE_ELSEWHERE)
    extra = (
        ROUTING_SPREAD * math.sqrt(2 * math.log(p.expert) / max(1, model.experts // p.expert)) if p.expert > 1 else 0
    )
    ranks = memory.rank_layers(model, p)
    operations = (2 * _forwards(r) + 4) * _step_tokens(subject) / p.tensor / FLOPS

    works = {kind: _kind_work(model, kind, _longest(r)) for layers in ranks for kind in set(layers)}

    def work(part: int) -> float:
        stages = [sum(works[kind][part] for kind in layers) for layers in ranks]
        stages[-1] += 0 if part else model.vocab * model.hidden
        return operations * max(stages)

    # Of what goes to experts: to the other expert ranks, (e−1)/e, some of them on other nodes; and whole − 1 times to
    # ranks that hold the rest of the same experts, next to this one.
    away = (p.expert - 1) / p.expert
    far = max(0, p.expert - max(1, node // whole)) / p.expert
    to_experts = sent.expert / max(away + whole - 1, 1e-9) * (far / beyond + (away - far + whole - 1) / INSIDE)
    meanwhile = {
        "arithmetic": work(0) + work(1),
        "launches": LAUNCH * (_forwards(r) + 1) * max(map(len, ranks)) * micro_batches * _updates(r),
        "tensor": sent.tensor / INSIDE,
        "context": sent.context / (INSIDE if p.tensor * p.context <= node else beyond),
        "pipeline": sent.pipeline / (INSIDE if subject.world <= node else beyond),
        "experts": to_experts,
        "uneven experts": extra * (work(1) + to_experts),
    }
    return {
        **meanwhile,
        "idle": sum(meanwhile.values()) * bubble / (1 - bubble),
        "data": sent.data / (INSIDE if subject.world // p.pipeline <= node else beyond),
    }


def _longest(recipe: Recipe) -> int:
    return recipe.data.max_prompt_length + recipe.data.max_response_length


def _step_tokens(subject: Subject) -> float:
    """Return the tokens a device sees in a step, once each: its sequences at their longest, over context."""
    r = subject.recipe
    sequences = max(1, r.batch.mini * r.rollout.n // subject.data_parallel)
    return _updates(r) * sequences * _longest(r) / r.parallel.context


def _updates(recipe: Recipe) -> int:
    """Return the optimizer updates of a step; a fully asynchronous run is weighed by one."""
    return max(1, math.ceil(recipe.batch.train / recipe.batch.mini))


def _forwards(recipe: Recipe) -> int:
    return 2 + (recipe.memory.recompute == "full") + (recipe.algorithm.kl_loss_coef is not None)


def _layer_work(model: ModelFacts, layer: int) -> float:
    return sum(_kind_work(model, (memory.has_experts(model, layer), layer in models.index_layers(model)), 0))


def _kind_work(model: ModelFacts, kind: tuple[bool, bool], longest: int) -> tuple[float, float]:
    """Return a token's multiplications in a layer: dense parameters and the keys it is compared with, and experts."""
    dense, expert = memory.layer_parameters(model, moe=kind[0], index=kind[1])
    routed = expert * model.experts_per_token / model.experts if model.experts else 0.0
    keys = min(longest, model.index_topk) if model.index_heads else longest / 2
    if model.kv_lora_rank is None:
        width = 2 * (model.head_dim or model.hidden // model.heads)
    else:
        width = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    return dense + keys * model.heads * width, routed


# ----------------------------------------------------------------------------------------------------------- rollout


class _Engines:
    """The ways to split the rollout on this subject's devices, best first, for each share of device memory."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.found: dict[float, list[tuple[Rollout, memory.Generation]]] = {}

    def at(self, share: float, training: memory.Training) -> list[tuple[Rollout, memory.Generation]]:
        if share not in self.found:
            self.found[share] = sorted(_engines(self.subject, share, training), key=lambda one: _preference(one[0]))
        return self.found[share]


def _preference(rollout: Rollout) -> tuple:
    """The recipe's own split where it holds a sequence; then few turns, small replicas, little tensor parallelism."""
    return (rollout.sequences < 1, not rollout.own, rollout.waves, rollout.tensor * rollout.data, rollout.tensor)


def _engines(subject: Subject, share: float, training: memory.Training) -> Iterator[tuple[Rollout, memory.Generation]]:
    r, model = subject.recipe, subject.model
    own = (r.rollout.tensor or 1, r.rollout.data or 1, r.rollout.expert or 1)
    node, rules = subject.devices_per_node, _rules(of="rollout")
    if r.mode == "fully_async":
        node = r.fully_async.rollout_devices or subject.hardware.devices_per_node
    for tensor in _divisors(math.gcd(node, model.heads)):
        for data in _divisors(subject.rollout_world // tensor) if own[1] > 1 else [1]:
            if own[2] > 1 and model.experts % (tensor * data):
                continue
            expert = tensor * data if own[2] > 1 else 1
            rollout = dataclasses.replace(
                r.rollout,
                tensor=tensor if r.rollout.tensor or tensor > 1 else None,
                data=data if own[1] > 1 else r.rollout.data,
                expert=expert if own[2] > 1 else r.rollout.expert,
                memory=share,
            )
            there = _with(subject, rollout=rollout)
            if _fault(there, rules):
                continue
            made = memory.generate(there, training)
            asked = max(1, (r.batch.train or r.batch.mini) * r.rollout.n * tensor // subject.rollout_world)
            held = made.sequences or 0
            yield (
                Rollout(
                    tensor=tensor,
                    data=data,
                    expert=expert,
                    share=share,
                    sequences=held,
                    waves=math.ceil(asked / held) if held else 0,
                    weights=made.weights,
                    own=(tensor, data, expert) == own,
                ),
                made,
            )


def _rollout(subject: Subject, training: memory.Training, usable: int, engines: _Engines) -> tuple[Rollout | None, int]:
    """Return how generation is split beside this training, or None; and the most a device then holds while it does.

    The engine's share of memory is the recipe's, or less where what the trainer leaves resident would not leave it.
    """
    device = _device(subject)
    asked = memory.ROLLOUT_SHARE if subject.recipe.rollout.memory is None else subject.recipe.rollout.memory
    resident, trained = memory.resident(subject.recipe, training)
    left = math.floor((usable - resident) / device * 100) / 100
    share = min(asked, left)
    if share <= 0:
        return None, resident + int(asked * device)
    for rollout, made in engines.at(share, training):
        if rollout.sequences < 1:
            break
        sync = max(resident, trained) + made.weights + made.bucket
        if sync <= usable:
            return rollout, max(resident + int(share * device), sync)
    return None, resident + int(asked * device)


# ----------------------------------------------------------------------------------------------------------- reasons


def _reasons(row: Layout, chosen: Subject, subject: Subject, training: memory.Training, usable: int) -> Iterator[str]:
    p, node = row.parallel, chosen.devices_per_node
    full = training.fullest
    parts = {
        "weights": full.weights,
        "gradients": full.gradients,
        "optimizer": full.optimizer,
        "reference": full.reference,
        "activations": full.activations,
        "a layer's backward pass" if full.backward >= full.logits else "logits": max(full.backward, full.logits),
        "engine asleep": training.rollout,
    }
    said = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)
    verdict = "fits" if row.peak <= usable else "does not fit"
    passing = " in the log-prob pass" if full.peak > full.states + full.update else ""
    yield f"training {verdict}: {row.peak / 1e9:.1f} of {usable / 1e9:.1f} GB on stage {row.stage}{passing} ({said})"
    if row.rollout is None:
        yield f"generation does not fit: {row.generation / 1e9:.1f} of {usable / 1e9:.1f} GB, whatever the split"
    else:
        o = row.rollout
        yield (
            f"generation: tensor {o.tensor}, data {o.data}, expert {o.expert}, {o.share:g} of the device; "
            f"{o.sequences} longest sequences at once on {o.tensor} devices, {o.waves} turn{'s' * (o.waves > 1)} a step"
        )
    if p.pipeline > 1:
        idle = f"{p.pipeline - 1} of {row.micro_batches + p.pipeline - 1} slots idle"
        yield f"bubble {100 * row.bubble:.0f} %: {idle}, {row.micro_batches} micro batches an update"
    sent = [f"{n} {v / 1e9:.0f}" for n, v in dataclasses.asdict(row.traffic).items() if v >= 5e8]
    if sent:
        yield f"GB a device sends a step: {', '.join(sent)}"
    if chosen.model.experts:
        place = "within a node" if memory.expert_tensor(p) * p.expert <= node else "across nodes"
        yield f"{row.experts} experts a rank, their all-to-all {place}"
    host = max(stage.host for stage in training.stages) * node
    if host:
        yield f"host: {host / 1e9:.0f} GB a node for what is offloaded"
    if row.max_tokens != subject.recipe.batch.max_tokens:
        yield f"batch.max_tokens {subject.recipe.batch.max_tokens} becomes {row.max_tokens}"


# ----------------------------------------------------------------------------------------------------------- a file


def changes(found: Plan, layout: Layout) -> dict[str, Any]:
    """Return what a layout changes of the recipe it was planned for: {dotted key: value}, nothing that stays."""
    there = _with(found.subject, parallel=layout.parallel)
    recipe = there.recipe
    batch = dataclasses.replace(recipe.batch, max_tokens=layout.max_tokens)
    rollout = recipe.rollout
    if layout.rollout:
        o = layout.rollout
        split = {"tensor": o.tensor, "data": o.data, "expert": o.expert}
        # 1 is what an unset size means.
        split = {k: v for k, v in split.items() if v != (getattr(rollout, k) or 1)}
        share = memory.ROLLOUT_SHARE if rollout.memory is None else rollout.memory
        rollout = dataclasses.replace(rollout, **split, **({"memory": o.share} if o.share != share else {}))
    recipe = dataclasses.replace(recipe, batch=batch, rollout=rollout)
    before = dict(flatten(dataclasses.asdict(found.subject.composed.recipe)))
    after = dict(flatten(dataclasses.asdict(recipe)))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def recipe_text(found: Plan, layout: Layout, base: str) -> str:
    """Return a recipe file that extends `base` by what the layout and overrides change, its reasons as comments."""
    # What was overridden for the plan is no part of the base either.
    history = found.subject.composed.history
    said = {key: s[-1].value for key, s in history.items() if s[-1].origin.startswith("override ")}
    title = f"{found.name} on {_nodes(found)} of {found.hardware}"
    return extending(
        base, title, {**said, **changes(found, layout)}, ("Planned by recipes layouts, never run.", *layout.reasons)
    )


def extending(base: str, title: str, settings: Mapping[str, Any], comments: Iterable[str]) -> str:
    """Return a recipe file that extends `base` by dotted `settings`; each comment is a line before them."""
    import yaml

    tree: dict[str, Any] = {"defaults": [base], "title": title}
    for key, value in settings.items():
        here: Any = tree
        *groups, last = key.split(".")
        for group in groups:
            here = here.setdefault(group, {})
        here[last] = value
    told = "".join(f"# {comment}\n" for comment in comments)
    return told + yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)


def _nodes(found: Plan) -> str:
    return f"{found.nodes} node{'s' * (found.nodes > 1)}"


def base_name(composed: Composed, output: Path) -> str:
    """Return how a file at `output` names the recipe in its defaults: by name, or by a path relative to itself."""
    own = composed.files[-1]
    if composed.name.count("/"):
        return composed.name
    return Path(os.path.relpath(own.with_suffix(""), output.resolve().parent)).as_posix()


def behind(found: Plan, layout: Layout) -> dict[str, float]:
    """Return where a layout costs more than the first one (less: below 0), as shares of the first one's cost."""
    first = found.layouts[0]
    return {name: (part - first.spent[name]) / first.cost for name, part in layout.spent.items()}


def describe(found: Plan, top: int = 5) -> str:
    """Return the ranking as text: a table of the `top` first layouts and the recipe's own, each with its reasons."""
    lines = [
        f"{found.name} on {_nodes(found)} of {found.hardware}, {found.subject.world} devices of "
        f"{found.device / 1e9:g} GB; {100 * RESERVE:g} % are kept in reserve.",
        f"{len(found.layouts)} layouts pass preflight; {found.fitting} of them fit, all sequences at their longest.",
        "",
        "     tp  pp  cp   ep etp  dp  micro  bubble  GB train  GB generate  experts  GB sent  cost",
    ]
    best = found.layouts[0].cost
    for place, row in enumerate(found.layouts, 1):
        if place > top and not row.own:
            continue
        p = row.parallel
        lines.append(
            f"{place:3}. {p.tensor:2} {p.pipeline:3} {p.context:3} {p.expert:4} {memory.expert_tensor(p):3} "
            f"{row.data:3} {row.micro_batches:6}  {100 * row.bubble:4.0f} %  {row.peak / 1e9:8.1f}  "
            f"{row.generation / 1e9:11.1f}  {row.experts:7}  {row.traffic.total / 1e9:7.0f}  {row.cost / best:4.2f}"
            f"{'  the recipe’s own' if row.own else ''}"
        )
        parts = [f"{name} {part / best:.2f}" for name, part in row.spent.items() if part >= 0.005 * best]
        lines += [f"       {reason}" for reason in (*row.reasons, f"cost: {', '.join(parts)}")]
        more = [f"{name} {part:+.2f}" for name, part in behind(found, row).items() if row.own and part >= 0.05]
        if more:
            lines.append(f"       behind the first by: {', '.join(more)}")
        altered = changes(found, row)
        if altered:
            lines.append("       changes: " + ", ".join(f"{key}={value}" for key, value in altered.items()))
    lines.append("")
    lines.append("cost is relative to the first, from assumed rates: it orders layouts and predicts no step time.")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- arithmetic


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _shards(p: Parallel) -> int:
    return p.tensor * p.pipeline * p.expert * memory.expert_tensor(p)


def _least_states(subject: Subject) -> float:
    """Return the bytes all devices together need at least: a weight and a gradient of every parameter."""
    (stage,) = memory.train(_with(subject, parallel=Parallel())).stages
    return stage.weights + stage.gradients
