"""The formulas of recipes.memory against what Megatron-Core and verl hold: measured here, not stored.

Known with torch 2.11.0, megatron-core 0.18.0, megatron-bridge 0.5.1, verl 0.9.1.
"""

import dataclasses
import json
from dataclasses import dataclass, field

import pytest

from recipes import memory, params, simulate
from recipes.schema import ModelFacts

pytestmark = pytest.mark.slow

TOKENS = 128  # more than any width below: what a token does not scale (weights' gradients, a mask) is small beside it

DENSE = ModelFacts(
    name="dense",
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=16,
    ffn=160,
    vocab=64,
    max_positions=512,
    qk_norm=True,
)
MOE = dataclasses.replace(
    DENSE, name="moe", architecture="Qwen3MoeForCausalLM", experts=8, experts_per_token=2, expert_ffn=48
)
GLM = dataclasses.replace(params.model_facts("tiny_glm5_2"), index_topk=TOKENS)
APART = {"moe_shared_expert_overlap": False}  # as GLM's recipes have it; overlapped, its gathered input is kept besides
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Case:
    model: ModelFacts
    tensor: int = 1
    sequence: bool = False
    dtype: str = "float32"
    tokens: int = TOKENS
    settings: dict = field(default_factory=dict)
    fused: bool = True

    def told(self) -> dict:
        engine = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
            "dtype": self.dtype,
            "override_transformer_config": self.settings,
        }
        asked = {"config": simulate.config(self.model), "engine": engine, "world": self.tensor}
        return asked | {"tokens": self.tokens, "fused": self.fused, "sequence": self.sequence}

    @property
    def kernels(self) -> memory.Kernels:
        return memory.Kernels(number=4 if self.dtype == "float32" else 2, statistics=4, place=8)

    def layers(self, formula, **more) -> list[int]:
        facts = self.model
        more |= {"tensor": self.tensor, "sequence": self.sequence, "kernels": self.kernels}
        return [
            formula(facts, self.tokens, moe=memory.has_experts(facts, layer), **more) for layer in range(facts.layers)
        ]

    @property
    def entry(self) -> float:
        return self.tokens * self.kernels.number * self.model.hidden / (self.tensor if self.sequence else 1)

    def kept(self) -> float:
        """By the formula: all layers, and input and output of the last norm."""
        return sum(self.layers(memory.layer_activations, index=self.model.index_heads > 0)) + 2 * self.entry

    def moment(self) -> float:
        """By the formula: the fullest moment of forward and backward. The logits are small here."""
        kept = self.layers(memory.layer_activations, index=self.model.index_heads > 0)
        gradients = max(self.layers(memory.layer_gradients))
        if self.settings.get("recompute_granularity") == "full":
            return self.model.layers * self.entry + 2 * self.entry + max(kept) - self.entry + gradients
        return sum(kept) + 2 * self.entry + gradients


def wider(model: ModelFacts, **changes) -> ModelFacts:
    return dataclasses.replace(model, **changes)


