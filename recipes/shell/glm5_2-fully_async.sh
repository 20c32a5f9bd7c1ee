#!/usr/bin/env bash
# glm5_2/fully_async: GSPO of GLM-5.2, 256 devices training and 256 generating at the same time
# verl 0.9.1, stack ascend-9.1.0, 16 node(s) of atlas_a3.
# Written by `recipes export glm5_2/fully_async`, workbook 0.1.0. Do not edit: change the recipe.
# --print as the first argument shows what would run. All other arguments are Hydra overrides and come last.
# Note: Needs 32 nodes: 16 that train and 16 that generate.
# Note: The published script must be started from a checkout of verl, whose files its configuration looks for in the current folder; here verl is taken as installed.
# Note: It describes a reference policy with another context parallelism than the actor's; without KL loss there is none, so nothing of it is set here.
# Note: It validates on its training file, resumes from a directory in which it never saves, and names no external module.
# Note: Its rollout correction is without effect in verl 0.9.1, seen in a rehearsal: with bypass_mode, this entry's default, the trainer picks the loss that makes it after its ranks were given theirs. They train with policy_loss and clipping alone. verl.algorithm.rollout_correction.bypass_mode=false corrects, for one more forward pass.
# Note: Never run on NPUs by this workbook.
# Several nodes: export the environment below on each, then start Ray, on the head node
#   ray start --head --resources='{"NPU": 16}'
# and on every other node
#   ray start --address=HEAD:6379 --resources='{"NPU": 16}'
# with the same versions and paths everywhere; HCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name each node's own interface.
# When `ray status` shows all devices, run this on the head node.
set -euo pipefail

# ---- places: set these variables to change them ----
PYTHON="${PYTHON:-python3}"
RECIPES_WORK="${RECIPES_WORK:-$PWD/work}"
RUN_DIR="${RUN_DIR:-$PWD/runs/glm5_2-fully_async/$(date +%Y%m%d-%H%M%S)}"
# The same within Hydra's single quotes.
work="${RECIPES_WORK//\'/\\\'}"
run_dir="${RUN_DIR//\'/\\\'}"

# ---- environment ----
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_EXEC_TIMEOUT=3600
export HYDRA_FULL_ERROR=1
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
export TENSORBOARD_DIR="$RUN_DIR/attempts/1/tensorboard"
export VERL_FILE_LOGGER_PATH="$RUN_DIR/attempts/1/metrics.jsonl"
export VERL_VLLM_ASCEND_GLM52_PATCH=1

# Modules verl imports first: those already named, then the recipe's; no blanks, no duplicates.
modules=""
IFS=, read -ra named <<<"${VERL_USE_EXTERNAL_MODULES:-},"megatron_adaptor
for module in "${named[@]}"; do
  module="${module//[[:space:]]/}"
  [ -n "$module" ] || continue
  case ",$modules," in *",$module,"*) ;; *) modules="${modules:+$modules,}$module" ;; esac
done
export VERL_USE_EXTERNAL_MODULES="$modules"

