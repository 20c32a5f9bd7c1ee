"""The memory model: its counts are the published ones, its bytes are those worked out by hand beside them."""

from __future__ import annotations

import json

import pytest

from recipes import memory, models, params, preflight
from recipes.errors import RecipeError
from recipes.schema import ModelFacts, Parallel

GLM_LAYOUT = "Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L"


def subject(name: str, *overrides: str) -> preflight.Subject:
    return preflight.subject(params.compose(name, overrides))


def small(**changes) -> ModelFacts:
    """Hidden 64, 4 heads of 16, 2 key-value heads, FFN 128."""
    facts = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 1000}
    return ModelFacts(**{"name": "small", "architecture": "any", "max_positions": 64, **facts, **changes})


# ------------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    "name", ["glm5_2", "qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b", "qwen3_235b_a22b", "tiny_glm5_2", "tiny_qwen3_moe"]
)
def test_one_device_holds_the_whole_model(name):
    facts = params.model_facts(name)
    assert sum(memory.stage_parameters(facts, Parallel())[0]) == models.parameters(facts).total
    assert memory.engine_parameters(facts, 1, 1) == models.parameters(facts).total


def test_the_stages_of_glm_5_2_add_up_to_the_published_size():
    stages = memory.stage_parameters(params.model_facts("glm5_2"), Parallel(pipeline=8, pipeline_layout=GLM_LAYOUT))
    assert sum(map(sum, stages)) == 743_377_000_704


