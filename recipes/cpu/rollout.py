"""The rollout replica `hf_cpu`: what verl's trainer and its ranks see of the servers in `recipes.cpu.server`."""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator

import ray
from torch import Tensor
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from recipes.cpu.server import Server
from recipes.cpu.verl_patches import NoProgress, deadline_seconds


def server_name(replica_rank: int) -> str:
    """Name of the Ray actor, by which the trainer's ranks find the server they feed."""
    return f"recipes_cpu_rollout_{replica_rank}"


class RolloutClient(BaseRollout):
    """A rank's side: sends weights to the server of its replica. They are the engine's, where the rank also trains, and
    what the checkpoint engine brings, where it does not.
    """

    def __init__(self, config, model_config: HFModelConfig, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self._replica = rank // ranks if replica_rank == -1 else replica_rank
        self._sends = rank % ranks == 0
        self._server = None

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Generator[tuple[str, Tensor], None, None] | AsyncGenerator[tuple[str, Tensor], None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_,
    ) -> None:
        """Gather the weights, which every rank takes part in, and send them if this rank is the replica's first."""
        if wire_format != "named_tensors":
            raise ValueError(f"rollout.name=hf_cpu takes whole weights, not wire format {wire_format!r}.")
        gathered = {name: weight.detach().clone() async for name, weight in ensure_async_iterator(weights)}
        if not self._sends:
            return
        if self._server is None:
            self._server = ray.get_actor(server_name(self._replica))
        seconds = deadline_seconds()
        try:
            await asyncio.wait_for(self._server.update_weights.remote(gathered, global_steps), seconds)
        except TimeoutError as error:
            raise NoProgress(
                f"The rollout server did not take the weights of step {global_steps} in {seconds:g} s."
            ) from error


class Replica(RolloutReplica):
    """One server in a Ray actor of its own; it takes no rank resource, since it computes while the ranks wait."""

    async def launch_servers(self) -> None:
        server = (
            ray.remote(Server)
            .options(num_cpus=0, name=server_name(self.replica_rank), max_concurrency=self.max_concurrency)
            .remote(
                self.model_config.path,
                self.config.response_length,
                self.config.dtype,
                bool(self.config.enable_rollout_routing_replay),
            )
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()
