"""What a look at a node yields: one line a subject, with a Finding where something is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recipes.finding import Finding
from recipes.logtext import clean

# `unseen` is no verdict: the text says why nothing could be said. It must never read as if it had passed.
STATES = ("error", "warning", "info", "ok", "unseen")

# Characters of foreign text (a path, an error, a device's name) shown at most: a line stays a line.
SHOWN = 400


@dataclass(frozen=True)
class Line:
    """One result: of which section, on what, its state (one of STATES), in words, and the finding if it is one."""

    section: str
    subject: str
    state: str
    text: str
    finding: Finding | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; values of keys that JSON does not know become their text."""
        return asdict(self)


class Section:
    """Makes the lines of one section; `source` and `noticed` of a finding are given where it is made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, subject: str, text: str) -> Line:
        """Say that something was looked at and is as it should be."""
        return Line(self.name, subject, "ok", shown(text))

    def unseen(self, subject: str, why: str) -> Line:
        """Say that something was not looked at, and why (a clause after `because`)."""
        return Line(self.name, subject, "unseen", shown(f"not looked at, because {why}"))

    def fault(
        self,
        subject: str,
        keys: Mapping[str, Any],
        sentence: str,
        remedy: str = "",
        *,
        severity: str = "error",
        noticed: str = "",
        source: str = "",
    ) -> Line:
        """Say what is wrong: the keys with their values, why, and what to do. The rule is `doctor.section.subject`."""
        rule = f"doctor.{self.name}.{subject}".replace(" ", "_").replace("/", "")
        plain = {key: shown(str(value)) for key, value in keys.items()}
        found = Finding(rule, severity, plain, shown(sentence), shown(remedy), noticed, source)
        return Line(self.name, subject, severity, str(found), found)


def shown(text: str, limit: int = SHOWN) -> str:
    """Return foreign text fit for one line: no control characters, no line ends, at most `limit` characters."""
    flat = " ".join(clean(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def gib(size: float) -> str:
    """Return bytes as text in GiB (2**30) or, below one, MiB (2**20)."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
