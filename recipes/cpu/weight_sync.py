"""Weights from the ranks that train to replicas with ranks of their own: a checkpoint engine of verl over gloo.

A fully asynchronous run sends its weights from process to process, and verl's engines for that need CUDA, NPUs or RDMA.
verl imports this module by `checkpoint_engine.custom_backend_module`, and takes the engine by `backend: gloo`
(params/cpu/base_async.yaml).
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta

import ray
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, TensorMeta
from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

from recipes.cpu.verl_patches import NoProgress, deadline_seconds

SENDER = 0
"""The trainer's first rank. Its other ranks take part in gathering a weight, and in nothing here."""


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts buckets of at most `bucket_size` bytes in a process group that lives for one weight sync.

    verl calls, on every rank and in this order: prepare, init_process_group, send_weights or receive_weights, finalize.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Host and port at which the ranks of this sync meet, from the one that sends; None from all others."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_patience())
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[tuple[str, int] | None]
    ) -> tuple[dict[str, list], dict[str, list]]:
        """Arguments of init_process_group, one a rank: for the trainer's ranks, and for the rollout's."""
        world = 1 + rollout_world_size
        ranks = [SENDER, *[-1] * (actor_wg_world_size - 1)], list(range(1, world))
        return tuple(
            {"rank": those, "world_size": [world] * len(those), "meeting": [metadata[0]] * len(those)}
            for those in ranks
        )

    def init_process_group(self, rank: int, world_size: int, meeting: tuple[str, int]) -> None:
        """Join the group; with rank -1 stay outside."""
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(*meeting, is_master=False, timeout=_patience())
        self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world_size, _patience())

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Broadcast `weights`; a rank outside the group draws them all the same, for gathering takes every rank."""
        if self._group is None:
            for _ in weights:
                pass
            return
        bucket: list[tuple[TensorMeta, Tensor]] = []
        size = 0
        whole = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
        async for meta, chunk in split_weight_chunks(whole, self._bucket_size):
            if bucket and size + chunk.nbytes > self._bucket_size:
                await self._send(bucket)
                bucket, size = [], 0
            bucket.append((meta, chunk))
            size += chunk.nbytes
        if bucket:
            await self._send(bucket)
        await self._send([])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Yield (name, weight) as they were sent."""
        async for name, weight in merge_weight_chunks(self._chunks(), self._bucket_size):
            yield name, weight

    async def _send(self, bucket: list[tuple[TensorMeta, Tensor]]) -> None:
        """How long the description of a bucket is, and how many bytes it holds; then both. An empty one is the last."""
        described = torch.frombuffer(bytearray(pickle.dumps([meta for meta, _ in bucket])), dtype=torch.uint8)
        held = sum(chunk.nbytes for _, chunk in bucket)
        await self._broadcast(torch.tensor([len(described), held]))
        if bucket:
            await self._broadcast(described)
            await self._broadcast(torch.cat([chunk for _, chunk in bucket]))

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, Tensor], None]:
        while True:
            sizes = torch.zeros(2, dtype=torch.int64)
            await self._broadcast(sizes)
            if not sizes[1]:
                return
            described, held = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
            await self._broadcast(described)
            await self._broadcast(held)
            start = 0
            for meta in pickle.loads(described.numpy().tobytes()):
                # a copy: a weight can be viewed as numbers only where its first byte is aligned
                yield meta, held[start : start + meta.chunk_size].clone()
                start += meta.chunk_size

    async def _broadcast(self, tensor: Tensor) -> None:
        """In a thread, so that the rank's other calls are answered; gloo waits for the slowest rank."""
        try:
            await asyncio.to_thread(lambda: self._group.broadcast(tensor, SENDER).wait())
        except RuntimeError as error:
            raise NoProgress(
                f"The weights did not get from the trainer to every rollout replica: {error} The log of the others "
                "says why; RECIPES_CPU_DEADLINE (seconds) allows more time."
            ) from error


def _patience() -> timedelta:
    return timedelta(seconds=deadline_seconds())
