"""verl's call sites that are not behind its platform, and what makes a run on a small machine end when it must."""

import asyncio
import hashlib
import inspect
import os
import time
from types import ModuleType

from recipes.cpu.import_hook import after
from recipes.cpu.ranks import RANK_RESOURCE
from recipes.cpu.replace import UnknownCode, expect, expect_attribute, replace

POLL_SECONDS = 0.1
"""How often the trainer looks whether the step's responses are complete."""


def deadline_seconds() -> float:
    """How long one response, one weight sync, or a step without any progress may take (params/cpu/base.yaml)."""
    return float(os.environ.get("RECIPES_CPU_DEADLINE", "300"))


class RolloutFailed(RuntimeError):
    """A response could not be generated or scored; the sentence names the first cause."""


class NoProgress(TimeoutError):
    """Nothing moved for longer than the deadline."""


def install() -> None:
    """Register every patch below; each runs when its module is imported."""
    after("verl.models.mcore.util")(build_full_attention_mask)
    after("verl.workers.config.engine")(train_in_float32)
    after("verl.utils.distributed")(initialize_gloo_once)
    after("verl.utils.distributed")(bind_to_no_gpu_node)
    after("verl.single_controller.ray.base")(count_cpu_ranks)
    after("verl.trainer.ppo.v1.replay_buffer")(poll_often)
    after("verl.trainer.ppo.v1.replay_buffer")(order_trajectories)
    after("verl.trainer.ppo.v1.replay_buffer")(raise_first_cause)
    after("verl.trainer.ppo.v1.replay_buffer")(stop_without_progress)
    after("verl.experimental.agent_loop.agent_loop")(seed_each_trajectory)
    after("verl.workers.rollout.llm_server")(answer_before_deadline)
    after("verl.workers.rollout.base")(register_rollout_client)
    after("verl.workers.rollout.replica")(register_rollout_replica)


def build_full_attention_mask(module: ModuleType) -> None:
    """preprocess_bshd_engine and postprocess_bshd_engine (verl.models.mcore.util) hand Megatron a [batch, sequence]
    mask that only TransformerEngine's attention takes. Its own DotProductAttention wants [batch, 1, sequence,
    sequence], True where a query must not look, which is what verl builds when it believes to be on an NPU.
    """
    expect_attribute(module, "_build_npu_attn_mask")
    replace(module, "is_npu_available", True)


def train_in_float32(module: ModuleType) -> None:
    """McoreEngineConfig.__post_init__ (verl.workers.config.engine) takes bfloat16 and float16 only. A processor without
    instructions for them emulates both: a matrix product of the quickstart's size takes 30 times as long as in float32.
    """
    config = module.McoreEngineConfig
    expect_attribute(config, "dtype")

    def check_the_rest(self) -> None:
        wanted = self.dtype
        if wanted == "float32":
            object.__setattr__(self, "dtype", "bfloat16")  # the configuration is frozen, and only this is refused
        checks(self)
        object.__setattr__(self, "dtype", wanted)

    checks = replace(config, "__post_init__", check_the_rest, parameters="self")


