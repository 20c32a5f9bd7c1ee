"""Proves that Megatron-Core under the CPU target computes what transformers computes, in one process without Ray.

    python -m recipes.cpu.parity MODEL_DIR [--tolerance 1e-5]      the largest difference of the logits, in fp32
    python -m recipes.cpu.parity MODEL_DIR --export OUT [--strict | --no-strict]      and writes the weights back

Exits 1 when the difference is above the tolerance. A run that trains proves nothing of the kind.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes.cpu import settings

LOCAL = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of two logits, and the largest absolute logit it is to be seen against."""

    largest: float
    scale: float


def megatron_model(model_dir: str | Path):
    """Megatron-Bridge's AutoBridge for `model_dir`, and the model it builds, in fp32 on one rank, weights loaded.

    Takes the process over: environment, process group, patches. Use a process of its own.
    """
    os.environ.update(LOCAL | settings.ENVIRONMENT)
    import torch
    import verl  # noqa: F401  imports the CPU target, which must come before Megatron

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel
    from verl.utils.megatron_utils import mapping_string_to_attn_backend

    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    bridge = AutoBridge.from_hf_pretrained(str(model_dir))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(
        dtype=torch.float32,
        overrides={
            "moe_token_dispatcher_type": "alltoall",  # these two as verl's engine sets them
            "variable_seq_lengths": True,
            **mapping_string_to_attn_backend(settings.transformer_config(bridge.hf_pretrained.config.model_type)),
        },
    )
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_hf_weights(model, str(model_dir))
    return bridge, model


def logits_difference(model_dir: str | Path, megatron, tokens: int = 24) -> Difference:
    """Compare `megatron` (a list of one model chunk) with transformers on two sequences of `tokens` tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    vocabulary = reference.config.vocab_size
    input_ids = torch.randint(vocabulary, (2, tokens), generator=torch.Generator().manual_seed(0))
    position_ids = torch.arange(tokens).expand_as(input_ids)
    not_to_see = torch.ones(tokens, tokens, dtype=torch.bool).triu(1).expand(2, 1, tokens, tokens)
    with torch.inference_mode():
        found = megatron[0].eval()(input_ids=input_ids, position_ids=position_ids, attention_mask=not_to_see)
        wanted = reference(input_ids=input_ids).logits
    found = found[..., :vocabulary].float()  # Megatron pads its vocabulary
    return Difference((found - wanted).abs().max().item(), wanted.abs().max().item())


def export(bridge, megatron, out: str | Path, strict: bool) -> list[str]:
    """Write the weights of `megatron` to directory `out` as verl's checkpoint manager does; the names that are there.

    `strict` is actor.checkpoint.strict (verl.utils.checkpoint.megatron_checkpoint_manager hands it to save_hf_weights).
    """
    from safetensors import safe_open

    bridge.save_hf_weights(megatron, str(out), strict=strict)
    names = []
    for file in sorted(Path(out).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names += weights.keys()
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.cpu.parity", description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path, help="model in Hugging Face's layout, small enough for this machine")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference allowed (default 1e-5)")
    parser.add_argument("--export", type=Path, metavar="OUT", help="also write the weights back, to this directory")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=True, help="actor.checkpoint.strict of the export"
    )
    options = parser.parse_args(arguments)
    bridge, model = megatron_model(options.model_dir)
    difference = logits_difference(options.model_dir, model)
    print(f"largest difference of the logits: {difference.largest:.3g} (largest logit {difference.scale:.3g})")
    if options.export:
        names = export(bridge, model, options.export, options.strict)
        print(f"tensors exported with strict={options.strict}: {len(names)}")
    if not difference.largest <= options.tolerance:  # not `>`: NaN is a failure
        print(f"that is more than {options.tolerance:g}: Megatron and transformers disagree", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
