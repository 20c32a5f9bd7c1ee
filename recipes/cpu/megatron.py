"""Megatron-Core on the CPU: the call sites that need more than a stand-in for torch.cuda, and torch layers for DSA."""

import logging
from types import ModuleType

import torch

from recipes.cpu import torch_cuda
from recipes.cpu.import_hook import after
from recipes.cpu.replace import expect, replace


def install() -> None:
    """Register every patch below; each runs when its module is imported."""
    for module in _MODULES_WITH_CUDA_LITERALS:
        after(module)(torch_cuda.build_on_cpu)
    after("megatron.core.tensor_parallel.random")(set_random_state_of_cpu)
    after("megatron.core.tensor_parallel.random")(expect_cpu_random_state_to_change)
    after("megatron.core.optimizer.distrib_optimizer")(resume_torch_adam)
    after("megatron.core.transformer.moe.token_dispatcher")(give_split_sizes_as_numbers)
    after("megatron.core.models.gpt.experimental_attention_variant_module_specs")(build_dsa_from_torch_layers)
    after("megatron.core.transformer.experimental_attention_variant.dsa")(leave_out_hadamard_rotation)


_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.optimizer.clip_grads",  # get_grad_norm_fp32, clip_grad_by_total_norm_fp32, count_zeros_fp32
    "megatron.core.optimizer.optimizer",  # MixedPrecisionOptimizer.__init__, FP32Optimizer.__init__
    "megatron.core.pipeline_parallel.schedules",  # total_num_tokens of the three forward_backward schedules
    "megatron.core.transformer.utils",  # get_default_causal_mask
    "megatron.core.utils",  # local_multi_tensor_l2_norm, in place of TransformerEngine's kernel
)


def set_random_state_of_cpu(module: ModuleType) -> None:
    """_set_cuda_rng_state (megatron.core.tensor_parallel.random) reaches for torch.cuda.default_generators, which is
    empty here; its counterpart _get_cuda_rng_state already asks the stand-in of torch_cuda.
    """

    def set_rng_state(new_state, device=-1, graph_safe=False):
        torch.random.set_rng_state(new_state)

    replace(module, "_set_cuda_rng_state", set_rng_state, parameters="new_state device graph_safe")


def expect_cpu_random_state_to_change(module: ModuleType) -> None:
    """CudaRNGStatesTracker.fork (megatron.core.tensor_parallel.random) warns when the CPU's random state changes
    inside. Here the CPU's state is the device's state, so it has to, and the warning says nothing.
    """
    needless = "CPU RNG state changed within GPU RNG context"
    logging.getLogger(module.__name__).addFilter(lambda record: record.getMessage() != needless)


def resume_torch_adam(module: ModuleType) -> None:
    """DistributedOptimizer (megatron.core.optimizer.distrib_optimizer) is made for the fused Adam of TransformerEngine
    or Apex, which counts steps once a group. torch's Adam counts them once a parameter: loading a checkpoint asks an
    optimizer that has made no step yet for its count, then gives all parameters one counter, which every step advances
    once for each of them, or leaves it at 0. Weights in float32 are the trained ones themselves, not copies: autograd
    must not watch them being loaded.
    """
    optimizer = module.DistributedOptimizer

    def state_dict(self):
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if not self.optimizer.state[weight]:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
        return known_state_dict(self)

    def load_state_dict(self, state_dict):
        with torch.no_grad():
            known_load(self, state_dict)
        (step,) = {group["step"] for group in state_dict["optimizer"]["param_groups"]}
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(step))

    known_state_dict = replace(optimizer, "state_dict", state_dict, parameters="self")
    known_load = replace(optimizer, "load_state_dict", load_state_dict, parameters="self state_dict")


def give_split_sizes_as_numbers(module: ModuleType) -> None:
    """maybe_move_tensor_to_cpu (megatron.core.transformer.moe.token_dispatcher) turns the split sizes of its all-to-all
    into numbers only on their way from a GPU; gloo gets tensors and refuses them (expert_parallel > 1).
    """

    def to_numbers(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replace(module, "maybe_move_tensor_to_cpu", to_numbers, parameters="tensor as_numpy record_stream")


def leave_out_hadamard_rotation(module: ModuleType) -> None:
    """rotate_activation (megatron.core.transformer.experimental_attention_variant.dsa) is a CUDA kernel. It applies
    one orthogonal matrix to the indexer's queries and keys alike, so their products, and the chosen tokens, are the
    same without it. transformers' GLM does not rotate either.
    """
    replace(module, "rotate_activation", lambda x: x, parameters="x")


def build_dsa_from_torch_layers(module: ModuleType) -> None:
    """get_dsa_module_spec_for_backend and _get_backend_spec_provider
    (megatron.core.models.gpt.experimental_attention_variant_module_specs) know TransformerEngine's layers only. Here
    the same attention is built from Megatron's own layers, with the q and kv norms as modules of their own, because no
    linear layer here fuses them.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class DuplicatedLinear(Linear):
        """A linear layer that every tensor-parallel rank holds whole, as TELinear(parallel_mode="duplicated")."""

        def __init__(self, *args, parallel_mode, **kwargs):
            expect(parallel_mode == "duplicated", "parallel_mode of an indexer's linear", parallel_mode, "duplicated")
            super().__init__(*args, **kwargs)

    class TorchLayers(LocalSpecProvider):
        def linear(self) -> type:
            return DuplicatedLinear

        def column_parallel_layer_norm_linear(self) -> type:
            return ColumnParallelLinear

    def backend_spec_provider(config):
        return TorchLayers()

    def dsa_module_spec(config, backend=None):
        spec = known_spec(config=config, backend=backend)
        attention = spec.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ColumnParallelLinear
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = WrappedTorchNorm
        return spec

    replace(module, "_get_backend_spec_provider", backend_spec_provider, parameters="config")
    known_spec = replace(module, "get_dsa_module_spec_for_backend", dsa_module_spec, parameters="config backend")
