"""The supervised warm start: a tiny Qwen3 that can work an addition out, and mostly does not.

``python -m recipes.quickstart.warm_start OUT [--seed N]`` writes a Hugging Face checkpoint, its tokenizer and
``warm_start.json`` (settings, what was measured, versions). Most of the steps show worked solutions; the last few
show mostly straight answers, so that the model ends up able to work but in the habit of blurting. That habit is what
GRPO then changes: it does not teach addition.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.quickstart import task
from recipes.quickstart.reward import compute_score

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

RECORD = "warm_start.json"
IGNORED = -100  # the label cross-entropy skips
MEASURED_PROBLEMS = 200
MEASURED_SEED = 5


@dataclass(frozen=True)
class Settings:
    """What decides the weights. Found by trial: see the figures of the quickstart notebook for what they lead to."""

    seed: int = 1
    # The optimizer: AdamW, linear warm-up, then linear decay to zero.
    steps: int = 700
    batch_size: int = 32
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    # Work first, blurt last: the share of worked solutions before and after `first_part` of the steps.
    first_part: float = 0.75
    worked_share_first: float = 0.8
    worked_share_last: float = 0.35
    # Qwen3, small enough that a training step costs little next to what surrounds it. Four query and two key heads
    # leave room for tensor parallelism of two.
    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    # Sequences have 60 tokens, not 10,000: nearby positions must differ more than Qwen3's own base makes them.
    rope_theta: float = 100.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"The seed is {self.seed}; give a whole number from 0 up.")
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"{self.steps} steps of {self.batch_size} problems: both must be at least 1.")


@dataclass(frozen=True)
class Measured:
    """What the model does on held-out problems when sampled at temperature 1. Shares are between 0 and 1."""

    accuracy: float
    worked_share: float
    accuracy_if_worked: float
    accuracy_if_straight: float
    mean_response_tokens: float


class Refused(ValueError):
    """The directory holds something else, and replacing it was not asked for."""


def fingerprint(settings: Settings) -> dict[str, Any]:
    """Settings and a checksum of the task's texts: equal exactly when a warm start would be made alike.

    How an addition is asked, worked out and answered shows in one that carries, and one that does not.
    """
    shown = [task.Problem(472, 8315), task.Problem(99, 7)]
    written = [[p.question, p.held_out, p.solution(worked=True), p.solution(worked=False)] for p in shown]
    rules = [task.WORDS, task.CHAT_TEMPLATE, task.MIN_DIGITS, task.MAX_DIGITS, task.HELD_OUT_ONE_IN]
    texts = json.dumps([*rules, written])
    return {**asdict(settings), "task": zlib.crc32(texts.encode())}


def untrained_model(settings: Settings) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 with the weights of ``settings.seed``; the global generator is left as it was."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(task.WORDS),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.initializer_range,
        tie_word_embeddings=False,
        pad_token_id=task.WORD_IDS[task.PAD],
        eos_token_id=task.WORD_IDS[task.END],
        bos_token_id=None,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")


def training_batch(rng: random.Random, size: int, worked_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, both ``[size, longest]``, of training problems; only the response is learnt."""
    import torch

    ids, labels = [], []
    while len(ids) < size:
        problem = task.draw(rng)
        if problem.held_out:
            continue
        prompt = task.token_ids(task.prompt_text(problem))
        response = task.token_ids(problem.solution(worked=rng.random() < worked_share) + task.END)
        ids.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([IGNORED] * len(prompt) + response))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(ids, batch_first=True, padding_value=task.WORD_IDS[task.PAD]),
        pad(labels, batch_first=True, padding_value=IGNORED),
    )


