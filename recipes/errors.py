"""The one exception a user is meant to read: a sentence with the key, the value, the reason and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.masking import mask

# difflib's own measure of likeness from which on a name is offered for another.
ALIKE = 0.6


class RecipeError(ValueError):
    """A fault in what the user gave us. Faces print its text and exit with a code other than 0.

    Its text may quote what was given, or the last words of a child: whatever looks like a secret in it is masked.
    """

    def __init__(self, *words: Any) -> None:
        super().__init__(*(mask(word) if isinstance(word, str) else word for word in words))

    def _render_traceback_(self) -> list[str]:
        """Shown by IPython in place of a traceback, which would lead through our code and help nobody."""
        return [f"{type(self).__name__}: {self}"]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return the end of a sentence on a name nobody knows: `"; did you mean a, b?"`, or `"."` where none is close.

    Of a dotted key the part in which it differs must be close too: what it shares with all keys of its group says
    nothing.
    """
    dotted = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name)
    near = [k for k in dict.fromkeys(known) if not dotted or _alike(name.split("."), k.split("."))]
    close = difflib.get_close_matches(name, near, n=limit, cutoff=ALIKE)
    return f"; did you mean {', '.join(close)}?" if close else "."


def _alike(one: list[str], other: list[str]) -> bool:
    """Whether two dotted keys end the same, or are alike where they first differ."""
    if one[-1] == other[-1]:
        return True
    at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return at is not None and difflib.SequenceMatcher(None, one[at], other[at]).ratio() >= ALIKE


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into the sentence that `path`, which `option` named, cannot be written."""
    try:
        yield
    except OSError as fault:
        raise RecipeError(f"{option} {path} cannot be written: {fault.strerror}.") from fault
