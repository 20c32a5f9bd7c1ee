"""The rotary embedding of transformers' GLM (`glm_moe_dsa`), which differs from the published model's."""

from types import ModuleType

import torch

from recipes.cpu.import_hook import after
from recipes.cpu.replace import replace


def install() -> None:
    """Register the patch below; it runs when transformers' GLM is imported."""
    after("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")(interleave_main_attention)


def interleave_main_attention(module: ModuleType) -> None:
    """apply_rotary_pos_emb (transformers.models.glm_moe_dsa.modeling_glm_moe_dsa) rotates the first half of the
    channels against the second, in the main attention too. GLM-5 pairs neighbouring channels there, as Megatron's MLA
    does, and halves in the indexer only. The main attention is known by unsqueeze_dim=1 (heads before sequence).
    """

    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
        if unsqueeze_dim == 1:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return rotate_halves(x, cos, sin, unsqueeze_dim)

    rotate_halves = replace(module, "apply_rotary_pos_emb", apply_rotary_pos_emb, parameters="x cos sin unsqueeze_dim")
