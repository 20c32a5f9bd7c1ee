"""Engines, stacks, hardware and weights that do not fit are refused before launch, with the reason."""

from __future__ import annotations

import pytest

from recipes import params, preflight, verl_history
from recipes.command import build
from recipes.errors import RecipeError

GLM = "glm5_2/grpo_a3_512"
PRUNED = "glm5_2/pruned_check_2nodes"
ASYNC = "glm5_2/fully_async"
QUICK = "qwen3/grpo_0_6b_vllm_a2"
MINDSPEED = "qwen3/grpo_8b_mindspeed_sglang_a3"


def findings(name, *overrides):
    composed = params.compose(name, overrides, run_dir="/run", work="/work")
    return {f.rule: f for f in preflight.check(composed, here=False)}


@pytest.mark.parametrize(
    ("name", "overrides", "rule", "words"),
    [
        (
            GLM,
            ["stack=ascend-9.0.0", "external_modules=[]"],
            "stack.model",
            "from verl 0.9.1 on, and this stack has 0.8.0",
        ),
        (QUICK, ["stack=cpu"], "engine.adaptor", "no MegatronAdaptor"),
        (QUICK, ["stack=ascend-9.0.0", "algorithm.router_replay=R3"], "stack.router_replay", "this stack has v0.18.0"),
        ("quickstart/grpo", ["stack=ascend-9.1.0"], "stack.hardware", "this stack is for atlas_a2, atlas_a3"),
        (QUICK, ["devices=16"], "hardware.devices", "a node has 8 devices"),
        (ASYNC, ["fully_async.rollout_devices=32"], "hardware.devices", "a node has 16 devices"),
        (QUICK, ["parallel.tensor=4", "parallel.pipeline=4"], "layout.world", "not divisible"),
        (GLM, ["nodes=31"], "layout.world", "not divisible"),
        # It composes there, and nothing reads it.
        (MINDSPEED, ["stack=ascend-9.1.0"], "engine.mindspeed", "verl 0.9.1 has no MindSpeed engine"),
        (
            QUICK,
            ["extra_args=[+actor_rollout_ref.actor.mindspeed.strategy=mindspeed_megatron]"],
            "engine.mindspeed",
            "0.9.1",
        ),
        (QUICK, ["verl.actor_rollout_ref.actor.strategy=mindspeed_megatron"], "engine.mindspeed", "0.9.1"),
        (QUICK, ["verl.actor_rollout_ref.actor.strategy=mindspeed_llm"], "engine.strategy", "another engine"),
        (MINDSPEED, ["mindspeed.strategy=mindspeed_fsdp"], "engine.mindspeed_fsdp", "never reads"),
        (MINDSPEED, ["mindspeed.fsdp_kwargs.a=1"], "engine.mindspeed_fsdp", "never reads"),
        (MINDSPEED, ["model.bridge=megatron_bridge"], "engine.mindspeed_weights", "mbridge only"),
        (MINDSPEED, ["transformer.swiglu=true"], "engine.mindspeed_transformer", "mindspeed.mcore_kwargs"),
        (QUICK, ["mindspeed.mcore_kwargs.swiglu=true"], "engine.mindspeed_transformer", "under transformer"),
        # Starts on 10, 20, 30 …: an even-looking split that ignores who computes the index.
        (
            GLM,
            ["parallel.pipeline_layout='Et*10|t*10|t*10|t*10|t*10|t*10|t*10|t*8L'"],
            "layout.index_sharing",
            "20, 40, 60",
        ),
        (
            GLM,
            ["parallel.pipeline_layout='Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*3L'"],
            "layout.stages",
            "places 77 layers",
        ),
        (GLM, ["parallel.pipeline_layout='Et*39|t*38|tL'"], "layout.stages", "3 stages, which 8"),
        (
            GLM,
            ["parallel.pipeline_layout='t*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L'"],
            "layout.stages",
            "start with the one E",
        ),
        (GLM, ["parallel.pipeline_layout='Ex|L'"], "layout.stages", "'x' is none of"),
        (GLM, ["parallel.first_stage_layers=5"], "layout.stages", "exclude each other"),
        (
            GLM,
            ["checkpoint.strict=true", "checkpoint.save_freq=20"],
            "checkpoint.strict",
            "neither trained nor exported",
        ),
        (
            GLM,
            ["checkpoint.strict=null", "checkpoint.save_freq=20"],
            "checkpoint.strict",
            "neither trained nor exported",
        ),
        (GLM, ["checkpoint.strict=true"], "checkpoint.strict_later", "no effect yet"),
        (GLM, ["checkpoint.resume=auto"], "checkpoint.resume", "never saves"),
        (GLM, ["checkpoint.resume=resume_path", "checkpoint.resume_path=/x"], "checkpoint.resume_path", "the step"),
        (QUICK, ["checkpoint.keep=1"], "checkpoint.keep", "the only checkpoint"),
        (GLM, ["data.val_files=/work/data/dapo-math/train.parquet"], "files.validation", "the training file"),
        (ASYNC, ["fully_async.rollout_nodes=null"], "async.nodes", "no nodes generate"),
        (ASYNC, ["rollout.data=7"], "async.nodes", "one rollout replica takes 56"),
        (ASYNC, ["batch.train=64"], "async.batch", "streams its samples"),
        (GLM, ["batch.train=0"], "async.batch", "needs prompts"),
        (ASYNC, ["rollout.log_probs=false"], "async.log_probs", "the rollout's own"),
    ],
)
def test_a_fault_is_found_before_launch(name, overrides, rule, words):
    found = findings(name, *overrides)
    assert rule in found, found
    assert words in str(found[rule])
    assert found[rule].remedy


