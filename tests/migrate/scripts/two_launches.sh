# A grid in one file.
args="data.train_files=a data.val_files=b"
python3 -m verl.trainer.main_ppo model_engine=megatron $args actor_rollout_ref.actor.optim.lr=1e-6
python3 -m verl.trainer.main_ppo model_engine=megatron $args actor_rollout_ref.actor.optim.lr=2e-6
