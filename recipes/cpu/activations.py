"""Measures what a forward pass of Megatron-Core keeps for its backward pass: what recipes.memory computes, counted.

    python -m recipes.cpu.activations < request.json > answer.json

A model small enough for the CPU is built as recipes.cpu.simulate builds it and run forth and back, on real numbers.
Every storage that autograd saves is counted once; parameters are left out. In a fake world of two, collectives answer
at once and with no data, so one process shows the shapes of a tensor-parallel rank.

`fused` puts torch's flash attention in place of Megatron's unfused one, Megatron's fused SwiGLU in place of its plain
one, and stand-ins for two kernels a CPU has not: RMSNorm, which keeps its input and one fp32 number a row, and sparse
attention, which keeps inputs, output, chosen places and one fp32 number a head and token. Without `fused`: what a smoke
run keeps.
"""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.cpu import simulate

ROWS = 4  # that a stand-in for a kernel computes at a time: of 128 and more, so that its temporaries are small


class Kept:
    """Bytes that autograd holds, now and at most: use `hooks()` around forward and backward."""

    def __init__(self, without: Iterator[torch.Tensor] = ()):
        self.now = self.most = 0
        self._left_out = {tensor.untyped_storage()._cdata for tensor in without}
        self._held: Counter = Counter()

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor)

    def hold(self, storage: int, size: int) -> None:
        if storage in self._left_out:
            return
        self._held[storage] += 1
        if self._held[storage] == 1:
            self.now += size
            self.most = max(self.most, self.now)

    def release(self, storage: int, size: int) -> None:
        if storage in self._left_out:
            return
        self._held[storage] -= 1
        if not self._held[storage]:
            self.now -= size


class _Saved:
    def __init__(self, kept: Kept, tensor: torch.Tensor):
        # Detached, or a saved output would hold the node that holds it; the flag is what recomputation asks for.
        self.tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        self._kept, self._what = kept, (storage._cdata, storage.nbytes())
        kept.hold(*self._what)

    def __del__(self):
        self._kept.release(*self._what)


class Alive(TorchDispatchMode):
    """Bytes of all tensors made inside and not yet freed, now and at most; gradients and temporaries included."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inside = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inside:
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known and self._known[key]() is not None:
            return

        def freed(_) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and the reciprocal root mean square of each row, and has no temporaries."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
        for some, s, into in _by_rows(x, scale, out):
            s[:] = torch.rsqrt(some.float().square().mean(-1, keepdim=True) + eps)
            into[:] = (some.float() * s).to(x.dtype) * weight
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        back, back_weight = torch.empty_like(x), torch.zeros(x.shape[-1])
        for some, s, g, into in _by_rows(x, scale, gradient, back):
            normal, inner = some.float() * s, g.float() * weight.float()
            into[:] = s * (inner - normal * (inner * normal).mean(-1, keepdim=True))
            back_weight += (g.float() * normal).sum(0)
        return back, back_weight.to(weight.dtype), None


class FusedSparseAttention(torch.autograd.Function):
    """Causal attention that keeps its inputs, its output, a number a head and row, and the places that were chosen.

    All places are attended to: what is kept does not depend on which ones are chosen, and a test chooses all.
    """

    @staticmethod
    def forward(ctx, query, key, value, places, scale):
        out = _attention(query, key, value, scale)
        ctx.save_for_backward(query, key, value, places, out, torch.zeros(query.shape[:3]))
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            out = _attention(*inputs, ctx.scale)
        return (*torch.autograd.grad(out, inputs, gradient), None, None)


def _attention(query, key, value, scale: float):
    """[tokens, batch, heads, width] each → [tokens, batch, heads · width]."""
    turned = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*turned, is_causal=True, scale=scale, enable_gqa=True)
    return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def indexer_loss(q, weights, k, query, key, topk, *unused):
    """A fused indexer: which places are chosen ([batch, tokens, topk]), and its loss, with no scores of all places.

    The first `topk` are, whatever the scores: a test has as many places as are chosen.
    """
    tokens, batch = q.shape[:2]
    return torch.arange(topk).expand(batch, tokens, topk).contiguous(), q.new_zeros(())


def indexer_loss_back(q, weights, k, *unused):
    """The gradients of a fused indexer's inputs: their shapes, not their values."""
    return torch.zeros_like(q), torch.zeros_like(weights), torch.zeros_like(k)


