"""One rank of a real gloo group: builds a tiny model as recipes.cpu.simulate does, trains a step, prints what it holds.

python real_ranks.py RANK WORLD STORE < request.json
"""

import json
import sys

from recipes.cpu import simulate


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    asked = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    simulate._environment()
    held = [train(told, rank, world, f"{folder}/store{place}") for place, told in enumerate(asked)]
    json.dump(held, answer)


def train(told: dict, rank: int, world: int, store: str) -> dict:
    import torch
    import torch.distributed as dist
    import verl  # noqa: F401
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    engine = told["engine"]
    parallel_state.initialize_model_parallel(
        engine["tensor_model_parallel_size"],
        engine["pipeline_model_parallel_size"],
        expert_model_parallel_size=engine["expert_model_parallel_size"],
        expert_tensor_parallel_size=engine["expert_tensor_parallel_size"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    provider, _ = simulate.provide(told)
    chunks = simulate.distributed(provider, told)
    dtype = provider.params_dtype
    options = {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **options)
    optimizer = get_megatron_optimizer(config, chunks)
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    for buffer in buffers:
        buffer.grad_data.fill_(1e-3)
    optimizer.step()
    held = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": sum(b.param_data.nbytes for b in buffers if b.param_data is not None),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(_state_bytes(each, dtype == torch.float32) for each in _flat(optimizer)),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return held


def _flat(optimizer) -> list:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _state_bytes(optimizer, in_place: bool) -> int:
    """Bytes of the moments, and of the fp32 weights where these are copies."""
    import torch

    total = 0
    for group in optimizer.optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.optimizer.state.get(weight, {})
            total += sum(v.nbytes for v in state.values() if torch.is_tensor(v) and v.numel() == weight.numel() > 1)
            total += 0 if in_place else weight.nbytes
    return total


if __name__ == "__main__":
    main()
