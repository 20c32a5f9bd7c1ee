"""What a recipe may say: the dataclasses OmegaConf coerces every value to, each with the meaning `explain` prints.

`None` always means "leave it to verl": the key is then absent from the command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

# OmegaConf reads annotations at run time and knows typing.Optional better than `X | None` inside containers.
# ruff: noqa: UP045


# Rules of recipes.verdict that may end a run early; a test holds the two equal.
STOP_ON = ("NAN", "MISMATCH", "ENTROPY COLLAPSE", "KL BLOW-UP", "NO SIGNAL", "REWARD COLLAPSE")


def item(default: Any, meaning: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    """Declare a field with its meaning, the names it accepts and the smallest number it accepts."""
    metadata = {"meaning": meaning, "choices": choices, "minimum": minimum}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Model:
    name: str = item("???", "a file of facts under params/models/")
    path: str = item("???", "directory with config.json, tokenizer and safetensors, or a hub id")
    bridge: Optional[str] = item(
        None,
        "what converts weights between Hugging Face and Megatron: NVIDIA's Megatron-Bridge, or mbridge, verl's vanilla",
        choices=("megatron_bridge", "mbridge"),
    )
    distributed_checkpoint: Optional[str] = item(None, "load these converted weights instead (dist_checkpointing_path)")
    remove_padding: Optional[bool] = item(None, "pack sequences without padding, in model and engine alike")
    fused_kernels: Optional[bool] = item(None, "fuse the logits with the loss (use_fused_kernels)")
    torch_compile: Optional[bool] = item(None, "compile the loss of actor and reference (use_torch_compile)")


@dataclass
class Parallel:
    """Megatron-Core's mesh. World = nodes x devices a node; data parallel = world / (tensor x pipeline x context)."""

    tensor: int = item(1, "tensor_model_parallel_size", minimum=1)
    pipeline: int = item(1, "pipeline_model_parallel_size", minimum=1)
    context: int = item(1, "context_parallel_size", minimum=1)
    expert: int = item(1, "expert_model_parallel_size", minimum=1)
    expert_tensor: Optional[int] = item(None, "expert_tensor_parallel_size; unset: the same as tensor", minimum=1)
    virtual_pipeline: Optional[int] = item(None, "virtual_pipeline_model_parallel_size", minimum=2)
    sequence: Optional[bool] = item(None, "sequence_parallel; verl turns it off by itself when tensor is 1")
    pipeline_layout: Optional[str] = item(None, "stages in Megatron's notation, such as Et*10|t*12|…|t*4L")
    first_stage_layers: Optional[int] = item(None, "num_layers_in_first_pipeline_stage", minimum=1)
    last_stage_layers: Optional[int] = item(None, "num_layers_in_last_pipeline_stage", minimum=1)


@dataclass
class MindSpeed:
    """Ascend's own training engine, for `engine: mindspeed`; verl 0.8.0 and 0.9.0 have it, 0.9.1 has not."""

    strategy: str = item(
        "mindspeed_megatron", "which of its engines trains", choices=("mindspeed_megatron", "mindspeed_fsdp")
    )
    mcore_kwargs: dict[str, Any] = item({}, "Megatron arguments of mindspeed_megatron, merged last")
    fsdp_kwargs: dict[str, Any] = item({}, "arguments of mindspeed_fsdp, which no released verl reads")


@dataclass
class FullyAsync:
    """Training and generation on nodes of their own, for `mode: fully_async`; nodes and devices are the trainer's."""

    rollout_nodes: Optional[int] = item(None, "nodes that generate, besides those that train", minimum=1)
    rollout_devices: Optional[int] = item(None, "devices used on each of them; unset: all the hardware has", minimum=1)
    rollout_steps: Optional[int] = item(None, "prompts generated in the whole run (total_rollout_steps)", minimum=1)
    staleness: Optional[float] = item(None, "share of samples that may come from older weights", minimum=0)
    sync_every: Optional[int] = item(None, "updates between two weight syncs (trigger_parameter_sync_step)", minimum=1)
    mini_batches: Optional[int] = item(None, "mini batches fetched for an update (require_batches)", minimum=1)
    partial_rollout: Optional[bool] = item(None, "continue responses a sync interrupts, instead of dropping them")