def initialize_gloo_once(module: ModuleType) -> None:
    """initialize_global_process_group_ray (verl.utils.distributed) asks for "cpu:gloo,<device>:<backend>". With the CPU
    as the device that is "cpu:gloo,cpu:gloo", and torch refuses a device type named twice.
    """

    def initialize(timeout_second=None, backend=None):
        return known(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    known = replace(module, "initialize_global_process_group_ray", initialize, parameters="timeout_second backend")


def bind_to_no_gpu_node(module: ModuleType) -> None:
    """set_numa_affinity (verl.utils.distributed) binds a rank to the NUMA node of its GPU and prints a warning when
    there is none.
    """
    replace(module, "set_numa_affinity", lambda: None, parameters="")


def count_cpu_ranks(module: ModuleType) -> None:
    """ResourcePoolManager._check_resource_available (verl.single_controller.ray.base) counts the Ray resources "GPU"
    and "NPU" only. Same check, with the resource of this platform.
    """

    def check(self):
        nodes = module.ray._private.state.available_resources_per_node().values()
        offered = sum(node.get(RANK_RESOURCE, 0) for node in nodes)
        wanted = sum(sum(ranks) for ranks in self.resource_pool_spec.values())
        if offered < wanted:
            raise ValueError(
                f"The run wants {wanted} training ranks and Ray offers {offered:g}: set "
                f"ray_kwargs.ray_init.resources.{RANK_RESOURCE} to trainer.n_gpus_per_node × trainer.nnodes, and as "
                "many more as generate apart."
            )

    replace(module.ResourcePoolManager, "_check_resource_available", check, parameters="self")


def poll_often(module: ModuleType) -> None:
    """ReplayBuffer.__init__ (verl.trainer.ppo.v1.replay_buffer) looks for finished responses every 2 seconds and has no
    setting for it; a whole step of a tiny model takes about that long.
    """
    init = module.ReplayBuffer.__init__
    parameter = inspect.signature(init).parameters.get("poll_interval")
    found = "no such parameter" if parameter is None else f"default {parameter.default}"
    expect(found == "default 2.0", "poll_interval of ReplayBuffer.__init__", found, "default 2.0")
    init.__defaults__ = tuple(POLL_SECONDS if value == 2.0 else value for value in init.__defaults__)


def order_trajectories(module: ModuleType) -> None:
    """ReplayBuffer._materialize_batch (verl.trainer.ppo.v1.replay_buffer) lines trajectories up as they arrived, so
    mini-batches differ between two runs with the same seed. Line them up as their prompts were drawn, then by sample.
    """

    def materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        drawn = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, int, int]:
            uid, sample, turn = key.split("_")
            return drawn.get(uid, len(drawn)), int(sample), int(turn)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return known(self, partition_id, selected_prompt_uids, ordered)

    parameters = "self partition_id selected_prompt_uids partition_snapshot"
    known = replace(module.ReplayBuffer, "_materialize_batch", materialize_batch, parameters=parameters)


def raise_first_cause(module: ModuleType) -> None:
    """ReplayBuffer._sync_metadata_from_transfer_queue (verl.trainer.ppo.v1.replay_buffer): in a synchronous run verl
    pads responses that failed, or says that nothing could be materialised, while the reason scrolls by in another
    process. Raise in the trainer with the first reason, as `seed_each_trajectory` wrote it down. A run that asked for
    failed groups to be refilled (trainer.v1.sampler.sync_refill_failed_groups) keeps verl's behaviour.
    """

    def sync_metadata(self):
        known(self)
        failed = [uid for uids in self.failure_keys.values() for uid in uids]
        if not failed or self.trainer_mode != "sync" or self.sync_refill_failed_groups:
            return
        tags = [tag for items in module.tq.kv_list().values() for tag in items.values() if "failed_because" in tag]
        if tags:
            first = min(tags, key=lambda tag: tag["failed_at"])
            raise RolloutFailed(
                "A response could not be generated or scored, so the step cannot be trained on: "
                f"{first['failed_because']}"
            )

    known = replace(module.ReplayBuffer, "_sync_metadata_from_transfer_queue", sync_metadata, parameters="self")


def stop_without_progress(module: ModuleType) -> None:
    """ReplayBuffer._wait_for_next_poll (verl.trainer.ppo.v1.replay_buffer) waits for ever when the process that runs
    the agent loops has died. End the run when nothing changed for twice the deadline.
    """

    def wait_for_next_poll(self, partition_id, last_debug_time):
        kinds = (self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys)
        counts = tuple(len(keys[partition_id]) for keys in kinds)
        progress = (counts, len(self.partitions[partition_id]))
        now = time.monotonic()
        known_progress, since = getattr(self, "_recipes_progress", (None, now))
        if progress != known_progress:
            self._recipes_progress = (progress, now)
        elif now - since > 2 * deadline_seconds():
            raise NoProgress(
                f"No response arrived for {now - since:.0f} s: of the prompts, {counts[0]} are pending, {counts[1]} "
                f"running, {counts[2]} finished, {counts[3]} failed. The log of the agent loop worker and of the "
                "rollout server says why; RECIPES_CPU_DEADLINE (seconds) allows more time."
            )
        return known(self, partition_id, last_debug_time)

    parameters = "self partition_id last_debug_time"
    known = replace(module.ReplayBuffer, "_wait_for_next_poll", wait_for_next_poll, parameters=parameters)


