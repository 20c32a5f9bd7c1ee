#!/usr/bin/env bash
# Training and generation on nodes of their own.
gen_nodes=2; train_nodes=2
rollout_args=(
  actor_rollout_ref.hybrid_engine=False
  rollout.nnodes=$gen_nodes rollout.n_gpus_per_node=16 rollout.total_rollout_steps=$((64 * 100))
  async_training.staleness_threshold=0.3 async_training.trigger_parameter_sync_step=4
  async_training.require_batches=1 async_training.partial_rollout=True
)
python -m verl.experimental.fully_async_policy.fully_async_main \
  --config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml "${rollout_args[@]}" \
  algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=0 \
  data.max_prompt_length=2048 data.max_response_length=4096 \
  actor_rollout_ref.model.path=/models/Qwen3-30B-A3B actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  trainer.device=npu trainer.nnodes=$train_nodes trainer.n_gpus_per_node=16
