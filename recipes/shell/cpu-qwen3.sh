#!/usr/bin/env bash
# cpu/qwen3: smoke run of a tiny Qwen3, no accelerator
# verl 0.9.1, stack cpu, 1 node(s) of cpu.
# Written by `recipes export cpu/qwen3`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/cpu-qwen3/$(date +%Y%m%d-%H%M%S)}"
# The same within Hydra's single quotes.
work="${RECIPES_WORK//\'/\\\'}"
run_dir="${RUN_DIR//\'/\\\'}"

# ---- environment ----
export ASCEND_RT_VISIBLE_DEVICES=''
export CUDA_VISIBLE_DEVICES=''
export HF_HUB_OFFLINE=1
export HYDRA_FULL_ERROR=1
export OMP_NUM_THREADS=1
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=''
export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=''
export RAY_USAGE_STATS_ENABLED=0
export RAY_prestart_worker_first_driver=0
export RAY_worker_niceness=0
export RECIPES_CPU_DEADLINE=300
export RECIPES_CPU_FORK=1
export TENSORBOARD_DIR="$RUN_DIR/attempts/1/tensorboard"
export TORCHDYNAMO_DISABLE=1
export TQ_NUM_THREADS=1
export VERL_ENGINE_DEVICE=cuda
export VERL_FILE_LOGGER_PATH="$RUN_DIR/attempts/1/metrics.jsonl"
export VERL_PLATFORM=cpu

# Modules verl imports first: those already named, then the recipe's; no blanks, no duplicates.
modules=""
IFS=, read -ra named <<<"${VERL_USE_EXTERNAL_MODULES:-},"recipes.cpu.adaptor
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
  "data.train_files='$work/cpu/say/train.parquet'"
  "data.val_files='$work/cpu/say/val.parquet'"
  data.train_batch_size=8
  data.max_prompt_length=16
  data.max_response_length=8
  data.seed=1
  data.dataloader_num_workers=0
)
# algorithm
command+=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
)
# model
command+=(
  "actor_rollout_ref.model.path='$work/cpu/qwen3'"
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.ppo_mini_batch_size=4
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
  actor_rollout_ref.actor.use_dynamic_bsz=false
  actor_rollout_ref.actor.optim.lr=0.0001
  actor_rollout_ref.actor.use_kl_loss=false
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
  actor_rollout_ref.actor.megatron.context_parallel_size=1
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=1
  actor_rollout_ref.actor.megatron.sequence_parallel=false
  actor_rollout_ref.actor.megatron.seed=1
  actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=local
  +actor_rollout_ref.actor.megatron.override_transformer_config.masked_softmax_fusion=false
)
# rollout
command+=(
  actor_rollout_ref.rollout.name=hf_cpu
  actor_rollout_ref.rollout.n=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.seed=1
  actor_rollout_ref.rollout.calculate_log_probs=true
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false
  actor_rollout_ref.rollout.agent.num_workers=2
)
# reward
command+=(
  "reward.custom_reward_function.path='pkg://recipes.cpu.tiny_reward'"
  reward.num_workers=1
)
# checkpoint
command+=(
  "trainer.default_local_dir='$run_dir/checkpoints'"
  trainer.save_freq=-1
  trainer.resume_mode=disable
)
# trainer
command+=(
  trainer.device=cpu
  trainer.nnodes=1
  trainer.n_gpus_per_node=1
  trainer.total_training_steps=2
  trainer.test_freq=-1
  trainer.val_before_train=false
  'trainer.logger=[console,file,tensorboard]'
  trainer.project_name=grpo-recipes
  "trainer.experiment_name='cpu/qwen3'"
  "hydra.run.dir='$run_dir/attempts/1/hydra'"
)
# ray
command+=(
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM='cpu'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_DEVICE='cuda'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.CUDA_VISIBLE_DEVICES=''"
  "+ray_kwargs.ray_init.runtime_env.env_vars.ASCEND_RT_VISIBLE_DEVICES=''"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=''"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=''"
  "+ray_kwargs.ray_init.runtime_env.env_vars.TORCHDYNAMO_DISABLE='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.TQ_NUM_THREADS='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HF_HUB_OFFLINE='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_USAGE_STATS_ENABLED='0'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_worker_niceness='0'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_prestart_worker_first_driver='0'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RECIPES_CPU_FORK='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RECIPES_CPU_DEADLINE='300'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$VERL_USE_EXTERNAL_MODULES'"
)
# any other verl key
command+=(
  actor_rollout_ref.model.use_remove_padding=false
  actor_rollout_ref.actor.megatron.use_remove_padding=false
  actor_rollout_ref.actor.megatron.dtype=float32
  actor_rollout_ref.rollout.n_gpus_per_node=1
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
  +ray_kwargs.ray_init.address=local
  ray_kwargs.ray_init.num_cpus=16
  +ray_kwargs.ray_init.resources.cpu_rank=1
  +ray_kwargs.ray_init.include_dashboard=false
  +ray_kwargs.ray_init.object_store_memory=200000000
)

if [ "${1:-}" = --print ]; then
  shift
  for name in ASCEND_RT_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES HF_HUB_OFFLINE HYDRA_FULL_ERROR OMP_NUM_THREADS RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES RAY_USAGE_STATS_ENABLED RAY_prestart_worker_first_driver RAY_worker_niceness RECIPES_CPU_DEADLINE RECIPES_CPU_FORK TENSORBOARD_DIR TORCHDYNAMO_DISABLE TQ_NUM_THREADS VERL_ENGINE_DEVICE VERL_FILE_LOGGER_PATH VERL_PLATFORM VERL_USE_EXTERNAL_MODULES; do printf '%s=%q\n' "$name" "${!name}"; done
  printf '%q ' "${command[@]}" "$@"
  echo
  exit 0
fi

# Makes the model and the data here, unless they are there.
"$PYTHON" -m recipes.cpu.tiny_models qwen3 "$RECIPES_WORK/cpu/qwen3" --data "$RECIPES_WORK/cpu/say"

mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