def seed_each_trajectory(module: ModuleType) -> None:
    """AgentLoopWorker._run_agent_loop (verl.experimental.agent_loop.agent_loop) is the last place that knows which
    trajectory a request belongs to. Give its sampling parameters a seed made of the run's seed
    (actor_rollout_ref.rollout.seed), the step, the prompt and the sample, so that two runs with the same seed draw the
    same tokens however the requests race; and write down why it failed where `raise_first_cause` finds it.
    """

    async def run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
        apart = "async_training" in self.config  # the fully asynchronous entry: no steps, no TransferQueue
        sample = f"{kwargs.get('uid')} {trajectory['rollout_n']}" if apart else kwargs.get("session_id", 0)
        seed = trajectory_seed(self.rollout_config.seed, trajectory, sample)
        try:
            return await known(
                self, {**sampling_params, "seed": seed}, trajectory, agent_name=agent_name, trace=trace, **kwargs
            )
        except Exception as error:
            if not apart:
                await _write_down(error, kwargs.get("uid"), "val" if trajectory["validate"] else "train")
            raise

    parameters = "self sampling_params trajectory agent_name trace kwargs"
    known = replace(module.AgentLoopWorker, "_run_agent_loop", run_agent_loop, parameters=parameters)


def trajectory_seed(run_seed: int, trajectory: dict, sample: int | str) -> int:
    """A 63-bit seed for one trajectory; `trajectory` is what verl's get_trajectory_info says about it.

    `sample` is its number in the group, or a name for it that is its own in the whole run.
    """
    parts = (
        int(run_seed),
        int(trajectory["step"]),
        str(trajectory["sample_index"]),
        bool(trajectory["validate"]),
        sample if isinstance(sample, str) else int(sample),
    )
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


async def _write_down(error: Exception, uid: str | None, partition_id: str) -> None:
    if uid is None:
        return
    import transfer_queue as tq

    cause = getattr(error, "cause", None) or error  # of a RayTaskError: what was raised in the other process
    tag = {"failed_because": f"{type(cause).__name__}: {cause}", "failed_at": time.time()}
    await tq.async_kv_put(key=uid, partition_id=partition_id, tag=tag)


def answer_before_deadline(module: ModuleType) -> None:
    """LLMServerClient.generate (verl.workers.rollout.llm_server) waits for ever for a server that is stuck."""

    async def generate(self, request_id, **kwargs):
        seconds = deadline_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await known(self, request_id, **kwargs)
        except TimeoutError as error:
            raise NoProgress(
                f"The rollout server gave no response within {seconds:g} s. Its log says what it is doing; "
                "RECIPES_CPU_DEADLINE (seconds) allows more time."
            ) from error

    parameters = (
        "self request_id prompt_ids sampling_params image_data video_data audio_data mm_processor_kwargs kwargs"
    )
    known = replace(module.LLMServerClient, "generate", generate, parameters=parameters)


def register_rollout_client(module: ModuleType) -> None:
    """_ROLLOUT_REGISTRY (verl.workers.rollout.base): the trainer's side of rollout.name=hf_cpu."""
    registry = getattr(module, "_ROLLOUT_REGISTRY", None)
    if not isinstance(registry, dict) or ("vllm", "async") not in registry:
        raise UnknownCode(f"{module.__name__}._ROLLOUT_REGISTRY does not map (name, mode) to a class any more.")
    registry[("hf_cpu", "async")] = "recipes.cpu.rollout.RolloutClient"


def register_rollout_replica(module: ModuleType) -> None:
    """RolloutReplicaRegistry (verl.workers.rollout.replica): the servers of rollout.name=hf_cpu."""

    def load() -> type:
        from recipes.cpu.rollout import Replica

        return Replica

    module.RolloutReplicaRegistry.register("hf_cpu", load)
