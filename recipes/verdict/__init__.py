"""Metrics → verdict: rules that say whether a run may be believed, each with its number, its source and its step.

    judge(metrics, state)      → Verdict    of a run, or of a bare file (state None)
    thresholds(["name=value"]) → Thresholds
    junit(verdict)             → str

"Reward up and no NaN" is not enough: a public run once passed that gate with a mean probability difference of 0.81.
Whatever is missing, not finite or too little fails; nothing is skipped. `recipes.verdict.rules` holds the rules,
`recipes.verdict.early` looks at a run that goes on.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.metrics.growing import GZIP, Unpacked
from recipes.metrics.plain import Curves
from recipes.verdict.rules import ORDER, RULES, STOPPABLE, WATCHED, Judgement, Subject, Told, apply
from recipes.verdict.thresholds import Thresholds, thresholds

if TYPE_CHECKING:
    from recipes.baseline import Baseline
    from recipes.exports import Exported
    from recipes.metrics import Metrics

__all__ = [
    "ORDER",
    "RULES",
    "STOPPABLE",
    "WATCHED",
    "Judgement",
    "Thresholds",
    "Told",
    "Verdict",
    "judge",
    "junit",
    "junit_of_error",
    "logged",
    "sentence",
    "thresholds",
    "told",
]

# What verl, Megatron and torch print when a step's numbers were not finite; the training goes on after the first.
_NOT_FINITE = (
    b"grad_norm is not finite",
    b"found NaN in local grad norm",
    b"found Inf in local grad norm",
    b"Megatron optimizer step failed",
)
_PIECE = 1 << 20


def sentence(passed: bool, *, bare: bool = False) -> str:
    """Return what a verdict says of its run. `bare`: of a file, which cannot tell how its run ended."""
    if not passed:
        return "The run may not be believed."
    return "As far as a file tells, the run may be believed." if bare else "The run may be believed."


@dataclass(frozen=True)
class Verdict:
    """All judgements of a run, the worst first. `passed` is false as soon as one rule fails."""

    judgements: tuple[Judgement, ...]
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def passed(self) -> bool:
        return all(j.outcome != "fail" for j in self.judgements)

    def summary(self, *, bare: bool = False) -> str:
        """Return the verdict as a sentence; see `sentence`."""
        return sentence(self.passed, bare=bare)

    def to_dict(self) -> dict[str, Any]:
        told = {"passed": self.passed, "judgements": [asdict(j) for j in self.judgements]}
        return told | {"thresholds": asdict(self.thresholds), "set": self.thresholds.changed()}


def judge(
    metrics: Metrics,
    state: Mapping[str, Any] | None,
    exported: Exported | None = None,
    *,
    limits: Thresholds | None = None,
    told: Told | None = None,
    logged: Iterable[str] = (),
    ended: str = "",
    baseline: Baseline | None = None,
    unmatched: str = "",
) -> Verdict:
    """Judge a run by its metrics, its state (run.json: `state`, `cause`, `steps`) and what it exported, if anything.

    With `state` None only a file is judged: how the training ended and how many steps were due is then said not to be
    known, unless `ended` says what its log shows of a failure. `logged` are lines of the log that say a value was not
    finite; `unmatched` says why there is no baseline.
    """
    limits = limits or Thresholds()
    subject = Subject(
        curves=Curves.of(metrics),
        state=state,
        limits=limits,
        told=told or Told(),
        broken=tuple(metrics.broken),
        unfinished=metrics.unfinished and (state is None or state["state"] != "running"),
        restarts=metrics.restarts,
        rounded=metrics.rounded,
        trainer=metrics.trainer,
        logged=tuple(logged),
        ended=ended,
        exported=exported,
        baseline=baseline,
        unmatched=unmatched,
        hint=_unflushed(metrics) if state is None else "",
    )
    found = [judgement for one in RULES.values() for judgement in apply(one, subject)]
    return Verdict(tuple(sorted(found, key=lambda j: ORDER[j.outcome])), limits)


def _unflushed(metrics: Metrics) -> str:
    """What to think of a file without a step: a CI has read a log before `tee` had written it."""
    if metrics.source is None or not metrics.source.is_file():
        return ""
    size = metrics.source.stat().st_size
    return f": {metrics.source.name} holds {size} bytes; what writes it, such as tee, may not be done yet"


def told(path: str | Path) -> Told:
    """What a run's own verl.yaml says of the metrics that must be there.

    Bypass mode takes the rollout's log-probs for the trainer's: there is nothing to compare then, and no entropy.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.load(path)

    def value(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)

    expected = []
    if value("actor_rollout_ref.actor.use_kl_loss"):
        expected.append("actor/kl_loss")
    if value("algorithm.rollout_correction.rollout_is"):
        expected.append("rollout_corr/rollout_is_mean")
    why = "algorithm.rollout_correction.bypass_mode is on"
    impossible = {}
    if value("algorithm.rollout_correction.bypass_mode"):
        impossible = {"training/rollout_probs_diff_mean": why, "actor/entropy": why}
        if value("async_training"):
            # apply_bypass_mode (verl 0.9.1) writes the loss that would do it into the trainer's configuration, after
            # the ranks have been given theirs.
            never = f"{why}, and this entry then applies neither importance weights nor rejection"
            impossible["rollout_corr/rollout_is_mean"] = never
    strict = value("actor_rollout_ref.actor.checkpoint.strict")
    return Told(
        deterministic=bool(value("actor_rollout_ref.rollout.full_determinism")),
        strict=None if strict is None else bool(strict),
        expected=tuple(expected),
        impossible=impossible,
    )


