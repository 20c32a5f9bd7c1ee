"""Rehearse a recipe without its accelerators: the same algorithm, a tiny model of the same family, the layout folded.

A rehearsal is a recipe of params/cpu with what can be carried over from the recipe that is rehearsed, launched through
the same command module. It shows that the settings are accepted together, that the losses are finite, that a checkpoint
is written and read as asked. It says nothing about memory, speed, NPU kernels or learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipes import params
from recipes.errors import RecipeError
from recipes.params import Composed
from recipes.schema import Recipe

STAND_INS = {
    "GlmMoeDsaForCausalLM": "cpu/glm5_2",
    "Qwen3MoeForCausalLM": "cpu/qwen3_moe",
    "Qwen3ForCausalLM": "cpu/qwen3",
}
"""The recipe that stands in for a family, by the architecture in config.json; with _async behind it, for a recipe that
generates and trains apart.
"""

RANKS = (1, 2, 4)
RESPONSES = 4  # at most so many a prompt
UPDATES = 2  # at most so many a step
MINI = 4  # prompts an update
SYNC_EVERY = 4  # updates between two weight syncs, where a recipe leaves it to verl

# Carried over as they are. What a rehearsal is for: these decide the losses and what a checkpoint holds.
KEPT = (
    "algorithm.advantage",
    "algorithm.normalize_by_std",
    "algorithm.policy_loss",
    "algorithm.loss_aggregation",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.clip_dual",
    "algorithm.entropy_coeff",
    "algorithm.kl_loss_coef",
    "algorithm.kl_loss_type",
    "algorithm.rollout_correction.importance",
    "algorithm.rollout_correction.importance_threshold",
    "algorithm.rollout_correction.normalize",
    "algorithm.rollout_correction.rejection",
    "algorithm.rollout_correction.rejection_threshold",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.log_probs",
    "mode",
    "batch.train",
    "fully_async.staleness",
    "fully_async.sync_every",
    "fully_async.mini_batches",
    "fully_async.partial_rollout",
    "checkpoint.strict",
    "checkpoint.contents",
    "data.truncation",
    "data.shuffle",
    "memory.recompute",
    "memory.recompute_method",
    "memory.recompute_layers",
    "transformer.moe_router_dtype",
    "transformer.dsa_indexer_loss_coeff",
    "supervision.thresholds",
)

# Set by the stand-in, with the reason. A prefix stands for all keys below it.
REPLACED = {
    "model": "a tiny random model of the same family",
    "hardware": "gloo ranks on this processor",
    "stack": "what trains without an accelerator",
    "engine": "Megatron-Core as it is; MindSpeed needs NPUs",
    "mindspeed": "Megatron-Core as it is; MindSpeed needs NPUs",
    "external_modules": "recipes.cpu.adaptor in place of Ascend's adaptor",
    "data.train_files": "the tiny task of the stand-in: say a digit",
    "data.val_files": "the tiny task of the stand-in: say a digit",
    "reward": "the tiny task of the stand-in",
    "rollout.engine": "transformers on this processor",
    "optimizer.lr": "one at which a tiny model moves",
    "env": "the variables of the CPU target",
    "prepare": "makes the tiny model and its data",
}


COUNTS = ("ENDED", "INCOMPLETE", "NAN", "MISMATCH", "EXPORT")
"""Rules of the verdict that a rehearsal must pass. What a tiny random model learns in a few steps is not among them."""


@dataclass(frozen=True)
class Change:
    """One key of the recipe that is rehearsed, its value there, what becomes of it, and why."""

    key: str
    value: Any
    rehearsed: Any
    why: str


@dataclass(frozen=True)
class Rehearsal:
    """A recipe to launch, and what it does with each setting of the one it rehearses."""

    of: str
    composed: Composed
    kept: tuple[Change, ...]
    folded: tuple[Change, ...]
    replaced: tuple[Change, ...]
    left_out: tuple[Change, ...]

    def lines(self) -> list[str]:
        """Return the account of every setting as lines of text."""
        words = {
            "kept": "as in the recipe",
            "folded": "folded",
            "replaced": "replaced",
            "left_out": "not exercised",
        }
        found = []
        for name, heading in words.items():
            found.append(f"{heading}:")
            for c in getattr(self, name):
                change = f"{c.value!r}" if name == "kept" else f"{c.value!r} -> {c.rehearsed!r}"
                found.append(f"  {c.key}: {change}" + (f"  ({c.why})" if c.why else ""))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the account of every setting, ready for JSON."""
        groups = ("kept", "folded", "replaced", "left_out")
        return {"rehearses": self.of, **{name: [vars(c) for c in getattr(self, name)] for name in groups}}


