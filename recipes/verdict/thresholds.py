"""The numbers the rules compare with, each with its meaning and its source; `--threshold NAME=VALUE` sets one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recipes.errors import RecipeError, nearest

FAQ = "verl's FAQ on training against rollout"
OURS = "our choice"


def _number(default: float, meaning: str, source: str = OURS) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, "source": source})


@dataclass(frozen=True)
class Thresholds:
    """Every threshold of the verdict. Steps are counted in training steps; a mean is one of five steps in a row."""

    minimum_steps: int = _number(10, "steps below which no trend can be judged")

    # Mean |trainer probability - rollout probability| of the sampled tokens. Healthy mixture-of-experts runs sit near
    # 0.0056 (the published Ascend nightlies), so the lower bound only warns.
    probability_difference_warn: float = _number(0.005, "mean probability difference that is normal up to here", FAQ)
    probability_difference_fail: float = _number(0.01, "mean probability difference that is a problem", FAQ)
    # Both streams describe the same tokens; published Ascend runs show 0.997 and more.
    pearson_fail: float = _number(0.98, "correlation of the two probabilities below which they disagree", FAQ)
    deterministic_difference: float = _number(
        1e-6, "largest mean probability difference of a deterministic run that is rounding", "published bitwise runs"
    )
    deterministic_largest: float = _number(1e-4, "the same of a single token; real deterministic runs show 1e-6")
    jump_factor: float = _number(3.0, "probability difference, times its median of the first steps, that is a jump")
    jump_first: int = _number(5, "steps of that median")
    jump_floor: float = _number(1e-3, "probability difference below which nothing is a jump")

    rollout_kl_fail: float = _number(0.05, "|KL| of trainer and rollout; healthy Ascend runs show 3e-4 to 7e-4")
    rollout_k3_warn: float = _number(0.01, "k3 estimate of the same KL")
    importance_low: float = _number(0.5, "mean importance weight")
    importance_high: float = _number(2.0, "mean importance weight")
    effective_samples: float = _number(0.3, "share of effective samples that importance weights leave")

    entropy_first: int = _number(3, "steps whose mean entropy is what a run starts from")
    entropy_steps: int = _number(5, "steps in a row for which entropy must be too low or too high")
    entropy_collapse: float = _number(0.2, "entropy, times that of the start, that has collapsed")
    entropy_floor: float = _number(0.02, "entropy in nats that has collapsed, wherever it started")
    entropy_explosion: float = _number(3.0, "entropy, times that of the start, that has exploded")
    entropy_ceiling: float = _number(2.0, "entropy in nats that has exploded, if the run started below")
    # A policy that solves its task is sure of it: quickstarts that end at 0.97 of the reward end at 0.01 nats.
    solved: float = _number(0.8, "mean reward, as a share of the best single reward, at which low entropy is right")

    ppo_kl_fail: float = _number(0.1, "|KL| of one update; 1e-6 to 1e-4 is usual in published runs")
    kl_loss_fail: float = _number(1.0, "KL loss to the reference policy")
    kl_loss_factor: float = _number(10.0, "KL loss, times its moving average, that blows up")
    kl_loss_window: int = _number(10, "steps of that moving average")
    kl_loss_floor: float = _number(0.01, "KL loss below which nothing blows up: it starts at 0")

    grad_factor: float = _number(10.0, "gradient norm, times the median of the steps before, that is a spike")
    grad_window: int = _number(20, "steps of that median, and of a rise without end")
    grad_floor: float = _number(1.0, "gradient norm below which nothing is a spike: verl clips at 1.0")

    no_signal_steps: int = _number(2, "steps in a row whose advantages are all 0")
    reward_kept: float = _number(0.75, "share of its best mean reward that a run keeps; a lr of 1e-3 kept 0.69")
    # Of flat rewards of chance alone, in 120 steps: one run in a hundred fails at its end, four end early.
    reward_noise: float = _number(5.0, "fall of the mean reward, times the noise of such a mean, that is no chance")
    reward_steps: int = _number(5, "means in a row that must have fallen before a run is ended early for it")
    plateau_steps: int = _number(20, "steps without a better mean reward that are a plateau")
    clip_ratio_warn: float = _number(0.3, "mean share of responses cut at the limit")
    clip_ratio_fail: float = _number(0.5, "the same, if it still rises")
    clip_ratio_all: float = _number(0.9, "the same, rising or not: the limit is too small for the task")
    aborted_warn: float = _number(0.01, "share of responses the engine gave up")
    aborted_fail: float = _number(0.1, "share of responses the engine gave up")

    def source(self, *names: str) -> str:
        """Where the thresholds `names` come from, as words; one that was set says so."""
        defaults = Thresholds()
        told = [
            f"--threshold {name}={getattr(self, name):g}"
            if getattr(self, name) != getattr(defaults, name)
            else self.__dataclass_fields__[name].metadata["source"]
            for name in names
        ]
        return "; ".join(dict.fromkeys(told))

    def changed(self) -> dict[str, float]:
        """The thresholds that are not as here, by name."""
        return {n: v for n, v in dataclasses.asdict(self).items() if v != getattr(Thresholds(), n)}


def thresholds(texts: Iterable[str], key: str = "--threshold") -> Thresholds:
    """Thresholds with some set by `NAME=VALUE`. Raises RecipeError for an unknown name or no number of 0 or more.

    `key` is where the texts were given, for that sentence.
    """
    known = {f.name: f for f in dataclasses.fields(Thresholds)}
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip()
        if name not in known:
            raise RecipeError(f"{key} {text!r}: there is no threshold {name!r}{nearest(name, known)}")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise RecipeError(f"{key} {text!r}: {name} must be a number of 0 or more.")
        if isinstance(known[name].default, int):
            if not number.is_integer() or number < 1:
                raise RecipeError(f"{key} {text!r}: {name} counts steps, so it is a whole number from 1.")
            number = int(number)
        given[name] = number
    return Thresholds(**given)  # type: ignore[arg-type]
