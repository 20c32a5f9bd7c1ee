#!/usr/bin/env bash
# qwen3/grpo_8b_vllm_a2: GRPO of Qwen3-8B on GSM8K, one A2 node
# verl 0.9.1, stack ascend-9.1.0, 1 node(s) of atlas_a2.
# Written by `recipes export qwen3/grpo_8b_vllm_a2`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
# Note: The published script is written for GPUs and trains on GSM8K and MATH together; here on GSM8K.
# Note: Never run on NPUs by this workbook.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/qwen3-grpo_8b_vllm_a2/$(date +%Y%m%d-%H%M%S)}"
# The same within Hydra's single quotes.
work="${RECIPES_WORK//\'/\\\'}"
run_dir="${RUN_DIR//\'/\\\'}"

# ---- environment ----
export HCCL_CONNECT_TIMEOUT=1500
export HCCL_HOST_SOCKET_PORT_RANGE=60000-60050
export HCCL_NPU_SOCKET_PORT_RANGE=61000-61050
export HYDRA_FULL_ERROR=1
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
export TENSORBOARD_DIR="$RUN_DIR/attempts/1/tensorboard"
export VERL_FILE_LOGGER_PATH="$RUN_DIR/attempts/1/metrics.jsonl"

# Modules verl imports first: those already named, then the recipe's; no blanks, no duplicates.
modules=""
IFS=, read -ra named <<<"${VERL_USE_EXTERNAL_MODULES:-},"megatron_adaptor
for module in "${named[@]}"; do
  module="${module//[[:space:]]/}"
  [ -n "$module" ] || continue
  case ",$modules," in *",$module,"*) ;; *) modules="${modules:+$modules,}$module" ;; esac
done
export VERL_USE_EXTERNAL_MODULES="$modules"

# ---- the run ----
command=("$PYTHON" -u -m verl.trainer.main_ppo)
# engine
command+=(
  model_engine=megatron
)
# data
command+=(
  "data.train_files='$work/data/gsm8k/train.parquet'"
  "data.val_files='$work/data/gsm8k/test.parquet'"
  data.train_batch_size=1024
  data.max_prompt_length=1024
  data.max_response_length=2048
  data.truncation=error
  data.filter_overlong_prompts=true
)
# algorithm
command+=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
)
# model
command+=(
  "actor_rollout_ref.model.path='$work/models/Qwen3-8B'"
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.ppo_mini_batch_size=256
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
  actor_rollout_ref.actor.optim.lr=1e-06
  actor_rollout_ref.actor.use_kl_loss=true
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
  actor_rollout_ref.actor.megatron.context_parallel_size=1
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=1
)
# reference policy
command+=(
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
  actor_rollout_ref.ref.megatron.context_parallel_size=1
  actor_rollout_ref.ref.megatron.expert_model_parallel_size=1
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
)
# rollout
command+=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=5
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.calculate_log_probs=true
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
)
# checkpoint
command+=(
  "trainer.default_local_dir='$run_dir/checkpoints'"
  trainer.save_freq=20
  trainer.resume_mode=disable
)
# trainer
command+=(
  trainer.device=npu
  trainer.nnodes=1
  trainer.n_gpus_per_node=8
  trainer.total_epochs=15
  trainer.test_freq=5
  trainer.val_before_train=true
  trainer.balance_batch=true
  'trainer.logger=[console,file,tensorboard]'
  trainer.project_name=grpo-recipes
  "trainer.experiment_name='qwen3/grpo_8b_vllm_a2'"
  "hydra.run.dir='$run_dir/attempts/1/hydra'"
)
# ray
command+=(
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_CONNECT_TIMEOUT='1500'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_HOST_SOCKET_PORT_RANGE='60000-60050'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_NPU_SOCKET_PORT_RANGE='61000-61050'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$VERL_USE_EXTERNAL_MODULES'"
)

if [ "${1:-}" = --print ]; then
  shift
  for name in HCCL_CONNECT_TIMEOUT HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE HYDRA_FULL_ERROR RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES TENSORBOARD_DIR VERL_FILE_LOGGER_PATH VERL_USE_EXTERNAL_MODULES; do printf '%s=%q\n' "$name" "${!name}"; done
  printf '%q ' "${command[@]}" "$@"
  echo
  exit 0
fi

mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
