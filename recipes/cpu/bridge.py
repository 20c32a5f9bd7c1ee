"""Megatron-Bridge without TransformerEngine, and its GLM mapping for experts that are not fused."""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from recipes.cpu.import_hook import after, around
from recipes.cpu.replace import expect, expect_attribute, replace


def install() -> None:
    """Register every patch below; each runs when its module is imported."""
    for name in _IMPORTED_FIRST:
        around(name)(functools.partial(without_transformer_engine, name))
    after("megatron.bridge.models.gpt_provider")(build_local_layers)
    after("megatron.bridge.models.conversion.param_mapping")(copy_duplicated_layers)
    after("megatron.bridge.models.glm_moe_dsa.glm5_bridge")(map_unfused_experts_of_glm)


_IMPORTED_FIRST = {
    "megatron.bridge.peft.lora_layers": (
        "megatron.core.transformer.moe.moe_utils",
        "megatron.bridge.peft.adapter_wrapper",
    ),
    "megatron.bridge.peft.lora": (
        "megatron.core.transformer.moe.router",
        "megatron.bridge.peft.base",
        "megatron.bridge.peft.lora_layers",
        "megatron.bridge.peft.module_matcher",
        "megatron.bridge.peft.utils",
    ),
}
"""Modules that import TransformerEngine without asking whether it is there, and what they import besides: these ask,
and must not take the placeholder for the real thing."""


@contextmanager
def without_transformer_engine(name: str) -> Iterator[None]:
    """megatron.bridge.peft.{lora,lora_layers} need transformer_engine.pytorch for the base class of TELinearAdapter,
    for annotations and for class comparisons. A placeholder stands in while the body of module `name` runs.
    """
    for other in _IMPORTED_FIRST[name]:
        importlib.import_module(other)
    expect("transformer_engine" not in sys.modules, "sys.modules", "transformer_engine is imported", "not installed")
    engine, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    engine.pytorch = layers
    layers.Linear = type("Linear", (torch.nn.Module,), {})
    layers.LayerNormLinear = type("LayerNormLinear", (torch.nn.Module,), {})
    layers.ops = ModuleType("transformer_engine.pytorch.ops")
    layers.ops.Sequential = type("Sequential", (torch.nn.Module,), {})
    placeholders = {module.__name__: module for module in (engine, layers)}
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for placeholder in placeholders:
            del sys.modules[placeholder]


def build_local_layers(module: ModuleType) -> None:
    """transformer_engine_layer_spec (megatron.bridge.models.gpt_provider) is the default of every dense and MoE
    provider; its neighbour local_layer_spec builds the same model from Megatron's own layers.
    """
    expect_attribute(module, "local_layer_spec")
    replace(module, "transformer_engine_layer_spec", module.local_layer_spec, parameters="config")


def copy_duplicated_layers(module: ModuleType) -> None:
    """AutoMapping (megatron.bridge.models.conversion.param_mapping) looks up by class name how a layer is spread over
    ranks. The
    indexer's linear of `megatron.build_dsa_from_torch_layers` is whole on each of them.
    """
    replicated = module.AutoMapping._MODULE_TYPE_REGISTRY.get("replicated")
    expect(isinstance(replicated, set), f"{module.__name__}.AutoMapping's registry", repr(replicated), "a set of names")
    module.AutoMapping.register_module_type("DuplicatedLinear", "replicated")


def map_unfused_experts_of_glm(module: ModuleType) -> None:
    """GLM5Bridge.mapping_registry (megatron.bridge.models.glm_moe_dsa.glm5_bridge) names the weights of grouped
    experts only; a CPU runs them one by one (`local_experts`). Qwen3's bridge has both.
    """
    hf = "model.layers.*.mlp.experts.*."
    megatron = "decoder.layers.*.mlp.experts.local_experts.*."

    def mapping_registry(self):
        known = grouped(self).mappings
        unfused = [name for name in (mapping.megatron_param for mapping in known) if "local_experts" in name]
        expect(not unfused, "GLM5Bridge.mapping_registry", f"mappings {unfused}", "no mapping of local_experts")
        return module.MegatronMappingRegistry(
            *known,
            module.AutoMapping(megatron_param=f"{megatron}linear_fc2.weight", hf_param=f"{hf}down_proj.weight"),
            module.GatedMLPMapping(
                megatron_param=f"{megatron}linear_fc1.weight",
                gate=f"{hf}gate_proj.weight",
                up=f"{hf}up_proj.weight",
            ),
        )

    grouped = replace(module.GLM5Bridge, "mapping_registry", mapping_registry, parameters="self")
