"""Model facts: the counts they give are the published ones, and those of the models transformers builds."""

from __future__ import annotations

import pytest

from recipes import models, params, pipeline
from recipes.errors import RecipeError
from recipes.schema import Parallel

GLM = "glm5_2"
PUBLISHED = {
    "glm5_2": 743_377_000_704,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert models.parameters(params.model_facts(name)).total == PUBLISHED[name]


def test_the_checkpoint_of_glm_5_2_holds_the_published_elements_and_tensors():
    counted = models.parameters(params.model_facts(GLM))
    assert counted.checkpoint == 753_329_940_480
    assert counted.checkpoint_tensors == 59_585
    # The MTP layer, and 76 router biases of 256 that are stored and not trained.
    assert counted.checkpoint == counted.total + counted.mtp + counted.buffers
    assert counted.buffers == 76 * 256


@pytest.mark.parametrize(("name", "billions"), [("glm5_2", 41.3), ("qwen3_30b_a3b", 3.4), ("qwen3_235b_a22b", 22.2)])
def test_the_parameters_of_one_token_are_as_the_name_says(name, billions):
    assert models.parameters(params.model_facts(name)).active / 1e9 == pytest.approx(billions, abs=0.1)


def test_a_model_without_experts_uses_all_its_parameters():
    counted = models.parameters(params.model_facts("qwen3_8b"))
    assert counted.active == counted.total


def built(config) -> int:
    """Count the parameters of the model transformers builds from a configuration; nothing is allocated."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in PUBLISHED if n != GLM])
def test_transformers_builds_qwen3_with_as_many_parameters(name):
    transformers = pytest.importorskip("transformers")
    facts = params.model_facts(name)
    common = {
        "vocab_size": facts.vocab,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.ffn,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "tie_word_embeddings": facts.tied_embeddings,
    }
    if facts.experts:
        config = transformers.Qwen3MoeConfig(
            **common,
            num_experts=facts.experts,
            num_experts_per_tok=facts.experts_per_token,
            moe_intermediate_size=facts.expert_ffn,
        )
    else:
        config = transformers.Qwen3Config(**common)
    assert built(config) == models.parameters(facts).total


def test_transformers_builds_glm_5_2_with_as_many_parameters_but_for_indexers_it_never_uses():
    transformers = pytest.importorskip("transformers")
    facts = params.model_facts(GLM)
    computing = models.index_layers(facts)
    config = transformers.GlmMoeDsaConfig(
        vocab_size=facts.vocab,
        hidden_size=facts.hidden,
        intermediate_size=facts.ffn,
        moe_intermediate_size=facts.expert_ffn,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        n_shared_experts=facts.shared_experts,
        n_routed_experts=facts.experts,
        q_lora_rank=facts.q_lora_rank,
        kv_lora_rank=facts.kv_lora_rank,
        qk_nope_head_dim=facts.qk_nope_head_dim,
        qk_rope_head_dim=facts.qk_rope_head_dim,
        v_head_dim=facts.v_head_dim,
        index_n_heads=facts.index_heads,
        index_head_dim=facts.index_head_dim,
        indexer_types=["full" if layer in computing else "shared" for layer in range(facts.layers)],
    )
    # transformers 5.8 gives every layer an indexer; the checkpoint has one only where an index is computed.
    indexer = sum(t.elements for t in models.tensors(facts) if "indexer" in t.name and t.part == "model")
    unused = indexer // len(computing) * (facts.layers - len(computing))
    assert built(config) == models.parameters(facts).total + unused


def test_an_index_is_computed_by_21_layers_of_glm_5_2():
    assert models.index_layers(params.model_facts(GLM)) == (0, 1, 2, *range(6, 75, 4))
    assert models.index_layers(params.model_facts("qwen3_8b")) == ()


# --------------------------------------------------------------------------------------------------- pipeline stages


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L", [10, 12, 8, 8, 12, 12, 12, 4]),
        ("Ettt|(tt|)*29,m|L", [3, *[2] * 29, 0, 0]),
        ("E|(t|)*3L", [0, 1, 1, 1, 0]),
    ],
)
def test_a_layout_is_read_as_megatron_reads_it(layout, sizes):
    assert pipeline.stage_sizes(Parallel(pipeline_layout=layout), sum(sizes)) == sizes
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = core.PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert [sum(part == core.LayerType.decoder for part in stage) for stage in theirs] == sizes


def test_a_layout_with_another_letter_is_refused():
    with pytest.raises(RecipeError, match="'x' is none of E"):
        pipeline.read_layout("Et|xL")


@pytest.mark.parametrize(
    ("parallel", "layers", "starts"),
    [
        (Parallel(pipeline=1), 28, [0]),
        (Parallel(pipeline=4), 36, [0, 9, 18, 27]),
        (Parallel(pipeline=8, first_stage_layers=11, last_stage_layers=11), 94, [0, 11, 23, 35, 47, 59, 71, 83]),
        (Parallel(pipeline=2, last_stage_layers=10), 28, [0, 18]),
        (Parallel(pipeline=2, first_stage_layers=10, last_stage_layers=18), 28, [0, 10]),
        (Parallel(pipeline=2, virtual_pipeline=2), 8, [0, 2, 4, 6]),
    ],
)
def test_stages_start_where_the_ones_before_end(parallel, layers, starts):
    assert pipeline.stage_starts(parallel, layers) == starts
