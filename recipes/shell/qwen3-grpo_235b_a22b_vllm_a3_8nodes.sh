#!/usr/bin/env bash
# qwen3/grpo_235b_a22b_vllm_a3_8nodes: GRPO of Qwen3-235B-A22B with vLLM on GSM8K, eight A3 nodes
# verl 0.9.1, stack ascend-9.1.0, 8 node(s) of atlas_a3.
# Written by `recipes export qwen3/grpo_235b_a22b_vllm_a3_8nodes`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
# Note: The published script asks for gradient offload, a key verl 0.9.1 dropped, and stops there.
# Note: It waits 1500 s for links, the value for one node; here 3600 s.
# Note: Never run on NPUs by this workbook.
# Several nodes: export the environment below on each, then start Ray, on the head node
#   ray start --head --resources='{"NPU": 16}'
# and on every other node
#   ray start --address=HEAD:6379 --resources='{"NPU": 16}'
# with the same versions and paths everywhere; HCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name each node's own interface.
# When `ray status` shows all devices, run this on the head node.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/qwen3-grpo_235b_a22b_vllm_a3_8nodes/$(date +%Y%m%d-%H%M%S)}"
# The same within Hydra's single quotes.
work="${RECIPES_WORK//\'/\\\'}"
run_dir="${RUN_DIR//\'/\\\'}"

# ---- environment ----
export HCCL_CONNECT_TIMEOUT=3600
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
  data.train_batch_size=128
  data.max_prompt_length=8192
  data.max_response_length=4096
  data.truncation=error
  data.filter_overlong_prompts=false
)
# algorithm
command+=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
)
# model
command+=(
  "actor_rollout_ref.model.path='$work/models/Qwen3-235B-A22B'"
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.ppo_mini_batch_size=128
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288
  actor_rollout_ref.actor.optim.lr=1e-06
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.use_kl_loss=true
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8
  actor_rollout_ref.actor.megatron.context_parallel_size=1
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
  actor_rollout_ref.actor.megatron.param_offload=true
  actor_rollout_ref.actor.megatron.optimizer_offload=true
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
  +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11
  +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11
  actor_rollout_ref.nccl_timeout=7200
)
# reference policy
command+=(
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=8
  actor_rollout_ref.ref.megatron.context_parallel_size=1
  actor_rollout_ref.ref.megatron.expert_model_parallel_size=4
  actor_rollout_ref.ref.megatron.param_offload=true
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=12288
)
# rollout
command+=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=16
  actor_rollout_ref.rollout.tensor_model_parallel_size=8
  actor_rollout_ref.rollout.data_parallel_size=8
  actor_rollout_ref.rollout.expert_parallel_size=64
  actor_rollout_ref.rollout.gpu_memory_utilization=0.75
  actor_rollout_ref.rollout.max_num_batched_tokens=1024
  actor_rollout_ref.rollout.enforce_eager=false
  actor_rollout_ref.rollout.enable_chunked_prefill=true
  actor_rollout_ref.rollout.enable_prefix_caching=true
  actor_rollout_ref.rollout.free_cache_engine=true
  actor_rollout_ref.rollout.calculate_log_probs=true
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288
  +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
  '+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes=[8,16,32,64,128]'
)
# checkpoint
command+=(
  "trainer.default_local_dir='$run_dir/checkpoints'"
  trainer.save_freq=100
  trainer.resume_mode=disable
)
# trainer
command+=(
  trainer.device=npu
  trainer.nnodes=8
  trainer.n_gpus_per_node=16
  trainer.total_epochs=1
  trainer.test_freq=-1
  trainer.val_before_train=false
  trainer.balance_batch=true
  'trainer.logger=[console,file,tensorboard]'
  trainer.project_name=grpo-recipes
  "trainer.experiment_name='qwen3/grpo_235b_a22b_vllm_a3_8nodes'"
  "hydra.run.dir='$run_dir/attempts/1/hydra'"
)
# ray
command+=(
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_CONNECT_TIMEOUT='3600'"
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