CASES = {
    "dense": Case(DENSE),
    "dense, four layers": Case(wider(DENSE, layers=4)),
    "dense, twice the tokens": Case(DENSE, tokens=2 * TOKENS),
    "dense, wide FFN": Case(wider(DENSE, ffn=512)),
    "dense, a key-value head a query": Case(wider(DENSE, kv_heads=8)),
    "dense, bfloat16": Case(DENSE, dtype="bfloat16"),
    "dense, tensor 2": Case(DENSE, tensor=2),
    "dense, tensor 2, sequence parallel": Case(DENSE, tensor=2, sequence=True),
    "dense, heads of a rank not contiguous": Case(wider(DENSE, kv_heads=4), tensor=2, sequence=True),
    "dense, full recomputation": Case(wider(DENSE, layers=4), settings=FULL),
    "dense, selective recomputation": Case(
        DENSE, settings={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    ),
    "experts": Case(MOE),
    "experts, four layers": Case(wider(MOE, layers=4)),
    "experts, wide": Case(wider(MOE, expert_ffn=160, experts_per_token=4)),
    "experts, narrow as Qwen3's": Case(wider(MOE, expert_ffn=24, experts_per_token=4)),
    "experts, narrow as Qwen3's, full recomputation": Case(
        wider(MOE, expert_ffn=24, experts_per_token=4, layers=4), settings=FULL
    ),
    "experts, bfloat16": Case(MOE, dtype="bfloat16"),
    "experts, tensor 2, sequence parallel": Case(MOE, tensor=2, sequence=True),
    "experts, full recomputation": Case(wider(MOE, layers=4), settings=FULL),
    "sparse attention": Case(GLM, settings=APART),
    "sparse attention, tensor 2, sequence parallel": Case(GLM, tensor=2, sequence=True, settings=APART),
    "as a smoke run": Case(DENSE, fused=False),
}

LOSSES = {
    "update": (8, {"entropy": False, "backward": True}),
    "update with an entropy bonus": (16, {"entropy": True, "backward": True}),
    "log-probs and entropy": (16, {"entropy": True, "backward": False}),
    "log-probs and entropy by chunks": (9, {"entropy": True, "backward": False, "chunk": 8}),
}

IN_ONE_PROCESS = """
import json, sys
from recipes.cpu import activations, simulate

cases, losses = json.loads(sys.argv[1])
simulate._environment()
import verl
report = [activations.measure(told) for told in cases]
alone = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")} | {"context_parallel_size": 1}
with simulate.rank_of(0, 1, alone):
    counted = [activations.measure_loss(64, 4096, **options) for options in losses]
print("REPORT", json.dumps([report, counted, stand_ins()]))
"""

# What stands in for a kernel computes what the kernel does: the largest relative difference from torch's operators.
STAND_INS = """
import torch
from megatron.core.fusions.fused_bias_swiglu import WeightedSwiGLUFunction
from torch.nn.functional import rms_norm, silu


def stand_ins():
    torch.manual_seed(1)
    x, scale, rows, given = (torch.randn(*shape) for shape in ((10, 2, 8), (8,), (10, 12), (10, 1)))
    experts = [torch.randn(6, 12) for _ in range(3)]
    counts = [5, 0, 5]

    def plain_norm(x, weight):
        return rms_norm(x, (8,), weight, 1e-6)

    def plain_swiglu(rows, given):
        gate, up = rows.chunk(2, -1)
        return silu(gate) * up * given

    def one_after_the_other(rows):
        return torch.cat([some @ weight.t() for some, weight in zip(rows.split(counts), experts)])

    with activations.fused_kernels():
        return {
            "norm": apart(lambda *a: activations.FusedNorm.apply(*a, 1e-6), plain_norm, x, scale),
            "swiglu": apart(lambda *a: WeightedSwiGLUFunction.apply(*a, False), plain_swiglu, rows, given),
            "experts": apart(lambda r: activations.GroupedMatmul.apply(r, counts, *experts), one_after_the_other, rows),
        }


def apart(one, other, *inputs):
    found = []
    for function in (one, other):
        given = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*given)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))
"""


@pytest.fixture(scope="module")
def measured(child):
    """One process for all: importing Megatron takes longer than everything else here."""
    asked = [[case.told() for case in CASES.values()], [options for _, options in LOSSES.values()]]
    result = child("-W", "ignore", "-c", STAND_INS + IN_ONE_PROCESS, json.dumps(asked), timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("REPORT"))
    cases, losses, stand_ins = json.loads(line.removeprefix("REPORT"))
    return dict(zip(CASES, cases, strict=True)), dict(zip(LOSSES, losses, strict=True)), stand_ins


@pytest.mark.parametrize("name", [name for name, c in CASES.items() if c.fused and c.settings is not FULL])
def test_what_is_kept_is_what_the_formula_says(measured, name):
    found = measured[0][name]["kept"]
    assert CASES[name].kept() == pytest.approx(found, rel=memory.KEPT_WITHIN)


def test_a_layer_more_costs_what_the_formula_says_to_the_byte(measured):
    """Of two models that differ in depth alone: nothing but layers is left."""
    for name, short, long in (("dense", DENSE, wider(DENSE, layers=4)), ("experts", MOE, wider(MOE, layers=4))):
        more = measured[0][f"{name}, four layers"]["kept"] - measured[0][name]["kept"]
        assert more == Case(long).kept() - Case(short).kept()


@pytest.mark.parametrize("name", [name for name, c in CASES.items() if c.fused])
def test_the_fullest_moment_is_what_the_formula_says(measured, name):
    found = measured[0][name]["most"]
    assert CASES[name].moment() == pytest.approx(found, rel=memory.MOMENT_WITHIN)


def test_recomputation_leaves_inputs_and_takes_one_layer_at_a_time(measured):
    for name, whole in (("dense", "dense, four layers"), ("experts", "experts, four layers")):
        found, case = measured[0][f"{name}, full recomputation"], CASES[f"{name}, full recomputation"]
        assert found["kept"] < 0.1 * measured[0][whole]["kept"]
        # Its input is there already, and input and output of the last norm are gone by then.
        layer = max(case.layers(memory.layer_activations)) - 3 * case.entry
        assert found["kept_most"] - found["kept"] == pytest.approx(layer, rel=0.02)


def test_nothing_is_left_when_the_backward_pass_is_over(measured):
    assert {each["left"] for each in measured[0].values()} == {0}


def test_without_fused_kernels_a_smoke_run_keeps_far_more(measured):
    """Scores, and what each of torch's operators keeps for itself: the formula is not for it."""
    assert measured[0]["as a smoke run"]["kept"] > 2 * measured[0]["dense"]["kept"]


@pytest.mark.parametrize("name", ["norm", "swiglu", "experts"])
def test_what_stands_in_for_a_kernel_computes_the_same(measured, name):
    assert measured[2][name] < 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_bytes_of_a_logit_in_verl_s_own_loss(measured, name):
    wanted, _ = LOSSES[name]
    assert measured[1][name] / (64 * 4096) == pytest.approx(wanted, rel=0.01)
