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
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps({"refused": refused(told)}), file=answers, flush=True)


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
