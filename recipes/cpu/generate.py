"""Samples responses for a batch of prompts with a KV cache; each request draws from a random stream of its own."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

_WORTH_COMPACTING = 0.75
"""Drop finished rows once no more than this share of the batch is alive: copying the cache has its price too."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k -1 and top_p 1 keep the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self):
        for name, value, allowed in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1),
            ("temperature", self.temperature, self.temperature >= 0),
            ("top_k", self.top_k, self.top_k == -1 or self.top_k >= 1),
            ("top_p", self.top_p, 0 < self.top_p <= 1),
        ):
            if not allowed:
                raise ValueError(
                    f"The rollout cannot sample with {name}={value}: max_new_tokens is at least 1, temperature at "
                    "least 0 (0 is greedy), top_k at least 1 or -1 for all, top_p above 0 and at most 1."
                )


@dataclass(frozen=True)
class Request:
    """One response to make: token ids of the prompt, and the seed (any non-negative integer) of its random stream."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Response:
    """Token ids, end of sequence included, and their log-probabilities (nats) in the distribution they come from.

    `routes`, if they were asked for: the experts each token went to, int16 [prompt + response - 1, layers, top_k]. The
    last token is never fed to the model; a layer without experts has zeros.
    """

    tokens: list[int]
    log_probs: list[float]
    finished: bool
    routes: np.ndarray | None = None


class Routes:
    """Writes down the experts that each layer of a model chooses, while it is entered as a context."""

    def __init__(self, model: PreTrainedModel):
        self._blocks = {
            place: layer.mlp
            for place, layer in enumerate(model.model.layers)
            if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts")
        }
        if not self._blocks:
            raise ValueError(f"{type(model).__name__} has no layer with experts, so there are no routes to hand back.")
        self._layers = len(model.model.layers)
        self._chosen: dict[int, Tensor] = {}
        self._hooks: list = []

    def __enter__(self) -> "Routes":
        for place, block in self._blocks.items():
            self._hooks.append(block.gate.register_forward_hook(self._writer(place, block)))
        return self

    def __exit__(self, *exception) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _writer(self, place: int, block: torch.nn.Module):
        def write(module, arguments, output) -> None:
            # Qwen3-MoE's gate returns its choice; GLM's returns logits, and the block around it chooses.
            self._chosen[place] = output[2] if isinstance(output, tuple) else block.route_tokens_to_experts(output)[0]

        return write

    def of_last_forward(self, rows: int) -> Tensor:
        """The choices of the last forward pass, int16 [rows, tokens, layers, top_k]."""
        width = next(iter(self._chosen.values())).shape[-1]
        found = {place: chosen.reshape(rows, -1, width).to(torch.int16) for place, chosen in self._chosen.items()}
        nothing = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(place, nothing) for place in range(self._layers)], dim=2)


@torch.inference_mode()
def respond(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    routes: bool = False,
    interrupt: Event | None = None,
) -> list[Response]:
    """Answer all requests, one response each, in their order; with `routes`, with the experts of each token.

    A request's response depends on its prompt, its seed and the sampling, and not on its neighbours (up to the rounding
    of the model's matrix products, which may differ in the last bit between batch sizes). Once `interrupt` is set, no
    further token is drawn, and what was drawn until then is returned.
    """
    if not requests:
        return []
    with Routes(model) if routes else nullcontext() as recorded:
        return _respond(model, requests, sampling, eos_token_ids, pad_token_id, recorded, interrupt or Event())


def _respond(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    recorded: Routes | None,
    interrupt: Event,
) -> list[Response]:
    input_ids, attention_mask = _pad_left([request.prompt for request in requests], pad_token_id)
    uniform = torch.stack([_uniform(request.seed, sampling.max_new_tokens) for request in requests])  # [rows, steps]
    eos = torch.tensor(list(eos_token_ids))
    tokens = torch.full((len(requests), sampling.max_new_tokens), -1)
    log_probs = torch.zeros(len(requests), sampling.max_new_tokens)

    rows = torch.arange(len(requests))  # row of the answer that each row of the running batch fills
    alive = torch.ones(len(requests), dtype=torch.bool)  # of the running batch
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    chosen: list[list[Tensor]] = [[] for _ in requests]
    cache = DynamicCache(config=model.config)
    _forget_keys_of_indexers(model)
    for step in range(sampling.max_new_tokens):
        if interrupt.is_set():
            break
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if recorded is not None:
            passed = recorded.of_last_forward(len(rows))
            for place, row in enumerate(rows.tolist()):
                if alive[place]:
                    fed = attention_mask[place, -passed.shape[1] :].bool()
                    chosen[row].append(passed[place][fed])
        drawn, drawn_log_probs = _draw(logits.float(), uniform[rows, step], sampling)
        writing = rows[alive]
        tokens[writing, step] = drawn[alive]
        log_probs[writing, step] = drawn_log_probs[alive]
        alive &= ~torch.isin(drawn, eos)
        survivors = int(alive.sum())
        if survivors == 0:
            break
        position_ids = position_ids[:, -1:] + 1
        attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
        input_ids = drawn[:, None]
        if survivors <= _WORTH_COMPACTING * len(rows):
            keep = alive.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            _keep_keys_of_indexers(model, keep)
            rows, alive = rows[keep], alive[keep]
            input_ids, attention_mask, position_ids = input_ids[keep], attention_mask[keep], position_ids[keep]

    lengths = (tokens >= 0).sum(-1).tolist()
    finished = torch.isin(tokens, eos).any(-1).tolist()
    return [
        Response(
            row_tokens[:length],
            row_log_probs[:length],
            row_finished,
            torch.cat(row_chosen).numpy() if row_chosen else None,
        )
        for row_tokens, row_log_probs, length, row_finished, row_chosen in zip(
            tokens.tolist(), log_probs.tolist(), lengths, finished, chosen, strict=True
        )
    ]


def _pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [rows, longest prompt]."""
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError("The rollout was asked to answer an empty prompt.")
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    return input_ids, attention_mask


