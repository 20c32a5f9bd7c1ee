#!/usr/bin/env bash
# The head starts Ray, waits, and trains; the others join.
ulimit -n 32768
source /usr/local/Ascend/ascend-toolkit/set_env.sh
nnodes=${1:-2}
master=${2:-10.0.0.1}
local_ip=$(hostname -I | awk '{print $1}')
export GLOO_SOCKET_IFNAME=eth0
export HCCL_CONNECT_TIMEOUT=3600
if [ "$master" = "$local_ip" ]; then
  ray start --head --port 6379 --resources='{"NPU": 16}'
  while true; do
    count=$(ray status | grep -c NPU)
    if [ "$count" -ge $((nnodes * 16)) ]; then break; fi
    sleep 5
  done
  python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo data.train_files=/data/train.parquet data.val_files=/data/test.parquet data.train_batch_size=64 \
    data.max_prompt_length=1024 data.max_response_length=1024 \
    actor_rollout_ref.model.path=/models/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    trainer.device=npu trainer.nnodes=$nnodes trainer.n_gpus_per_node=16
else
  ray start --address="$master:6379" --resources='{"NPU": 16}'
fi
