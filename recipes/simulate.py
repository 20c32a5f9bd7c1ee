"""Recipe → simulation: every stage of the full-size model built by Megatron-Core itself, and what it weighs.

Megatron runs in a child (recipes.cpu.simulate) on the CPU target's interpreter, with parameters that have a shape and
no data. Weights, gradients and optimizer state are read off what it built; activations, KV cache and the rollout come
from the closed form of recipes.memory. What Megatron refuses, it would refuse on the devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from recipes import memory, models, params, preflight
from recipes.command import build, compose_verl, external_modules
from recipes.errors import RecipeError
from recipes.finding import Finding
from recipes.preflight.engines import ADAPTOR
from recipes.preflight.rules import Subject
from recipes.schema import ModelFacts

SECONDS = 600  # a build takes seconds; this is for a machine that is busy with something else

# Bytes of optimizer state an element: Adam's two moments and the main copy of the weight, each in fp32. With weights
# in fp32 Megatron's fp32 optimizer updates them in place and keeps no copy (megatron.core.optimizer.FP32Optimizer); its
# distributed optimizer views the shard instead of cloning it.
MAIN, MOMENTS = 4, 8

# verl's names of the engines that build Megatron-Core's model; MindSpeed's own has its settings in mcore_kwargs.
MEGATRON = ("megatron", "mindspeed_megatron")

CLASSES = {
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "GlmMoeDsaForCausalLM": "GlmMoeDsaConfig",
}


@dataclass(frozen=True)
class Built:
    """A device of one pipeline stage as Megatron built it: counts of elements, and bytes."""

    stage: int
    layers: int
    parameters: int
    expert_parameters: int
    whole: int  # parameters of the stage over all ranks that share it, each once
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Simulation:
    """What Megatron built (empty where it refused), the closed form beside it, and what was found."""

    recipe: str
    world: int
    built: tuple[Built, ...]
    memory: memory.Memory
    total: int
    shared_indexers: int
    expected: int
    unknown: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # the recipe's own, with what others have measured
    seconds: float  # processor time of building all stages, imports left out

    @property
    def passed(self) -> bool:
        return not any(f.severity == "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON. Bytes and elements."""
        return {
            "recipe": self.recipe,
            "world": self.world,
            "passed": self.passed,
            "built": [vars(b) for b in self.built],
            "memory": self.memory.to_dict(),
            "total": self.total,
            "shared_indexers": self.shared_indexers,
            "expected": self.expected,
            "seconds": self.seconds,
            "not_modelled": list(self.unknown),
            "notes": list(self.notes),
            "findings": [vars(f) | {"keys": {k: str(v) for k, v in f.keys.items()}} for f in self.findings],
        }


def request(subject: Subject, told: Any) -> dict[str, Any]:
    """Return what the child is told: the model, verl's own engine configuration, the world. `told`: verl's config."""
    from omegaconf import OmegaConf

    actor = OmegaConf.to_container(told.actor_rollout_ref.actor, resolve=True)
    engine, optim = actor[subject.recipe.engine], actor.get("optim") or {}
    strategy = engine.get("strategy", MEGATRON[0])
    if strategy not in MEGATRON:
        raise RecipeError(f"mindspeed.strategy={strategy} cannot be simulated; {' and '.join(MEGATRON)} can.")
    adapted = not subject.model.index_heads or ADAPTOR in external_modules(subject.composed, os.environ)
    options = dict(optim.get("override_optimizer_config") or {})
    aware = bool(options.get("use_precision_aware_optimizer") or optim.get("use_precision_aware_optimizer"))
    gradients = options.get("main_grads_dtype", optim.get("main_grads_dtype", "fp32"))
    half = aware and gradients not in ("fp32", "float32", None)
    return {
        "config": config(subject.model),
        "engine": engine,
        "takes_context": adapted,
        "set_aside": sorted(engine.get("mcore_kwargs") or ()),
        "world": subject.world,
        "ddp": {"grad_reduce_in_fp32": not half, **(engine.get("override_ddp_config") or {})},
        "state_bytes": MOMENTS + (0 if engine["dtype"] in ("float32", "fp32") else MAIN),
    }


