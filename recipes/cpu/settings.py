"""Environment and verl keys the CPU target needs, as data, each with its reason (imports no torch).

`ENVIRONMENT` is for every process of the run, `verl_keys` for verl's command line. What a recipe chooses freely (batch
sizes, learning rate, lengths, dtype of the training) is not here.
"""

from pathlib import Path
from typing import Any

EXTERNAL_MODULE = "recipes.cpu.adaptor"
RANK_RESOURCE = "cpu_rank"
"""Ray resource that one training rank takes. Not "NPU": Ray would look for Ascend's driver and log a traceback. Not
"GPU": Ray refuses to offer more of those than CUDA_VISIBLE_DEVICES, which is empty, names."""

PYTHONPATH = str(Path(__file__).with_name("absent"))
"""To stand first on PYTHONPATH: saves each of Ray's dozen processes three to four seconds (`recipes.cpu.absent`)."""

ENVIRONMENT: dict[str, str] = {
    # Loads the CPU target into every process that imports verl. Merge with the modules of recipe and user.
    "VERL_USE_EXTERNAL_MODULES": EXTERNAL_MODULE,
    # Selects its platform; verl's own detection would end at "nvidia".
    "VERL_PLATFORM": "cpu",
    # verl looks its engine up by device, and Megatron's is registered for cuda and npu only.
    "VERL_ENGINE_DEVICE": "cuda",
    # An accelerator that is there stays out of it: with one in sight the adaptor changes nothing.
    "CUDA_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
    # Some images set these; verl would then look a rank up among Ray's accelerators.
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "",
    # Compiling small functions takes far longer than running them.
    "TORCHDYNAMO_DISABLE": "1",
    # There are more processes than cores.
    "OMP_NUM_THREADS": "1",
    # TransferQueue asks for more threads than there are cores, and says so at every call.
    "TQ_NUM_THREADS": "1",
    # Ray's workers, which do the work here, would run at niceness 15 and wait for every other process of the machine.
    "RAY_worker_niceness": "0",
    # Models and data are local: no look-up, no telemetry.
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds until a response, a weight sync or a step without progress is given up.
    "RECIPES_CPU_DEADLINE": "300",
}


def transformer_config(model_type: str) -> dict[str, Any]:
    """Fields of Megatron's transformer config for a model of Hugging Face's `model_type`."""
    fields: dict[str, Any] = {
        # verl's default, flash, is TransformerEngine's.
        "attention_backend": "local",
        # A CUDA kernel, chosen by sequence length and batch.
        "masked_softmax_fusion": False,
    }
    if model_type in ("qwen3_moe", "glm_moe_dsa"):
        # TransformerEngine's kernels; experts run one by one.
        fields |= {"moe_permute_fusion": False, "moe_grouped_gemm": False}
    if model_type == "glm_moe_dsa":
        # Wants the side stream of a GPU.
        fields["moe_shared_expert_overlap"] = False
    return fields


def verl_keys(ranks: int, model_type: str) -> dict[str, Any]:
    """verl's keys for `ranks` training ranks on this machine, and a model of Hugging Face's `model_type`."""
    keys: dict[str, Any] = {
        "model_engine": "megatron",
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ranks,
        # A Ray of its own: never one that RAY_ADDRESS or a forgotten `ray start` offers.
        "ray_kwargs.ray_init.address": "local",
        # Slots, not cores: verl asks for three a rank, and one for each of its other actors.
        "ray_kwargs.ray_init.num_cpus": 8 + 4 * ranks,
        f"ray_kwargs.ray_init.resources.{RANK_RESOURCE}": ranks,
        "ray_kwargs.ray_init.include_dashboard": False,
        # Bytes; Ray's default is a third of the memory.
        "ray_kwargs.ray_init.object_store_memory": 200_000_000,
        # Processes: one of each kind.
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # The rollout of this target: one server for each rank that holds a replica.
        "actor_rollout_ref.rollout.name": "hf_cpu",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": ranks,
        "actor_rollout_ref.rollout.dtype": "float32",
        # Megatron's own attention takes padded sequences, not packed ones.
        "actor_rollout_ref.model.use_remove_padding": False,
        # The reference policy takes this and the transformer config from the actor.
        "actor_rollout_ref.actor.megatron.use_remove_padding": False,
        # torch's RMSNorm, which stands in for TransformerEngine's, does not know about it.
        "actor_rollout_ref.actor.megatron.sequence_parallel": False,
        "actor_rollout_ref.ref.megatron.sequence_parallel": False,
    }
    fields = transformer_config(model_type)
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config"
    return keys | {f"{prefix}.{field}": value for field, value in fields.items()}