def test_strict_matters_to_no_model_without_an_mtp_layer():
    assert findings(QUICK, "checkpoint.strict=true") == {}


def test_strict_is_left_alone_where_the_mtp_layer_is_trained():
    trained = "verl.actor_rollout_ref.model.mtp.enable=true"
    placed = "parallel.pipeline_layout='Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4mL'"
    assert findings(GLM, "checkpoint.strict=true", "checkpoint.save_freq=20", trained, placed) == {}
    assert set(findings(GLM, "checkpoint.strict=true", "checkpoint.save_freq=20", trained)) == {"layout.stages"}


def test_a_converted_checkpoint_exports_only_when_asked_to():
    converted = ["checkpoint.strict=true", "checkpoint.save_freq=20", "model.distributed_checkpoint=/mcore"]
    assert set(findings(GLM, *converted)) == {"checkpoint.strict_later"}
    assert "checkpoint.strict" in findings(GLM, *converted, "checkpoint.contents=[model, hf_model]")


def test_megatron_on_npus_without_the_adaptor_is_refused(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [{QUICK}]\nexternal_modules: []\n")
    assert "before anything else imports it" in findings(str(mine))["engine.adaptor"].sentence


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("quickstart/grpo", ["external_modules=megatron_adaptor"]),
        (MINDSPEED, ["external_modules=megatron_adaptor"]),
        (QUICK, ["verl.model_engine=veomni"]),
    ],
)
def test_a_run_without_megatron_is_warned_of_the_adaptor(name, overrides):
    found = findings(name, *overrides)["engine.adaptor_needless"]
    assert (found.severity, found.keys["external_modules"]) == ("warning", "megatron_adaptor")


def test_a_module_the_image_names_counts(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "megatron_adaptor")
    assert "engine.adaptor_needless" in findings("quickstart/grpo")


# ------------------------------------------------------------------------------------------------ what was renamed


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.actor.megatron.grad_offload", "memory.param_offload"),
        ("actor_rollout_ref.actor.router_replay.mode", "algorithm.router_replay"),
        ("trainer.max_ckpt_to_keep", "checkpoint.keep"),
        ("actor_rollout_ref.rollout.single_turn_response_length", "data.max_response_length"),
        ("actor_rollout_ref.rollout.limit_images", "extra_args"),
        ("actor_rollout_ref.rollout.repetition_penalty", "extra_args"),
        ("actor_rollout_ref.rollout.enable_sleep_mode", "extra_args"),
        ("algorithm.rollout_is", "algorithm.rollout_correction"),
        ("actor_rollout_ref.rollout.rollout_correction.rollout_is", "under algorithm"),
        ("rollout_correction.rollout_rs", "under algorithm"),
        ("actor_rollout.ref.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref"),
        ("actor_rollout_ref.actor.mindspeed.llm_kwargs.spec", "mindspeed.mcore_kwargs"),
        ("actor_rollout_ref.actor.mindspeed.mm_kwargs.x", "mindspeed.fsdp_kwargs"),
        ("actor_rollout_ref.actor.mindspeed_llm.strategy", "mindspeed_megatron"),
    ],
)
def test_a_key_of_former_times_is_refused_with_what_to_write_instead(key, words):
    with pytest.raises(RecipeError, match=f"has no key '{key}'.*{words}"):
        build(params.compose(QUICK, [f"verl.{key}=1"]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine=mindspeed_llm", "did you mean mindspeed"),
        ("mindspeed.strategy=mindspeed_llm", "did you mean .*mindspeed_megatron"),
        ("mindspeed.llm_kwargs.x=1", "mindspeed.mcore_kwargs"),
    ],
)
def test_a_name_of_former_times_in_our_own_fields_finds_the_new_one(override, words):
    with pytest.raises(RecipeError, match=words):
        params.compose(MINDSPEED, [override])


def test_a_key_that_was_never_there_has_no_history():
    assert verl_history.instead("trainer.balance_bach") == ""


def test_mindspeed_on_a_verl_without_it_is_refused_by_the_command_too():
    with pytest.raises(
        RecipeError, match=r"engine=mindspeed: verl 0.9.1 has no such training engine; it has dp, megatron"
    ):
        build(params.compose(MINDSPEED, ["stack=ascend-9.1.0"]))
