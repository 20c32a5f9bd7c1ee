"""Old names lead to names that exist: held to the configuration of the verl that is installed."""

from __future__ import annotations

import pytest

from recipes import verl_schema
from recipes.migrate import names


@pytest.fixture(scope="module")
def known():
    import sys

    schema = verl_schema.find("0.9.1", sys.executable, fetch=False)
    return verl_schema.defaults(schema, "megatron")


def test_every_new_name_is_one_verl_has_or_takes(known):
    absent = {
        new
        for new in names._MOVED.values()
        if ".mindspeed." not in new and not (verl_schema.declares(known, new) or verl_schema.is_open(known, new))
    }
    assert absent == set()


def test_no_name_that_verl_dropped_is_one_it_still_has(known):
    assert [key for key in names._GONE if verl_schema.declares(known, key)] == []


@pytest.mark.parametrize(
    ("key", "present", "words"),
    [
        ("custom_reward_function.path", "reward.custom_reward_function.path", "calls it"),
        ("ray_init.num_cpus", "ray_kwargs.ray_init.num_cpus", "calls it"),
        ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad", "calls it"),
        ("actor_rollout_ref.actor.megatron.grad_offload", "", "gradients move with the weights"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "", "FSDP"),
        ("data.sampler.class_path", "", "custom_cls"),
    ],
)
def test_what_became_of_a_key(known, key, present, words):
    found = names.renamed(known, "0.9.1", key)
    assert found.key == present
    assert words in found.sentence


def test_a_key_that_has_kept_its_name_is_left_alone(known):
    assert names.renamed(known, "0.9.1", "data.train_batch_size") is None


def test_what_has_no_effect_depends_on_what_the_run_does():
    off = {"actor_rollout_ref.actor.use_kl_loss": False, "algorithm.use_kl_in_reward": False}
    assert "actor_rollout_ref.ref" in names.idle(off)
    assert names.idle(off | {"algorithm.use_kl_in_reward": True}).keys() == {
        "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.kl_loss_type",
    }
