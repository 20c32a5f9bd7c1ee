"""Look at a run that goes on, and say when a rule fails: `python -m recipes.verdict.early METRICS RULE…`.

The supervisor starts it for a recipe with `supervision.stop_on`, and ends the run when this process ends with exit code
3; what it prints is the cause. It is a process of its own so that a fault in a rule costs no training, and it loads
neither numpy nor pandas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from recipes.metrics.plain import Curves
from recipes.verdict.rules import RULES, Judgement, Subject, apply
from recipes.verdict.thresholds import Thresholds, thresholds

FAILED = 3
# Seconds between looks at the file; a look at an unchanged one costs a stat.
LOOK = 1.0


class Watch:
    """Reads new lines of a metrics file and judges them by some rules."""

    def __init__(self, path: Path, names: Iterable[str], limits: Thresholds | None = None) -> None:
        self.path, self.rules, self.limits = path, [RULES[name] for name in names], limits or Thresholds()
        self._start_over()

    def _start_over(self) -> None:
        self.curves, self._offset, self._rest = Curves(), 0, b""

    def look(self) -> Judgement | None:
        """Take in what is new, step by step. Returns the first failure, None while there is none."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:  # the file logger opens its file for writing: a restart erases it
                self._start_over()
            if size == self._offset:
                return None
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return None
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            if self._take(line) and (found := self._judge()):
                return found
        return None

    def _take(self, line: bytes) -> bool:
        try:
            record = json.loads(line)
            step, data = record["step"], record["data"]
            if type(step) is not int or not isinstance(data, dict):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):
            return False  # a broken line fails the verdict, not the training
        self.curves.add(step, data)
        return True

    def _judge(self) -> Judgement | None:
        subject = Subject(self.curves, limits=self.limits, live=True)
        found = [j for one in self.rules for j in apply(one, subject) if j.outcome == "fail"]
        return found[0] if found else None


def main() -> int:
    """Watch until a rule fails or the supervisor is gone."""
    parser = argparse.ArgumentParser(description="Watch a run; exit code 3 when a rule fails.")
    parser.add_argument("metrics", type=Path)
    parser.add_argument("rules", nargs="+", choices=list(RULES))
    parser.add_argument("--threshold", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    watch, parent = Watch(given.metrics, given.rules, thresholds(given.threshold)), os.getppid()
    while os.getppid() == parent:
        if found := watch.look():
            print(f"{found.rule}: {found.sentence}, at step {found.step}", flush=True)
            return FAILED
        time.sleep(LOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
