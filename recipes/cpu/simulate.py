"""Builds one device of each pipeline stage of a full-size model with the real Megatron-Core, in a fake world.

    python -m recipes.cpu.simulate < request.json > answer.json

No weight is allocated: parameters live on torch's meta device, the process group is torch's fake one, so 8192 ranks
cost what 8 do. Megatron validates the layout and the settings as it would on devices; its refusals are in the answer.
The buffers are those of Megatron's own DistributedDataParallel, padding included, and an optimizer shard is what its
DistributedOptimizer maps to this rank. Takes the process over: environment, process group, patches.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from recipes import params
from recipes.command import EXTERNAL_MODULES

# What a CPU build needs instead of TransformerEngine's and CUDA's kernels. None of it changes a parameter's shape.
UNFUSED = {
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
    "perform_initialization": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "attention_backend": "local",
}


def simulate(told: dict) -> dict:
    """Build every stage. `told` is what `recipes.simulate.request` makes of a recipe.

    Returns {"stages": [...], "unknown": [...], "refused": {...} or None, "seconds": processor time of building}. A
    stage: `stage`, `layers`; elements: `parameters`, `expert_parameters`, `whole` (of all ranks that share the
    stage); bytes: `weights`, `gradients`, `optimizer`. `unknown` are transformer settings this Megatron-Core does not
    have. `refused`: {"at", "why"}.
    """
    _environment()
    import torch
    import verl  # noqa: F401  imports the CPU target, which must come before Megatron
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    torch.cuda.current_device = lambda: torch.device("meta")
    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        # Cuts a table of positions, which is no weight, into those of a context-parallel rank, by way of CUDA.
        module.get_pos_emb_on_this_cp_rank = lambda table, *_: table
    answer: dict = {"stages": [], "unknown": [], "refused": None, "seconds": 0.0}
    engine, world = told["engine"], told["world"]
    # The attention of a CPU build refuses context parallelism, which devices' attention takes: the groups and what is
    # sharded over them are as asked for, and the model is built as the one rank of context it then looks like.
    size = "context_parallel_size"
    settings = {k: v for k, v in (engine.get("override_transformer_config") or {}).items() if k != size}
    one = engine | {size: 1, "override_transformer_config": settings}
    alone = told | {"engine": one} if told["takes_context"] else told
    pipeline = engine["pipeline_model_parallel_size"]
    began = time.process_time()
    for stage in range(pipeline):
        try:
            with rank_of(stage * (world // pipeline), world, engine):
                provider, unknown = provide(alone)
                answer["unknown"] = sorted({*unknown, *told["set_aside"]})
                answer["stages"].append({"stage": stage, **_built(provider, told)})
        except Exception as fault:  # noqa: BLE001  Megatron refuses with asserts, ValueError, RuntimeError
            said = str(fault).strip().splitlines() or [f"an {type(fault).__name__} without a word"]
            answer["refused"] = {"at": f"stage {stage}", "why": said[0], "kind": type(fault).__name__}
            break
    answer["seconds"] = time.process_time() - began
    return answer


def _environment() -> None:
    recipe = params.compose("cpu/qwen3").recipe
    os.environ.update(recipe.env | {EXTERNAL_MODULES: ",".join(recipe.external_modules), "RECIPES_CPU_FORK": "0"})


@contextmanager
def rank_of(rank: int, world: int, engine: dict) -> Iterator[None]:
    """Be rank `rank` of a world in which nobody else is, with Megatron's process groups of the layout."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def only_our_groups(ranks=None, *arguments, **options):
        # A group of others is nothing to us, in a real world too; making thousands of them takes most of the time.
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return known(ranks, *arguments, **options)

    known = parallel_state.create_group
    _remember_rank_groups(parallel_state)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel_state.create_group = only_our_groups
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=engine["tensor_model_parallel_size"],
            pipeline_model_parallel_size=engine["pipeline_model_parallel_size"],
            virtual_pipeline_model_parallel_size=engine.get("virtual_pipeline_model_parallel_size"),
            context_parallel_size=engine["context_parallel_size"],
            expert_model_parallel_size=engine["expert_model_parallel_size"],
            expert_tensor_parallel_size=engine.get("expert_tensor_parallel_size"),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.create_group = known
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _remember_rank_groups(parallel_state) -> None:
    """generate_masked_orthogonal_rank_groups (megatron.core.parallel_state) lists the ranks of every group of a kind,
    in pure Python, for each stage anew; it depends on its arguments alone.
    """
    known = parallel_state.generate_masked_orthogonal_rank_groups
    if hasattr(known, "cache_info"):
        return

    @functools.cache
    def remembered(world_size: int, parallel_size: tuple, mask: tuple) -> list:
        return known(world_size, list(parallel_size), list(mask))

    def groups(world_size: int, parallel_size: list, mask: list) -> list:
        return [list(ranks) for ranks in remembered(world_size, tuple(parallel_size), tuple(mask))]

    groups.cache_info = remembered.cache_info
    parallel_state.generate_masked_orthogonal_rank_groups = groups


