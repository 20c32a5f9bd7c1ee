"""Rules on what generates: replicas, lengths, batches of the engine, and the weight sync."""

from __future__ import annotations

from recipes import memory
from recipes.finding import divisors
from recipes.preflight.engines import verbatim
from recipes.preflight.rules import Subject, rule

START = "rollout start, AFTER the actor has loaded"
VLLM = "verl 0.9.1, vLLMHttpServer; vLLM's SchedulerConfig"
MIB = 1 << 20


@rule("rollout.heads", noticed=START, source="vLLM, ModelConfig.verify_with_parallel_config")
def heads_are_split_over_the_replica(s: Subject):
    tensor = s.recipe.rollout.tensor or 1
    if s.model.heads % tensor:
        yield (
            {"rollout.tensor": tensor},
            f"{s.model.name} has {s.model.heads} attention heads, which {tensor} does not divide.",
            f"{divisors(s.model.heads)} do.",
        )


VOCAB_PADDING = 64


@rule("rollout.vocab", noticed=START, source="vLLM and SGLang, VocabParallelEmbedding")
def vocabulary_is_split_over_the_replica(s: Subject):
    """The engines pad a vocabulary to a multiple of VOCAB_PADDING, and divide that."""
    tensor, padded = s.recipe.rollout.tensor or 1, -(-s.model.vocab // VOCAB_PADDING) * VOCAB_PADDING
    if s.recipe.rollout.engine != "hf_cpu" and padded % tensor:
        yield (
            {"rollout.tensor": tensor},
            f"{s.model.name} has {s.model.vocab} words, padded to {padded}, which {tensor} does not divide.",
            f"{divisors(VOCAB_PADDING)} always do.",
        )


@rule("rollout.expert", noticed="engine start", source="verl 0.9.1, RolloutConfig.__post_init__")
def experts_lie_over_the_whole_replica(s: Subject):
    r = s.recipe.rollout
    replica = (r.tensor or 1) * (r.data or 1)
    if r.expert and r.expert not in (1, replica):
        yield (
            {"rollout.expert": r.expert, "rollout.tensor": r.tensor, "rollout.data": r.data},
            "experts are spread over the whole replica, or not at all.",
            f"Take 1 or {replica}.",
        )


@rule("rollout.node", noticed=START, source="verl 0.9.1, RolloutReplica")
def tensor_parallel_stays_in_a_node(s: Subject):
    r = s.recipe.rollout
    apart = s.recipe.fully_async
    on_a_node = s.devices_per_node
    if s.recipe.mode == "fully_async" and apart.rollout_nodes:
        on_a_node = apart.rollout_devices or s.hardware.devices_per_node
    if (r.data or 1) > 1 and on_a_node % (r.tensor or 1):
        yield (
            {"rollout.tensor": r.tensor, "rollout.data": r.data},
            f"a node has {on_a_node} devices, which {r.tensor} does not divide: a data-parallel rank would lie across "
            "nodes.",
            f"{divisors(on_a_node)} do.",
        )


@rule("rollout.modes", noticed="engine start", source="verl 0.9.1, RolloutConfig.__post_init__")
def modes_are_still_there(s: Subject):
    said = dict(verbatim(s))
    stages = said.get("actor_rollout_ref.rollout.pipeline_model_parallel_size")
    if stages is not None and str(stages) != "1":
        key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
        yield {key: stages}, "verl's rollout has no pipeline parallelism.", "Use rollout.tensor and rollout.data."
    if said.get("actor_rollout_ref.rollout.mode") == "sync":
        yield (
            {"actor_rollout_ref.rollout.mode": "sync"},
            "this mode was removed: rollouts are servers now.",
            "Leave it out.",
        )


@rule("rollout.model_len", noticed="rollout start; a response is cut without a word", source=VLLM)
def longest_sequence_fits_the_engine(s: Subject):
    d, given = s.recipe.data, s.recipe.rollout.max_model_len
    longest = d.max_prompt_length + d.max_response_length
    if given and given < longest:
        yield (
            {"rollout.max_model_len": given},
            f"prompt and response may have {longest} tokens together, and what is longer is cut.",
            f"Take {longest}.",
        )
    elif given and given > s.model.max_positions:
        yield (
            {"rollout.max_model_len": given},
            f"{s.model.name} has {s.model.max_positions} positions.",
            f"Take {longest}.",
        )


@rule("rollout.long_context", severity="warning", noticed=START, source=VLLM)
def cache_holds_the_models_longest_sequence(s: Subject):
    r = s.recipe.rollout
    if r.max_model_len or r.engine == "hf_cpu" or s.model.max_positions < 65_536:
        return
    tokens = memory.estimate(s).generation.tokens
    if tokens is not None and tokens < s.model.max_positions:
        d = s.recipe.data
        yield (
            {"rollout.max_model_len": None},
            f"the engine then provides for the {s.model.max_positions} positions of {s.model.name}, and its KV cache "
            f"holds about {tokens}.",
            f"Set rollout.max_model_len={d.max_prompt_length + d.max_response_length}.",
        )


@rule("rollout.batched_tokens", noticed=START, source=VLLM)
def engine_step_holds_its_sequences(s: Subject):
    r = s.recipe.rollout
    tokens, sequences = r.max_batched_tokens, r.max_sequences or memory.ROLLOUT_SEQUENCES
    if tokens and tokens < sequences:
        yield (
            {"rollout.max_batched_tokens": tokens, "rollout.max_sequences": r.max_sequences},
            f"an engine step takes a token of each of {sequences} sequences at least.",
            f"Take {sequences} or more; 8192 is usual.",
        )


@rule("rollout.capture_sizes", severity="warning", noticed="rollout start: slow, or out of memory", source=VLLM)
def graphs_are_captured_for_batches_that_come(s: Subject):
    r = s.recipe.rollout
    config = r.engine_kwargs.get("compilation_config") if isinstance(r.engine_kwargs, dict) else None
    sizes = (config or {}).get("cudagraph_capture_sizes") if isinstance(config, dict) else None
    most = r.max_sequences or memory.ROLLOUT_SEQUENCES
    beyond = [size for size in sizes or () if str(size).isdigit() and int(size) > most]
    if beyond:
        yield (
            {"rollout.engine_kwargs.compilation_config.cudagraph_capture_sizes": beyond, "rollout.max_sequences": most},
            "graphs are captured for batches that never come; each takes memory and time at the start.",
            f"Leave out what is above {most}.",
        )


@rule("rollout.bucket", noticed="first weight sync", source="verl 0.9.1, BucketedWeightSender")
def largest_weight_fits_the_bucket(s: Subject):
    """A weight has the precision Megatron keeps it in: bfloat16, 2 bytes, unless its dtype says otherwise (verl 0.9.1,
    MegatronEngine.get_per_tensor_param). Only FSDP's weights are float32 whatever trains.
    """
    r = s.recipe.rollout
    if r.engine == "hf_cpu":
        return
    bucket = r.update_bucket_mb or memory.BUCKET_MIB
    dtype = str(dict(verbatim(s)).get("actor_rollout_ref.actor.megatron.dtype", "bfloat16"))
    width = 4 if dtype in ("float32", "fp32") else 2
    largest = -(-s.model.vocab * s.model.hidden * width // MIB)
    if largest > bucket:
        yield (
            {"rollout.update_bucket_mb": r.update_bucket_mb or f"unset, so {bucket}"},
            f"the embedding of {s.model.name} takes {largest} MiB in {dtype}, and a weight must fit whole.",
            f"Take {largest} or more.",
        )