@dataclass
class Batch:
    train: int = item("???", "prompts a step (train_batch_size)", minimum=0)
    mini: int = item("???", "prompts an optimizer update (ppo_mini_batch_size)", minimum=1)
    micro: Optional[int] = item(None, "sequences a device holds at once in the update", minimum=1)
    log_prob_micro: Optional[int] = item(None, "the same for log-prob passes; unset: as micro", minimum=1)
    dynamic: Optional[bool] = item(None, "pack micro batches by tokens (use_dynamic_bsz) instead of by sequences")
    max_tokens: Optional[int] = item(None, "token budget of a packed micro batch on one device", minimum=1)
    balance: Optional[bool] = item(None, "even out sequence lengths over data-parallel ranks (balance_batch)")


@dataclass
class Data:
    train_files: str = item("???", "parquet with verl's columns: prompt, data_source, reward_model")
    val_files: str = item("???", "parquet for validation; never the training file")
    max_prompt_length: int = item("???", "longest prompt in tokens", minimum=1)
    max_response_length: int = item("???", "longest response in tokens", minimum=1)
    truncation: Optional[str] = item(
        None, "what happens to a longer prompt", choices=("error", "left", "right", "middle")
    )
    filter_overlong_prompts: Optional[bool] = item(None, "drop longer prompts when the data is read")
    shuffle: Optional[bool] = item(None, "shuffle the training prompts")
    dataloader_workers: Optional[int] = item(None, "processes that read data (dataloader_num_workers)", minimum=0)
    chat_template_kwargs: dict[str, Any] = item({}, "passed to the chat template, such as enable_thinking")


@dataclass
class RolloutCorrection:
    """Importance weights and rejection for the trainer-vs-rollout mismatch (algorithm.rollout_correction)."""

    importance: Optional[str] = item(None, "level of the importance weight", choices=("token", "sequence"))
    importance_threshold: Optional[float] = item(None, "truncate the weight above this", minimum=0)
    normalize: Optional[bool] = item(None, "divide weights by their batch mean")
    rejection: Optional[str] = item(None, "rule that drops tokens or sequences, such as token_k1")
    rejection_threshold: Optional[str] = item(None, "its bounds as low_high, such as 0.6_1.6")


@dataclass
class Algorithm:
    advantage: str = item("grpo", "advantage estimator (adv_estimator)")
    normalize_by_std: Optional[bool] = item(None, "divide a group's advantages by their standard deviation")
    policy_loss: Optional[str] = item(None, "policy loss of the actor (policy_loss.loss_mode), such as gspo")
    loss_aggregation: Optional[str] = item(None, "loss_agg_mode: how token losses become one number")
    clip_low: Optional[float] = item(None, "lower clip of the probability ratio", minimum=0)
    clip_high: Optional[float] = item(None, "upper clip of the probability ratio", minimum=0)
    clip_dual: Optional[float] = item(None, "dual clip for negative advantages (clip_ratio_c)", minimum=1)
    entropy_coeff: Optional[float] = item(None, "weight of the entropy bonus")
    kl_loss_coef: Optional[float] = item(None, "weight of the KL loss to the reference policy; unset: no KL loss")
    kl_loss_type: Optional[str] = item(None, "estimator of that KL, such as low_var_kl")
    router_replay: Optional[str] = item(
        None,
        "experts used in training: as the old policy chose (R2) or as the rollout chose (R3)",
        choices=("disabled", "R2", "R3"),
    )
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)


@dataclass
class Optimizer:
    lr: float = item("???", "learning rate of the actor", minimum=0)
    weight_decay: Optional[float] = item(None, "decoupled weight decay", minimum=0)
    clip_grad: Optional[float] = item(None, "largest norm of the gradient", minimum=0)
    lr_warmup_steps: Optional[int] = item(None, "steps of linear warm-up")
    lr_decay_steps: Optional[int] = item(None, "steps until the learning rate is at its end", minimum=1)
    options: dict[str, Any] = item({}, "Megatron optimizer settings (override_optimizer_config)")