def fold(
    composed: Composed, *, ranks: int = 2, steps: int = 2, export: bool = False, run_dir: str = "", seed: int = 1
) -> Rehearsal:
    """Return the rehearsal of a composed recipe on `ranks` gloo ranks for `steps` steps.

    export: also write a checkpoint at the end, with the recipe's checkpoint.contents (the Hugging Face export, where
    the recipe says nothing) and checkpoint.strict.
    Raises RecipeError for an architecture no tiny model stands in for, or a number of ranks that cannot be folded to.
    """
    recipe = composed.recipe
    facts = params.model_facts(recipe.model.name)
    if recipe.hardware == "cpu":
        raise RecipeError(f"Recipe {composed.name} runs without an accelerator already: `recipes run {composed.name}`.")
    if ranks not in RANKS:
        raise RecipeError(
            f"ranks={ranks}: a layout is folded to {', '.join(map(str, RANKS[:-1]))} or {RANKS[-1]} ranks."
        )
    stand_in = STAND_INS.get(facts.architecture)
    if stand_in is None:
        known = ", ".join(STAND_INS)
        raise RecipeError(
            f"model.name={recipe.model.name}: no tiny model stands in for {facts.architecture}; for {known} one does."
        )
    apart = recipe.mode == "fully_async"
    told = dict(params.flatten(params.to_dict(recipe)))
    said = {key for key in composed.history if key in told}
    layout = _layout(recipe, facts.experts, ranks)
    folded = {**layout, **_batch(recipe), **_shape(recipe, steps), **_replay(recipe, facts.experts)}
    if apart:
        folded |= _apart(recipe, steps)
    if export:
        folded |= {"checkpoint.save_freq": steps, "checkpoint.contents": recipe.checkpoint.contents or ["hf_model"]}
    kept = {key: told[key] for key in KEPT if key in said and told[key] is not None and key not in folded}
    small = {"trainer.seed": seed, "title": f"rehearsal of {composed.name}: tiny model, no accelerator"}
    rehearsed = params.compose(
        f"{stand_in}_async" if apart else stand_in, (), {**kept, **folded, **small}, run_dir=run_dir
    )
    now = dict(params.flatten(params.to_dict(rehearsed.recipe)))
    groups: dict[str, list[Change]] = {"kept": [], "folded": [], "replaced": [], "left_out": []}
    for key in sorted(said - {"recipe", "title", "notes", "run_dir", "work"}):
        reason = _first(REPLACED, key)
        if key in kept:
            groups["kept"].append(Change(key, told[key], now.get(key), ""))
        elif key in folded:
            groups["folded"].append(Change(key, told[key], now.get(key), _why(key)))
        elif reason:
            groups["replaced"].append(Change(key, told[key], now.get(key), reason))
        elif told[key] is not None:
            groups["left_out"].append(Change(key, told[key], now.get(key), _why_not(key)))
    account = {name: tuple(changes) for name, changes in groups.items()}
    return Rehearsal(composed.name, replace(rehearsed, name=f"rehearsal of {composed.name}"), **account)


def _layout(recipe: Recipe, experts: int, ranks: int) -> dict[str, Any]:
    """Fold each parallel size above 1 to 2 while there are ranks: pipeline, then tensor or experts."""
    p = recipe.parallel
    sizes = {"pipeline": 1, "tensor": 1}
    for name in sizes:
        if name == "tensor" and experts:
            continue  # Megatron wants sequence parallelism then, which torch's RMSNorm cannot do
        if getattr(p, name) > 1 and sizes["pipeline"] * sizes["tensor"] * 2 <= ranks:
            sizes[name] = 2
    used = sizes["pipeline"] * sizes["tensor"]
    # Expert parallelism takes no ranks of its own: its group lies across tensor and data parallel ranks.
    expert = 2 if experts and p.expert > 1 and ranks // sizes["pipeline"] >= 2 else 1
    world = max(used, sizes["pipeline"] * expert)
    found = {f"parallel.{name}": size for name, size in sizes.items()}
    found |= {"nodes": 1, "devices": world, "parallel.context": 1}
    if experts:
        found |= {"parallel.expert": expert, "parallel.expert_tensor": 1}
    return found


