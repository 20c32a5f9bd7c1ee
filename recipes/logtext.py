"""Text from a log made fit to show: no colours, no control characters, carriage returns as line ends."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Drop ANSI sequences, control and bidirectional-override characters; turn carriage returns into line ends."""
    return _CONTROL.sub("", _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))