def _uniform(seed: int, count: int) -> Tensor:
    """`count` numbers in [0, 1), one for each token a request may draw."""
    return torch.from_numpy(np.random.default_rng(seed).random(count))


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, both [rows], from logits [rows, vocabulary] and numbers in [0, 1) [rows].

    The inverse of the cumulative distribution turns one uniform number into one token, for all rows at once and with no
    random state shared between them. Raises FloatingPointError for logits that are not numbers.
    """
    if not logits.isfinite().all():
        raise FloatingPointError(
            "The rollout's logits are not finite: the weights the trainer sent are broken. Look at actor/grad_norm and "
            "the learning rate of the steps before."
        )
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        drawn = logits.argmax(-1)
        return drawn, log_probs.gather(-1, drawn[:, None])[:, 0]
    log_probs = _truncate(logits / sampling.temperature, sampling).log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    return drawn, log_probs.gather(-1, drawn[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Rule out all but the top_k most likely tokens, then all beyond the smallest set holding top_p of the rest."""
    if sampling.top_k > 0:
        smallest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # the token that crosses top_p is kept
        logits = logits.scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
    return logits


def _indexers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """DSA indexers (transformers' GlmMoeDsaIndexer): they keep the keys of earlier tokens outside the KV cache."""
    return [module for module in model.modules() if "_cached_keys" in module._buffers]


def _forget_keys_of_indexers(model: PreTrainedModel) -> None:
    """They do so themselves only when a prompt has two tokens or more."""
    for indexer in _indexers(model):
        indexer._cached_keys = None


def _keep_keys_of_indexers(model: PreTrainedModel, rows: Tensor) -> None:
    for indexer in _indexers(model):
        indexer._cached_keys = indexer._cached_keys[rows]
