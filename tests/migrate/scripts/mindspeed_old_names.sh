#!/bin/bash
# MindSpeed's engine under its first names.
set -e
export HCCL_CONNECT_TIMEOUT=1500
MODEL=/models/Qwen3-8B
ENGINE=(
  actor_rollout_ref.actor.strategy=mindspeed
  actor_rollout_ref.actor.mindspeed.strategy=mindspeed_llm
  actor_rollout_ref.actor.mindspeed.tensor_model_parallel_size=4
  actor_rollout_ref.actor.mindspeed.pipeline_model_parallel_size=4
  actor_rollout_ref.actor.mindspeed.use_mbridge=True
  actor_rollout_ref.actor.mindspeed.vanilla_mbridge=True
  +actor_rollout_ref.actor.mindspeed.llm_kwargs.seq_length=4096
  +actor_rollout_ref.actor.mindspeed.llm_kwargs.micro_batch_size=1
  '+actor_rollout_ref.actor.mindspeed.llm_kwargs.spec=[mindspeed_llm.tasks.models.spec.qwen3_spec, layer_spec]'
)
python -m verl.trainer.main_ppo model_engine=mindspeed "${ENGINE[@]}" \
  algorithm.adv_estimator=grpo data.train_files=/data/train.parquet data.val_files=/data/test.parquet data.train_batch_size=16 \
  data.max_prompt_length=2048 data.max_response_length=2048 \
  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=8 \
  trainer.device=npu trainer.nnodes=1 trainer.n_gpus_per_node=16