def test_a_stage_of_the_512_device_run():
    layout = Parallel(tensor=8, pipeline=8, expert=64, expert_tensor=1, pipeline_layout=GLM_LAYOUT)
    dense, expert = memory.stage_parameters(params.model_facts("glm5_2"), layout)[1]
    # Twelve layers with 256 / 64 = 4 experts each, of 3 x 6144 x 2048.
    assert expert == 12 * 4 * 37_748_736
    norms = 2 * 6144 + 2048 + 512
    latent = 2048 * 6144 + (512 + 64) * 6144  # whole on every rank
    heads = 64 * 256 * 2048 + 64 * (192 + 256) * 512 + 6144 * 64 * 256  # split over 8
    router, shared = 256 * 6144, 37_748_736
    layer = norms + latent + heads // 8 + router + shared // 8
    # Layers 10 to 21 compute an index three times: 10, 14, 18. An indexer is never split.
    assert dense == 12 * layer + 3 * 9_371_904
    sharded, _ = memory.stage_parameters(params.model_facts("glm5_2"), layout, latent_sharded=True)[1]
    assert sharded == dense - 12 * (latent - latent // 8)


def test_a_tied_head_is_a_second_copy_on_another_stage():
    first, last = memory.stage_parameters(params.model_facts("qwen3_0_6b"), Parallel(tensor=2, pipeline=2))
    # q and o 2048 x 1024, k and v 1024 x 1024, an FFN of 3 x 3072 x 1024, over two; norms and q/k norms whole.
    layer = (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024) // 2 + 2 * 1024 + 2 * 128
    assert first == (14 * layer + 151936 * 1024 // 2, 0)
    assert last == (14 * layer + 151936 * 1024 // 2 + 1024, 0)


def test_experts_are_split_like_the_rest_where_expert_tensor_is_not_set():
    layout = Parallel(tensor=4, pipeline=8, expert=4, first_stage_layers=11, last_stage_layers=11)
    stages = memory.stage_parameters(params.model_facts("qwen3_235b_a22b"), layout)
    a_layer = 128 * 3 * 4096 * 1536
    assert [expert for _, expert in stages] == [size * a_layer // 16 for size in (11, *[12] * 6, 11)]


def test_virtual_stages_of_a_rank_are_counted_together():
    facts = small(layers=8)
    plain, virtual = Parallel(pipeline=2), Parallel(pipeline=2, virtual_pipeline=2)
    assert memory.stage_parameters(facts, virtual) == memory.stage_parameters(facts, plain)


def test_stages_that_do_not_hold_the_model_are_refused():
    with pytest.raises(RecipeError, match=r"parallel.pipeline=8: its stages hold 72 layers and glm5_2 has 78; set"):
        memory.stage_parameters(params.model_facts("glm5_2"), Parallel(pipeline=8))


# ----------------------------------------------------------------------------------------------------- activations


# Of a token, bf16, by hand: norms 8x64 and two statistics; attention 2x16x(8 projected + 6 rotated + 4 out) + 64x4
# statistics; rotary 2x4x16 on every rank; SwiGLU 6x128.
NORMS, ATTENTION, ROTARY, SWIGLU = 512 + 8, 2 * 16 * 18 + 64 * 4, 128, 768
QK_NORM = 4 * (4 + 2)  # a statistic a head; besides, a copy of the queries, 2x16x4, where heads are not contiguous
ROUTING = 8 * 8 + 24 * 2  # eight experts, two rows


@pytest.mark.parametrize(
    ("facts", "settings", "a_token"),
    [
        (small(), {}, NORMS + ATTENTION + ROTARY + SWIGLU),
        (small(), {"tensor": 2}, NORMS + (ATTENTION + SWIGLU) / 2 + ROTARY),
        (small(), {"tensor": 2, "sequence": True}, (NORMS + ATTENTION + SWIGLU) / 2 + ROTARY),
        (small(qk_norm=True), {}, NORMS + ATTENTION + QK_NORM + 2 * 16 * 4 + ROTARY + SWIGLU),
        (small(qk_norm=True), {"tensor": 2}, NORMS + (ATTENTION + QK_NORM + SWIGLU) / 2 + ROTARY),
        (
            small(experts=8, experts_per_token=2, expert_ffn=32),
            {"moe": True},
            NORMS + ATTENTION + ROTARY + 2 * (128 + 192) + ROUTING,
        ),
        # sigmoid scores with a bias
        (
            small(experts=8, experts_per_token=2, expert_ffn=32, router_bias=True),
            {"moe": True},
            NORMS + ATTENTION + ROTARY + 2 * (128 + 192) + ROUTING + 5 * 8 + 8 * 2 + 12,
        ),
        # expert tensor parallelism: the rows of both ranks, half of each
        (
            small(experts=8, experts_per_token=2, expert_ffn=32, shared_experts=1),
            {"moe": True, "tensor": 2, "sequence": True, "expert_tensor": 2},
            (NORMS + ATTENTION + 2 * (2 * (128 + 24) + 192) + 64 + 192) / 2 + ROTARY,
        ),
    ],
)
def test_what_a_layer_keeps_of_a_token(facts, settings, a_token):
    assert memory.layer_activations(facts, 1000, **settings) == 1000 * a_token


def test_what_latent_attention_keeps_of_a_token():
    facts = small(q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=16, ffn=128)
    latents = 4 * (32 + 24) + 2 * 4 + 8 + 2 * 4 * 4  # before and after the norms, statistics, rotary
    per_head = 2 * 16 + 2 * 16 + 2 * 16 + 2 * 16 + 64  # queries, keys, values, output, statistics
    assert memory.layer_activations(facts, 1) == NORMS + latents + 4 * per_head + SWIGLU
    absorbed = 2 * 16 + 2 * 28 + 2 * 24 + 2 * 16 + 64  # queries twice, output in latent space and after it, statistics
    assert memory.layer_activations(facts, 1, absorb=True) == NORMS + latents + 4 * absorbed + SWIGLU
    facts = small(**vars(facts) | {"index_topk": 10, "index_heads": 2, "index_head_dim": 8})
    index = 2 * (2 * 8 + 2 + 2 * 8) + 2 * 4 * 4 + 8 + 10 * 4  # queries, weights, keys twice, rotary, statistics, places
    assert memory.layer_activations(facts, 1, index=True) == memory.layer_activations(facts, 1) + index
    two = {"tensor": 2, "sequence": True}
    gathered = 2 * (64 + 32)  # whole on each rank: the hidden states, and the queries' latent
    assert memory.layer_activations(facts, 1, index=True, **two) == (
        memory.layer_activations(facts, 1, **two) + index + gathered
    )


def test_the_fullest_moment_of_a_layer_is_where_its_backward_pass_begins_or_where_experts_return():
    assert memory.layer_gradients(small(), 10) == 10 * 2 * (2 * 64 + 2 * 128)
    assert memory.layer_gradients(small(), 10, tensor=2, sequence=True) == 10 * (2 * 64 + 2 * 128)
    experts = {"experts": 8, "experts_per_token": 2}
    assert memory.layer_gradients(small(**experts, expert_ffn=32), 10, moe=True) == 10 * 2 * (64 + 2 * 3 * 64)
    assert memory.layer_gradients(small(**experts, expert_ffn=96), 10, moe=True) == 10 * 2 * (2 * 64 + 2 * 2 * 96)


def test_a_rank_keeps_as_many_micro_batches_as_stages_follow_it():
    assert [memory.in_flight(Parallel(pipeline=4), rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [memory.in_flight(Parallel(pipeline=4), rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    # Interleaved, the first rank of K22 keeps 1 + (p-1)/(pv) as much as with one chunk: 4 + 3/2 of 4.
    assert memory.in_flight(Parallel(pipeline=4), 0, 16, chunks=2) == 4 + 3 / 2


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer():
    name, on = "qwen3/grpo_0_6b_vllm_a2", ("memory.recompute=full", "memory.recompute_method=uniform")
    tokens = 3072
    # Over two ranks: norms 8x1024 + 8; projected, rotated and copied queries, output 2x128x(32 + 24 + 16 + 16);
    # statistics 64x16 and 4x24; SwiGLU 6x3072. Whole: rotary 8x128.
    layer = tokens * ((8192 + 8 + 22528 + 1024 + 96 + 18432) // 2 + 1024)
    entry = tokens * 2 * 1024 // 2
    gradients = tokens * 2 * (2 * 1024 + 2 * 3072) // 2
    first = memory.estimate(subject(name)).training.stages[0]
    assert (first.in_flight, first.activations, first.backward) == (2, 2 * 14 * layer, gradients)
    first = memory.estimate(subject(name, *on)).training.stages[0]
    assert (first.activations, first.backward) == (2 * 14 * entry, layer - entry + gradients)
    first = memory.estimate(subject(name, *on, "memory.recompute_layers=7")).training.stages[0]
    assert (first.activations, first.backward) == (2 * 2 * entry, 7 * layer - entry + gradients)
    block = (on[0], "memory.recompute_method=block", "memory.recompute_layers=4")
    first = memory.estimate(subject(name, *block)).training.stages[0]
    assert (first.activations, first.backward) == (2 * (4 * entry + 10 * layer), layer - entry + gradients)


def test_the_loss_and_a_layer_s_backward_pass_take_turns():
    last = memory.estimate(subject("qwen3/gspo_30b_a3b_vllm_a3")).training.stages[-1]
    assert 0 < last.backward < last.logits
    assert last.peak == last.states + last.activations + last.logits
    fused = memory.estimate(subject("qwen3/gspo_30b_a3b_vllm_a3", "model.fused_kernels=true")).training.stages[-1]
    assert fused.peak == fused.states + fused.activations + fused.backward


def test_micro_batches_are_fixed_or_filled_to_a_budget():
    fixed = subject("qwen3/grpo_0_6b_vllm_a2")  # 8 x 2 sequences over 2 ranks, one at a time
    assert memory.micro_batch_tokens(fixed) == (3072, 8)
    filled = subject("qwen3/grpo_8b_vllm_a2")  # 256 x 5 over 2 ranks, eight of 3072 in a budget of 24576
    assert memory.micro_batch_tokens(filled) == (24576, 80)
    long = subject("qwen3/grpo_235b_a22b_256k_vllm_a3_16nodes")  # 262144 over cp 8
    assert memory.micro_batch_tokens(long) == (32768, 16)


# --------------------------------------------------------------------------------------------------- training states


def test_states_of_a_dense_model():
    stage = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2")).training.stages[0]
    held = stage.dense_parameters
    assert (stage.weights, stage.gradients) == (2 * held, 4 * held)
    assert stage.optimizer == 12 * held // 2  # eight devices, tensor 2, pipeline 2: two ranks share
    assert stage.reference == 2 * held  # KL loss, nothing offloaded
    assert stage.logits == 0
    last = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2")).training.stages[1]
    assert last.logits == 3072 * 151936 // 2 * 8
    bonus = subject("qwen3/grpo_0_6b_vllm_a2", "algorithm.entropy_coeff=0.001")
    assert memory.estimate(bonus).training.stages[1].logits == 2 * last.logits
    chunked = "verl={actor_rollout_ref.actor.megatron: {entropy_from_logits_with_chunking: true}}"
    by_chunks = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2", chunked, "batch.log_prob_micro=2")).training.stages[
        1
    ]
    whole = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2", "batch.log_prob_micro=2")).training.stages[1]
    assert whole.log_probs - by_chunks.log_probs == (6144 - 2048) * 151936 // 2 * 8
    fused = subject("qwen3/grpo_0_6b_vllm_a2", "model.fused_kernels=true")
    assert memory.estimate(fused).training.stages[1].logits == 0


def test_experts_are_shared_out_over_their_own_ranks():
    (stage,) = memory.estimate(subject("qwen3/gspo_30b_a3b_vllm_a3")).training.stages
    # Sixteen devices: tensor 2 leaves eight for dense parameters, expert 8 leaves two for experts.
    assert stage.optimizer == pytest.approx(12 * (stage.dense_parameters / 8 + stage.expert_parameters / 2), abs=1)


def test_the_peak_verl_s_nightly_measured():
    """49.14 GiB at the most. Its throughput tells how long its problems are, and the peak of that is computed here."""
    name, measured = "qwen3/gspo_30b_a3b_vllm_a3", 49.14 * 2**30
    worst = memory.estimate(subject(name)).training
    assert worst.tokens == 30720
    sequence = round(90.37 * 32.06 * 16 / (32 * 4))  # seconds x tokens/s/device x devices / sequences of a step
    assert sequence == 362
    lengths = ("data.max_prompt_length=100", f"data.max_response_length={sequence - 100}")
    as_run = memory.estimate(subject(name, *lengths)).training
    assert as_run.tokens == 8 * sequence  # a rank's part of the mini batch, one micro batch
    (stage,) = as_run.stages
    assert 0.9 * measured < stage.states < stage.peak < measured < worst.peak
    assert stage.peak == pytest.approx(measured, rel=0.05)
    note = subject(name).recipe.notes[1]
    for told in (sequence, f"{stage.peak / 2**30:.2f}", f"{1 - stage.peak / measured:.1%}".replace("%", " %")):
        assert str(told) in note
    assert f"{stage.states / 2**30:.2f} are weights" in note


@pytest.mark.parametrize(
    ("overrides", "device", "host"),
    [
        ((), 12, 0),
        (("optimizer.options.use_precision_aware_optimizer=true",), 10, 0),
        (
            (
                "optimizer.options.use_precision_aware_optimizer=true",
                "optimizer.options.exp_avg_dtype=bf16",
                "optimizer.options.store_param_remainders=false",
            ),
            10,
            0,
        ),
        (
            (
                "optimizer.options.use_precision_aware_optimizer=true",
                "optimizer.options.optimizer_cpu_offload=true",
                "optimizer.options.optimizer_offload_fraction=1",
            ),
            0,
            16,
        ),
        (
            (
                "optimizer.options.optimizer_cpu_offload=true",
                "optimizer.options.optimizer_offload_fraction=0.5",
            ),
            8,
            8,
        ),
        (("verl.actor_rollout_ref.actor.megatron.dtype=float32",), 8, 0),
    ],
)
def test_what_the_optimizer_takes_of_device_and_host(overrides, device, host):
    stage = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2", *overrides)).training.stages[0]
    assert (stage.optimizer, stage.host) == (stage.dense_parameters * device // 2, stage.dense_parameters * host // 2)


def test_gradients_are_fp32_unless_verl_s_own_keys_say_otherwise():
    prefix = "verl.actor_rollout_ref.actor"
    aware = (f"{prefix}.optim.use_precision_aware_optimizer=true", f"{prefix}.optim.main_grads_dtype=bf16")
    reduce = (f"{prefix}.megatron.override_ddp_config.grad_reduce_in_fp32=false",)
    ignored = ("optimizer.options.use_precision_aware_optimizer=true", "optimizer.options.main_grads_dtype=bf16")
    for overrides, each in (((), 4), (aware, 2), (reduce, 2), (ignored, 4)):
        stage = memory.estimate(subject("qwen3/grpo_0_6b_vllm_a2", *overrides)).training.stages[0]
        assert stage.gradients == each * stage.dense_parameters


# ------------------------------------------------------------------------------------------------------- generation


def test_generation_of_glm_5_2():
    made = memory.estimate(subject("glm5_2/grpo_a3_512")).generation
    # One compressed latent a layer, 512 + 64, and an index key of 128 in 21 of the 78 layers; bf16.
    assert made.kv_per_token == 2 * (78 * 576 + 21 * 128)
    assert made.share == 0.6 * 64e9
    assert made.kv == made.share - made.weights - made.activations
    assert made.sequences == made.kv // made.kv_per_token // 8192
    facts = params.model_facts("glm5_2")
    experts = 75 * 256 * 3 * 6144 * 2048
    assert made.weights > 2 * (experts // 64 + (models.parameters(facts).total - experts) // 8)
    assert made.training == 0  # everything is offloaded


def test_fewer_key_value_heads_than_ranks_are_repeated():
    facts = params.model_facts("qwen3_30b_a3b")
    assert memory.kv_elements(facts, 1) == 48 * 2 * 128 * 4
    assert memory.kv_elements(facts, 4) == memory.kv_elements(facts, 8) == 48 * 2 * 128
    four, eight = memory.engine_parameters(facts, 4, 4), memory.engine_parameters(facts, 8, 8)
    assert 2 * eight - four == 48 * (2 * 128 * 2048 + 2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # what 8 do not split


def test_without_offload_the_trainer_stays_while_the_engine_generates():
    found = memory.estimate(subject("qwen3/grpo_8b_vllm_a2"))
    left = max(stage.states for stage in found.training.stages)
    assert found.generation.training == left
    assert found.generation.peak == left + found.generation.share
    assert any("stays on the device" in sentence for sentence in found.assumed)


def test_an_engine_that_keeps_its_memory_adds_to_training():
    found = memory.estimate(subject("qwen3/gspo_30b_a3b_vllm_a3", "rollout.free_cache=false"))
    assert found.training.rollout == found.generation.share
    assert found.training.peak == found.training.rollout + found.training.fullest.peak


def test_apart_nothing_of_one_is_on_the_other_s_devices():
    found = memory.estimate(subject("glm5_2/fully_async", "memory.param_offload=false"))
    assert (found.training.rollout, found.generation.training) == (0, 0)


@pytest.mark.parametrize("name", params.names())
def test_every_recipe_has_an_estimate_that_json_can_hold(name):
    found = memory.estimate(subject(name))
    tree = json.loads(json.dumps(found.to_dict()))
    assert tree["training"]["peak"] == found.training.peak > 0
    assert tree["generation"]["weights"] > 0
    if found.device is None:
        assert tree["generation"]["kv"] is None
