"""The rollout server: one transformers model in a Ray actor, answering requests in batches.

Imports neither verl nor Megatron: the process of a server starts in a third of the time without them.
"""

import asyncio
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from recipes.cpu import hf_glm
from recipes.cpu.generate import Request, Response, Sampling, respond

SETTLE_SECONDS = 0.06
"""A batch starts when no request came for this long. One batch of 64 takes little longer than one of 8."""

LONGEST_SETTLE_SECONDS = 1.0
"""… and at the latest this long after its first request."""

_UNDERSTOOD = {
    "logprobs",
    "max_new_tokens",
    "max_tokens",
    "repetition_penalty",
    "seed",
    "temperature",
    "top_k",
    "top_p",
}


def sampling_of(params: Mapping[str, Any], response_length: int) -> Sampling:
    """The Sampling that verl's sampling parameters ask for, at most `response_length` tokens.

    Raises ValueError for a parameter that this rollout would have to ignore.
    """
    unknown = params.keys() - _UNDERSTOOD
    if unknown or params.get("repetition_penalty", 1.0) != 1.0:
        ignored = ", ".join(f"{name}={params[name]!r}" for name in sorted(unknown or {"repetition_penalty"}))
        raise ValueError(
            f"rollout.name=hf_cpu cannot sample with {ignored}: it knows temperature, top_k, top_p and the length. "
            "Leave that out, or choose another rollout."
        )
    limit = params.get("max_tokens", params.get("max_new_tokens", response_length))
    return Sampling(
        max_new_tokens=min(int(limit), response_length),
        temperature=float(params.get("temperature", 1.0)),
        top_k=int(params.get("top_k", -1)),
        top_p=float(params.get("top_p", 1.0)),
    )


def request_seed(seed: int | None, prompt: tuple[int, ...], repeat: int) -> int:
    """128 bits for one request's random stream. `seed` says which trajectory it is, the prompt which turn of it;
    `repeat` tells apart requests that agree in both (the same row of a data set twice in a batch).
    """
    return int.from_bytes(hashlib.blake2b(repr((seed, prompt, repeat)).encode(), digest_size=16).digest())


@dataclass
class TokenOutput:
    """What verl's client reads of verl.workers.rollout.replica.TokenOutput, which would drag verl in."""

    token_ids: list[int]
    log_probs: list[float] | None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    stop_reason: str = "completed"
    num_preempted: int = 0
    routed_experts: Any = None