# ---- the run ----
command=("$PYTHON" -u -m verl.experimental.fully_async_policy.fully_async_main)
# engine
command+=(
  model_engine=megatron
)
# data
command+=(
  "data.train_files='$work/data/dapo-math/train.parquet'"
  "data.val_files='$work/data/dapo-math/test.parquet'"
  data.train_batch_size=0
  data.max_prompt_length=2048
  data.max_response_length=32768
  data.truncation=left
  data.filter_overlong_prompts=false
  +data.apply_chat_template_kwargs.enable_thinking=false
)
# algorithm
command+=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
  algorithm.rollout_correction.rollout_is=token
  algorithm.rollout_correction.rollout_is_threshold=2.0
  algorithm.rollout_correction.rollout_is_batch_normalize=false
  algorithm.rollout_correction.rollout_rs=seq_mean_k1
  "algorithm.rollout_correction.rollout_rs_threshold='0.98_1.02'"
)
# model
command+=(
  "actor_rollout_ref.model.path='$work/models/GLM-5.2'"
  actor_rollout_ref.model.use_remove_padding=false
  actor_rollout_ref.model.use_fused_kernels=false
)
# actor
command+=(
  actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
  actor_rollout_ref.actor.use_dynamic_bsz=false
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=34816
  actor_rollout_ref.actor.optim.lr=1e-06
  actor_rollout_ref.actor.optim.lr_decay_steps=6400
  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=true
  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1
  +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=true
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
  actor_rollout_ref.actor.clip_ratio_low=0.0003
  actor_rollout_ref.actor.clip_ratio_high=0.0004
  actor_rollout_ref.actor.clip_ratio_c=10.0
  actor_rollout_ref.actor.use_kl_loss=false
  actor_rollout_ref.actor.use_torch_compile=false
)
# parallel layout and memory
command+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8
  actor_rollout_ref.actor.megatron.context_parallel_size=4
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=32
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
  actor_rollout_ref.actor.megatron.use_mbridge=true
  actor_rollout_ref.actor.megatron.vanilla_mbridge=false
  actor_rollout_ref.actor.megatron.use_remove_padding=false
  actor_rollout_ref.actor.megatron.param_offload=true
  actor_rollout_ref.actor.megatron.optimizer_offload=true
  actor_rollout_ref.actor.megatron.router_replay.mode=R3
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
  "+actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout='Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L'"
  +actor_rollout_ref.actor.megatron.override_transformer_config.context_parallel_size=4
  actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=fused
  +actor_rollout_ref.actor.megatron.override_transformer_config.sequence_parallel=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=false
  +actor_rollout_ref.actor.megatron.override_transformer_config.masked_softmax_fusion=false
  +actor_rollout_ref.actor.megatron.override_transformer_config.bias_dropout_fusion=false
  +actor_rollout_ref.actor.megatron.override_transformer_config.attention_softmax_in_fp32=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.normalization=RMSNorm
  +actor_rollout_ref.actor.megatron.override_transformer_config.experimental_attention_variant=dsa
  +actor_rollout_ref.actor.megatron.override_transformer_config.dsa_indexer_use_sparse_loss=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.dsa_indexer_loss_coeff=0
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_enable_expert_bias=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_shared_expert_overlap=false
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_distributed_optimizer=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.dsa_grouped_recompute=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_rmsnorm=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.swiglu=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_swiglu=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_dsa_absorb=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_lightning_indexer=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_sparse_flash_attention=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_lightning_indexer_kl_loss=true
  +actor_rollout_ref.actor.megatron.override_transformer_config.context_parallel_algo=kvallgather_cp_algo
  +actor_rollout_ref.actor.megatron.override_transformer_config.reset_position_ids=false
  +actor_rollout_ref.actor.megatron.override_transformer_config.use_ascend_mc2=false
  actor_rollout_ref.nccl_timeout=7200
)
# rollout
command+=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=8
  actor_rollout_ref.rollout.data_parallel_size=8
  actor_rollout_ref.rollout.expert_parallel_size=64
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
  actor_rollout_ref.rollout.max_num_batched_tokens=4096
  actor_rollout_ref.rollout.max_num_seqs=64
  actor_rollout_ref.rollout.max_model_len=34816
  actor_rollout_ref.rollout.enforce_eager=false
  actor_rollout_ref.rollout.load_format=dummy
  actor_rollout_ref.rollout.calculate_log_probs=true
  actor_rollout_ref.rollout.enable_rollout_routing_replay=true
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=34816
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1824
  +actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.enable_cpu_binding=true
  +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
  '+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes=[2,4,8,16,24,32,64]'
  +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.num_nextn_predict_layers=1
  +actor_rollout_ref.rollout.engine_kwargs.vllm.safetensors_load_strategy=lazy
)
# checkpoint
command+=(
  actor_rollout_ref.actor.checkpoint.strict=false
  "trainer.default_local_dir='$run_dir/checkpoints'"
  trainer.save_freq=-1
  trainer.resume_mode=disable
)
# training and generation apart
command+=(
  actor_rollout_ref.hybrid_engine=false
  rollout.nnodes=16
  rollout.n_gpus_per_node=16
  rollout.total_rollout_steps=6400
  async_training.staleness_threshold=0.3
  async_training.trigger_parameter_sync_step=4
  async_training.require_batches=1
  async_training.partial_rollout=true
)
# trainer
command+=(
  trainer.device=npu
  trainer.nnodes=16
  trainer.n_gpus_per_node=16
  trainer.total_epochs=100
  trainer.test_freq=-1
  trainer.val_before_train=false
  trainer.balance_batch=false
  'trainer.logger=[console,file,tensorboard]'
  trainer.project_name=grpo-recipes
  "trainer.experiment_name='glm5_2/fully_async'"
  "trainer.rollout_data_dir='$run_dir/attempts/1/rollouts'"
  "hydra.run.dir='$run_dir/attempts/1/hydra'"
)
# ray
command+=(
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_VLLM_ASCEND_GLM52_PATCH='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_CONNECT_TIMEOUT='3600'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.HCCL_EXEC_TIMEOUT='3600'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES='1'"
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$VERL_USE_EXTERNAL_MODULES'"
)
# any other verl key
command+=(
  actor_rollout_ref.actor.megatron.pad_bshd_to_minibatch_max=false
)

if [ "${1:-}" = --print ]; then
  shift
  for name in HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT HYDRA_FULL_ERROR RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES TENSORBOARD_DIR VERL_FILE_LOGGER_PATH VERL_VLLM_ASCEND_GLM52_PATCH VERL_USE_EXTERNAL_MODULES; do printf '%s=%q\n' "$name" "${!name}"; done
  printf '%q ' "${command[@]}" "$@"
  echo
  exit 0
fi

mkdir -p "$RUN_DIR/attempts/1"
exec "${command[@]}" "$@"
