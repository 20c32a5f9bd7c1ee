#!/usr/bin/env bash
# qwen3/grpo_30b_a3b_sglang_a3: GRPO of Qwen3-30B-A3B with SGLang on DAPO-Math-17k, one A3 node
# verl 0.9.1, stack ascend-9.1.0, 1 node(s) of atlas_a3.
# Written by `recipes export qwen3/grpo_30b_a3b_sglang_a3`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
# Note: Convert the weights first: model.distributed_checkpoint is Megatron's own format, on a file system all nodes see.
# Note: The published script asks for gradient offload, a key verl 0.9.1 dropped, and stops there; and it switches a profiler on that no step uses.
# Note: Never run on NPUs by this workbook.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/qwen3-grpo_30b_a3b_sglang_a3/$(date +%Y%m%d-%H%M%S)}"
# The same within Hydra's single quotes.
work="${RECIPES_WORK//\'/\\\'}"
run_dir="${RUN_DIR//\'/\\\'}"

# ---- environment ----
export DISABLE_L2_CACHE=1
export HCCL_CONNECT_TIMEOUT=1500
export HCCL_HOST_SOCKET_PORT_RANGE=60000-60050
export HCCL_NPU_SOCKET_PORT_RANGE=61000-61050
export HYDRA_FULL_ERROR=1
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
export TASK_QUEUE_ENABLE=1
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
  "data.train_files='$work/data/dapo-math/train.parquet'"
  "data.val_files='$work/data/dapo-math/test.parquet'"
  data.train_batch_size=16
  data.max_prompt_length=2048
  data.max_response_length=8192
  data.truncation=left
  data.filter_overlong_prompts=false
)
# algorithm
command+=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
)
# model
command+=(
  "actor_rollout_ref.model.path='$work/models/Qwen3-30B-A3B'"
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
  actor_rollout_ref.actor.use_dynamic_bsz=false
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
  actor_rollout_ref.actor.optim.lr=1e-06
  actor_rollout_ref.actor.use_kl_loss=true
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.use_torch_compile=false
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
  actor_rollout_ref.actor.megatron.context_parallel_size=1
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=4
  actor_rollout_ref.actor.megatron.use_dist_checkpointing=true
  "actor_rollout_ref.actor.megatron.dist_checkpointing_path='$work/models/Qwen3-30B-A3B-mcore'"
  actor_rollout_ref.actor.megatron.param_offload=true
  actor_rollout_ref.actor.megatron.optimizer_offload=true
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=true
)
# reference policy
command+=(
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1
  actor_rollout_ref.ref.megatron.context_parallel_size=1
  actor_rollout_ref.ref.megatron.expert_model_parallel_size=4
  actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=4
  actor_rollout_ref.ref.megatron.use_dist_checkpointing=true
  "actor_rollout_ref.ref.megatron.dist_checkpointing_path='$work/models/Qwen3-30B-A3B-mcore'"
  actor_rollout_ref.ref.megatron.param_offload=true
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10240
)
# rollout
command+=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.rollout.enforce_eager=false
  actor_rollout_ref.rollout.calculate_log_probs=true
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=10240
  actor_rollout_ref.rollout.val_kwargs.n=1
  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0
  actor_rollout_ref.rollout.val_kwargs.top_p=1.0
  actor_rollout_ref.rollout.val_kwargs.top_k=-1
  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend
  +actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=-1
  +actor_rollout_ref.rollout.engine_kwargs.sglang.enable_dp_attention=false
)
# checkpoint
command+=(
  "trainer.default_local_dir='$run_dir/checkpoints'"
  trainer.save_freq=-1
  trainer.resume_mode=disable
)
# trainer
command+=(
  trainer.device=npu
  trainer.nnodes=1
  trainer.n_gpus_per_node=16
  trainer.total_epochs=15
  trainer.test_freq=-1
  trainer.val_before_train=false
  'trainer.logger=[console,file,tensorboard]'
  trainer.project_name=grpo-recipes
  "trainer.experiment_name='qwen3/grpo_30b_a3b_sglang_a3'"
  "hydra.run.dir='$run_dir/attempts/1/hydra'"
)
# ray
command+=(
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_CONNECT_TIMEOUT='1500'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_HOST_SOCKET_PORT_RANGE='60000-60050'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_NPU_SOCKET_PORT_RANGE='61000-61050'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.DISABLE_L2_CACHE='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.TASK_QUEUE_ENABLE='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$VERL_USE_EXTERNAL_MODULES'"
)

if [ "${1:-}" = --print ]; then
  shift
  for name in DISABLE_L2_CACHE HCCL_CONNECT_TIMEOUT HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE HYDRA_FULL_ERROR RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES TASK_QUEUE_ENABLE TENSORBOARD_DIR VERL_FILE_LOGGER_PATH VERL_USE_EXTERNAL_MODULES; do printf '%s=%q\n' "$name" "${!name}"; done
  printf '%q ' "${command[@]}" "$@"
  echo
  exit 0
fi

mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
