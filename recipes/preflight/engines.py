"""Rules on engine, stack, hardware and weights: do they fit each other and the model?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from recipes import models, pipeline, stack
from recipes.command import external_modules
from recipes.errors import RecipeError
from recipes.finding import divisors
from recipes.params import flatten
from recipes.preflight.rules import Subject, rule

ADAPTOR = "megatron_adaptor"
MINDSPEED_VERL = ("0.8.0", "0.9.0")
R3_VLLM = (0, 22)
NEVER = "never"


@rule("stack.model", noticed="model build, or a key that verl lacks", source="the model's and the stack's facts")
def stack_trains_the_model(s: Subject):
    first, has = s.model.first_verl, stack.verl_version(s.recipe.stack)
    if first and _version(has) < _version(first):
        yield (
            {"stack": s.recipe.stack, "model.name": s.model.name},
            f"{s.model.name} trains on Ascend from verl {first} on, and this stack has {has}.",
            "Choose a later stack.",
        )


@rule("stack.hardware", noticed="import torch_npu", source="the stack's facts")
def stack_is_for_the_hardware(s: Subject):
    known = stack.load(s.recipe.stack).hardware
    if known and s.recipe.hardware not in known:
        yield (
            {"stack": s.recipe.stack, "hardware": s.recipe.hardware},
            f"this stack is for {', '.join(known)}.",
            "Choose a stack for the hardware.",
        )


@rule("stack.router_replay", noticed="rollout start", source="verl 0.9.1, vLLMHttpServer")
def rollout_returns_its_experts(s: Subject):
    vllm = stack.load(s.recipe.stack).repositories.get("vllm")
    if s.recipe.algorithm.router_replay != "R3" or s.recipe.rollout.engine != "vllm" or vllm is None:
        return
    if _version(vllm.ref.rpartition("v")[2]) < R3_VLLM:
        yield (
            {"algorithm.router_replay": "R3", "stack": s.recipe.stack},
            f"vLLM returns the experts it chose from {'.'.join(map(str, R3_VLLM))} on, and this stack has {vllm.ref}.",
            "Choose a later stack, or algorithm.router_replay=R2.",
        )


@rule("hardware.devices", noticed="engine start: Ray has fewer devices than asked for", source="the hardware's facts")
def node_has_the_devices(s: Subject):
    has = s.hardware.devices_per_node
    asked = {"devices": s.recipe.devices, "fully_async.rollout_devices": s.recipe.fully_async.rollout_devices}
    for key, number in asked.items():
        # Without an accelerator a device is a process, and there may be as many as one likes.
        if number and number > has and s.hardware.device != "cpu":
            yield (
                {key: number, "hardware": s.recipe.hardware},
                f"a node has {has} devices.",
                f"Take {key}={has} or fewer.",
            )


@rule(
    "engine.mindspeed", noticed=NEVER + ": it composes, and the engine is not MindSpeed's", source="verl 0.8.0 … 0.9.1"
)
def mindspeed_is_in_this_verl(s: Subject):
    verl = stack.verl_version(s.recipe.stack)
    if verl in MINDSPEED_VERL:
        return
    keys = {
        key: value for key, value in verbatim(s) if ".mindspeed." in f"{key}." or str(value).startswith("mindspeed")
    }
    if s.recipe.engine == "mindspeed":
        keys = {"engine": "mindspeed", **keys}
    if keys:
        yield (
            {**keys, "stack": s.recipe.stack},
            f"verl {verl} has no MindSpeed engine, and these settings would change nothing it reads.",
            f"Choose a stack with verl {' or '.join(MINDSPEED_VERL)}; or engine=megatron, which Ascend patches itself.",
        )


@rule("engine.strategy", noticed="engine start, or never", source="verl 0.9.1, EngineRegistry")
def strategy_is_the_engine(s: Subject):
    for key, value in verbatim(s):
        if key in ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.ref.strategy") and value != s.recipe.engine:
            yield (
                {key: value, "engine": s.recipe.engine},
                "the settings of this recipe are for another engine than the strategy names.",
                "Leave it out: engine says which, and mindspeed.strategy for MindSpeed's.",
            )


@rule("engine.mindspeed_fsdp", noticed=NEVER, source="verl 0.8.0 and 0.9.0: no engine is registered under that name")
def mindspeed_fsdp_is_read(s: Subject):
    asked = {}
    if s.recipe.mindspeed.strategy == "mindspeed_fsdp":
        asked["mindspeed.strategy"] = "mindspeed_fsdp"
    if s.recipe.mindspeed.fsdp_kwargs:
        asked["mindspeed.fsdp_kwargs"] = s.recipe.mindspeed.fsdp_kwargs
    if asked:
        yield (
            asked,
            "verl accepts it and never reads it.",
            "Take mindspeed.strategy=mindspeed_megatron and mcore_kwargs.",
        )


@rule(
    "engine.mindspeed_weights",
    noticed="after the model is built",
    source="verl 0.9.0, MindSpeedMegatronEngineWithLMHead",
)
def mindspeed_loads_through_mbridge(s: Subject):
    bridge = s.recipe.model.bridge
    if s.recipe.engine == "mindspeed" and bridge != "mbridge":
        yield (
            {"model.bridge": bridge},
            "MindSpeed's engine loads weights through mbridge only.",
            "Set model.bridge=mbridge.",
        )


@rule("engine.mindspeed_transformer", noticed=NEVER, source="verl 0.9.0, workers/engine/mindspeed")
def mindspeed_reads_its_own_settings(s: Subject):
    if s.recipe.engine == "mindspeed" and s.recipe.transformer:
        yield (
            {"transformer": sorted(s.recipe.transformer)},
            "MindSpeed's engine does not read these.",
            "Put them under mindspeed.mcore_kwargs.",
        )
    if s.recipe.engine != "mindspeed" and s.recipe.mindspeed.mcore_kwargs:
        yield (
            {"mindspeed.mcore_kwargs": sorted(s.recipe.mindspeed.mcore_kwargs), "engine": s.recipe.engine},
            "only MindSpeed's engine reads these.",
            "Put them under transformer.",
        )


@rule("engine.adaptor", noticed="model build: an unknown attribute", source="Ascend's MegatronAdaptor")
def megatron_is_patched(s: Subject):
    if s.hardware.device != "npu" or s.recipe.engine != "megatron":
        return
    has = any(r.module == ADAPTOR for r in stack.load(s.recipe.stack).repositories.values())
    named = ADAPTOR in external_modules(s.composed, os.environ)
    if has and not named:
        yield (
            {"external_modules": s.recipe.external_modules},
            "Megatron runs on NPUs only after the adaptor has patched it, before anything else imports it.",
            f"Add {ADAPTOR}.",
        )
    elif named and not has:
        yield (
            {"external_modules": ADAPTOR, "stack": s.recipe.stack},
            "this stack has no MegatronAdaptor; verl's engine patches Megatron by itself there.",
            "Take it off the list (external_modules=[] in a recipe file).",
        )


@rule("engine.adaptor_needless", severity="warning", noticed=NEVER, source="Ascend's MegatronAdaptor")
def adaptor_is_needed(s: Subject):
    engine = dict(verbatim(s)).get("model_engine", s.recipe.engine)
    if ADAPTOR not in external_modules(s.composed, os.environ):
        return
    if engine != "megatron" or s.hardware.device != "npu":
        yield (
            {"external_modules": ADAPTOR, "engine": engine, "hardware": s.recipe.hardware},
            "this run has no Megatron on NPUs, and the adaptor changes what other code does.",
            "Take it off the list.",
        )


# ------------------------------------------------------------------------------------------------- pipeline stages


@rule("layout.stages", noticed="model build", source="Megatron-Core 0.18, PipelineParallelLayerLayout")
def stages_hold_the_model(s: Subject):
    p = s.recipe.parallel
    if not p.pipeline_layout:
        return
    key = {"parallel.pipeline_layout": p.pipeline_layout}
    try:
        stages = pipeline.read_layout(p.pipeline_layout)
    except RecipeError as fault:
        yield key, str(fault), "See Megatron-Core's pipeline_model_parallel_layout."
        return
    if p.first_stage_layers or p.last_stage_layers:
        yield key, "a layout and the layers of the first or last stage exclude each other.", "Keep one of them."
    text = "".join(stages)
    if not (text.startswith("E") and text.endswith("L") and text.count("E") == text.count("L") == 1):
        yield key, "it must start with the one E, the embedding, and end with the one L, the loss.", "Write each once."
    wrong = _mtp_out_of_place(s, stages)
    if wrong:
        yield key, *wrong
    if len(stages) % p.pipeline:
        yield (
            {**key, "parallel.pipeline": p.pipeline},
            f"it has {len(stages)} stages, which {p.pipeline} pipeline ranks cannot share evenly.",
            f"Take parallel.pipeline={divisors(len(stages), limit=256)}, or write another layout.",
        )
    layers = sum(stage.count("t") for stage in stages)
    if layers != s.model.layers:
        yield key, f"it places {layers} layers, and {s.model.name} has {s.model.layers}.", "Place all of them once."


def _mtp_out_of_place(s: Subject, stages: list[str]) -> tuple[str, str] | None:
    """What is wrong with the MTP layers of a layout, and the remedy: as validate_layer_layout refuses them."""
    trained, text = (s.model.mtp_layers if trains_mtp(s) else 0), "".join(stages)
    if text.count("m") != trained:
        why = "none is trained" if not trained else f"{s.model.name} trains {trained}"
        return f"it places MTP layers (m) {text.count('m')} times, and {why}.", f"Write {'m' * trained or 'no m'}."
    with_them = [number for number, stage in enumerate(stages) if "m" in stage]
    late = not with_them or with_them[-1] >= len(stages) - s.recipe.parallel.pipeline
    if len(with_them) > 1 or not late or "t" in text.partition("m")[2]:
        return (
            "its MTP layers must follow all others, in one stage, among the last virtual stages of the ranks.",
            "Write them before the L.",
        )
    return None


@rule(
    "layout.index_sharing",
    noticed="never on Megatron-Core 0.18, which trains on wrong indexes; 0.19 refuses",
    source="index_topk_freq and index_skip_topk_offset of the model",
)
def stages_start_on_an_index(s: Subject):
    p, computing = s.recipe.parallel, models.index_layers(s.model)
    if p.pipeline == 1 or not computing or len(computing) == s.model.layers:
        return
    try:
        starts = pipeline.stage_starts(p, s.model.layers)
    except RecipeError:
        return  # layout.stages says so
    wrong = [start for start in starts if start not in computing]
    if wrong:
        yield (
            {"parallel.pipeline": p.pipeline, "parallel.pipeline_layout": p.pipeline_layout},
            f"{s.model.name} shares a sparse-attention index between layers, so a stage must start on one that "
            f"computes it; stages start on {', '.join(map(str, wrong))} (counted from 0).",
            f"Those are {', '.join(map(str, computing))}.",
        )


# ---------------------------------------------------------------------------------------------------- checkpoints

_STRICT = (
    "{name} has an MTP layer that is neither trained nor exported; strict then drops every shard of the export that "
    "misses one of its tensors, and other weights with it, such as the head."
)


@rule(
    "checkpoint.strict", noticed=NEVER + ": a warning in the log, and a shard is gone", source="Megatron-Bridge 0.5.0"
)
def strict_export_is_whole(s: Subject):
    if _strict_without_mtp(s) and _exports(s):
        yield (
            {"checkpoint.strict": s.recipe.checkpoint.strict, "checkpoint.save_freq": s.recipe.checkpoint.save_freq},
            _STRICT.format(name=s.model.name),
            "Set checkpoint.strict=false; the export is then compared with the source.",
        )


@rule("checkpoint.strict_later", severity="warning", noticed="once it saves", source="Megatron-Bridge 0.5.0")
def strict_would_not_be_whole(s: Subject):
    if _strict_without_mtp(s) and not _exports(s):
        yield (
            {"checkpoint.strict": s.recipe.checkpoint.strict},
            f"nothing is exported, so it has no effect yet. {_STRICT.format(name=s.model.name)}",
            "Set checkpoint.strict=false.",
        )


def trains_mtp(s: Subject) -> bool:
    """Whether verl is told to train the MTP layers; it takes them off the model otherwise."""
    return str(dict(verbatim(s)).get("actor_rollout_ref.model.mtp.enable", False)).lower() == "true"


def _strict_without_mtp(s: Subject) -> bool:
    return s.model.mtp_layers > 0 and s.recipe.checkpoint.strict is not False and not trains_mtp(s)


def _exports(s: Subject) -> bool:
    """Whether the run writes weights through the bridge: asked for as such, or as its way to save the model."""
    c = s.recipe.checkpoint
    contents = c.contents or ["model", "optimizer", "extra"]
    return c.save_freq > 0 and (
        "hf_model" in contents or ("model" in contents and not s.recipe.model.distributed_checkpoint)
    )


@rule("checkpoint.resume", severity="warning", noticed=NEVER, source="verl 0.9.1, resume_mode")
def resume_has_something_to_find(s: Subject):
    c = s.recipe.checkpoint
    if c.resume == "auto" and c.save_freq < 1:
        yield (
            {"checkpoint.resume": c.resume, "checkpoint.save_freq": c.save_freq},
            "this run never saves, so auto can only find what another run left in checkpoint.directory.",
            "Set checkpoint.resume=disable, or save.",
        )


@rule("checkpoint.resume_path", noticed="configuration", source="verl 0.9.1, resume_from_path")
def resume_path_is_a_step(s: Subject):
    c = s.recipe.checkpoint
    if c.resume == "resume_path" and "global_step_" not in (c.resume_path or ""):
        yield (
            {"checkpoint.resume": c.resume, "checkpoint.resume_path": c.resume_path},
            "verl takes the step from the path.",
            "Name a global_step_N directory.",
        )


@rule(
    "checkpoint.keep", severity="warning", noticed="a crash while saving", source="verl 0.9.1, max_actor_ckpt_to_keep"
)
def more_than_one_is_kept(s: Subject):
    c = s.recipe.checkpoint
    if c.keep == 1 and c.save_freq > 0:
        yield {"checkpoint.keep": 1}, "the only checkpoint goes before the next is written.", "Keep 2."


# ------------------------------------------------------------------------------------- training and generation apart

_ASYNC = "verl 0.9.1, FullyAsyncRollouter"


@rule("async.nodes", noticed="engine start", source=_ASYNC)
def generation_has_nodes(s: Subject):
    apart = s.recipe.fully_async
    if s.recipe.mode != "fully_async":
        return
    if not apart.rollout_nodes:
        yield {"fully_async.rollout_nodes": None}, "no nodes generate.", "Say how many do, besides those that train."
        return
    world = apart.rollout_nodes * (apart.rollout_devices or s.hardware.devices_per_node)
    replica = (s.recipe.rollout.tensor or 1) * (s.recipe.rollout.data or 1)
    if world % replica:
        yield (
            {"fully_async.rollout_nodes": apart.rollout_nodes, "rollout.tensor": s.recipe.rollout.tensor},
            f"{world} devices generate, and one rollout replica takes {replica}.",
            f"rollout.tensor x rollout.data must be {divisors(world, limit=1024)}.",
        )


@rule("async.batch", noticed="engine start: a bare assertion", source=_ASYNC)
def samples_are_streamed(s: Subject):
    train, apart = s.recipe.batch.train, s.recipe.mode == "fully_async"
    if apart and train:
        yield {"batch.train": train}, "a fully asynchronous run streams its samples.", "Set batch.train=0."
    if not apart and not train:
        yield {"batch.train": train}, "a synchronous step needs prompts.", "Set batch.train, or mode=fully_async."


@rule("async.log_probs", noticed="engine start: a bare assertion", source=_ASYNC)
def rollout_returns_log_probs(s: Subject):
    if s.recipe.mode == "fully_async" and not s.recipe.rollout.log_probs:
        yield {"rollout.log_probs": False}, "training uses the rollout's own log-probs.", "Set rollout.log_probs=true."


def verbatim(s: Subject) -> Iterator[tuple[str, Any]]:
    """Yield what the recipe says to verl past its own fields: (key, value) of `verl:` and of extra_args."""
    yield from flatten(s.recipe.verl)
    for text in s.recipe.extra_args:
        key, _, value = text.partition("=")
        yield key.lstrip("+~"), value.strip("'\"")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
