#!/usr/bin/env bash
# qwen3/grpo_8b_mindspeed_sglang_a3: GRPO of Qwen3-8B with MindSpeed's engine and SGLang on GSM8K, one A3 node
# verl 0.8.0, stack ascend-9.0.0, 1 node(s) of atlas_a3.
# Written by `recipes export qwen3/grpo_8b_mindspeed_sglang_a3`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
# Note: Needs MindSpeed-LLM beside the stack: the engine imports mindspeed_llm.
# Note: Never run on NPUs by this workbook.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/qwen3-grpo_8b_mindspeed_sglang_a3/$(date +%Y%m%d-%H%M%S)}"
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

# ---- the run ----
command=("$PYTHON" -u -m verl.trainer.main_ppo)
# engine
command+=(
  model_engine=mindspeed
)
# data
command+=(
  "data.train_files='$work/data/gsm8k/train.parquet'"
  "data.val_files='$work/data/gsm8k/test.parquet'"
  data.train_batch_size=16
  data.max_prompt_length=2048
  data.max_response_length=2048
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
  "actor_rollout_ref.model.path='$work/models/Qwen3-8B'"
  actor_rollout_ref.model.use_remove_padding=true
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=mindspeed
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
  actor_rollout_ref.actor.use_dynamic_bsz=false
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
  actor_rollout_ref.actor.optim.lr=1e-06
  actor_rollout_ref.actor.use_kl_loss=true
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.use_torch_compile=false
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.mindspeed.tensor_model_parallel_size=4
  actor_rollout_ref.actor.mindspeed.pipeline_model_parallel_size=4
  actor_rollout_ref.actor.mindspeed.context_parallel_size=1
  actor_rollout_ref.actor.mindspeed.expert_model_parallel_size=1
  actor_rollout_ref.actor.mindspeed.use_mbridge=true
  actor_rollout_ref.actor.mindspeed.vanilla_mbridge=true
  actor_rollout_ref.actor.mindspeed.use_remove_padding=true
  actor_rollout_ref.actor.mindspeed.param_offload=true
  actor_rollout_ref.actor.mindspeed.optimizer_offload=true
  actor_rollout_ref.actor.mindspeed.grad_offload=true
  actor_rollout_ref.actor.mindspeed.strategy=mindspeed_megatron
  +actor_rollout_ref.actor.mindspeed.mcore_kwargs.recompute_granularity=full
  +actor_rollout_ref.actor.mindspeed.mcore_kwargs.recompute_method=uniform
  +actor_rollout_ref.actor.mindspeed.mcore_kwargs.recompute_num_layers=1
  'actor_rollout_ref.actor.mindspeed.mcore_kwargs.spec=[mindspeed_llm.tasks.models.spec.qwen3_spec,layer_spec]'
  actor_rollout_ref.actor.mindspeed.mcore_kwargs.seq_length=4096
  actor_rollout_ref.actor.mindspeed.mcore_kwargs.micro_batch_size=1
  +actor_rollout_ref.actor.mindspeed.mcore_kwargs.num_query_groups=8
)
# reference policy
command+=(
  actor_rollout_ref.ref.mindspeed.tensor_model_parallel_size=4
  actor_rollout_ref.ref.mindspeed.pipeline_model_parallel_size=4
  actor_rollout_ref.ref.mindspeed.context_parallel_size=1
  actor_rollout_ref.ref.mindspeed.expert_model_parallel_size=1
  actor_rollout_ref.ref.mindspeed.use_mbridge=true
  actor_rollout_ref.ref.mindspeed.vanilla_mbridge=true
  actor_rollout_ref.ref.mindspeed.param_offload=true
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096
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
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
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
  "trainer.experiment_name='qwen3/grpo_8b_mindspeed_sglang_a3'"
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
)

if [ "${1:-}" = --print ]; then
  shift
  for name in DISABLE_L2_CACHE HCCL_CONNECT_TIMEOUT HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE HYDRA_FULL_ERROR RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES TASK_QUEUE_ENABLE TENSORBOARD_DIR VERL_FILE_LOGGER_PATH; do printf '%s=%q\n' "$name" "${!name}"; done
  printf '%q ' "${command[@]}" "$@"
  echo
  exit 0
fi

mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
