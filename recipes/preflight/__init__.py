"""Know before you launch: one small function a rule, each saying when the fault would otherwise have shown."""

from __future__ import annotations

from recipes.preflight import batch, engines, files, layout, software  # noqa: F401  (importing them registers their rules)
from recipes.preflight.rules import RULES, Subject, check, refuse, subject

__all__ = ["RULES", "Subject", "check", "refuse", "subject"]