def _batch(recipe: Recipe) -> dict[str, Any]:
    small = {"batch.mini": MINI, "rollout.n": min(RESPONSES, recipe.rollout.n)}
    if not recipe.batch.train:  # streamed
        return small
    return {"batch.train": MINI * min(UPDATES, -(-recipe.batch.train // recipe.batch.mini)), **small}


def _apart(recipe: Recipe, steps: int) -> dict[str, Any]:
    """One replica generates. A step is what lies between two weight syncs, so it takes `sync_every` updates."""
    apart = recipe.fully_async
    prompts = steps * MINI * (apart.sync_every or SYNC_EVERY) * (apart.mini_batches or 1)
    bypass = "verl.algorithm.rollout_correction.bypass_mode"
    said = dict(params.flatten({"verl": recipe.verl})).get(bypass, True)  # verl's default for this entry
    return {
        "fully_async.rollout_nodes": 1,
        "fully_async.rollout_devices": 1,
        "fully_async.rollout_steps": prompts,
        "optimizer.lr_decay_steps": prompts,
        "trainer.steps": None,
        bypass: said,
    }


def _replay(recipe: Recipe, experts: int) -> dict[str, Any]:
    """Router replay R3 as it is. Routes are packed and sequences here are padded, so they go through one at a time."""
    if recipe.algorithm.router_replay != "R3" or not experts:
        return {}
    pad = "verl.actor_rollout_ref.actor.megatron.pad_bshd_to_minibatch_max"
    return {"algorithm.router_replay": "R3", "batch.micro": 1, pad: False}


def _shape(recipe: Recipe, steps: int) -> dict[str, Any]:
    validates = recipe.trainer.test_freq > 0
    return {
        "trainer.steps": steps,
        "trainer.test_freq": steps if validates else -1,
        "trainer.val_before_train": recipe.trainer.val_before_train,
        "trainer.rollout_dump": recipe.trainer.rollout_dump,
    }


_FOLDED = {
    "parallel": "a size above 1 becomes 2 while there are ranks for it",
    "parallel.tensor": "2 while there are ranks for it; 1 with experts, which need sequence parallelism then",
    "nodes": "all ranks are on this machine",
    "devices": "a rank is a process here",
    "batch": "as many updates a step, up to two",
    "rollout.n": "a smaller group",
    "algorithm.router_replay": "as in the recipe; the rollout here hands its routed experts back too",
    "fully_async": "one replica on this machine, and as many prompts as the steps take",
    "optimizer.lr_decay_steps": "as long as the rehearsal",
    "verl": "routes and sequences line up one sequence at a time",
    "verl.algorithm": "as in the recipe",
    "trainer": "a few steps",
    "checkpoint": "written at the last step, if asked for",
}

_LEFT_OUT = {
    "parallel": "the tiny model has two layers: one a stage",
    "parallel.context": "context parallelism needs the attention of TransformerEngine or of the NPU adaptor",
    "parallel.sequence": "torch's RMSNorm, which stands in here, knows nothing of sequence parallelism",
    "memory": "everything is in main memory: there is nothing to offload to",
    "transformer": "fused kernels and settings of the NPU adaptor",
    "optimizer": "schedules of a long run",
    "optimizer.options": "offload and precision of an optimizer that fills a device",
    "algorithm.router_replay": "only R3 is rehearsed, and only with experts",
    "fully_async": "for mode=fully_async alone",
    "data": "lengths and files of the tiny task",
    "batch": "memory of a device is no matter here",
    "rollout": "settings of vLLM and SGLang",
    "checkpoint": "a rehearsal starts afresh and keeps nothing",
    "trainer": "names, loggers and schedules of a long run",
    "verl": "keys of the devices' own code",
    "extra_args": "given for the devices' own code",
    "launch": "a rehearsal runs on this machine",
    "ray_address": "a rehearsal runs on this machine",
    "ray_nodes": "a rehearsal runs on this machine",
    "ray_wait_minutes": "a rehearsal runs on this machine",
    "supervision": "times that fit the full size",
}


def _first(reasons: Mapping[str, str], key: str) -> str:
    found = [p for p in reasons if key == p or key.startswith(f"{p}.")]
    return reasons[max(found, key=len)] if found else ""


def _why(key: str) -> str:
    return _first(_FOLDED, key)


def _why_not(key: str) -> str:
    return _first(_LEFT_OUT, key) or "not exercised"
