# Misspelt keys, keys no release has, and what Hydra cannot read.
python3 -m verl.trainer.main_ppo model_engine=megatron \
  data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=32 \
  data.max_prompt_length=512 data.max_response_length=512 data.max_promt_length=512 \
  actor_rollout_ref.model.path=/models/Some-New-Model-7B actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8,16 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
  +actor_rollout_ref.rollout.limit_images=4 '~actor_rollout_ref.actor.optim.betas' 'trainer.x={a' \
  trainer.device=cuda trainer.n_gpus_per_node=8
