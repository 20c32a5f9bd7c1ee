"""Recipe → Memory: what a device holds while it trains and while it generates, in closed form. Bytes, always.

Two bars that are never summed: training and generation take turns on the same devices, or have devices of their own.
Everything is the worst case the recipe allows: the longest sequences, the fullest micro batches, evenly routed tokens.
What the formulas leave out (allocator, communication buffers, the runtime itself) is for a reserve to cover.

One published peak can be compared: 49.14 GiB of verl's nightly with Qwen3-30B-A3B (qwen3/gspo_30b_a3b_vllm_a3). verl
reads `max_memory_allocated` of the trainer's process after an update (engine_workers.py). Nothing ever resets it, so
it is the fullest moment since the start: that of an update, with weights, gradients and optimizer state all there. The
rollout is another process and not in it. States are 45.93 GiB here. The longest sequences the recipe allows would bring
it to 66.2, but step time and throughput say a sequence had 362 tokens, not 4096: eight of them, 2896 tokens, make it
47.84. The 1.3 GiB still missing are 2.6 % of the peak and not explained by a measurement: steps whose sequences are
longer than the mean of one step, experts that get more than their even share, and temporaries of the optimizer step,
of the weight sync and of collectives, none of which is modelled. tests/test_memory.py does this sum.

The sources: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (K22); Rajbhandari
et al. 2020, "ZeRO" (Z20); Megatron-Core 0.18 and verl 0.9.1 where a formula names them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipes import models, pipeline
from recipes.errors import RecipeError
from recipes.params import flatten
from recipes.preflight.rules import Subject
from recipes.schema import ModelFacts, Parallel, Recipe

FP32, HALF = 4, 2
_WIDTH = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}

# What verl takes where a recipe says nothing (verl 0.9.1, trainer/config/rollout/rollout.yaml).
ROLLOUT_SHARE, ROLLOUT_SEQUENCES, ROLLOUT_BATCHED_TOKENS, BUCKET_MIB = 0.5, 256, 8192, 2048
ENTROPY_CHUNK = 2048  # trainer/config/engine/megatron.yaml

# Whole on every tensor-parallel rank: norms, the router, the indexer; and the two projections into MLA's latent space,
# which Megatron-Core builds with parallel_mode="duplicated" from TransformerEngine's layers.
_WHOLE = ("router", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
_OUTSIDE = ("embed_tokens", "norm", "lm_head")


# --------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Stage:
    """A device of one pipeline stage in training. Counts: layers, parameters, micro batches in flight. Else bytes."""

    stage: int
    layers: int
    dense_parameters: int
    expert_parameters: int
    in_flight: float
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int  # what all micro batches in flight keep for their backward passes
    backward: int  # one layer's, while its backward pass runs: what it recomputes, and gradients
    logits: int  # with their gradient; gone before the first layer's backward pass
    log_probs: int  # activations and logits of a forward pass without backward, which never meet those above
    host: int
    released: int  # of weights, gradients and optimizer: what is on the host while log-probs are computed

    @property
    def states(self) -> int:
        """Weights, gradients, optimizer and reference: what is there whatever the batch."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def update(self) -> int:
        """What an update adds to the states: the loss and a layer's backward pass take turns."""
        return self.activations + max(self.backward, self.logits)

    @property
    def peak(self) -> int:
        """The larger of the update and the log-prob pass before it."""
        return self.states + max(self.update, self.log_probs - self.released)


@dataclass(frozen=True)
class Training:
    """The first bar. `tokens` is what a device holds of one micro batch; `rollout` what generation leaves resident."""

    tokens: int
    micro_batches: int
    rollout: int
    stages: tuple[Stage, ...]

    @property
    def peak(self) -> int:
        return self.rollout + max(stage.peak for stage in self.stages)

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.peak)


@dataclass(frozen=True)
class Generation:
    """The second bar: a device of the rollout. An engine rank is `rollout.tensor` devices with one KV cache.

    `share` is what the engine may take, and kv what is left of it; both None where the device's memory is unknown.
    `training` is what the trainer leaves resident. `sync_peak` is the moment of the weight sync, before the KV cache.
    """

    weights: int
    activations: int
    kv_per_token: int
    share: int | None
    kv: int | None
    tokens: int | None
    sequences: int | None
    training: int
    bucket: int
    sync_peak: int

    @property
    def peak(self) -> int:
        return max(self.training + (self.share or self.weights + self.activations), self.sync_peak)