@dataclass
class Memory:
    param_offload: Optional[bool] = item(None, "keep weights on the host while they are not used")
    optimizer_offload: Optional[bool] = item(None, "keep optimizer state on the host while it is not used")
    recompute: Optional[str] = item(
        None, "activations to recompute (recompute_granularity)", choices=("full", "selective")
    )
    recompute_method: Optional[str] = item(None, "recompute_method", choices=("uniform", "block"))
    recompute_layers: Optional[int] = item(None, "recompute_num_layers", minimum=1)


@dataclass
class Validation:
    n: Optional[int] = item(None, "responses a validation prompt", minimum=1)
    do_sample: Optional[bool] = item(None, "sample instead of taking the most likely token")
    temperature: Optional[float] = item(None, "sampling temperature in validation", minimum=0)
    top_p: Optional[float] = item(None, "nucleus sampling in validation", minimum=0)
    top_k: Optional[int] = item(None, "top-k sampling in validation; -1: off")


@dataclass
class Rollout:
    engine: str = item("???", "what generates", choices=("vllm", "sglang", "hf_cpu"))
    n: int = item("???", "responses a prompt: the group GRPO compares", minimum=1)
    tensor: Optional[int] = item(None, "tensor parallel size of the rollout engine", minimum=1)
    data: Optional[int] = item(None, "data parallel size of one rollout replica", minimum=1)
    expert: Optional[int] = item(None, "expert parallel size of the rollout: 1, or tensor x data", minimum=1)
    dtype: Optional[str] = item(None, "precision of the rollout weights", choices=("bfloat16", "float16", "float32"))
    temperature: Optional[float] = item(None, "sampling temperature", minimum=0)
    top_p: Optional[float] = item(None, "nucleus sampling", minimum=0)
    top_k: Optional[int] = item(None, "top-k sampling; -1: off")
    memory: Optional[float] = item(None, "share of device memory for weights and KV cache", minimum=0)
    max_batched_tokens: Optional[int] = item(None, "tokens an engine step may hold (max_num_batched_tokens)", minimum=1)
    max_sequences: Optional[int] = item(None, "sequences an engine step may hold (max_num_seqs)", minimum=1)
    max_model_len: Optional[int] = item(None, "longest prompt + response the engine allows", minimum=1)
    enforce_eager: Optional[bool] = item(None, "run without graph capture")
    chunked_prefill: Optional[bool] = item(None, "split long prompts (enable_chunked_prefill)")
    prefix_caching: Optional[bool] = item(None, "reuse the KV cache of equal prefixes")
    free_cache: Optional[bool] = item(None, "give the KV cache back while training (free_cache_engine)")
    load_format: Optional[str] = item(None, "how the engine first gets weights, such as dummy or auto")
    log_probs: bool = item(True, "return the sampled tokens' log-probs, for the trainer-vs-rollout curves")
    routing_replay: Optional[bool] = item(
        None, "return the experts chosen (enable_rollout_routing_replay); unset: where algorithm.router_replay is R3"
    )
    update_bucket_mb: Optional[int] = item(
        None, "MiB of one weight-sync message; the largest tensor must fit (update_weights_bucket_megabytes)", minimum=1
    )
    engine_kwargs: dict[str, Any] = item({}, "passed to the engine itself (engine_kwargs.<engine>)")
    agent_workers: Optional[int] = item(None, "processes that drive the conversations", minimum=1)
    validation: Validation = field(default_factory=Validation)


@dataclass
class Reward:
    function: Optional[str] = item(
        None, "module (pkg://package.module) or file with the reward function; unset: verl's by data source"
    )
    name: Optional[str] = item(None, "name of the function; unset: compute_score")
    kwargs: dict[str, Any] = item({}, "passed to the reward function")
    workers: Optional[int] = item(None, "processes that compute rewards", minimum=1)