class GroupedMatmul(torch.autograd.Function):
    """One product for all experts of a rank, rows of each after the other's; keeps its input, and has no temporaries.

    What moe_grouped_gemm asks for, on Ascend too. Megatron's own module without it computes an expert at a time and
    then copies all results into one, so that for a moment all are there twice. The gradients of the weights are left
    out: with gradient_accumulation_fusion they are added where Megatron's buffer is, which nobody measures here.
    """

    @staticmethod
    def forward(ctx, rows, counts, *weights):
        out = rows.new_empty(rows.shape[0], weights[0].shape[0])
        for some, into, weight in zip(rows.split(counts), out.split(counts), weights, strict=True):
            torch.mm(some, weight.t(), out=into)
        ctx.save_for_backward(rows, *weights)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx, gradient):
        rows, *weights = ctx.saved_tensors
        back = torch.empty_like(rows)
        for some, into, weight in zip(gradient.split(ctx.counts), back.split(ctx.counts), weights, strict=True):
            torch.mm(some, weight, out=into)
        return back, None, *(None for _ in weights)


def grouped_experts(self, rows, counts, probs):
    """Megatron-Core's experts of a rank with grouped products: rows [n, h], `counts` of each expert, probs [n]."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    counts = counts.tolist()
    inner = GroupedMatmul.apply(rows, counts, *(expert.linear_fc1.weight for expert in self.local_experts))
    inner = weighted_bias_swiglu_impl(inner, None, probs.unsqueeze(-1))
    return GroupedMatmul.apply(inner, counts, *(expert.linear_fc2.weight for expert in self.local_experts)), None


def swiglu(gate_and_up, weights=None):
    """SwiGLU, few rows at a time: Megatron's functions, in torch's operators, have temporaries no kernel has.

    `weights`: what each row is multiplied with, a router's probabilities.
    """
    out = gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)
    for into, y, weight in _by_rows(out, gate_and_up, _of_rows(weights, out)):
        gate, up = y.float().chunk(2, -1)
        into[:] = torch.nn.functional.silu(gate) * up * weight
    return out


def swiglu_back(gradient, gate_and_up, weights=None):
    """The gradient of `swiglu`: of gate and up, and of the rows' weights where there are any."""
    back, given = torch.empty_like(gate_and_up), _of_rows(weights, gradient)
    back_weights = torch.empty_like(given)
    for into, g, y, weight, of_weight in _by_rows(back, gradient, gate_and_up, given, back_weights):
        gate, up = y.float().chunk(2, -1)
        sigmoid = gate.sigmoid()
        into[:] = torch.cat((g * weight * up * sigmoid * (1 + gate * (1 - sigmoid)), g * weight * gate * sigmoid), -1)
        of_weight[:] = (g * gate * sigmoid * up).sum(-1, keepdim=True)
    return back if weights is None else (back, back_weights.view_as(weights))


def _of_rows(weights, like):
    """One number a row of `like`, [..., 1]; ones where there are none."""
    return like.new_ones(()).expand(*like.shape[:-1], 1) if weights is None else weights