@dataclass(frozen=True)
class Memory:
    """Both bars of a recipe, what a device has (None: unknown), and what was assumed, in sentences."""

    device: int | None
    training: Training
    generation: Generation
    assumed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers, with the peaks."""
        tree = dataclasses.asdict(self)
        tree["training"]["peak"] = self.training.peak
        tree["generation"]["peak"] = self.generation.peak
        for stage, there in zip(self.training.stages, tree["training"]["stages"], strict=True):
            there["peak"] = stage.peak
        return tree


# ------------------------------------------------------------------------------------------------------ parameters


def stage_parameters(model: ModelFacts, parallel: Parallel, *, latent_sharded: bool = False) -> list[tuple[int, int]]:
    """Return for each pipeline rank the (dense, expert) parameters one of its devices holds; MTP is left out.

    A matrix is split over `tensor`; norms, router and indexer are whole on each rank. A routed expert is split over
    `expert_tensor` (unset: tensor), and a rank has experts / `expert` of them. The embedding is on the first stage,
    norm and head on the last; a tied head is a second copy where that is another rank. Indexers are where an index is
    computed. `latent_sharded`: MLA's down projections are split too, as Megatron's own ColumnParallelLinear does;
    TransformerEngine's are whole on each rank. Raises RecipeError when the stages do not hold all layers.
    Source: Megatron-Core 0.18, the layers' parallel modes.
    """
    tensor, experts = parallel.tensor, parallel.expert * expert_tensor(parallel)
    counts = []
    for rank, layers in enumerate(rank_layers(model, parallel)):
        dense = expert = 0
        for kind in set(layers):
            one = _layer_parameters(facts_key(model), *kind, tensor, experts, tensor, latent_sharded)
            dense, expert = dense + layers.count(kind) * one[0], expert + layers.count(kind) * one[1]
        first, last = rank == 0, rank == parallel.pipeline - 1
        table = model.vocab * model.hidden // tensor
        dense += table if first else 0
        if last:
            dense += model.hidden + (0 if model.tied_embeddings and first else table)
        counts.append((dense, expert))
    return counts


def rank_layers(model: ModelFacts, parallel: Parallel) -> tuple[tuple[tuple[bool, bool], ...], ...]:
    """Return for each pipeline rank its layers as (has experts, computes an index), virtual stages together.

    Raises RecipeError when the stages do not hold all layers of the model.
    """
    p = parallel
    key = (p.pipeline, p.pipeline_layout, p.first_stage_layers, p.last_stage_layers, p.virtual_pipeline)
    return _rank_layers(facts_key(model), *key)


@functools.lru_cache(maxsize=4096)
def _rank_layers(fields: tuple, stages: int, layout: str | None, first: int | None, last: int | None, v: int | None):
    model = ModelFacts(*fields)
    parallel = Parallel(
        pipeline=stages, pipeline_layout=layout, first_stage_layers=first, last_stage_layers=last, virtual_pipeline=v
    )
    sizes = pipeline.stage_sizes(parallel, model.layers)
    if sum(sizes) != model.layers or len(sizes) % parallel.pipeline:
        raise RecipeError(
            f"parallel.pipeline={parallel.pipeline}: its stages hold {sum(sizes)} layers and {model.name} has "
            f"{model.layers}; set parallel.pipeline_layout, or another number of stages."
        )
    computing = set(models.index_layers(model))
    ranks: list[list[tuple[bool, bool]]] = [[] for _ in range(parallel.pipeline)]
    start = 0
    for stage, size in enumerate(sizes):
        for layer in range(start, start + size):
            ranks[stage % parallel.pipeline].append((has_experts(model, layer), layer in computing))
        start += size
    return tuple(tuple(layers) for layers in ranks)


def layer_parameters(
    model: ModelFacts, *, moe: bool, index: bool, tensor: int = 1, experts: int = 1
) -> tuple[int, int]:
    """Return the (dense, routed expert) parameters a device holds of one layer; `experts` ranks share its experts."""
    return _layer_parameters(facts_key(model), moe, index, tensor, experts, tensor, False)


def facts_key(model: ModelFacts) -> tuple:
    """Return the facts as a key of caches: a search for layouts asks for the same layers thousands of times."""
    return tuple(vars(model).values())


@functools.lru_cache(maxsize=4096)
def _layer_parameters(
    fields: tuple, moe: bool, index: bool, tensor: int, experts: int, kv_tensor: int, latent_sharded: bool
) -> tuple[int, int]:
    """Count what a device holds of one layer: (dense, routed experts)."""
    dense = expert = 0
    for t in _layer_tensors(ModelFacts(*fields), moe, index):
        if t.buffer:
            continue
        if t.expert:
            expert += t.elements // experts
        elif _is_whole(t.name, latent_sharded):
            dense += t.elements
        else:
            dense += t.elements // (kv_tensor if t.name in ("k_proj", "v_proj") else tensor)
    return dense, expert


def _layer_tensors(model: ModelFacts, moe: bool, index: bool) -> Iterator[models.Tensor]:
    """Yield the tensors of one layer: those of a model that has just this one."""
    one = dataclasses.replace(
        model,
        layers=1,
        dense_layers=0 if moe else 1,
        experts=model.experts if moe else 0,
        index_heads=model.index_heads if index else 0,
        mtp_layers=0,
    )
    return (t for t in models.tensors(one) if t.name not in _OUTSIDE)


def _is_whole(name: str, latent_sharded: bool) -> bool:
    return "norm" in name or name in _WHOLE or (name in _LATENT and not latent_sharded)


def has_experts(model: ModelFacts, layer: int) -> bool:
    """Say whether a layer, counted from 0, has routed experts."""
    return model.experts > 0 and layer >= model.dense_layers


def expert_tensor(parallel: Parallel) -> int:
    """Return how many ranks share one expert: Megatron takes tensor where expert_tensor is not set."""
    return parallel.expert_tensor or parallel.tensor


# ----------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Kernels:
    """Bytes that depend on the kernels: a number of an activation, and what attention keeps besides its operands.

    `statistics`: of the softmax, a head and token. Ascend's flash attention keeps its maximum and its sum, each eight
    times over in fp32 (MindSpeed, fusion_attention_v2.cpp, SOFTMAXMAX_LAST_DIMSHAPE); other ones keep one fp32 number.
    `place`: of a token that sparse attention has chosen; Ascend's are int32, Megatron-Core's own int64.
    """

    number: int = HALF
    statistics: int = 64
    place: int = 4


ASCEND = Kernels()

# How far the formulas may be from what Megatron-Core does: bytes kept, and the fullest moment of forward and backward.
# tests/cpu/test_activations.py measures both, and fails beyond.
KEPT_WITHIN, MOMENT_WITHIN = 0.05, 0.10


@dataclass(frozen=True)
class _Width:
    """Bytes a token: what is split over tensor parallelism anyway, only with sequence parallelism, and never."""

    split: float
    sequence: float
    whole: float = 0.0


def layer_activations(
    model: ModelFacts,
    tokens: int,
    *,
    moe: bool = False,
    index: bool = False,
    tensor: int = 1,
    sequence: bool = False,
    expert_tensor: int = 1,
    absorb: bool = False,
    kernels: Kernels = ASCEND,
) -> int:
    """Return the bytes one layer keeps for its backward pass, of `tokens` tokens on this device.

    K22, equation 1, counts 34·s·b·h for a GELU layer with dropout. Here anew for what is trained: no dropout, fused
    norms, SwiGLU and flash attention (no scores are kept, so no 5·a·s²·b). tests/cpu/test_activations.py counts the
    same storages in Megatron-Core. In numbers a token, n bytes each, t = tensor:

    - both norms' inputs and outputs: 4h, over t with sequence parallelism (K22, equation 4), else whole;
    - attention, over t: the output of the qkv projection d(a + 2g), which the values, a view, keep whole; queries and
      keys after the rotary embedding d(a + g); attention's output da; its statistics. With a norm of q and k (Qwen3)
      also the queries before it, da: a copy, unless a rank has one key-value head, or as many as queries;
    - the rotary embedding's cosine and sine, once for q and once for k: 4d on every rank, MindSpeed's fused one too;
    - latent attention instead: both latents before and after their norm, 2(q_lora + kv_lora) + rope; queries and keys
      2a(nope + rope), values and output 2a·v over t; 4·rope. With `absorb` (Ascend's, not counted in Megatron-Core)
      keys and values are the latent itself, the queries a(kv_lora + rope) once more, and the output a·kv_lora before it
      is projected up;
    - where an index is computed (never over t): its queries, keys before and after their norm, weights, the rotary
      embedding, and the chosen places; with sequence parallelism also the gathered inputs h + q_lora;
    - SwiGLU: gate and up 2f, their product f; over t;
    - experts: a token goes to k of them, so k rows of h (input) + 3·expert_ffn / expert_tensor, each on expert_tensor
      ranks; evenly routed, a device receives as many rows as it sends. Shared experts: as SwiGLU, over t, and their
      input is the norm's output (with moe_shared_expert_overlap a gathered copy of h more, not counted). Routing, in
      bytes: 8 an expert and 24 a row, and where scores are sigmoids with a bias 5 an expert, 8 a row and 12 more.

    The fp32 statistics of a norm are 4 bytes a row.
    """
    attention = _latent_attention(model, index, absorb, kernels, tensor, sequence) if model.kv_lora_rank else None
    attention = attention or _attention(model, kernels, tensor)
    n, h = kernels.number, model.hidden
    norms = _Width(0, 4 * n * h + 2 * FP32)
    mlp = _experts(model, kernels, expert_tensor) if moe else _Width(3 * n * model.ffn, 0)
    parts = (norms, attention, mlp)
    split = sum(part.split for part in parts) / tensor
    whole = sum(part.sequence for part in parts) / (tensor if sequence else 1) + sum(part.whole for part in parts)
    return math.ceil(tokens * (split + whole))


def _attention(model: ModelFacts, kernels: Kernels, tensor: int) -> _Width:
    n, a, g, d = kernels.number, model.heads, model.kv_heads, _head_dim(model)
    split = n * d * ((a + 2 * g) + (a + g) + a) + kernels.statistics * a
    if model.qk_norm:
        split += (n * d * a if a > g > tensor else 0) + FP32 * (a + g)
    return _Width(split, 0, 4 * n * d)


def _latent_attention(
    model: ModelFacts, index: bool, absorb: bool, kernels: Kernels, tensor: int, sequence: bool
) -> _Width:
    n, a, latent, rope = kernels.number, model.heads, model.kv_lora_rank, model.qk_rope_head_dim
    query, value = model.qk_nope_head_dim + rope, model.v_head_dim
    split = n * a * (query + value) + kernels.statistics * a
    split += n * a * (latent + rope + latent) if absorb else n * a * (query + value)
    latents = n * (2 * (model.q_lora_rank + latent) + rope) + 2 * FP32
    whole = 4 * n * rope
    if index:
        heads, width = model.index_heads, model.index_head_dim
        whole += n * (heads * (width + 1) + 2 * width + 4 * rope) + 2 * FP32 + kernels.place * model.index_topk
        whole += n * (model.hidden + model.q_lora_rank) if sequence and tensor > 1 else 0
    return _Width(split, latents, whole)


def _experts(model: ModelFacts, kernels: Kernels, expert_tensor: int) -> _Width:
    n, k = kernels.number, model.experts_per_token
    rows = k * (expert_tensor * (n * model.hidden + 24) + 3 * n * model.expert_ffn)
    routing = 8 * model.experts + ((5 * model.experts + 8 * k + 12) if model.router_bias else 0)
    return _Width(3 * n * model.expert_ffn * model.shared_experts, rows + routing)


def in_flight(parallel: Parallel, rank: int, micro_batches: int, chunks: int = 1) -> float:
    """Return how many micro batches' activations a pipeline rank keeps at most.

    1F1B: min(p − rank, m) (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training"). With v virtual
    stages a rank warms up with 2(p − rank − 1) + (v − 1)p chunks of 1/v of its layers each (Megatron-Core 0.18).
    """
    p = parallel.pipeline
    if chunks == 1:
        return min(p - rank, micro_batches)
    return min(2 * (p - rank - 1) + (chunks - 1) * p + 1, chunks * micro_batches) / chunks


def layer_gradients(
    model: ModelFacts,
    tokens: int,
    *,
    moe: bool = False,
    tensor: int = 1,
    sequence: bool = False,
    expert_tensor: int = 1,
    kernels: Kernels = ASCEND,
) -> int:
    """Return the bytes a layer holds at the fullest moment of its forward and backward pass, beyond what it keeps.

    A dense layer: where its backward pass begins, in the MLP: 2h of the residual stream, and 2f of gate and up while
    their own values are still there. Experts, in rows: there the larger of 2·expert_ffn and h + expert_ffn, the step
    before; or in the forward pass 3h, which is most where experts are narrow. Megatron-Core's MoELayer holds the
    dispatched rows while the experts compute, and what they return while it is put back in order; when that is a
    recomputation the gradient of the layer's output, h, is there too. Not in it: the workspace of a kernel, and a
    weight's gradient on its way to the buffer, which no number of tokens makes larger.
    Counted in tests/cpu/test_activations.py.
    """
    n, h, shared = kernels.number, model.hidden, tensor if sequence else 1
    if not moe:
        return math.ceil(tokens * n * (2 * h / shared + 2 * model.ffn / tensor))
    f, rows = model.expert_ffn / expert_tensor, model.experts_per_token * expert_tensor
    return math.ceil(tokens * n * max(2 * h + rows * max(h + f, 2 * f), h + rows * 3 * h) / shared)


def _kept(recipe: Recipe, layers: list[int], entry: int, flying: float) -> tuple[int, int]:
    """Return what a stage keeps, and what it recomputes at a time. `layers`: bytes of its layers, `entry`: of an input.

    Nothing recomputed: all layers of all micro batches in flight. "full": of those only the inputs of chunks of
    recompute_layers ("uniform"), or of the first recompute_layers ("block"), and one chunk is recomputed at a time
    (K22, section 5), its input being there already. "selective" recomputes the attention core, which flash attention
    does by itself: no difference.
    """
    each = recipe.memory.recompute_layers or 1
    if not layers:
        return 0, 0
    if recipe.memory.recompute != "full":
        return math.ceil(flying * sum(layers)), 0
    if recipe.memory.recompute_method == "block":
        inside, outside = layers[:each], layers[each:]
        return math.ceil(flying * (len(inside) * entry + sum(outside))), max(inside) - entry
    chunks = [sum(layers[i : i + each]) for i in range(0, len(layers), each)]
    return math.ceil(flying * len(chunks) * entry), max(chunks) - entry


def micro_batch_tokens(subject: Subject) -> tuple[int, int]:
    """Return the most tokens a device holds of one micro batch, and the micro batches of an update.

    Fixed: micro · longest / cp. Dynamic: max_tokens, or less where a rank's whole mini batch is smaller; verl scales
    the budget by cp itself. Longest is prompt + response. Source: verl 0.9.1, rearrange_micro_batches.
    """
    r, cp = subject.recipe, subject.recipe.parallel.context
    longest = r.data.max_prompt_length + r.data.max_response_length
    sequences = max(1, r.batch.mini * r.rollout.n // subject.data_parallel)
    if r.batch.dynamic:
        budget = max(r.batch.max_tokens or longest, math.ceil(longest / cp))
        tokens = min(budget, math.ceil(sequences * longest / cp))
        return tokens, min(sequences, math.ceil(sequences * longest / (budget * cp)))
    micro = r.batch.micro or 1
    return math.ceil(micro * longest / cp), max(1, sequences // micro)


# -------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class _Bytes:
    """Bytes a parameter takes; the optimizer's are shared out over data parallelism, on device and host."""

    weight: int
    gradient: int
    optimizer: float
    optimizer_host: float
    sharded: bool


def _bytes(recipe: Recipe) -> _Bytes:
    """Return what a parameter costs in training.

    Z20: bf16 weights 2, fp32 gradients 4, fp32 main weights and two moments 12, the last three shared by the
    distributed optimizer (in Megatron the gradient buffer stays whole). fp32 weights are their own main weights: 8.
    Gradients are fp32 unless verl's optim.main_grads_dtype or override_ddp_config says otherwise (verl 0.9.1,
    MegatronEngine). Precision-aware: moments of their own dtype, and of the main weights the 2 bytes bf16 lacks.
    On the host (optimizer_cpu_offload) all is fp32, with a copy of the gradients: 16 for the offloaded fraction; what
    stays on the device is the rest of it, and without the precision-aware option the fp32 main weights.
    """
    options = dict(recipe.optimizer.options)
    verbatim = dict(flatten(recipe.verl))
    engine, optim = f"actor_rollout_ref.actor.{recipe.engine}", "actor_rollout_ref.actor.optim"
    for key in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if f"{optim}.{key}" in verbatim:
            options.setdefault(key, verbatim[f"{optim}.{key}"])
    weight = _WIDTH.get(str(verbatim.get(f"{engine}.dtype", "bfloat16")), HALF)
    aware = bool(options.get("use_precision_aware_optimizer"))
    # What override_optimizer_config says about gradients does not reach the buffer: verl reads its own keys for it.
    low = verbatim.get(f"{optim}.use_precision_aware_optimizer") and verbatim.get(f"{optim}.main_grads_dtype")
    gradient = _WIDTH.get(str(low), FP32) if low else FP32
    if verbatim.get(f"{engine}.override_ddp_config.grad_reduce_in_fp32") is False:
        gradient = weight
    main = 0 if weight == FP32 else FP32
    moments = 2 * FP32
    if aware and not options.get("optimizer_cpu_offload"):
        moments = sum(_WIDTH.get(str(options.get(k, "fp32")).rpartition(".")[2], FP32) for k in _MOMENTS)
        if weight == HALF and options.get("store_param_remainders", True):
            main = HALF
    optimizer, host = float(main + moments), 0.0
    if options.get("optimizer_cpu_offload"):
        fraction = float(options.get("optimizer_offload_fraction", 0.0))
        stays = 0 if aware else main
        optimizer, host = stays + (1 - fraction) * (main + moments - stays), fraction * 4 * FP32
    sharded = verbatim.get(f"{engine}.use_distributed_optimizer", True) is not False
    return _Bytes(weight, gradient, optimizer, host, sharded)


_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def train(subject: Subject) -> Training:
    """Return the bar of training, stage by stage.

    Optimizer state is shared over the data-parallel ranks that hold the same parameters: world / (t·p) for dense ones
    (dp·cp), world / (expert_tensor·expert·p) for experts (Megatron-Core 0.18, DistributedOptimizer). Logits are the
    last stage's alone, tokens · vocab / t of them, 8 bytes each: in fp32, overwritten by softmax and gradient, and
    once more while the gradient is divided by the temperature; an entropy bonus keeps a copy and its softmax, 8 more.
    A log-prob pass keeps one layer and, for the entropy it reports, 16 bytes a logit: logits, copy, softmax, product
    (vocab_parallel_entropy); the last two of a chunk only where verl is told to go by chunks. With fused kernels there
    are no logits. All of it counted on verl's own function in tests/cpu/test_activations.py.
    The reference policy is weights alone, on the host while it is not asked (param_offload).
    """
    r, model, p = subject.recipe, subject.model, subject.recipe.parallel
    cost = _bytes(r)
    tokens, micro_batches = micro_batch_tokens(subject)
    sequence = sequence_parallel(r)
    parameters = stage_parameters(model, p)
    dense_ranks = max(1, subject.world // (p.tensor * p.pipeline)) if cost.sharded else 1
    expert_ranks = max(1, subject.world // (expert_tensor(p) * p.expert * p.pipeline)) if cost.sharded else 1
    longest = r.data.max_prompt_length + r.data.max_response_length
    log_prob_tokens = tokens
    if not r.batch.dynamic:
        log_prob_tokens = math.ceil((r.batch.log_prob_micro or r.batch.micro or 1) * longest / p.context)
    entry = 2 * model.hidden / (p.tensor if sequence else 1)
    setting = {"tensor": p.tensor, "sequence": sequence, "expert_tensor": expert_tensor(p)}
    absorb = bool(r.transformer.get("use_dsa_absorb"))
    ranks = rank_layers(model, p)
    kinds = {kind for layers in ranks for kind in layers}
    many = 1 << 20  # so that rounding to whole bytes is nothing
    a_token = {k: layer_activations(model, many, moe=k[0], index=k[1], absorb=absorb, **setting) / many for k in kinds}
    back = {k: layer_gradients(model, many, moe=k[0], **setting) / many for k in kinds}
    vocab = 0 if r.model.fused_kernels else model.vocab / p.tensor
    logit = 8 + (8 if r.algorithm.entropy_coeff else 0)
    chunks = len(pipeline.stage_sizes(p, model.layers)) // p.pipeline
    offload, idle = bool(r.memory.param_offload), bool(r.memory.optimizer_offload)
    stages = []
    for rank, (layers, (dense, expert)) in enumerate(zip(ranks, parameters, strict=True)):
        total, share = dense + expert, dense / dense_ranks + expert / expert_ranks
        flying = in_flight(p, rank, micro_batches, chunks)
        last = rank == p.pipeline - 1
        weights, gradients = cost.weight * total, cost.gradient * total
        optimizer = math.ceil(cost.optimizer * share)
        kept, recomputed = _kept(r, [math.ceil(tokens * a_token[k]) for k in layers], math.ceil(tokens * entry), flying)
        # The final norm's input and output.
        kept += math.ceil(2 * tokens * entry) if last else 0
        passing = max((a_token[k] for k in layers), default=0) + (
            log_prob_logit(r, log_prob_tokens) * vocab if last else 0
        )
        reference = 0 if r.algorithm.kl_loss_coef is None else weights
        stages.append(
            Stage(
                stage=rank,
                layers=len(layers),
                dense_parameters=dense,
                expert_parameters=expert,
                in_flight=flying,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                reference=0 if offload else reference,
                activations=kept,
                backward=recomputed + math.ceil(tokens * max((back[k] for k in layers), default=0)),
                logits=math.ceil(tokens * vocab * logit) if last else 0,
                log_probs=math.ceil(log_prob_tokens * passing),
                host=math.ceil(cost.optimizer_host * share)
                + (weights + reference if offload else 0)
                + (optimizer if idle else 0),
                released=(gradients if offload else 0) + (optimizer if idle else 0),
            )
        )
    apart = r.mode == "fully_async" or r.rollout.free_cache is not False
    resident = 0 if apart else rollout_share(subject) or 0
    return Training(tokens, micro_batches, resident, tuple(stages))


def log_prob_logit(recipe: Recipe, tokens: int) -> float:
    """Return the bytes of a logit in a log-prob pass with its entropy, of `tokens` tokens on a device."""
    verbatim, own = dict(flatten(recipe.verl)), f"actor_rollout_ref.actor.{recipe.engine}.entropy_from_logits"
    if not verbatim.get(f"{own}_with_chunking"):
        return 16
    return 8 + 8 * min(1.0, verbatim.get(f"{own}_chunk_size", ENTROPY_CHUNK) / tokens)


def sequence_parallel(recipe: Recipe) -> bool:
    """Return whether sequence parallelism is on: verl's default is yes, and it needs tensor > 1."""
    asked = recipe.transformer.get("sequence_parallel", recipe.parallel.sequence)
    return asked is not False and recipe.parallel.tensor > 1


# ------------------------------------------------------------------------------------------------------ generation


def generate(subject: Subject, training: Training) -> Generation:
    """Return the bar of generation.

    Weights: dense over rollout.tensor, key and value heads repeated where there are fewer than that; experts over
    rollout.expert (tensor · data) when it is above 1, else over tensor. The engine gets `rollout.memory` of the device
    (gpu_memory_utilization); the KV cache is what its weights and its largest step leave. A step: max_batched_tokens
    of the residual stream and one MLP, and fp32 logits of max_sequences. KV bytes a token and layer: 2 · d · heads / t
    for keys and values; latent attention keeps one compressed kv_lora + rope on every rank (DeepSeek-AI 2024,
    "DeepSeek-V2", section 2.1), and index_head_dim where an index is computed. Sequences are the longest ones.
    The weight sync holds the trainer's weights, the engine's, and one bucket, before the KV cache is back
    (verl 0.9.1, update_weights).
    """
    r, model, rollout = subject.recipe, subject.model, subject.recipe.rollout
    tensor = rollout.tensor or 1
    experts = rollout.expert if (rollout.expert or 1) > 1 else tensor
    width = _WIDTH.get(rollout.dtype or "bfloat16", HALF)
    weights = width * engine_parameters(model, tensor, experts)
    sequences = rollout.max_sequences or ROLLOUT_SEQUENCES
    batched = rollout.max_batched_tokens or ROLLOUT_BATCHED_TOKENS
    routed = model.experts_per_token * (model.expert_ffn or 0) if model.experts else 0
    mlp = 3 * max(model.ffn / tensor, routed * tensor / experts)
    activations = math.ceil(width * batched * (4 * model.hidden + mlp) + FP32 * sequences * model.vocab)
    per_token = width * kv_elements(model, tensor)
    share = rollout_share(subject)
    kv = None if share is None else max(0, share - weights - activations)
    tokens = None if kv is None else kv // per_token
    longest = r.data.max_prompt_length + r.data.max_response_length
    left, trained = resident(r, training)
    bucket = (rollout.update_bucket_mb or BUCKET_MIB) << 20
    return Generation(
        weights=weights,
        activations=activations,
        kv_per_token=per_token,
        share=share,
        kv=kv,
        tokens=tokens,
        sequences=None if tokens is None else min(sequences, tokens // longest),
        training=left,
        bucket=bucket,
        sync_peak=max(left, trained) + weights + bucket,
    )


def resident(recipe: Recipe, training: Training) -> tuple[int, int]:
    """Return the bytes the trainer leaves on a device while the engine generates, and its weights during the sync.

    Of the fullest stage. With param_offload weights go to the host and gradients are released; optimizer_offload takes
    the optimizer state (verl 0.9.1, BaseEngineCtx). Both 0 where training and generation are apart.
    """
    if recipe.mode == "fully_async":
        return 0, 0
    held = max(
        (0 if recipe.memory.param_offload else stage.weights + stage.gradients + stage.reference)
        + (0 if recipe.memory.optimizer_offload else stage.optimizer)
        for stage in training.stages
    )
    return held, max(stage.weights for stage in training.stages)


def rollout_share(subject: Subject) -> int | None:
    """Return the bytes the engine may take of a device; None where the hardware's facts name no memory."""
    memory, share = subject.hardware.memory_gb, subject.recipe.rollout.memory
    return None if memory is None else int(memory * 1e9 * (ROLLOUT_SHARE if share is None else share))


def engine_parameters(model: ModelFacts, tensor: int, experts: int) -> int:
    """Return the parameters a rollout device holds, with `experts` ranks sharing each layer's experts. No MTP."""
    computing = set(models.index_layers(model))
    kinds = [(has_experts(model, layer), layer in computing) for layer in range(model.layers)]
    total = model.hidden + (1 if model.tied_embeddings else 2) * model.vocab * model.hidden // tensor
    for kind in set(kinds):
        total += kinds.count(kind) * sum(
            _layer_parameters(facts_key(model), *kind, tensor, experts, min(tensor, model.kv_heads), False)
        )
    return total


def kv_elements(model: ModelFacts, tensor: int) -> int:
    """Return the numbers a rollout device keeps of one token in its KV cache, over all layers."""
    if model.kv_lora_rank is None:
        return model.layers * 2 * _head_dim(model) * max(1, model.kv_heads // tensor)
    latent = model.layers * (model.kv_lora_rank + model.qk_rope_head_dim)
    return latent + len(models.index_layers(model)) * model.index_head_dim


def _head_dim(model: ModelFacts) -> int:
    return model.head_dim or model.hidden // model.heads


# ------------------------------------------------------------------------------------------------------------- both


def estimate(subject: Subject) -> Memory:
    """Return what a recipe needs of a device, in bytes: training stage by stage, and generation.

    Raises RecipeError when the pipeline stages do not hold all layers of the model.
    """
    memory = subject.hardware.memory_gb
    training = train(subject)
    return Memory(
        device=None if memory is None else int(memory * 1e9),
        training=training,
        generation=generate(subject, training),
        assumed=(*_assumed(subject.recipe), _to_compare(training)),
    )


def too_large(found: Memory) -> list[str]:
    """Return a sentence for each of the two bars that is above what a device has; none where that is unknown."""
    if found.device is None:
        return []
    peaks = (("training", found.training.peak), ("generation", found.generation.peak))
    return [
        f"{name} may need {need / 1e9:.1f} GB at its fullest, by a closed form for the longest sequences, and a device "
        f"has {found.device / 1e9:.0f}."
        for name, need in peaks
        if need > found.device
    ]


def _to_compare(training: Training) -> str:
    stage, tokens = training.fullest, training.tokens
    fixed = training.rollout + stage.states
    slope = 1000 * (training.peak - fixed) / tokens
    return (
        "To compare with verl's perf/max_memory_allocated_gb (GiB, of the trainer's process since its start): of the "
        f"{training.peak / 2**30:.1f} GiB of training {fixed / 2**30:.1f} are there whatever the lengths, and each "
        f"thousand tokens of a micro batch on a device take {slope / 2**30:.2f}; at most they are {tokens}."
    )


def _assumed(r: Recipe) -> Iterator[str]:
    longest = r.data.max_prompt_length + r.data.max_response_length
    yield f"Every sequence has the longest length, {longest} tokens; tokens are routed evenly to the experts."
    yield (
        f"What a layer keeps is within {KEPT_WITHIN:.0%} of Megatron-Core's own, the fullest moment of its forward and "
        f"backward pass within {MOMENT_WITHIN:.0%}, counted on the CPU with kernels that keep what fused ones do. What "
        "Ascend's keep is from their source, not measured. On top come their workspace, communication buffers, and a "
        "weight's gradient on its way to its buffer."
    )
    ours = ["absorbed sparse attention (use_dsa_absorb)"] if r.transformer.get("use_dsa_absorb") else []
    ours += ["context parallelism"] if r.parallel.context > 1 else []
    if ours:
        yield f"Activations of {' and '.join(ours)} are a formula that was not counted anywhere."
    if r.mode == "fully_async":
        yield "Training and generation have devices of their own: nothing of one is resident on the other's."
        return
    if r.rollout.free_cache is False:
        yield "rollout.free_cache=false: the engine keeps weights and KV cache while the trainer works."
    else:
        yield "While the trainer works the engine sleeps: its weights and KV cache are given back."
    away = "weights and gradients" if r.memory.param_offload else ""
    away += (" and " if away and r.memory.optimizer_offload else "") + (
        "optimizer state" if r.memory.optimizer_offload else ""
    )
    yield (
        f"While the engine generates, {away} of the trainer are on the host or released."
        if away
        else "While the engine generates, all of the trainer's state stays on the device (no offload)."
    )
    if r.memory.optimizer_offload:
        yield "verl brings the optimizer state back before the first micro batch of an update, not after the last."
