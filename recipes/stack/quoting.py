"""Words for a shell: quoted by the standard library, and refused where a script could not carry them on one line."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable

from recipes.errors import RecipeError

WIDTH = 112


def quote(text: str) -> str:
    """Return `text` as one shell word. Raises RecipeError for control characters, which no ref or version has."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise RecipeError(f"{text!r} has control characters and cannot be put into a script.")
    return shlex.quote(text)


def line(words: Iterable[str], *, indent: int) -> str:
    """Return the words as one command, quoted, broken with backslashes where it grows too wide."""
    quoted = " ".join(map(quote, words))
    parts = textwrap.wrap(quoted, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    # A quoted word with a blank in it must not be parted there: then the line stays whole.
    return f" \\\n{' ' * indent}".join(parts) if " ".join(parts).split() == [quote(w) for w in words] else quoted