def _by_rows(*tensors) -> Iterator[tuple]:
    """Tensors of as many rows each, ROWS of them at a time; what is written there is written to the tensor."""
    return zip(*(t.reshape(-1, t.shape[-1]).split(ROWS) for t in tensors), strict=True)


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Put the stand-ins in place of Megatron's and torch's own functions."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe.experts import SequentialMLP

    def norm(self, x):
        return FusedNorm.apply(x, self.weight, self.eps or 1e-6)

    def attention(self, query, key, value, *unused, **also_unused):
        return _attention(query, key, value, self.softmax_scale)

    with ExitStack() as stack:
        for owner, name, new in (
            (torch.nn.RMSNorm, "forward", norm),
            (DotProductAttention, "forward", attention),
            (dsa, "unfused_dsa_fn", FusedSparseAttention.apply),
            (dsa, "fwd_fused_indexer_loss_naive", indexer_loss),
            (dsa, "bwd_fused_indexer_loss_naive", indexer_loss_back),
            (fused_bias_swiglu, "swiglu", swiglu),
            (fused_bias_swiglu, "weighted_swiglu", swiglu),
            (fused_bias_swiglu, "swiglu_back", swiglu_back),
            (fused_bias_swiglu, "weighted_swiglu_back", swiglu_back),
            (SequentialMLP, "forward", grouped_experts),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


@contextmanager
def _norms_in_sequence_parallel() -> Iterator[None]:
    """WrappedTorchNorm refuses sequence parallelism because its gradient would miss a reduction: no matter here."""
    from megatron.core.transformer import torch_norm

    def build(cls, config, hidden_size, eps=1e-5, **unused):
        return torch.nn.RMSNorm(hidden_size, eps=eps)

    with mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", build):
        yield


def measure(told: dict) -> dict[str, int]:
    """Run one case; bytes. `told` is what recipes.simulate.request makes, and `tokens`, `fused`, `sequence`.

    `kept` is what autograd holds when the forward pass is over, `kept_most` at any time until the backward pass is
    over, recomputation included. `most` is all that is alive at the fullest moment: gradients and temporaries too.
    Embedding to the last norm and the head's input; the logits are not among `kept`, nothing saves them.
    """
    with simulate.rank_of(0, told["world"], told["engine"]), ExitStack() as stack:
        if told["fused"]:
            stack.enter_context(fused_kernels())
        stack.enter_context(_norms_in_sequence_parallel())
        provider, unknown = simulate.provide(told)
        if unknown:
            raise ValueError(f"Megatron-Core has no settings {', '.join(unknown)}.")
        provider.sequence_parallel = told["sequence"]
        provider.bias_activation_fusion = told["fused"]
        provider.perform_initialization = True
        (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # Megatron's is a buffer of its own
        tokens = told["tokens"]
        ids = torch.randint(provider.vocab_size, (1, tokens))
        not_to_see = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
        places = torch.arange(tokens)[None]
        kept, alive = Kept([*model.parameters(), *model.buffers(), ids]), Alive()
        with kept.hooks(), alive:
            out = model(input_ids=ids, position_ids=places, attention_mask=not_to_see)
            after = kept.now
            out.sum().backward()
    return {"kept": after, "kept_most": kept.most, "most": alive.most, "left": kept.now}


def _drop_gradient(weight) -> None:
    weight.grad = None


def measure_loss(tokens: int, vocab: int, *, entropy: bool, backward: bool, chunk: int | None = None) -> int:
    """Return the most bytes alive from fp32 logits to their gradient, as verl's Megatron engine computes the loss.

    `vocab` is this rank's part. `backward` false: a log-prob pass. `chunk`: entropy_from_logits_with_chunking.
    """
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    options = {"entropy_from_logits_with_chunking": chunk is not None, "entropy_from_logits_chunk_size": chunk}
    engine = SimpleNamespace(engine_config=SimpleNamespace(**options))
    source, label = torch.randn(1, tokens, vocab), torch.randint(vocab, (1, tokens))
    source.requires_grad_(backward)
    with Alive() as alive, torch.set_grad_enabled(backward):
        found = MegatronEngineWithLMHead._lm_head_logits_processor(
            engine,
            _copy(source),
            label,
            torch.ones(1, tokens),
            calculate_sum_pi_squared=False,
            calculate_entropy=entropy,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="bshd",
        )
        if backward:
            sum(part.sum() for part in found.values()).backward()
    return alive.most


def _copy(source):
    """A tensor that is no leaf and that nothing else holds, as logits are."""
    return source.clone()


def main() -> int:
    asked = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # Megatron and verl print as they please
    simulate._environment()
    import verl  # noqa: F401  imports the CPU target, which must come before Megatron

    json.dump([measure(told) for told in asked], answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