def train(model: Qwen3ForCausalLM, settings: Settings, progress: Callable[[int, float], None]) -> None:
    """Train ``model`` in place. ``progress`` hears of every step: its number from 1 and its loss in nats a token."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    rng = random.Random(settings.seed + 1)
    for step in range(1, settings.steps + 1):
        done = (step - 1) / settings.steps
        rate = settings.learning_rate * min(1.0, step / settings.warmup_steps) * (1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        share = settings.worked_share_first if done < settings.first_part else settings.worked_share_last
        ids, labels = training_batch(rng, settings.batch_size, share)
        # Padding is on the right and attention is causal, so no response token sees it: no mask needed.
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step, loss.item())


def sampled_responses(model: Qwen3ForCausalLM, chosen: list[task.Problem], seed: int) -> list[list[int]]:
    """One response a problem sampled at temperature 1: token ids, the end token included where it came."""
    import torch

    pad, end = task.WORD_IDS[task.PAD], task.WORD_IDS[task.END]
    prompts = [task.token_ids(task.prompt_text(problem)) for problem in chosen]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=task.MAX_RESPONSE_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    responses = [row[width:] for row in generated.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in responses]


def measure(model: Qwen3ForCausalLM, count: int = MEASURED_PROBLEMS, seed: int = MEASURED_SEED) -> Measured:
    """Sample one response to each of ``count`` held-out problems and score them with the run's own reward."""
    chosen = task.problems(count, seed, held_out=True)
    responses = sampled_responses(model, chosen, seed)
    scored = [
        compute_score("addition", task.text(response), problem.answer)
        for problem, response in zip(chosen, responses, strict=True)
    ]
    worked = [one["score"] for one in scored if one["worked"]]
    straight = [one["score"] for one in scored if not one["worked"]]
    return Measured(
        accuracy=sum(one["score"] for one in scored) / count,
        worked_share=len(worked) / count,
        accuracy_if_worked=sum(worked) / max(1, len(worked)),
        accuracy_if_straight=sum(straight) / max(1, len(straight)),
        mean_response_tokens=sum(map(len, responses)) / count,
    )


def existing(directory: Path) -> dict[str, Any] | None:
    """The record of a complete warm start in ``directory``, or None when there is nothing.

    Raises Refused when there is something that is no warm start.
    """
    if not directory.exists():
        return None
    try:
        record = json.loads((directory / RECORD).read_text())
        if not isinstance(record["settings"], dict):
            raise TypeError("its settings are no table")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Refused(
            f"{directory} exists and is no warm start ({RECORD} cannot be read: {error}). Name another directory, or "
            "move this one away."
        ) from error
    return record


def write_warm_start(
    directory: Path,
    settings: Settings,
    *,
    remake: bool = False,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Make the warm start in ``directory`` unless it is there, and return its record.

    A reader sees no directory or a whole one: everything is written beside it and moved into place.

    Raises:
        Refused: ``directory`` holds something else, or a warm start of other settings and ``remake`` is false.
    """
    wanted = fingerprint(settings)
    found = existing(directory)
    if found is not None and found["settings"] == wanted:
        return found
    if found is not None and not remake:
        differing = sorted(key for key in wanted if found["settings"].get(key) != wanted[key])
        raise Refused(
            f"{directory} holds a warm start made with other settings ({', '.join(differing)}). Name another "
            "directory, or pass --remake to replace it."
        )

    import torch
    import transformers

    directory.parent.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    # One thread: the sums then do not depend on the number of cores, nor the seconds on who else uses them (two
    # threads of so small a model mostly wait for each other).
    torch.set_num_threads(1)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        started = time.monotonic()
        model = untrained_model(settings)
        train(model, settings, progress)
        seconds = time.monotonic() - started
        record = {
            "settings": wanted,
            "measured": asdict(measure(model.eval())),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "seconds": round(seconds, 1),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        }
        model.save_pretrained(partial)
        task.tokenizer().save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        partial.chmod(0o755)  # mkdtemp makes it private; a checkpoint need not be
        if found is not None:
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(partial, ignore_errors=True)
    return record


def progress_line(settings: Settings, stream: Any = sys.stderr) -> Callable[[int, float], None]:
    """A progress that redraws one line on a terminal, and writes a line every quarter elsewhere."""
    on_terminal = stream.isatty()
    every = max(1, settings.steps // (100 if on_terminal else 4))

    def show(step: int, loss: float) -> None:
        if step % every == 0 or step == settings.steps:
            end = "\r" if on_terminal and step < settings.steps else "\n"
            print(f"warm start: step {step}/{settings.steps}, loss {loss:.3f}", end=end, file=stream, flush=True)

    return show


def summary(record: dict[str, Any]) -> str:
    """One sentence on what a warm start can do."""
    measured = record["measured"]
    return (
        f"answers {measured['accuracy']:.0%} of unseen additions, works out {measured['worked_share']:.0%} of them "
        f"and is then right {measured['accuracy_if_worked']:.0%} of the time, otherwise "
        f"{measured['accuracy_if_straight']:.0%} ({record['parameters']:,} parameters, {record['seconds']:.0f} s)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments this entry and ``prepare`` share."""
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of weights and problems (default %(default)s)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--remake", action="store_true", help="replace a warm start made with other settings")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.quickstart.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="directory of the checkpoint")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        settings = Settings(seed=options.seed, steps=options.steps)
        record = write_warm_start(options.out, settings, remake=options.remake, progress=progress_line(settings))
    except (ValueError, OSError) as error:
        print(f"No warm start: {error}", file=sys.stderr)
        return 2
    print(f"Warm start in {options.out}: {summary(record)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
