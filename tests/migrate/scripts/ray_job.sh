# Submitted to a cluster that runs already; the runtime environment is a file.
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/runtime_env.yaml"}
offload=True

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m verl.trainer.main_ppo \
    --config-name ppo_megatron_trainer \
    algorithm.adv_estimator=grpo data.train_files="/data/dapo math/train.parquet" \
    data.val_files=/data/aime.parquet \
    data.train_batch_size=512 data.max_prompt_length=2048 data.max_response_length=6144 \
    actor_rollout_ref.model.path=/models/Qwen3-32B \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=${offload} \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOG="'info'" \
    trainer.device=npu trainer.n_gpus_per_node=8 trainer.nnodes=4
