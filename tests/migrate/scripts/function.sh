#!/usr/bin/env bash
# The launch is a function; the log's name holds the date.
timestamp=$(date +%Y%m%d_%H%M%S)
log_dir=logs/$(basename "/models/Qwen3-8B/")
mkdir -p "$log_dir"
cat > "$log_dir/readme" <<EOF
python3 -m verl.trainer.main_ppo this=is not=a launch
EOF
run_training() {
  local lr=$1
  shift
  python3 -m verl.trainer.main_ppo model_engine=megatron \
    algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=32 \
    data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.model.path=/models/Qwen3-8B \
    actor_rollout_ref.actor.optim.lr=$lr \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    trainer.device=npu trainer.n_gpus_per_node=8 \
    trainer.experiment_name="$(basename /models/Qwen3-8B)-lr$lr" "$@" 2>&1 | tee "$log_dir/$timestamp.log"
}
run_training 2e-6 trainer.total_epochs=3 'trainer.logger=[console, "tensorboard"]'
