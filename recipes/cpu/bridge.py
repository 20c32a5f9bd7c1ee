"""Megatron-Bridge without TransformerEngine, and its GLM mapping for experts that are not fused."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType

import torch

from recipes.cpu.import_hook import after, around
from recipes.cpu.replace import expect, replace


def install() -> None:
    """Register every patch below; each runs when its module is imported."""
    around("megatron.bridge.peft.lora_layers")(import_without_transformer_engine)
    after("megatron.bridge.models.gpt_provider")(build_local_layers)
    after("megatron.bridge.models.conversion.param_mapping")(copy_duplicated_layers)
    after("megatron.bridge.models.glm_moe_dsa.glm5_bridge")(map_unfused_experts_of_glm)


@contextmanager
def import_without_transformer_engine():
    """megatron.bridge.peft.lora_layers imports transformer_engine.pytorch without asking whether it is there, for the
    base class of TELinearAdapter and for annotations. A placeholder stands in while that one module is imported.
    """
    expect("transformer_engine" not in sys.modules, "sys.modules", "transformer_engine is imported", "not installed")
    # what it imports in turn must not take the placeholder for the real thing
    importlib.import_module("megatron.core.transformer.moe.moe_utils")
    importlib.import_module("megatron.bridge.peft.adapter_wrapper")
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
        for name in placeholders:
            del sys.modules[name]


def build_local_layers(module: ModuleType) -> None:
    """transformer_engine_layer_spec (megatron.bridge.models.gpt_provider) is the default of every dense and MoE
    provider; its neighbour local_layer_spec builds the same model from Megatron's own layers.
    """
    expect(callable(getattr(module, "local_layer_spec", None)), f"{module.__name__}.local_layer_spec", "none", "present")
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
