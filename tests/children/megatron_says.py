"""Answers, line by line, whether Megatron-Core would start an engine and build a model: one JSON request, one answer.

{"engine": {...}, "world": 16, ...}  →  {"refused": null} or {"refused": "AssertionError: …"}
"""

import json
import sys

from recipes.cpu import simulate


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    simulate._environment()
    import torch
    import verl  # noqa: F401

    torch.cuda.current_device = lambda: torch.device("meta")
    take_context_parallelism()
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps({"refused": refused(told)}), file=answers, flush=True)


def take_context_parallelism() -> None:
    """Megatron's own attention refuses what TransformerEngine's, which devices have and a CPU has not, takes."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def built(self, config, *arguments, **options):
        context, config.context_parallel_size = config.context_parallel_size, 1
        try:
            build(self, config, *arguments, **options)
        finally:
            config.context_parallel_size = context

    DotProductAttention.__init__ = built


def refused(told: dict) -> str | None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    try:
        with simulate.rank_of(0, told["world"], told["engine"]):
            provider, _ = simulate.provide(told)
            with torch.device("meta"):
                simulate.distributed(provider, told)
    except Exception as fault:  # noqa: BLE001  whatever Megatron refuses with
        return f"{type(fault).__name__}: {fault}"
    finally:
        if dist.is_initialized():  # a refusal half-way through making groups
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
