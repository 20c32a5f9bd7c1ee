#!/usr/bin/env bash
# Arguments that depend on switches.
USE_KL=${USE_KL:-1}
ENGINE=${ENGINE:-vllm}
SMALL=${SMALL:-}
common=(algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.max_prompt_length=512 data.max_response_length=512
  actor_rollout_ref.model.path=/models/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=5e-7
  actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.device=npu trainer.n_gpus_per_node=8)
if [ "$USE_KL" -eq 1 ]; then
  common+=(actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001)
else
  common+=(actor_rollout_ref.actor.use_kl_loss=False)
fi
case "$ENGINE" in
  sg*) common+=(actor_rollout_ref.rollout.name=sglang) ;;
  vllm|hf) common+=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.enforce_eager=True) ;;
  *) echo "unknown engine $ENGINE"; exit 1 ;;
esac
[[ -n "$SMALL" && $ENGINE == v* ]] && batch=16 || batch=32
for seed in 1; do
  common+=("data.seed=$seed")
done
[ -f extra.sh ] && source extra.sh
python3 -m verl.trainer.main_ppo model_engine=megatron "${common[@]}" \
  data.train_batch_size=$batch actor_rollout_ref.rollout.n=4 "${@:2}"
