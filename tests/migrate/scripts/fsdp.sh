# Another training engine than this workbook has.
python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet \
  actor_rollout_ref.model.path=/models/Qwen3-8B actor_rollout_ref.actor.fsdp_config.param_offload=True