class Weights:
    """The model of a server: built from the config of `model_dir`, filled by `load`."""

    def __init__(self, model_dir: str, dtype: torch.dtype):
        self.config = AutoConfig.from_pretrained(model_dir)
        self.dtype = dtype
        self._class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        # transformers' sparse attention (DSA) needs a mask of numbers, which it builds for the eager attention only
        self._attention = "eager" if self.config.model_type == "glm_moe_dsa" else "sdpa"
        self.model = self._class._from_config(self.config, dtype=dtype, attn_implementation=self._attention).eval()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over `weights`, named as in a published checkpoint. Raises ValueError when some are missing."""
        state = self.model.state_dict(keep_vars=True)
        untied = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())} & state.keys()
        if untied <= weights.keys() <= state.keys():
            for name in untied:
                state[name].copy_(weights[name])
            return
        # The checkpoint's layout differs from the model's (experts one by one, here stacked): transformers converts.
        self.model, report = self._class.from_pretrained(
            None,
            config=self.config,
            state_dict={name: weight.to(self.dtype) for name, weight in weights.items()},
            dtype=self.dtype,
            attn_implementation=self._attention,
            output_loading_info=True,
        )
        self.model.eval()
        if report["missing_keys"]:
            raise ValueError(
                f"The trainer sent {len(weights)} weights, and the rollout's {self._class.__name__} lacks "
                f"{', '.join(sorted(report['missing_keys']))}: it would answer with random numbers there."
            )


Waiting = tuple[Sampling, Request, asyncio.Future[Response]]


class Server:
    """Ray actor that answers the requests of one replica; requests that come together share a batch."""

    def __init__(self, model_dir: str, response_length: int, dtype: str, routes: bool = False):
        hf_glm.install()
        disable_progress_bar()  # of every weight sync
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._weights = Weights(model_dir, getattr(torch, dtype))
        self._response_length = response_length
        self._routes = routes  # hand back the experts each token went to (router replay R3)
        self._eos_token_ids = _eos_token_ids(model_dir)
        self._weights_of_step: int | None = None
        self._waiting: list[Waiting] = []
        self._repeats: Counter[tuple[int | None, tuple[int, ...]]] = Counter()
        self._arrival = asyncio.Event()
        self._answering: asyncio.Task | None = None
        self._open = asyncio.Event()  # requests are taken
        self._open.set()
        self._rejects = False  # while not open: answer at once, in place of waiting
        self._interrupt = threading.Event()  # seen by the thread that generates

    def address(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{os.getpid()}"

    async def update_weights(self, weights: Mapping[str, Tensor], global_steps: int | None) -> None:
        await asyncio.to_thread(self._weights.load, weights)
        self._weights_of_step = global_steps
        self._repeats.clear()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data=None,
        video_data=None,
        **_,
    ) -> TokenOutput:
        if image_data or video_data:
            raise ValueError("rollout.name=hf_cpu answers text only, and this request has images or video.")
        if self._weights_of_step is None:
            raise RuntimeError("The rollout server was asked before the trainer sent it weights.")
        if not self._open.is_set():
            if self._rejects:
                return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted")
            await self._open.wait()
        prompt, seed = tuple(prompt_ids), sampling_params.get("seed")
        request = Request(prompt, request_seed(seed, prompt, self._repeats[seed, prompt]))
        self._repeats[seed, prompt] += 1
        answer = asyncio.get_running_loop().create_future()
        sampling = sampling_of(sampling_params, self._response_length)
        self._waiting.append((sampling, request, answer))
        self._arrival.set()
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_waiting())
        response: Response = await answer
        whole = response.finished or len(response.tokens) >= sampling.max_new_tokens
        return TokenOutput(
            token_ids=response.tokens,
            log_probs=response.log_probs if sampling_params.get("logprobs") else None,
            routed_experts=response.routes,
            extra_fields={"global_steps": self._weights_of_step},
            stop_reason="completed" if whole else "aborted",
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Answer every request with the tokens it has so far, and take no other until `resume_generation`.

        verl's client asks again with those tokens behind the prompt (partial rollout). What comes meanwhile waits, or
        with `reject_request` is answered at once, with nothing.
        """
        self._open.clear()
        self._rejects = reject_request
        self._interrupt.set()
        if self._answering is not None:
            await asyncio.wait([self._answering])

    async def resume_generation(self) -> None:
        self._interrupt.clear()
        self._open.set()

    async def _answer_waiting(self) -> None:
        while self._waiting:
            batch = self._waiting
            try:
                await self._settle()
                batch = self._take_batch()
                requests = [request for _, request, _ in batch]
                model, eos = self._weights.model, self._eos_token_ids
                responses = await asyncio.to_thread(
                    respond, model, requests, batch[0][0], eos, eos[0], self._routes, self._interrupt
                )
            except Exception as error:  # noqa: BLE001  each request raises it in its own agent loop
                self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
                for _, _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, _, answer), response in zip(batch, responses, strict=True):
                if not answer.done():  # the caller's deadline may have cancelled it
                    answer.set_result(response)

    def _take_batch(self) -> list[Waiting]:
        """Remove from the queue all that are sampled as the first is; in an order that does not tell how they came."""
        sampling = self._waiting[0][0]
        batch = [waiting for waiting in self._waiting if waiting[0] == sampling]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != sampling]
        return sorted(batch, key=lambda waiting: waiting[1].seed)

    async def _settle(self) -> None:
        """Wait until no request came for a while, so that requests of one step share a batch."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + LONGEST_SETTLE_SECONDS
        while (left := min(SETTLE_SECONDS, latest - loop.time())) > 0:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return

    async def _nothing_to_do(self, *args, **kwargs) -> None:
        """The model stays in memory, and a batch has its cache for itself."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing_to_do
    wait_for_requests_to_drain = start_profile = stop_profile = _nothing_to_do


def _eos_token_ids(model_dir: str) -> list[int]:
    """Token ids that end a response, from generation_config.json or else config.json."""
    try:
        found = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except OSError:
        found = AutoConfig.from_pretrained(model_dir).eos_token_id
    if found is None:
        raise ValueError(
            f"{model_dir} names no eos_token_id in generation_config.json or config.json: no response could end."
        )
    return [found] if isinstance(found, int) else list(found)
