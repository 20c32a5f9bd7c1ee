"""Rules on environment variables: stale, contradictory, or different on each node."""

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
CONNECT = 1500  # seconds; Ascend's advice for one node, 3600 for several


@rule("env.stale", severity="warning", noticed="never", source="vllm-ascend 0.23")
def variables_are_read(s: Subject):
    ref = getattr(stack.load(s.recipe.stack).repositories.get("vllm-ascend"), "ref", "")
    if s.hardware.device == "npu" and s.recipe.rollout.engine == "vllm" and _after(ref, (0, 23)):
        for name in STALE:
            if name in s.recipe.env:
                yield (
                    {f"env.{name}": s.recipe.env[name]},
                    f"{ref} of vllm-ascend does not read it any more.",
                    "Drop it.",
                )


@rule("env.expandable_segments", noticed="rollout start", source="vLLM's sleep mode: CuMemAllocator")
def sleeping_engine_has_its_pool(s: Subject):
    if s.recipe.rollout.engine == "hf_cpu" or s.recipe.rollout.free_cache is False or s.recipe.mode == "fully_async":
        return
    for name in ALLOCATORS:
        if "expandable_segments:true" in s.recipe.env.get(name, "").replace(" ", "").lower():
            yield (
                {f"env.{name}": s.recipe.env[name]},
                "the engine gives its memory back through a pool that expandable segments exclude.",
                "Drop it, or set rollout.free_cache=false.",
            )


@rule("env.task_queue", severity="warning", noticed="graph capture", source="Ascend's TASK_QUEUE_ENABLE")
def task_queue_fits_graphs(s: Subject):
    if s.recipe.env.get("TASK_QUEUE_ENABLE") == "2" and s.recipe.rollout.enforce_eager is not True:
        yield (
            {"env.TASK_QUEUE_ENABLE": "2", "rollout.enforce_eager": s.recipe.rollout.enforce_eager},
            "level 2 of the task queue and captured graphs exclude each other.",
            "Set it to 1, or rollout.enforce_eager=true.",
        )


@rule("env.interface", noticed="collectives of the first step", source="Ascend's and torch's multi-node guides")
def interfaces_are_a_nodes_own(s: Subject):
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
    nodes, given = s.recipe.nodes + (s.recipe.fully_async.rollout_nodes or 0), s.recipe.env.get("HCCL_CONNECT_TIMEOUT")
    if s.hardware.device != "npu" or nodes == 1:
        return
    if given is None or not given.isdigit() or int(given) < CONNECT:
        yield (
            {"env.HCCL_CONNECT_TIMEOUT": given, "nodes": nodes},
            f"the default of 120 s is short for links over {nodes} nodes that load weights at different speeds.",
            "Take 3600.",
        )


def _after(ref: str, version: tuple[int, int]) -> bool:
    digits = [int(part) for part in ref.rpartition("v")[2].split("rc")[0].split(".") if part.isdigit()]
    return tuple(digits[:2]) >= version
