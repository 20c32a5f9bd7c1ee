"""Keys of older verl releases that can be carried over under their present name, and those that have no successor.

What each release declares was read from the configuration files in its wheel (0.3.0 to 0.9.1). recipes.verl_history
knows the names that a recipe's own keys once had; here is what only a user's own script can still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from recipes import verl_history, verl_schema

ACTOR, REFERENCE, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"


class Renamed(NamedTuple):
    """What became of a key: its present name ("" when it has none), and the sentence that says so."""

    key: str
    sentence: str


# Old key or group → present one. A group takes the keys below it along.
_MOVED = {
    "actor_rollout.ref": REFERENCE,
    f"{ACTOR}.grad_clip": f"{ACTOR}.optim.clip_grad",
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_decay_style",
    f"{ACTOR}.optim.lr_scheduler_type": f"{ACTOR}.optim.lr_decay_style",
    f"{ACTOR}.checkpoint.contents": f"{ACTOR}.checkpoint.save_contents",
    f"{ACTOR}.router_replay": f"{ACTOR}.megatron.router_replay",
    f"{ACTOR}.mindspeed.llm_kwargs": f"{ACTOR}.mindspeed.mcore_kwargs",
    f"{ACTOR}.mindspeed.mm_kwargs": f"{ACTOR}.mindspeed.fsdp_kwargs",
    f"{REFERENCE}.mindspeed.llm_kwargs": f"{REFERENCE}.mindspeed.mcore_kwargs",
    f"{REFERENCE}.mindspeed.mm_kwargs": f"{REFERENCE}.mindspeed.fsdp_kwargs",
    f"{REFERENCE}.param_offload": f"{REFERENCE}.megatron.param_offload",
    f"{ROLLOUT}.update_weights_bucket_megabytes": f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}.enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.multi_turn.max_turns": f"{ROLLOUT}.multi_turn.max_assistant_turns",
    "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_method": (
        f"{TRANSFORMER}.recompute_method"
    ),
    "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity": (
        f"{TRANSFORMER}.recompute_granularity"
    ),
    "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers": (
        f"{TRANSFORMER}.recompute_num_layers"
    ),
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.rollout": "reward.reward_model.rollout",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "rollout_correction": "algorithm.rollout_correction",
    f"{ROLLOUT}.rollout_correction": "algorithm.rollout_correction",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    f"{ACTOR}.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "ray_init": "ray_kwargs.ray_init",
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.profile_steps": "global_profiler.steps",
    "trainer.npu_profile": "global_profiler",
}

# Keys and groups without a successor, and why nothing is lost. `verl_history.instead` is asked first.
_GONE = {
    f"{ACTOR}.megatron.grad_offload": "gradients move with the weights (memory.param_offload)",
    f"{REFERENCE}.megatron.grad_offload": "the reference policy has no gradients",
    f"{ACTOR}.mindspeed.grad_offload": "gradients move with the weights (memory.param_offload)",
    f"{REFERENCE}.router_replay": "the reference policy replays nothing",
    f"{ACTOR}.load_weight": "weights are always loaded",
    f"{REFERENCE}.load_weight": "weights are always loaded",
    f"{ROLLOUT}.layer_name_map": "the bridge knows the names",
    f"{ROLLOUT}.chat_scheduler": "conversations are driven by agent loops (rollout.agent)",
    f"{ROLLOUT}.micro_batch_size": "it belonged to a rollout without an engine",
    f"{ROLLOUT}.skip_rollout": "the group `skip` replaced it",
    f"{ROLLOUT}.skip_dump_dir": "the group `skip` replaced it",
    f"{ROLLOUT}.multi_turn.completion_callback": "agent loops replaced it",
    f"{ROLLOUT}.multi_turn.interaction_config_path": "agent loops replaced it",
    f"{ACTOR}.optim.min_lr_ratio": "optim.min_lr takes the rate itself, not a share of it",
    f"{ACTOR}.profile": "actor.profiler and global_profiler replaced it",
    f"{REFERENCE}.profile": "ref.profiler and global_profiler replaced it",
    "actor_rollout_ref.profiler": "actor.profiler and global_profiler replaced it",
    "algorithm.rollout_correction.rollout_rs_threshold_lower": "rollout_rs_threshold now says both, as low_high",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "rules of rollout_rs replaced it",
    "algorithm.rollout_correction.use_policy_gradient": "actor.policy_loss.loss_mode decides it",
    "algorithm.pf_ppo._target_": "it named an implementation",
    "data.continuous_token": "it is no choice any more",
    "data.sampler": "data.custom_cls may bring a sampler of its own",
    "data.datagen": "data.custom_cls may bring a source of its own",
    "reward_model.launch_reward_fn_async": "rewards are always computed beside the rollout",
    "reward_model.strategy": "a reward model is served by the rollout engine",
    "reward_model.megatron": "a reward model is served by the rollout engine",
    "reward_model.micro_batch_size": "a reward model is served by the rollout engine",
    "reward_model.micro_batch_size_per_gpu": "a reward model is served by the rollout engine",
    "trainer.use_legacy_worker_impl": "there is one implementation of workers",
    "trainer.remove_previous_ckpt_in_save": "checkpoint.keep says how many stay",
    "actor_rollout_ref.model.override_config.model_config": "override_transformer_config takes such settings",
    "actor_rollout_ref.model.override_config.moe_config": "override_transformer_config takes such settings",
    "actor_rollout_ref.model.gradient_checkpointing_kwargs": "memory.recompute takes its place",
}

# Settings of another training engine. They compose nowhere with Megatron, and mean nothing to it.
_FSDP = (
    f"{ACTOR}.fsdp_config",
    f"{REFERENCE}.fsdp_config",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REFERENCE}.ulysses_sequence_parallel_size",
    f"{ACTOR}.entropy_checkpointing",
    f"{REFERENCE}.entropy_checkpointing",
)


class Idle(NamedTuple):
    """Keys without effect while verl's configuration has these values, and why."""

    when: Mapping[str, Any]
    prefixes: tuple[str, ...]
    sentence: str


