"""Unmodified verl trains with Megatron-Core on gloo ranks: each kind of parallelism, and the export of a checkpoint."""

import math

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

MEGATRON = "actor_rollout_ref__actor__megatron__"
TENSOR, PIPELINE, EXPERT = (f"{MEGATRON}{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))


def check(run, steps):
    """Every step was made, every number is a number, and the rollout samples from the policy that is trained."""
    assert run.exit_code == 0, run.log[-4000:]
    assert len(run.metrics) == steps
    for metrics in run.metrics:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["training/rollout_probs_diff_mean"] < 0.01
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.99
        assert metrics["actor/grad_norm"] > 0


def test_tensor_and_pipeline_parallel_make_the_same_step(train, tiny):
    """Two ranks each; the seed gives both the same responses, so they differ by the rounding of bfloat16 only."""
    tensor, pipeline = (train(tiny("qwen3"), ranks=2, steps=2, **{kind: 2}) for kind in (TENSOR, PIPELINE))
    for run in (tensor, pipeline):
        check(run, steps=2)
    first, second = tensor.metrics[0], pipeline.metrics[0]
    assert first["critic/rewards/mean"] == second["critic/rewards/mean"]
    assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=0.01)
    assert first["actor/entropy"] == pytest.approx(second["actor/entropy"], rel=0.001)


def test_expert_parallel(train, tiny):
    check(train(tiny("qwen3_moe"), ranks=2, steps=2, **{EXPERT: 2}), steps=2)


def test_glm_trains_and_exports_all_but_its_mtp_layer(train, tiny):
    source = tiny("glm5_2", shards=2)
    saving = {
        "trainer__save_freq": 1,
        "actor_rollout_ref__actor__checkpoint__save_contents": "[hf_model]",
        "actor_rollout_ref__actor__checkpoint__strict": False,
    }
    run = train(source, ranks=1, steps=1, **saving)
    check(run, steps=1)
    files = list(run.folder.glob("checkpoints/global_step_1/actor/model/huggingface/*.safetensors"))
    written = {name: weight for file in files for name, weight in load_file(file).items()}
    before = {name: weight for file in source.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert before.keys() - written.keys() == {name for name in before if name.startswith("model.layers.2.")}
    assert written.keys() <= before.keys()
    assert not written["lm_head.weight"].float().equal(before["lm_head.weight"])  # it was trained


def test_the_first_cause_of_a_failed_response_is_what_the_trainer_raises(train, tiny, tmp_path):
    reward = tmp_path / "broken_reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    raise LookupError('no such answer')\n"
    )
    run = train(tiny("qwen3"), ranks=1, steps=1, reward__custom_reward_function__path=reward)
    assert run.exit_code not in (0, None)
    assert "RolloutFailed: A response could not be generated or scored" in run.log
    assert "LookupError: no such answer" in run.log.split("RolloutFailed: ")[-1]
