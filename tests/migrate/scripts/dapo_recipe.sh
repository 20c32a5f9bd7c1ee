#!/usr/bin/env bash
# A program of its own beside verl's trainer, with keys of its own.
project='DAPO'
exp="qwen3-8b-dapo"
python3 -m recipe.dapo.main_dapo --config-name=dapo_megatron_trainer \
  data.train_files=/data/dapo.parquet data.val_files=/data/aime.parquet \
  data.gen_batch_size=96 data.train_batch_size=32 \
  data.max_prompt_length=2048 data.max_response_length=4096 \
  algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
  actor_rollout_ref.model.path=/models/Qwen3-8B \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.grad_clip=1.0 \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
  reward_model.reward_manager=dapo \
  +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
  trainer.device=npu trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.project_name="${project}" trainer.experiment_name="${exp}" trainer.resume_mode=auto