_IDLE = (
    Idle(
        {f"{ACTOR}.use_kl_loss": False, "algorithm.use_kl_in_reward": False},
        (REFERENCE,),
        "there is no reference policy: KL is neither in the loss nor in the reward",
    ),
    Idle({f"{ACTOR}.use_kl_loss": False}, (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"), "there is no KL loss"),
    Idle(
        {"algorithm.use_kl_in_reward": False},
        ("algorithm.kl_ctrl", "algorithm.kl_penalty"),
        "there is no KL in the reward",
    ),
    Idle({"algorithm.adv_estimator": "grpo"}, ("critic",), "GRPO has no critic"),
    *(
        Idle(
            {f"{role}.{engine}.use_dist_checkpointing": False},
            (f"{role}.{engine}.dist_checkpointing_path",),
            "weights are not read from a distributed checkpoint",
        )
        for role in (ACTOR, REFERENCE)
        for engine in ("megatron", "mindspeed")
    ),
)

# Old key with this value → the present value.
_VALUES = {("strategy", "mindspeed_llm"): "mindspeed_megatron", ("strategy", "mindspeed_mm"): "mindspeed_fsdp"}


def renamed(known: Any, version: str, key: str, *, added: bool = False) -> Renamed | None:
    """Say what became of a key that a script uses, or None when this verl has it under the same name.

    `known` is the target verl's configuration. A key moves only where that verl declares the new name or takes it.
    `added`: the script writes it with +, so verl's files need not declare it.
    """
    found = _moved(known, key)
    if found:
        return Renamed(found, f"verl {version} calls it {found}")
    if verl_schema.declares(known, key):
        return None
    for old in _above(key):
        if old in _FSDP:
            return Renamed("", "a setting of FSDP, which this run does not train with")
        if old in _GONE:
            return Renamed("", (verl_history.instead(key).lstrip("; ") or f"it was dropped: {_GONE[old]}"))
    words = "" if added else verl_history.instead(key)
    return Renamed("", words.lstrip("; ")) if words and not verl_schema.is_open(known, key) else None


def idle(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return {key or group: reason} of what has no effect in a configuration given by dotted key."""
    found: dict[str, str] = {}
    for rule in _IDLE:
        if all(wanted.get(key) == value for key, value in rule.when.items()):
            for prefix in rule.prefixes:
                found.setdefault(prefix, rule.sentence)
    return found


def value_now(key: str, value: Any) -> Any:
    """Return the present spelling of a value that verl once called otherwise."""
    return _VALUES.get((key.rsplit(".", 1)[-1], value), value) if isinstance(value, str) else value


def _moved(known: Any, key: str) -> str:
    for old in _above(key):
        new = _MOVED.get(old)
        if new:
            candidate = verl_schema.spelled(known, new + key.removeprefix(old))
            if candidate != key and (verl_schema.declares(known, candidate) or verl_schema.is_open(known, candidate)):
                return candidate
    return ""


def _above(key: str) -> Iterable[str]:
    """The key and its groups, the longest first."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))
