"""Recipe → Command: argv and environment of a verl entry. The only module that knows verl's key names.

verl's real configuration is composed first; whether an override needs `+` is read from it, never guessed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from recipes import verl_schema
from recipes.errors import RecipeError
from recipes.params import Composed, flatten, hardware_facts
from recipes.schema import Recipe
from recipes.stack import verl_version

# The interpreter that trains, where it is not the one the workbook runs in.
PYTHON_VARIABLE = "RECIPES_PYTHON"
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
RAY_ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"

# Names of keys that some releases need to be told and later ones do by themselves: said where verl declares them.
# Gradients move with the weights since 0.9.1.
WHERE_DECLARED = ("grad_offload",)


@dataclass(frozen=True)
class Command:
    """What is launched: `python -u -m entry *overrides` under `environment` on top of the caller's.

    `groups` keeps the overrides in readable blocks, (title, overrides); argv is their concatenation.
    """

    python: str
    entry: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    environment: Mapping[str, str]
    verl: str

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(text for _, texts in self.groups for text in texts)

    @property
    def argv(self) -> tuple[str, ...]:
        return (self.python, "-u", "-m", self.entry, *self.overrides)


def training_python() -> str:
    """Return the interpreter that trains: RECIPES_PYTHON, or the one running this."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def build(
    composed: Composed,
    *,
    attempt: int = 1,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
    fetch: bool = True,
) -> Command:
    """Return the command of a composed recipe for attempt N in its run directory (`composed.recipe.run_dir`).

    `environment` is the caller's (default: this process's); its external modules come first. Raises RecipeError for a
    key the stack's verl does not have, or when that verl's configuration cannot be had.
    """
    recipe, python = composed.recipe, python or training_python()
    entry = verl_schema.ENTRIES[recipe.mode]
    schema = verl_schema.find(verl_version(recipe.stack), python, fetch=fetch)
    known = verl_schema.defaults(schema, recipe.engine, entry)
    modules = external_modules(composed, os.environ if environment is None else environment)
    variables = _environment(recipe, modules, attempt)
    blocks = [*_groups(recipe, attempt), ("ray", _ray(recipe, modules))]
    groups = [("engine", (f"model_engine={recipe.engine}",))]
    groups += [(title, _overrides(known, schema.version, keys)) for title, keys in blocks]
    verbatim = dict(flatten(recipe.verl))
    groups.append(("any other verl key", _overrides(known, schema.version, verbatim, keep_none=True)))
    groups.append(("extra", tuple(recipe.extra_args)))
    return Command(python, entry.module, _last_wins(groups), variables, schema.version)


def compose_verl(command: Command, composed: Composed, *, fetch: bool = True) -> Any:
    """Compose verl's whole configuration from the command, as verl will. Returns a DictConfig; raises RecipeError."""
    schema = verl_schema.find(command.verl, command.python, fetch=fetch)
    return verl_schema.compose(schema, command.overrides, verl_schema.ENTRIES[composed.recipe.mode])


