"""A finding: one result of a check, in a form people, JSON and JUnit can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """What a rule found: the keys with their values, why it is wrong, what to do, and when it would have shown."""

    rule: str
    severity: str
    keys: Mapping[str, Any]
    sentence: str
    remedy: str = ""
    noticed: str = ""
    source: str = ""

    def __str__(self) -> str:
        keys = ", ".join(f"{key}={value}" for key, value in self.keys.items())
        return f"{keys}: {self.sentence}{' ' + self.remedy if self.remedy else ''}"


def divisors(number: int, *, limit: int = 64) -> str:
    """Return the divisors of a number up to `limit` as words: `1, 2 or 4`."""
    found = [str(d) for d in range(1, min(number, limit) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
