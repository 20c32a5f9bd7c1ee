"""Environment and verl keys the CPU target needs, as data, each with its reason (imports no torch)."""

from typing import Any

ENVIRONMENT: dict[str, str] = {
    # Selects this package's platform; verl's detection would end at "nvidia".
    "VERL_PLATFORM": "cpu",
    # verl looks its engine class up by device, and Megatron's is registered for cuda and npu.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "recipes.cpu.adaptor",
    # Compiling small functions costs more than running them: the first step takes 28 s instead of 11.
    "TORCHDYNAMO_DISABLE": "1",
    # An accelerator that is there stays out of it; with one in sight the adaptor changes nothing.
    "CUDA_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
    # Some images set these; verl would then look for the device of a rank among Ray's accelerators.
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "",
    # One thread a process: there are more processes than cores.
    "OMP_NUM_THREADS": "1",
    # TransferQueue wants more threads than there are cores and says so at every call.
    "TQ_NUM_THREADS": "1",
    # Models and data are local; no look-up, no telemetry.
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds until a response, a weight sync or a step without progress is given up.
    "RECIPES_CPU_DEADLINE": "300",
}
"""Merge VERL_USE_EXTERNAL_MODULES with the user's modules instead of replacing them."""


def transformer_config(model_type: str) -> dict[str, Any]:
    """Fields of Megatron's transformer config for a model of Hugging Face's `model_type`, without their prefix."""
    fields: dict[str, Any] = {
        # TransformerEngine's attention is not installed.
        "attention_backend": "local",
        # A CUDA kernel, chosen for longer sequences.
        "masked_softmax_fusion": False,
    }
    if model_type in ("qwen3_moe", "glm_moe_dsa"):
        fields |= {
            # CUDA kernels of TransformerEngine; experts run one by one.
            "moe_permute_fusion": False,
            "moe_grouped_gemm": False,
        }
    if model_type == "glm_moe_dsa":
        # Overlaps on a second CUDA stream.
        fields["moe_shared_expert_overlap"] = False
    return fields
