"""verl keys that were renamed, moved or dropped: what to write instead, and the older spelling where a verl has it."""

from __future__ import annotations

import re

# The end of a key → what became of it. The first that matches is told. Only what verl's releases show.
_INSTEAD = (
    (
        r"megatron\.grad_offload|mindspeed\.grad_offload",
        "verl 0.9.1 dropped it: gradients move with the weights (memory.param_offload)",
    ),
    (r"actor\.router_replay(\..*)?", "it moved to the engine: algorithm.router_replay"),
    (r"ref\.router_replay(\..*)?", "the reference policy replays nothing; the actor's is algorithm.router_replay"),
    (r"trainer\.max_ckpt_to_keep", "actor and critic are counted apart: checkpoint.keep"),
    (
        r"rollout\.single_turn_response_length",
        "it was dropped: a response is as long as data.max_response_length, and rollout.max_model_len bounds the whole",
    ),
    (
        r"rollout\.(limit_images|repetition_penalty|enable_sleep_mode)",
        "verl reads it and its files do not declare it: extra_args=['+actor_rollout_ref.rollout.<name>=<value>']",
    ),
    (
        r"algorithm\.rollout_(is|rs)(_.*)?|(?<!rollout_correction)\.rollout_(is|rs)(_.*)?",
        "it moved into a group: algorithm.rollout_correction",
    ),
    (r"(rollout\.)?rollout_correction(\..*)?", "it belongs under algorithm: algorithm.rollout_correction"),
    (r"actor_rollout\.ref(\..*)?", "the group is called actor_rollout_ref"),
    (r".*\bllm_kwargs(\..*)?", "it is called mindspeed.mcore_kwargs"),
    (r".*\bmm_kwargs(\..*)?", "it is called mindspeed.fsdp_kwargs"),
    (r".*\bmindspeed_llm(\..*)?", "the engine is called mindspeed, its strategy mindspeed_megatron"),
)

# verl's key now → the spelling of releases that lack it. A prefix stands for all keys below it.
_OLDER = {
    "reward.custom_reward_function": "custom_reward_function",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "actor_rollout_ref.actor.megatron.router_replay": "actor_rollout_ref.actor.router_replay",
}


def instead(key: str) -> str:
    """Return what to write in place of a key that verl once had, as the end of a sentence; empty when unknown.

    >>> instead("trainer.max_ckpt_to_keep")
    '; actor and critic are counted apart: checkpoint.keep'
    """
    for pattern, words in _INSTEAD:
        if re.search(rf"(^|\.)({pattern})$", key):
            return f"; {words}"
    return ""


def older(key: str) -> str | None:
    """Return the older spelling of a key, or None when it has always had this one.

    >>> older("reward.custom_reward_function.path")
    'custom_reward_function.path'
    """
    for prefix, spelling in _OLDER.items():
        if key == prefix or key.startswith(f"{prefix}."):
            return spelling + key.removeprefix(prefix)
    return None