def external_modules(composed: Composed, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Merge the modules verl imports first: environment, recipe, user; in order, no duplicates, no blanks.

    verl splits the variable on commas without stripping and fails on an empty name, so this must be clean.
    """
    history = composed.history.get("external_modules", ())
    from_files = [s.value for s in history if s.origin.startswith("params/") or ".yaml:" in s.origin][-1:]
    from_user = [s.value for s in history if not (s.origin.startswith("params/") or ".yaml:" in s.origin)]
    parts = [environment.get(EXTERNAL_MODULES, "").split(","), *from_files, *from_user]
    names = [name.strip() for part in parts for name in part]
    for name in names:
        if name and not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise RecipeError(f"external_modules: {name!r} is no name of a Python module.")
    return tuple(dict.fromkeys(name for name in names if name))


class _Variable(str):
    """The text of an environment variable: quoted always, because Ray takes nothing but strings for it."""


def quote(value: Any) -> str:
    """Write a value in Hydra's override grammar, so that Hydra reads back exactly this value and type.

    Paths are quoted always: whether one holds a space is known only where a script runs.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        odd = [k for k in value if not re.fullmatch(r"[A-Za-z_]\w*", str(k))]
        if odd:  # Hydra's grammar has no quoted mapping keys
            raise RecipeError(f"The mapping key {odd[0]!r} cannot be written on Hydra's command line.")
        return "{" + ",".join(f"{k}:{quote(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(quote(item) for item in value) + "]"
    text = str(value)
    # Bare only where Hydra cannot see anything but a string: a name, never a number, null or a list.
    reserved = text.lower() in ("null", "true", "false", "nan", "inf") or re.fullmatch(r"[-+.\d_eE]+", text)
    if re.fullmatch(r"[A-Za-z_.][\w.:%@+-]*", text) and not (reserved or isinstance(value, _Variable)):
        return text
    return QuotedString(text, Quote.single).with_quotes()


# ------------------------------------------------------------------------------------------------- verl's key names


def _groups(r: Recipe, attempt: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, {verl key: value}) in the order an exported script shows them; None is left to verl."""
    hardware = hardware_facts(r.hardware)
    budget, engine = r.batch.max_tokens, f"{ACTOR}.{r.engine}"
    log_prob_micro = r.batch.log_prob_micro if r.batch.log_prob_micro is not None else r.batch.micro
    yield (
        "data",
        {
            "data.train_files": r.data.train_files,
            "data.val_files": r.data.val_files,
            "data.train_batch_size": r.batch.train,
            "data.max_prompt_length": r.data.max_prompt_length,
            "data.max_response_length": r.data.max_response_length,
            "data.truncation": r.data.truncation,
            "data.filter_overlong_prompts": r.data.filter_overlong_prompts,
            "data.shuffle": r.data.shuffle,
            "data.seed": r.trainer.seed,
            "data.dataloader_num_workers": r.data.dataloader_workers,
            **_under("data.apply_chat_template_kwargs", r.data.chat_template_kwargs),
        },
    )
    correction = r.algorithm.rollout_correction
    yield (
        "algorithm",
        {
            "algorithm.adv_estimator": r.algorithm.advantage,
            "algorithm.norm_adv_by_std_in_grpo": r.algorithm.normalize_by_std,
            "algorithm.use_kl_in_reward": False,
            "algorithm.rollout_correction.rollout_is": correction.importance,
            "algorithm.rollout_correction.rollout_is_threshold": correction.importance_threshold,
            "algorithm.rollout_correction.rollout_is_batch_normalize": correction.normalize,
            "algorithm.rollout_correction.rollout_rs": correction.rejection,
            "algorithm.rollout_correction.rollout_rs_threshold": correction.rejection_threshold,
        },
    )
    yield (
        "model",
        {
            "actor_rollout_ref.model.path": r.model.path,
            "actor_rollout_ref.model.use_remove_padding": r.model.remove_padding,
            "actor_rollout_ref.model.use_fused_kernels": r.model.fused_kernels,
        },
    )
    yield (
        "actor",
        {
            f"{ACTOR}.strategy": r.engine,
            f"{ACTOR}.ppo_mini_batch_size": r.batch.mini,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": r.batch.micro,
            f"{ACTOR}.use_dynamic_bsz": r.batch.dynamic,
            f"{ACTOR}.ppo_max_token_len_per_gpu": budget,
            f"{ACTOR}.optim.lr": r.optimizer.lr,
            f"{ACTOR}.optim.weight_decay": r.optimizer.weight_decay,
            f"{ACTOR}.optim.clip_grad": r.optimizer.clip_grad,
            f"{ACTOR}.optim.lr_warmup_steps": r.optimizer.lr_warmup_steps,
            f"{ACTOR}.optim.lr_decay_steps": r.optimizer.lr_decay_steps,
            **_under(f"{ACTOR}.optim.override_optimizer_config", r.optimizer.options),
            f"{ACTOR}.policy_loss.loss_mode": r.algorithm.policy_loss,
            f"{ACTOR}.loss_agg_mode": r.algorithm.loss_aggregation,
            f"{ACTOR}.clip_ratio_low": r.algorithm.clip_low,
            f"{ACTOR}.clip_ratio_high": r.algorithm.clip_high,
            f"{ACTOR}.clip_ratio_c": r.algorithm.clip_dual,
            f"{ACTOR}.entropy_coeff": r.algorithm.entropy_coeff,
            f"{ACTOR}.use_kl_loss": r.algorithm.kl_loss_coef is not None,
            f"{ACTOR}.kl_loss_coef": r.algorithm.kl_loss_coef,
            f"{ACTOR}.kl_loss_type": r.algorithm.kl_loss_type,
            f"{ACTOR}.use_torch_compile": r.model.torch_compile,
        },
    )
    yield (
        "parallel layout and memory",
        {
            **_mesh(r, engine),
            **_weights(r, engine),
            f"{engine}.sequence_parallel": r.parallel.sequence,
            f"{engine}.seed": r.trainer.seed,
            f"{engine}.use_remove_padding": r.model.remove_padding,
            f"{engine}.param_offload": r.memory.param_offload,
            f"{engine}.optimizer_offload": r.memory.optimizer_offload,
            f"{engine}.grad_offload": r.memory.param_offload,
            f"{engine}.router_replay.mode": r.algorithm.router_replay,
            **_transformer(r, engine),
            "actor_rollout_ref.nccl_timeout": r.trainer.collective_timeout,
        },
    )
    if r.algorithm.kl_loss_coef is not None:
        yield (
            "reference policy",
            {
                **_mesh(r, f"{REFERENCE}.{r.engine}"),
                **_weights(r, f"{REFERENCE}.{r.engine}"),
                f"{REFERENCE}.{r.engine}.param_offload": r.memory.param_offload,
                f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": log_prob_micro,
                f"{REFERENCE}.log_prob_use_dynamic_bsz": r.batch.dynamic,
                f"{REFERENCE}.log_prob_max_token_len_per_gpu": budget,
            },
        )
    yield (
        "rollout",
        {
            f"{ROLLOUT}.name": r.rollout.engine,
            f"{ROLLOUT}.n": r.rollout.n,
            f"{ROLLOUT}.tensor_model_parallel_size": r.rollout.tensor,
            f"{ROLLOUT}.data_parallel_size": r.rollout.data,
            f"{ROLLOUT}.expert_parallel_size": r.rollout.expert,
            f"{ROLLOUT}.dtype": r.rollout.dtype,
            f"{ROLLOUT}.temperature": r.rollout.temperature,
            f"{ROLLOUT}.top_p": r.rollout.top_p,
            f"{ROLLOUT}.top_k": r.rollout.top_k,
            f"{ROLLOUT}.seed": r.trainer.seed,
            f"{ROLLOUT}.gpu_memory_utilization": r.rollout.memory,
            f"{ROLLOUT}.max_num_batched_tokens": r.rollout.max_batched_tokens,
            f"{ROLLOUT}.max_num_seqs": r.rollout.max_sequences,
            f"{ROLLOUT}.max_model_len": r.rollout.max_model_len,
            f"{ROLLOUT}.enforce_eager": r.rollout.enforce_eager,
            f"{ROLLOUT}.enable_chunked_prefill": r.rollout.chunked_prefill,
            f"{ROLLOUT}.enable_prefix_caching": r.rollout.prefix_caching,
            f"{ROLLOUT}.free_cache_engine": r.rollout.free_cache,
            f"{ROLLOUT}.load_format": r.rollout.load_format,
            f"{ROLLOUT}.calculate_log_probs": r.rollout.log_probs,
            f"{ROLLOUT}.enable_rollout_routing_replay": _routing_replay(r),
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": log_prob_micro,
            f"{ROLLOUT}.log_prob_use_dynamic_bsz": r.batch.dynamic,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": budget,
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": r.rollout.update_bucket_mb,
            f"{ROLLOUT}.agent.num_workers": r.rollout.agent_workers,
            f"{ROLLOUT}.val_kwargs.n": r.rollout.validation.n,
            f"{ROLLOUT}.val_kwargs.do_sample": r.rollout.validation.do_sample,
            f"{ROLLOUT}.val_kwargs.temperature": r.rollout.validation.temperature,
            f"{ROLLOUT}.val_kwargs.top_p": r.rollout.validation.top_p,
            f"{ROLLOUT}.val_kwargs.top_k": r.rollout.validation.top_k,
            **_under(f"{ROLLOUT}.engine_kwargs.{r.rollout.engine}", r.rollout.engine_kwargs),
        },
    )
    yield (
        "reward",
        {
            "reward.custom_reward_function.path": r.reward.function,
            "reward.custom_reward_function.name": r.reward.name,
            **_under("reward.custom_reward_function.reward_kwargs", r.reward.kwargs),
            "reward.num_workers": r.reward.workers,
        },
    )
    yield (
        "checkpoint",
        {
            f"{ACTOR}.checkpoint.strict": r.checkpoint.strict,
            f"{ACTOR}.checkpoint.save_contents": r.checkpoint.contents or None,
            "trainer.default_local_dir": r.checkpoint.directory,
            "trainer.save_freq": r.checkpoint.save_freq,
            "trainer.max_actor_ckpt_to_keep": r.checkpoint.keep,
            "trainer.resume_mode": r.checkpoint.resume,
            "trainer.resume_from_path": r.checkpoint.resume_path,
        },
    )
    if r.mode == "fully_async":
        apart = r.fully_async
        yield (
            "training and generation apart",
            {
                "actor_rollout_ref.hybrid_engine": False,
                "rollout.nnodes": apart.rollout_nodes,
                "rollout.n_gpus_per_node": apart.rollout_devices or hardware.devices_per_node,
                "rollout.total_rollout_steps": apart.rollout_steps,
                "async_training.staleness_threshold": apart.staleness,
                "async_training.trigger_parameter_sync_step": apart.sync_every,
                "async_training.require_batches": apart.mini_batches,
                "async_training.partial_rollout": apart.partial_rollout,
            },
        )
    yield (
        "trainer",
        {
            "trainer.device": hardware.device,
            "trainer.nnodes": r.nodes,
            "trainer.n_gpus_per_node": r.devices or hardware.devices_per_node,
            "trainer.total_epochs": r.trainer.epochs,
            "trainer.total_training_steps": r.trainer.steps,
            "trainer.test_freq": r.trainer.test_freq,
            "trainer.val_before_train": r.trainer.val_before_train,
            "trainer.balance_batch": r.batch.balance,
            "trainer.logger": r.trainer.logger,
            "trainer.project_name": r.trainer.project,
            "trainer.experiment_name": r.trainer.experiment,
            "trainer.rollout_data_dir": f"{_attempt(r, attempt)}/rollouts" if r.trainer.rollout_dump else None,
            # Hydra would otherwise leave an outputs/DATE folder wherever the run was launched from.
            "hydra.run.dir": f"{_attempt(r, attempt)}/hydra",
        },
    )


def _mesh(r: Recipe, prefix: str) -> dict[str, Any]:
    """The parallel sizes. The reference policy repeats the actor's, context parallelism included."""
    return {
        f"{prefix}.tensor_model_parallel_size": r.parallel.tensor,
        f"{prefix}.pipeline_model_parallel_size": r.parallel.pipeline,
        f"{prefix}.virtual_pipeline_model_parallel_size": r.parallel.virtual_pipeline,
        f"{prefix}.context_parallel_size": r.parallel.context,
        f"{prefix}.expert_model_parallel_size": r.parallel.expert,
        f"{prefix}.expert_tensor_parallel_size": r.parallel.expert_tensor,
    }


def _weights(r: Recipe, prefix: str) -> dict[str, Any]:
    """How weights get in. The reference policy does not take the actor's distributed checkpoint over by itself."""
    bridge, converted = r.model.bridge, r.model.distributed_checkpoint
    return {
        f"{prefix}.use_mbridge": None if bridge is None else True,
        f"{prefix}.vanilla_mbridge": None if bridge is None else bridge == "mbridge",
        f"{prefix}.use_dist_checkpointing": None if converted is None else True,
        f"{prefix}.dist_checkpointing_path": converted,
    }


def _transformer(r: Recipe, engine: str) -> dict[str, Any]:
    """What Megatron's own dataclass takes: verl's Megatron engine reads one group of it, MindSpeed's another."""
    settings = {
        "recompute_granularity": r.memory.recompute,
        "recompute_method": r.memory.recompute_method,
        "recompute_num_layers": r.memory.recompute_layers,
        "pipeline_model_parallel_layout": r.parallel.pipeline_layout,
        "num_layers_in_first_pipeline_stage": r.parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": r.parallel.last_stage_layers,
    }
    if r.engine == "mindspeed":
        return {
            f"{engine}.strategy": r.mindspeed.strategy,
            **_under(f"{engine}.mcore_kwargs", {**settings, **r.mindspeed.mcore_kwargs}),
            **_under(f"{engine}.fsdp_kwargs", r.mindspeed.fsdp_kwargs),
        }
    # Ascend's patches read the size here, and Megatron in its own place: given once, one of them sees 1.
    if r.parallel.context > 1 and hardware_facts(r.hardware).device == "npu":
        settings["context_parallel_size"] = r.parallel.context
    return _under(f"{engine}.override_transformer_config", {**settings, **r.transformer})


def _routing_replay(r: Recipe) -> bool | None:
    """R3 trains on the experts the rollout chose, so the rollout must return them."""
    asked = r.rollout.routing_replay
    return True if asked is None and r.algorithm.router_replay == "R3" else asked


def _under(prefix: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in flatten(tree)}


def _ray(r: Recipe, modules: Sequence[str]) -> dict[str, Any]:
    """Ray does not pass our environment to workers of a cluster that was started earlier: say it in the runtime env."""
    variables = dict(r.env)
    if modules:
        variables[EXTERNAL_MODULES] = ",".join(modules)
    return {f"{RAY_ENVIRONMENT}.{name}": _Variable(text) for name, text in variables.items()}


def _environment(r: Recipe, modules: Sequence[str], attempt: int) -> dict[str, str]:
    variables = {
        **r.env,
        # verl opens this file for writing: one path per attempt, or a restart erases the earlier curve.
        "VERL_FILE_LOGGER_PATH": f"{_attempt(r, attempt)}/metrics.jsonl",
        "TENSORBOARD_DIR": f"{_attempt(r, attempt)}/tensorboard",
        "HYDRA_FULL_ERROR": "1",
    }
    if modules:
        variables[EXTERNAL_MODULES] = ",".join(modules)
    return variables


def _attempt(r: Recipe, attempt: int) -> str:
    return str(PurePosixPath(r.run_dir) / "attempts" / str(attempt))


def _overrides(known: Any, version: str, keys: Mapping[str, Any], *, keep_none: bool = False) -> tuple[str, ...]:
    """Turn {verl key: value} into Hydra overrides. None is left out, unless the user wrote it (`keep_none`)."""
    said = [(verl_schema.spelled(known, key), value) for key, value in keys.items() if keep_none or value is not None]
    if not keep_none:
        said = [(k, v) for k, v in said if k.rpartition(".")[2] not in WHERE_DECLARED or verl_schema.declares(known, k)]
    return tuple(f"{_sign(known, version, key)}{key}={quote(value)}" for key, value in said)


def _sign(known: Any, version: str, key: str) -> str:
    if key.startswith("hydra.") or verl_schema.declares(known, key):
        return ""
    if verl_schema.is_open(known, key):
        return "+"
    raise RecipeError(verl_schema.unknown(known, key, version))


def _last_wins(groups: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Keep only the last setting of a key: what a recipe says under `verl:` replaces what its fields say."""
    last = {_key_of(text): (title, text) for title, texts in groups for text in texts}
    kept = [(title, tuple(t for t in texts if last[_key_of(t)] == (title, t))) for title, texts in groups]
    return tuple((title, texts) for title, texts in kept if texts)


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
