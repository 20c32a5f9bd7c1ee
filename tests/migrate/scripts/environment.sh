#!/usr/bin/env bash
# Variables of every kind: of the run, of the node, secret, searched.
export VERL_USE_EXTERNAL_MODULES="megatron_adaptor, my_plugin"
export WANDB_API_KEY=0123456789abcdef
export HCCL_SOCKET_IFNAME=enp66s0f0
export PYTHONPATH=$PWD:$PYTHONPATH
export TASK_QUEUE_ENABLE=2 HCCL_BUFFSIZE=300
export TENSORBOARD_DIR=tb/$(date +%F)
export RUN_TAG="node-$(hostname)"
NOT_EXPORTED=1
VLLM_ASCEND_ENABLE_NZ=0 python3 -m verl.trainer.main_ppo model_engine=megatron \
  algorithm.adv_estimator=grpo data.train_files=~/data/a.parquet data.val_files=$HOME/data/b.parquet data.train_batch_size=32 \
  data.max_prompt_length=512 data.max_response_length=512 \
  actor_rollout_ref.model.path=${MODEL_PATH} actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
  trainer.default_local_dir='checkpoints/${trainer.project_name}/${trainer.experiment_name}' \
  trainer.device=npu trainer.n_gpus_per_node=8 trainer.nnodes=${CLUSTER_NODES}