def config(model: ModelFacts) -> dict[str, Any]:
    """Return transformers' configuration of an architecture, and its class. MTP layers are left out: none is trained.

    Raises RecipeError for an architecture the bridge of the CPU target does not build.
    """
    if model.architecture not in CLASSES:
        known = ", ".join(CLASSES)
        raise RecipeError(f"model.name={model.name}: {model.architecture} cannot be simulated; {known} can.")
    found = {
        "class": CLASSES[model.architecture],
        "architectures": [model.architecture],
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.head_dim:
        found["head_dim"] = model.head_dim
    if model.experts:
        found |= {"num_experts_per_tok": model.experts_per_token, "moe_intermediate_size": model.expert_ffn}
    if model.architecture == "Qwen3MoeForCausalLM":
        found["num_experts"] = model.experts
    if model.architecture == "GlmMoeDsaForCausalLM":
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
        found |= {name: getattr(model, name) for name in names}
        found |= {
            "n_routed_experts": model.experts,
            "n_shared_experts": model.shared_experts,
            "first_k_dense_replace": model.dense_layers,
            "n_group": 1,
            "topk_group": 1,
            "index_head_dim": model.index_head_dim,
            "index_n_heads": model.index_heads,
            "num_nextn_predict_layers": 0,
        }
    return found


def simulate(composed: params.Composed, *, python: str = sys.executable) -> Simulation:
    """Build every stage of a composed recipe and weigh it.

    `python` is the interpreter of the CPU target (the `cpu` extra), not the one that trains on NPUs.
    Raises RecipeError when that has no Megatron-Core, does not answer, or the model cannot be simulated.
    """
    return weigh(composed, _ask(asked(composed), python))


def asked(composed: params.Composed) -> dict[str, Any]:
    """Return what a child is asked to build for a composed recipe: see `request`."""
    return request(preflight.subject(composed), compose_verl(build(composed, environment={}), composed))


def weigh(composed: params.Composed, answer: dict[str, Any]) -> Simulation:
    """Return what a child's answer (recipes.cpu.simulate.simulate) says of a composed recipe."""
    subject = preflight.subject(composed)
    built = tuple(Built(**{key: each[key] for key in Built.__dataclass_fields__}) for each in answer["stages"])
    estimate = memory.estimate(subject)
    shared = _indexer(subject.model) * sum(_without_index(subject))
    total = sum(b.whole for b in built)
    expected = models.parameters(subject.model).total
    findings = tuple(_findings(subject, answer, built, estimate, total, shared, expected))
    return Simulation(
        composed.name,
        subject.world,
        built,
        estimate,
        total,
        shared,
        expected,
        tuple(answer["unknown"]),
        findings,
        tuple(subject.recipe.notes),
        answer["seconds"],
    )


def _ask(told: dict[str, Any], python: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "VERL_USE_EXTERNAL_MODULES"}
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-m", "recipes.cpu.simulate"],
            input=json.dumps(told),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as fault:
        raise RecipeError(f"Megatron-Core did not build the model within {SECONDS} s.") from fault
    except OSError as fault:
        raise RecipeError(f"The interpreter {python!r} cannot be started: {fault.strerror}.") from fault
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RecipeError(
            f"{python} cannot simulate: {last} Simulating needs the workbook's `cpu` extra (pip install '.[cpu]')."
        )
    return json.loads(done.stdout)


def _without_index(subject: Subject) -> list[int]:
    """For each stage, how many of its layers use another layer's index."""
    ranks = memory.rank_layers(subject.model, subject.recipe.parallel)
    return [sum(not index for _, index in layers) for layers in ranks]


def _indexer(model: ModelFacts) -> int:
    """Elements of one indexer, which Megatron-Bridge 0.5 builds also in layers that use another layer's index."""
    if not model.index_heads:
        return 0
    with_index, without = (memory.layer_parameters(model, moe=True, index=index)[0] for index in (True, False))
    return with_index - without


def _tied_copy(subject: Subject) -> int:
    """Elements of a tied head that is on another stage than the embedding: Megatron-Core keeps two copies equal."""
    model = subject.model
    return model.vocab * model.hidden if model.tied_embeddings and subject.recipe.parallel.pipeline > 1 else 0


def formula(subject: Subject) -> list[tuple[int, int]]:
    """Return the (dense, expert) parameters a device of each stage holds as the CPU target builds them.

    That is memory.stage_parameters with two differences of that build: MLA's down projections are split over tensor
    parallel ranks (Megatron's own ColumnParallelLinear, in place of TransformerEngine's duplicated one), and every
    layer has an indexer of its own.
    """
    one, without = _indexer(subject.model), _without_index(subject)
    sizes = memory.stage_parameters(subject.model, subject.recipe.parallel, latent_sharded=True)
    return [(dense + one * count, expert) for (dense, expert), count in zip(sizes, without, strict=True)]


def _findings(subject, answer, built, estimate, total, shared, expected):
    source = "Megatron-Core 0.18, built in a fake world"
    if answer["refused"]:
        refused = answer["refused"]
        sentence = f"Megatron-Core refuses ({refused['kind']}): {refused['why'].rstrip('.')}."
        yield Finding("simulate.refused", "error", {"at": refused["at"]}, sentence, "", "engine start", source)
        return
    tied = _tied_copy(subject)
    if total - shared - tied != expected:
        sentence = f"the stages hold {total - shared - tied:,} parameters and the model has {expected:,}."
        yield Finding("simulate.total", "error", {"model.name": subject.model.name}, sentence, "", "never", source)
    if tied:
        sentence = (
            f"{tied:,} parameters are there twice: the head is the embedding, and the last stage, which is not the "
            "first, has a copy of its own. They are left out of the total."
        )
        yield Finding("simulate.tied", "info", {"model.name": subject.model.name}, sentence, source=source)
    if shared:
        sentence = (
            f"{shared:,} parameters of indexers are built and never used: Megatron-Bridge 0.5 gives every layer its "
            "own, and the model shares them. They are left out of the total; a run through this bridge holds them."
        )
        yield Finding("simulate.indexers", "info", {"model.name": subject.model.name}, sentence, source=source)
    for one, form in zip(built, formula(subject), strict=True):
        if (one.parameters, one.expert_parameters) != form:
            sentence = (
                f"Megatron built {one.parameters:,} + {one.expert_parameters:,} (experts) parameters a device, the "
                f"formula says {form[0]:,} + {form[1]:,}."
            )
            yield Finding("simulate.formula", "warning", {"stage": one.stage}, sentence, source=source)
    for sentence in memory.too_large(estimate):
        remedy = "`recipes layouts` ranks layouts that fit; batch.max_tokens and rollout.memory weigh most."
        keys = {"hardware": subject.recipe.hardware}
        yield Finding("simulate.memory", "warning", keys, sentence, remedy, "first step", source)
    if answer["unknown"]:
        sentence = (
            f"{len(answer['unknown'])} transformer settings belong to Ascend's adaptor and are not modelled: fused "
            "kernels change activations and workspace, not weights, gradients or optimizer state."
        )
        yield Finding(
            "simulate.adaptor", "info", {"transformer": ", ".join(answer["unknown"])}, sentence, source=source
        )


def describe(found: Simulation) -> str:
    """Return a simulation as text: a line a stage, both bars, and what was found."""
    from recipes import bars

    def giga(size: int) -> str:
        return f"{size / 1e9:8.2f}"

    lines = [f"{found.recipe} on {found.world} devices; a device of each stage, bytes in GB (1e9)"]
    lines.append(
        "stage layers    parameters  of experts  weights gradients optimizer | formula: activations backward  logits"
    )
    for one, form in zip(found.built, found.memory.training.stages, strict=False):
        lines.append(
            f"{one.stage:5} {one.layers:6} {one.parameters + one.expert_parameters:13,} {one.expert_parameters:11,}"
            f" {giga(one.weights)} {giga(one.gradients)}  {giga(one.optimizer)} |"
            f"             {giga(form.activations)} {giga(form.backward)} {giga(form.logits)}"
        )
    if found.built:
        words = f"all stages: {found.total:,} parameters"
        if found.shared_indexers:
            words += f", {found.total - found.shared_indexers:,} without the indexers that are never used"
        lines.append(f"{words}; the model has {found.expected:,}")
    lines.append(bars.describe(found.memory).replace("; ", "\n"))
    lines += [f"assumed: {sentence}" for sentence in found.memory.assumed]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"{f.severity}: {f}" for f in found.findings]
    return "\n".join(lines)
