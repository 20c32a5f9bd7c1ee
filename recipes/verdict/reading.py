"""How to read each metric: what is good, when to worry, what to do. The table of notebooks/book/reading_the_curves.md.

Its numbers are the thresholds of the verdict; a test holds the page to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recipes.verdict.rules import RULES
from recipes.verdict.thresholds import Thresholds


@dataclass(frozen=True)
class Reading:
    """A metric as people read it. `rules` are those of the verdict that look at it; braces name thresholds."""

    keys: tuple[str, ...]
    good: str
    worry: str
    do: str
    rules: tuple[str, ...] = ()


READINGS = (
    Reading(
        ("critic/rewards/mean",),
        "rises, jittering, then stays; {reward_kept:.0%} of its best five-step mean is kept, of what lies above the "
        "lowest reward where rewards may be negative",
        "falls farther than chance lets it, which is {reward_noise:g} times the noise of such a mean (a run is ended "
        "early after {reward_steps} such means in a row); 0 in every step: the reward function may never match",
        "lower `optimizer.lr`; try the reward function (`recipes data check`); look at responses of those steps "
        "(`trainer.rollout_dump=true`)",
        ("REWARD COLLAPSE", "PLATEAU", "BASELINE"),
    ),
    Reading(
        ("critic/advantages/max", "critic/advantages/min"),
        "both far from 0; (n − 1)/√n when one of n responses succeeds: 2.47 for n = 8, 1.79 for n = 5",
        "0 for {no_signal_steps} steps: every group agrees, there is nothing to learn",
        "prompts that are neither too easy nor too hard, larger `rollout.n`, temperature 1; check the reward",
        ("NO SIGNAL",),
    ),
    Reading(
        ("training/rollout_probs_diff_mean",),
        "below {probability_difference_warn:g}; healthy mixture-of-experts runs sit near 0.0056; deterministic modes "
        "reach 0, or stay below {deterministic_difference:g}, and below {deterministic_largest:g} in each token",
        "above {probability_difference_fail:g}, or {jump_factor:g} times the median of the first {jump_first} steps",
        "trainer and rollout are not the same model: compare precision, router replay (R3), chat template and weight "
        "sync; do not read the reward before this is right",
        ("MISMATCH", "MISMATCH-JUMP", "DETERMINISM", "BASELINE"),
    ),
    Reading(
        ("training/rollout_actor_probs_pearson_corr",),
        "0.997 and more",
        "below {pearson_fail:g}",
        "as above",
        ("MISMATCH",),
    ),
    Reading(
        ("training/rollout_probs_diff_valid",),
        "1",
        "0: no token could be compared",
        "look whether responses are empty; `rollout.log_probs=true`",
        ("NAN",),
    ),
    Reading(
        ("rollout_corr/kl", "rollout_corr/k3_kl"),
        "3e-4 to 7e-4 in healthy Ascend runs",
        "|kl| above {rollout_kl_fail:g}; k3_kl above {rollout_k3_warn:g}",
        "as for the probability difference; `algorithm.rollout_correction` evens out what is left",
        ("ROLLOUT CORRECTION",),
    ),
    Reading(
        ("rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size"),
        "mean weight {importance_low:g} to {importance_high:g}; effective samples {effective_samples:g} and more",
        "outside: few samples carry the whole update",
        "fewer updates between weight syncs (`fully_async.sync_every`, `fully_async.staleness`)",
        ("ROLLOUT CORRECTION",),
    ),
    Reading(
        ("actor/entropy",),
        "falls slowly; low where the task is solved ({solved:.0%} of the best reward)",
        "below {entropy_collapse:g} of its start for {entropy_steps} steps, or below {entropy_floor:g} nats; above "
        "{entropy_explosion:g} times its start, or {entropy_ceiling:g} nats",
        "collapse: raise `algorithm.clip_high`, add `algorithm.entropy_coeff`, lower `optimizer.lr`; explosion: lower "
        "`optimizer.lr`; high at once: chat template, a model that is not tuned",
        ("ENTROPY COLLAPSE", "ENTROPY EXPLOSION"),
    ),
    Reading(
        ("actor/ppo_kl",),
        "|ppo_kl| 1e-6 to 1e-4; 0 where a step is one update",
        "above {ppo_kl_fail:g}: an update moved the policy too far",
        "lower `optimizer.lr`, larger `batch.mini`",
        ("KL BLOW-UP",),
    ),
    Reading(
        ("actor/kl_loss",),
        "starts at 0, rises slowly",
        "above {kl_loss_fail:g}, or {kl_loss_factor:g} times the mean of {kl_loss_window} steps",
        "raise `algorithm.kl_loss_coef`, lower `optimizer.lr`",
        ("KL BLOW-UP",),
    ),
    Reading(
        ("actor/grad_norm",),
        "steady, finite",
        "{grad_factor:g} times the median of {grad_window} steps; a mean that rises for {grad_window}; not finite",
        "lower `optimizer.lr`; `optimizer.clip_grad`; look at the batch of that step",
        ("GRAD", "NAN", "BASELINE"),
    ),
    Reading(
        ("response_length/clip_ratio",),
        "below {clip_ratio_warn:g}",
        "above {clip_ratio_warn:g}; above {clip_ratio_fail:g} and rising, or above {clip_ratio_all:g}: what is cut "
        "has no answer",
        "raise `data.max_response_length` (then `batch.max_tokens`); check that the model ends its answers",
        ("LENGTH",),
    ),
    Reading(
        ("response/aborted_ratio",),
        "0",
        "above {aborted_warn:g}; above {aborted_fail:g} the reward is not that of the policy",
        "the engine gives requests up: its log, `rollout.max_sequences`, `rollout.memory`",
        ("ABORTED",),
    ),
    Reading(
        ("val-core/…",),
        "rises with the reward",
        "falls or stays while the reward rises: the training data is learned by heart, or the reward is gamed",
        "read responses; fewer passes over the data (`trainer.epochs`)",
        ("VALIDATION", "BASELINE"),
    ),
    Reading(
        ("timing_s/step", "perf/throughput"),
        "flat after the first steps, but for response length",
        "slower than the baseline by more than its tolerance",
        "the panel of step time says which stage grew; `recipes simulate`, `recipes doctor`",
        ("PERF",),
    ),
    Reading(
        ("actor/perf/max_memory_allocated_gb",),
        "flat",
        "rises from step to step: fragmentation or a leak; above the baseline",
        "`memory.param_offload`, `memory.recompute`, smaller `batch.max_tokens`",
        ("PERF",),
    ),
)


def table(limits: Thresholds | None = None) -> list[str]:
    """The table as lines of Markdown."""
    numbers = vars(limits or Thresholds())
    lines = ["| metric | good | worry | do | rule |", "|---|---|---|---|---|"]
    for one in READINGS:
        cells = [
            "<br>".join(f"`{key}`" for key in one.keys),
            *(text.format(**numbers) for text in (one.good, one.worry)),
            one.do,
            ", ".join(one.rules),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def rules() -> Iterable[str]:
    """The rules as lines of a Markdown table."""
    yield from ("| rule | at worst | holds when | may stop a run |", "|---|---|---|---|")
    for one in RULES.values():
        yield f"| {one.name} | {one.worst} | {one.meaning} | {'yes' if one.stops else ''} |"
