"""Rules on environment variables: stale, contradictory, or different on each node.

A training has those of the recipe and those exported where it is launched; of one in both it has the recipe's.
"""

from __future__ import annotations

from recipes import stack
from recipes.preflight.rules import Subject, rule

# No longer read by vllm-ascend from 0.23 on; a setting that does nothing looks like one that does.
STALE = tuple(
    f"VLLM_ASCEND_ENABLE_{name}"
    for name in ("FLASHCOMM", "PREFETCH_MLP", "DENSE_OPTIMIZE", "TOPK_OPTIMIZE", "MLP_OPTIMIZE")
)
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
GLM_PATCH = "VERL_VLLM_ASCEND_GLM52_PATCH"
# Variables the rules below look at in the environment of a launch too.
INHERITED = (*STALE, *ALLOCATORS, "TASK_QUEUE_ENABLE", "HCCL_CONNECT_TIMEOUT")
CONNECT = 1500  # seconds; Ascend's advice for one node, 3600 for several


@rule("env.stale", severity="warning", noticed="never", source="vllm-ascend 0.23")
def variables_are_read(s: Subject):
    ref = getattr(stack.load(s.recipe.stack).repositories.get("vllm-ascend"), "ref", "")
    if s.hardware.device == "npu" and s.recipe.rollout.engine == "vllm" and _after(ref, (0, 23)):
        for name in STALE:
            key, value = s.variable(name)
            if value is not None:
                yield {key: value}, f"{ref} of vllm-ascend does not read it any more.", "Drop it."


@rule("env.expandable_segments", noticed="rollout start", source="vLLM's sleep mode: CuMemAllocator")
def sleeping_engine_has_its_pool(s: Subject):
    if s.recipe.rollout.engine == "hf_cpu" or s.recipe.rollout.free_cache is False or s.recipe.mode == "fully_async":
        return
    for name in ALLOCATORS:
        key, value = s.variable(name)
        if "expandable_segments:true" in (value or "").replace(" ", "").lower():
            yield (
                {key: value},
                "the engine gives its memory back through a pool that expandable segments exclude.",
                "Drop it, or set rollout.free_cache=false.",
            )


@rule("env.task_queue", severity="warning", noticed="graph capture", source="Ascend's TASK_QUEUE_ENABLE")
def task_queue_fits_graphs(s: Subject):
    key, value = s.variable("TASK_QUEUE_ENABLE")
    if s.hardware.device == "npu" and value == "2" and s.recipe.rollout.enforce_eager is not True:
        yield (
            {key: value, "rollout.enforce_eager": s.recipe.rollout.enforce_eager},
            "level 2 of the task queue and captured graphs exclude each other.",
            "Set it to 1, or rollout.enforce_eager=true.",
        )


@rule("env.interface", noticed="collectives of the first step", source="Ascend's and torch's multi-node guides")
def interfaces_are_a_nodes_own(s: Subject):
    """Of the recipe's alone: exported on each node is how it should be."""
    nodes = s.recipe.nodes + (s.recipe.fully_async.rollout_nodes or 0)
    for name in INTERFACES:
        if nodes > 1 and name in s.recipe.env:
            yield (
                {f"env.{name}": s.recipe.env[name], "nodes": nodes},
                "the name of an interface differs from node to node, and the run's environment is one for all.",
                "Export it on each node before Ray is started there.",
            )


@rule("env.glm_patch", noticed="rollout start", source="verl 0.9.1 with vllm-ascend 0.23")
def glm_is_patched(s: Subject):
    """By the recipe: its variables reach the workers on all nodes, and one exported here need not."""
    r = s.recipe
    glm = s.model.architecture == "GlmMoeDsaForCausalLM"
    if glm and s.hardware.device == "npu" and r.rollout.engine == "vllm" and r.env.get(GLM_PATCH) != "1":
        yield (
            {f"env.{GLM_PATCH}": r.env.get(GLM_PATCH)},
            "vllm-ascend 0.23 cannot run GLM-5.2 without verl's patch.",
            f"Set env.{GLM_PATCH} to '1'.",
        )


@rule("env.connect_timeout", severity="warning", noticed="engine start", source="Ascend's advice for several nodes")
def links_have_time_to_stand(s: Subject):
    nodes = s.recipe.nodes + (s.recipe.fully_async.rollout_nodes or 0)
    key, given = s.variable("HCCL_CONNECT_TIMEOUT")
    if s.hardware.device != "npu" or nodes == 1:
        return
    if given is None or not given.isdigit() or int(given) < CONNECT:
        yield (
            {key: given, "nodes": nodes},
            f"the default of 120 s is short for links over {nodes} nodes that load weights at different speeds.",
            "Take 3600.",
        )


def _after(ref: str, version: tuple[int, int]) -> bool:
    digits = [int(part) for part in ref.rpartition("v")[2].split("rc")[0].split(".") if part.isdigit()]
    return tuple(digits[:2]) >= version