def provide(told: dict):
    """Megatron-Bridge's provider with what verl's engine sets on it; and the settings this Megatron does not have.

    As MegatronEngine._build_tf_config (verl.workers.engine.megatron.transformer_impl) does it.
    """
    import transformers
    from megatron.bridge import AutoBridge
    from verl.utils.megatron_utils import mapping_string_to_attn_backend
    from verl.utils.torch_dtypes import PrecisionType

    told_config = dict(told["config"])
    config = getattr(transformers, told_config.pop("class"))(**told_config)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    engine = told["engine"]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    names += ("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size")
    overrides = {name: engine.get(name) for name in names}
    overrides |= {
        "batch_p2p_comm": False,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    wanted = dict(engine.get("override_transformer_config") or {})
    unknown = sorted(name for name in wanted if not hasattr(provider, name))
    overrides |= {name: value for name, value in wanted.items() if name not in unknown and value is not None}
    overrides |= mapping_string_to_attn_backend(dict(UNFUSED))
    # torch's RMSNorm, which stands in for the fused ones, knows nothing of sequence parallelism; shapes are the same.
    overrides["sequence_parallel"] = False
    provider.apply_overrides_and_finalize(
        dtype=PrecisionType.to_dtype(engine["dtype"]),
        overrides={name: value for name, value in overrides.items() if hasattr(provider, name)},
    )
    return provider, unknown


def _built(provider, told: dict) -> dict:
    import torch

    with torch.device("meta"):
        chunks = distributed(provider, told)
    return account(chunks, told)


def distributed(provider, told: dict):
    """The model of this rank in Megatron's DistributedDataParallel, as verl's make_megatron_module wraps it."""
    from megatron.bridge.training.utils.config_utils import create_ddp_config

    ddp = create_ddp_config(
        wrap_with_ddp=True,
        use_distributed_optimizer=told["engine"]["use_distributed_optimizer"],
        use_megatron_fsdp=False,
        overrides=dict(told["ddp"]),
    )
    return provider.provide_distributed_model(
        wrap_with_ddp=True, ddp_config=ddp, fp16=provider.fp16, bf16=provider.bf16, use_megatron_fsdp=False
    )


def account(chunks: list, told: dict) -> dict:
    """What this rank holds, from the buffers of its chunks and the shards the distributed optimizer maps to it."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.utils import get_attr_wrapped_model

    tensor, experts = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size() * parallel_state.get_expert_tensor_parallel_world_size(),
    )
    found = dict.fromkeys(("layers", "parameters", "expert_parameters", "whole"), 0)
    found |= dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for chunk in chunks:
        found["layers"] += len(get_attr_wrapped_model(chunk, "decoder").layers)
        for name, weight in chunk.named_parameters():
            count, expert = weight.numel(), ".experts." in name
            found["expert_parameters" if expert else "parameters"] += count
            found["whole"] += count * (experts if expert else tensor if weight.tensor_model_parallel else 1)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            weights = buffer.param_data.nbytes if buffer.param_data is not None else 0
            found["weights"] += weights or sum(p.numel() * p.element_size() for p in buffer.params)
            found["gradients"] += buffer.grad_data.nbytes
            found["optimizer"] += _shard(DistributedOptimizer, buffer, told) * told["state_bytes"]
    return found


def _shard(optimizer: type, buffer, told: dict) -> int:
    """Elements of a buffer whose optimizer state this rank keeps, padding left out."""
    if not told["engine"]["use_distributed_optimizer"]:
        return sum(weight.numel() for weight in buffer.params)
    ranges = optimizer._build_gbuf_range_map(buffer)
    buckets = [bucket for kinds in ranges.values() for bucket in kinds]
    return sum(own["param"].size for bucket in buckets for own in bucket["param_map"].values())


def main() -> int:
    told = json.load(sys.stdin)
    answer = sys.stdout
    sys.stdout = sys.stderr  # Megatron and verl print as they please
    found = simulate(told)
    json.dump(found, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