@dataclass
class Checkpoint:
    strict: Optional[bool] = item(
        None,
        "refuse or drop what the export of HF weights cannot match. False for a model whose MTP layer is neither "
        "trained nor exported; then the export is compared with the source checkpoint",
    )
    save_freq: int = item(-1, "steps between checkpoints; -1: none")
    contents: list[str] = item([], "what a checkpoint holds: model, optimizer, extra, hf_model")
    keep: Optional[int] = item(None, "checkpoints kept; 1 loses everything in a crash while saving", minimum=1)
    resume: str = item("disable", "where a run starts from", choices=("disable", "auto", "resume_path"))
    resume_path: Optional[str] = item(None, "the global_step_N directory for resume_path")
    directory: str = item("${run_dir}/checkpoints", "where checkpoints go")


@dataclass
class Trainer:
    steps: Optional[int] = item(None, "optimizer-driven steps (total_training_steps)", minimum=1)
    epochs: Optional[int] = item(None, "passes over the data; steps wins when both are set", minimum=1)
    test_freq: int = item(-1, "steps between validations; -1: none")
    val_before_train: bool = item(False, "validate before the first step")
    project: str = item("grpo-recipes", "project name for the loggers")
    experiment: str = item("${recipe}", "experiment name for the loggers")
    logger: list[str] = item(["console", "file", "tensorboard"], "where verl writes metrics")
    rollout_dump: bool = item(False, "keep prompts and responses of each step in the run directory")
    collective_timeout: Optional[int] = item(None, "seconds a collective may take (nccl_timeout)", minimum=1)
    seed: Optional[int] = item(None, "seed of data order, training and rollout", minimum=0)


@dataclass
class Supervision:
    """How a run is watched over. None of it reaches verl."""

    on_disconnect: str = item(
        "stop",
        "when the notebook, papermill or shell that launched it goes away: end the training, or let it go on",
        choices=("stop", "continue"),
    )
    hang_factor: float = item(
        10.0, "no step for so many times the median step: the run is taken to hang, its stacks are saved", minimum=1
    )
    hang_minutes: float = item(10.0, "but not before so many minutes without a step", minimum=0)
    startup_minutes: Optional[float] = item(
        120.0,
        "no first step, or no second one, after so many minutes: it is taken to hang; null: wait for ever",
        minimum=0,
    )
    on_hang: str = item("alarm", "what a hang does: say so and go on, or end the run", choices=("alarm", "stop"))
    stop_on: list[str] = item(
        [],
        "rules of the verdict that end the run as soon as one of them fails, such as [NAN, MISMATCH]",
        choices=STOP_ON,
    )
    thresholds: list[str] = item(
        [], "limits of the verdict for this recipe (NAME=VALUE, see `recipes judge --rules`); a list replaces the list"
    )


