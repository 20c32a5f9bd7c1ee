"""Know before you launch: one small function a rule, each saying when the fault would otherwise have shown."""

from __future__ import annotations

from recipes.preflight import (  # noqa: F401  (importing them registers their rules)
    batch,
    cluster,
    engines,
    environment,
    files,
    layout,
    rollout,
    software,
    training,
)
from recipes.preflight.rules import RULES, Subject, check, junit, looking, refuse, subject

__all__ = ["RULES", "Subject", "check", "junit", "looking", "refuse", "subject"]
