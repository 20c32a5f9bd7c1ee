#!/usr/bin/env bash
# Adjustable values, values derived from them, arrays, launch.
set -euo pipefail
NNODES=${NNODES:-2}
NDEVICES=${NDEVICES:-16}
root=${WORK_ROOT:=/share}
MODEL_PATH="${MODEL_PATH:-${root}/models/Qwen3-30B-A3B}"
model_name=${MODEL_PATH##*/}

max_prompt=$((1024 * 2))
max_response=$((1024 * 8))
budget=$(( (max_prompt + max_response) * 3 / 2 ))

DATA=(
  # the parquet files
  data.train_files="${root}/data/train.parquet"
  data.val_files="${root}/data/test.parquet"   # held out
  data.train_batch_size=64
  data.max_prompt_length=${max_prompt}
  data.max_response_length=$max_response
)
MODEL=(actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.model.use_remove_padding=True)
ACTOR=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
  ++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
)
EMPTY=()
ROLLOUT=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend
)
ROLLOUT+=(actor_rollout_ref.rollout.gpu_memory_utilization=0.5 "${EMPTY[@]}")

python3 -u -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \
  "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
  trainer.device=npu trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$NDEVICES" \
  trainer.experiment_name="${model_name}-$NNODES/$NDEVICES-n${#DATA[@]}" "$@"
