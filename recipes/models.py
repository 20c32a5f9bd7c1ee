"""Facts of an architecture → its tensors: how many, how large, which train and which are only carried along.

Names and shapes are those of the Hugging Face checkpoint, one expert a tensor, as `transformers` writes Qwen3 and
GLM-5.2. Megatron fuses some of them; the elements stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.schema import ModelFacts


@dataclass(frozen=True)
class Tensor:
    """A kind of tensor that occurs `count` times. `part` is model or mtp; a buffer is stored and never trained."""

    name: str
    shape: tuple[int, ...]
    count: int
    part: str = "model"
    buffer: bool = False
    expert: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


@dataclass(frozen=True)
class Parameters:
    """Counts of elements: trained without the MTP layers (`total`), used for one token (`active`), and the rest."""

    total: int
    active: int
    mtp: int
    buffers: int
    checkpoint: int
    checkpoint_tensors: int


def parameters(facts: ModelFacts) -> Parameters:
    """Count an architecture's parameters.

    `total` leaves the MTP layers and buffers out, as published sizes do; `active` counts only the routed experts one
    token visits; `mtp` is what the MTP layers add, without their buffers; `checkpoint` is all a full checkpoint holds.
    """
    found = list(tensors(facts))
    trained = [t for t in found if t.part == "model" and not t.buffer]
    total = sum(t.elements for t in trained)
    routed = sum(t.elements for t in trained if t.expert)
    idle = routed * (facts.experts - facts.experts_per_token) // facts.experts if facts.experts else 0
    return Parameters(
        total=total,
        active=total - idle,
        mtp=sum(t.elements for t in found if t.part == "mtp" and not t.buffer),
        buffers=sum(t.elements for t in found if t.buffer),
        checkpoint=sum(t.elements for t in found),
        checkpoint_tensors=sum(t.count for t in found),
    )


def index_layers(facts: ModelFacts) -> tuple[int, ...]:
    """Return the layers that compute a sparse-attention index, counted from 0; the others use the one before.

    The rule is that of vLLM's and Megatron-Core's GLM-5.2: index_topk_freq and index_skip_topk_offset of config.json.
    """
    if not facts.index_heads:
        return ()
    passed = (max(layer - facts.index_offset + 1, 0) for layer in range(facts.layers))
    return tuple(layer for layer, distance in enumerate(passed) if distance % facts.index_freq == 0)


def tensors(facts: ModelFacts) -> Iterator[Tensor]:
    """Yield every kind of tensor of a full checkpoint."""
    f = facts
    yield Tensor("embed_tokens", (f.vocab, f.hidden), 1)
    yield Tensor("norm", (f.hidden,), 1)
    if not f.tied_embeddings:
        yield Tensor("lm_head", (f.vocab, f.hidden), 1)
    experts = f.layers - f.dense_layers if f.experts else 0
    yield from _attention(f, f.layers, "model")
    yield from _indexer(f, len(index_layers(f)), "model")
    yield from _ffn("mlp", f.hidden, f.ffn, f.layers - experts, "model")
    yield from _experts(f, experts, "model")
    if f.mtp_layers:
        # An MTP layer joins the last hidden state with the next token's embedding, then is one more layer.
        yield Tensor("eh_proj", (f.hidden, 2 * f.hidden), f.mtp_layers, "mtp")
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield Tensor(name, (f.hidden,), f.mtp_layers, "mtp")
        yield from _attention(f, f.mtp_layers, "mtp")
        yield from _indexer(f, f.mtp_layers if f.index_heads else 0, "mtp")
        yield from _experts(f, f.mtp_layers, "mtp")


def _attention(f: ModelFacts, count: int, part: str) -> Iterator[Tensor]:
    yield Tensor("input_layernorm", (f.hidden,), count, part)
    yield Tensor("post_attention_layernorm", (f.hidden,), count, part)
    if f.kv_lora_rank is None:
        head_dim = f.head_dim or f.hidden // f.heads
        yield Tensor("q_proj", (f.heads * head_dim, f.hidden), count, part)
        yield Tensor("k_proj", (f.kv_heads * head_dim, f.hidden), count, part)
        yield Tensor("v_proj", (f.kv_heads * head_dim, f.hidden), count, part)
        yield Tensor("o_proj", (f.hidden, f.heads * head_dim), count, part)
        if f.qk_norm:
            yield Tensor("q_norm", (head_dim,), count, part)
            yield Tensor("k_norm", (head_dim,), count, part)
        return
    query = f.heads * (f.qk_nope_head_dim + f.qk_rope_head_dim)
    yield Tensor("q_a_proj", (f.q_lora_rank, f.hidden), count, part)
    yield Tensor("q_a_layernorm", (f.q_lora_rank,), count, part)
    yield Tensor("q_b_proj", (query, f.q_lora_rank), count, part)
    yield Tensor("kv_a_proj_with_mqa", (f.kv_lora_rank + f.qk_rope_head_dim, f.hidden), count, part)
    yield Tensor("kv_a_layernorm", (f.kv_lora_rank,), count, part)
    yield Tensor("kv_b_proj", (f.heads * (f.qk_nope_head_dim + f.v_head_dim), f.kv_lora_rank), count, part)
    yield Tensor("o_proj", (f.hidden, f.heads * f.v_head_dim), count, part)


def _indexer(f: ModelFacts, count: int, part: str) -> Iterator[Tensor]:
    if count:
        yield Tensor("indexer.wq_b", (f.index_heads * f.index_head_dim, f.q_lora_rank), count, part)
        yield Tensor("indexer.wk", (f.index_head_dim, f.hidden), count, part)
        yield Tensor("indexer.k_norm.weight", (f.index_head_dim,), count, part)
        yield Tensor("indexer.k_norm.bias", (f.index_head_dim,), count, part)
        yield Tensor("indexer.weights_proj", (f.index_heads, f.hidden), count, part)


def _ffn(name: str, hidden: int, width: int, count: int, part: str, *, expert: bool = False) -> Iterator[Tensor]:
    if count:
        yield Tensor(f"{name}.gate_proj", (width, hidden), count, part, expert=expert)
        yield Tensor(f"{name}.up_proj", (width, hidden), count, part, expert=expert)
        yield Tensor(f"{name}.down_proj", (hidden, width), count, part, expert=expert)


def _experts(f: ModelFacts, count: int, part: str) -> Iterator[Tensor]:
    if count and f.experts:
        yield from _ffn("experts", f.hidden, f.expert_ffn, count * f.experts, part, expert=True)
        yield from _ffn("shared_experts", f.hidden, f.expert_ffn, count * f.shared_experts, part)
        yield Tensor("router", (f.experts, f.hidden), count, part)
        if f.router_bias:
            yield Tensor("router.e_score_correction_bias", (f.experts,), count, part, buffer=True)
