"""Proves that Megatron-Core under the CPU target computes what transformers computes, in one process without Ray.

    python -m recipes.cpu.parity MODEL_DIR [--tolerance 1e-5]      the largest difference of the logits, in fp32
    python -m recipes.cpu.parity MODEL_DIR --export OUT [--strict | --no-strict]      and writes the weights back

Exits 1 when the difference is above the tolerance. A run that trains proves nothing of the kind.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes import params
from recipes.command import EXTERNAL_MODULES
from recipes.schema import Recipe

LOCAL = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Agreement:
    """What Megatron and transformers made of the same tokens, in fp32.

    The gradient is that of the mean next-token loss; the weights of DSA's indexers are left out of its norm, because
    Megatron trains them with a loss of their own and transformers does not train them.
    """

    logits_difference: float
    largest_logit: float
    megatron_gradient_norm: float
    transformers_gradient_norm: float

    def within(self, tolerance: float) -> bool:
        """Logits within `tolerance`, absolute; gradient norms within ten times that, relative. NaN is not within."""
        gap = abs(self.megatron_gradient_norm / self.transformers_gradient_norm - 1)
        return self.logits_difference <= tolerance and gap <= 10 * tolerance


def _recipe(model_dir: str | Path) -> Recipe:
    """The smoke recipe of the kind of model in `model_dir`: what Megatron needs without an accelerator."""
    kind = json.loads((Path(model_dir) / "config.json").read_text())["model_type"]
    return params.compose({"glm_moe_dsa": "cpu/glm5_2"}.get(kind, f"cpu/{kind}")).recipe


def megatron_model(model_dir: str | Path):
    """Megatron-Bridge's AutoBridge for `model_dir`, and the model it builds (a list of one chunk), in fp32 on one rank.

    Takes the process over: environment, process group, patches. Use a process of its own.
    """
    recipe = _recipe(model_dir)
    os.environ.update(LOCAL | recipe.env | {EXTERNAL_MODULES: ",".join(recipe.external_modules)})
    import torch
    import verl  # noqa: F401  imports the CPU target, which must come before Megatron
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel
    from verl.utils.megatron_utils import mapping_string_to_attn_backend

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    bridge = AutoBridge.from_hf_pretrained(str(model_dir))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(
        dtype=torch.float32,
        overrides={
            # as verl.workers.engine.megatron.transformer_impl sets them
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "variable_seq_lengths": True,
            **mapping_string_to_attn_backend(dict(recipe.transformer)),
        },
    )
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_hf_weights(model, str(model_dir))
    return bridge, model


def compare(model_dir: str | Path, megatron, tokens: int = 24) -> Agreement:
    """Run `megatron` and transformers' model of `model_dir` on two sequences of `tokens` tokens, forth and back."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    vocabulary = reference.config.vocab_size
    input_ids = torch.randint(vocabulary - 1, (2, tokens), generator=torch.Generator().manual_seed(0))
    input_ids += input_ids >= (reference.config.pad_token_id or 0)  # torch gives the pad token's row no gradient
    not_to_see = torch.ones(tokens, tokens, dtype=torch.bool).triu(1).expand(2, 1, tokens, tokens)
    found = megatron[0](
        input_ids=input_ids, position_ids=torch.arange(tokens).expand_as(input_ids), attention_mask=not_to_see
    )[..., :vocabulary].float()  # Megatron pads its vocabulary
    wanted = reference.train()(input_ids=input_ids).logits
    for logits in (found, wanted):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    return Agreement(
        logits_difference=(found - wanted).abs().max().item(),
        largest_logit=wanted.abs().max().item(),
        megatron_gradient_norm=_gradient_norm(megatron[0]),
        transformers_gradient_norm=_gradient_norm(reference),
    )


def _gradient_norm(model) -> float:
    import torch

    gradients = [
        weight.grad.float().flatten()
        for name, weight in model.named_parameters()
        if weight.grad is not None and "indexer" not in name
    ]
    return torch.cat(gradients).norm().item()


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
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference of two logits (default 1e-5)")
    parser.add_argument("--export", type=Path, metavar="OUT", help="also write the weights back, to this directory")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=True, help="actor.checkpoint.strict of the export"
    )
    options = parser.parse_args(arguments)
    bridge, model = megatron_model(options.model_dir)
    found = compare(options.model_dir, model)
    print(f"largest difference of the logits: {found.logits_difference:.3g} (largest logit {found.largest_logit:.3g})")
    print(f"gradient norm: {found.megatron_gradient_norm:.7g}, transformers {found.transformers_gradient_norm:.7g}")
    if options.export:
        names = export(bridge, model, options.export, options.strict)
        print(f"tensors exported with strict={options.strict}: {len(names)}")
    if not found.within(options.tolerance):
        print(f"Megatron and transformers disagree by more than {options.tolerance:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