def logged(log: Path) -> list[str]:
    """The lines of a log, packed by gzip or not, that say a value was not finite: masked, 160 characters at most.

    None without a log, or after a place where the packing is damaged. Untrusted text: escape it to show it.
    """
    from recipes.logtext import clean
    from recipes.masking import mask

    found: list[str] = []
    rest = b""
    for piece in _pieces(log):
        text, cut, rest = (rest + piece).rpartition(b"\n")
        if not cut and len(rest) > _PIECE:  # no end of line for a megabyte
            text, rest = rest, b""
        found += _lines_of(text)
    found += _lines_of(rest)
    return [mask(clean(line))[:160] for line in found]


def _pieces(log: Path) -> Iterator[bytes]:
    if not log.is_file():
        return
    with log.open("rb") as file, contextlib.suppress(EOFError, zlib.error):
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        text = Unpacked(file) if packed else file
        while piece := text.read(_PIECE):
            yield piece


def _lines_of(text: bytes) -> list[str]:
    if not any(words in text for words in _NOT_FINITE):
        return []
    lines = text.replace(b"\r", b"\n").split(b"\n")
    return [line.decode(errors="replace").strip() for line in lines if any(words in line for words in _NOT_FINITE)]


def junit(verdict: Verdict) -> str:
    """A verdict as a JUnit report: a test case a rule, failed by its failures; what else it says is its system-out."""
    import xml.etree.ElementTree as tree

    suite = tree.Element("testsuite", name="verdict", tests=str(len(RULES)))
    failures = 0
    for one in RULES.values():
        case = tree.SubElement(suite, "testcase", classname="verdict", name=one.name)
        own = [j for j in verdict.judgements if j.rule == one.name]
        failed = [j for j in own if j.outcome == "fail"]
        if failed:
            failures += 1
            failure = tree.SubElement(case, "failure", message=_printable(failed[0]), type="fail")
            failure.text = "\n".join(map(_printable, failed))
        if rest := [j for j in own if j.outcome != "fail"]:
            tree.SubElement(case, "system-out").text = "\n".join(map(_printable, rest))
    suite.set("failures", str(failures))
    tree.indent(suite)
    return tree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def junit_of_error(sentence: str) -> str:
    """A JUnit report of what could not be judged at all, such as a log that holds no step: one case, an error."""
    import xml.etree.ElementTree as tree

    suite = tree.Element("testsuite", name="verdict", tests="1", failures="0", errors="1")
    case = tree.SubElement(suite, "testcase", classname="verdict", name="can be judged")
    tree.SubElement(case, "error", message=_printable(sentence), type="error")
    tree.indent(suite)
    return tree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(said: Judgement | str) -> str:
    """XML has no place for control characters, and a cause or a path may hold some."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(said))
