"""Health lights: the rules that may end a run early, as they stand while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from recipes import page
from recipes.metrics import Metrics
from recipes.metrics.plain import Curves
from recipes.verdict import ORDER, RULES, STOPPABLE, Thresholds, Told
from recipes.verdict.rules import NOTHING, Subject, apply


@dataclass(frozen=True)
class Light:
    """One rule now: `outcome` as a judgement's, or `wait` before it can be judged; what it found; since when."""

    rule: str
    outcome: str
    sentence: str
    step: int | None = None

    def __str__(self) -> str:
        at = f" at step {self.step}" if self.step is not None and self.outcome in ("fail", "warn") else ""
        return f"{self.rule} {WORDS[self.outcome]}{at}"


WORDS = {"fail": "FAILS", "warn": "warns", "pass": "fine", "info": "fine", "wait": "waits"}


def lights(metrics: Metrics, told: Told | None = None, limits: Thresholds | None = None) -> list[Light]:
    """The rules of `supervision.stop_on` on what there is, the worst finding of each. `told` is what verl.yaml says."""
    subject = Subject(Curves.of(metrics), told=told or Told(), limits=limits or Thresholds(), live=True)
    found = []
    for name in STOPPABLE:
        judged = [j for j in apply(RULES[name], subject) if j.sentence != NOTHING]
        if not judged or not subject.curves.trained:
            found.append(Light(name, "wait", "nothing to judge yet"))
            continue
        worst = min(judged, key=lambda j: ORDER[j.outcome])
        found.append(Light(name, worst.outcome, worst.sentence, worst.step))
    return found


def row(found: list[Light]) -> str:
    """Lights in a row as HTML: a dot, the rule and a word, so that colour is never alone; the finding as a tooltip."""
    return page.dots([(light.outcome, str(light), light.sentence) for light in found])