@dataclass
class Recipe:
    """Everything that decides one training run."""

    recipe: str = item("", "the recipe's name, set by its file")
    title: str = item("", "one line that says what the run is")
    notes: list[str] = item([], "what is special, what the published script had wrong, what was never verified")
    model: Model = field(default_factory=Model)
    hardware: str = item("???", "a file of facts under params/hardware/")
    stack: str = item("???", "a file of dependency refs under params/stacks/")
    mode: str = item(
        "sync", "generate and train in turn on the same devices, or apart", choices=("sync", "fully_async")
    )
    engine: str = item("megatron", "training engine (model_engine)", choices=("megatron", "mindspeed"))
    nodes: int = item(1, "nodes that train", minimum=1)
    devices: Optional[int] = item(None, "devices used on each node; unset: all the hardware has", minimum=1)
    parallel: Parallel = field(default_factory=Parallel)
    mindspeed: MindSpeed = field(default_factory=MindSpeed)
    fully_async: FullyAsync = field(default_factory=FullyAsync)
    batch: Batch = field(default_factory=Batch)
    data: Data = field(default_factory=Data)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    memory: Memory = field(default_factory=Memory)
    transformer: dict[str, Any] = item({}, "Megatron transformer settings (override_transformer_config)")
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    trainer: Trainer = field(default_factory=Trainer)
    launch: str = item(
        "local",
        "where the training starts: on this machine, or as a job of an existing Ray cluster",
        choices=("local", "ray"),
    )
    ray_address: Optional[str] = item(
        None,
        "dashboard of that cluster, such as http://head:8265; unset: RAY_API_SERVER_ADDRESS or RAY_ADDRESS",
    )
    ray_nodes: list[str] = item([], "addresses or names of its nodes, if known: those missing are then named")
    ray_wait_minutes: float = item(
        30.0,
        "how long to wait for its nodes, and for a dashboard that does not answer; devices in use have no limit",
        minimum=0,
    )
    supervision: Supervision = field(default_factory=Supervision)
    prepare: list[str] = item([], "module and arguments that make model and data here (python -m …), before preflight")
    external_modules: list[str] = item([], "modules verl imports first, after those the environment names, in order")
    env: dict[str, str] = item({}, "environment variables of the run")
    verl: dict[str, Any] = item({}, "any other verl key, checked against the stack's verl")
    extra_args: list[str] = item([], "Hydra overrides passed as they are, last")
    work: str = item("", "where models and data live (RECIPES_WORK, or work/ in the checkout)")
    run_dir: str = item("", "the run's directory, set at launch")

    @property
    def steps(self) -> int | None:
        """Steps of the whole run, where the recipe says how many.

        A fully asynchronous run counts weight syncs, and ends with its prompts (FullyAsyncRollouter of verl 0.9.1).
        """
        apart = self.fully_async
        if self.mode != "fully_async":
            return self.trainer.steps
        if apart.rollout_steps is None or apart.sync_every is None:
            return None
        return apart.rollout_steps // (apart.sync_every * (apart.mini_batches or 1) * self.batch.mini)


@dataclass
class ModelFacts:
    """An architecture as its config.json states it; what layouts and memory are computed from."""

    name: str = "???"
    hub: Optional[str] = None
    architecture: str = "???"
    layers: int = "???"  # type: ignore[assignment]
    hidden: int = "???"  # type: ignore[assignment]
    heads: int = "???"  # type: ignore[assignment]
    kv_heads: int = "???"  # type: ignore[assignment]
    head_dim: Optional[int] = None
    ffn: int = "???"  # type: ignore[assignment]
    vocab: int = "???"  # type: ignore[assignment]
    tied_embeddings: bool = False
    max_positions: int = "???"  # type: ignore[assignment]
    qk_norm: bool = False
    # Mixture of experts. The first `dense_layers` layers have a plain FFN of width `ffn`.
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: Optional[int] = None
    shared_experts: int = 0
    dense_layers: int = 0
    router_bias: bool = False  # a buffer per MoE layer that evens out the experts' load; in the checkpoint, not trained
    # Multi-head latent attention: set together, or not at all.
    q_lora_rank: Optional[int] = None
    kv_lora_rank: Optional[int] = None
    qk_nope_head_dim: Optional[int] = None
    qk_rope_head_dim: Optional[int] = None
    v_head_dim: Optional[int] = None
    # Sparse attention's indexer. Layer i (from 0) computes an index where max(i - index_offset + 1, 0) is a multiple of
    # index_freq; the others use the one before.
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_freq: int = 1
    index_offset: int = 0
    mtp_layers: int = 0  # multi-token prediction, after the last layer; each with experts, and with an indexer if any
    first_verl: Optional[str] = None  # the first verl release that trains it on Ascend
    source: str = ""


@dataclass
class HardwareFacts:
    """A kind of node."""

    name: str = "???"
    device: str = "???"  # what verl calls it: npu or cpu
    devices_per_node: int = "???"  # type: ignore[assignment]
    memory_gb: Optional[float] = None  # of one device, GB = 1e9 bytes as vendors count
    image: Optional[str] = None  # tag part that names the device in image names
    soc: Optional[str] = None
    source: str = ""


def metadata(cls: type, name: str) -> dict[str, Any]:
    """Return the meaning, choices and minimum declared for field `name` of dataclass `cls`."""
    declared = cls.__dataclass_fields__[name]
    return {"meaning": "", "choices": (), "minimum": None, **declared.metadata}
