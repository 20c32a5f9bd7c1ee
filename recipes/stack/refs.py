"""Names of git refs: which are legal, whether one reads as a branch or a tag, and which version it speaks of."""

from __future__ import annotations

import fnmatch
import re

from recipes.errors import RecipeError

KINDS = ("tag", "branch", "commit")
HEADS = ("main", "master", "dev", "develop", "HEAD")  # what a moving default branch is usually called

# git-check-ref-format(1), rules 1-10, and beyond it every character a shell or Hydra could read as its own.
_LEGAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]*")
_BROKEN = re.compile(r"\.\.|//|/\.|\.lock(/|$)|[./]$|@\{")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT = re.compile(r"[0-9a-f]{7,40}")
_VERSION = re.compile(r"\d+(?:\.\d+)+(?:rc\d+|\.post\d+)?")


def fault(ref: str) -> str:
    """Return why `ref` cannot be the name of a branch or tag, or an empty string when it can.

    The rules are those of git-check-ref-format, made stricter: letters, digits and `._/+-` only, so that no ref can
    be read as an option or as shell.
    """
    if not ref:
        return "it is empty"
    if not _LEGAL.fullmatch(ref):
        if ref.startswith("-"):
            return "it starts with -, so git would read an option"
        if ref[0] in "./+":
            return f"it starts with {ref[0]!r}"
        bad = sorted({c for c in ref if not re.match(r"[A-Za-z0-9._/+-]", c)})
        return f"it has {' '.join(repr(c) for c in bad)}; only letters, digits and ._/+- may stand in a ref"
    broken = _BROKEN.search(ref)
    return f"git does not allow {broken[0]!r} there (git-check-ref-format)" if broken else ""


def check(ref: str, where: str) -> str:
    """Return `ref`. Raises RecipeError naming `where` when it cannot be a ref."""
    if why := fault(ref):
        raise RecipeError(f"{where}: {ref!r} is no name of a git ref: {why}.")
    return ref


def is_commit(text: str) -> bool:
    """Say whether `text` is a whole commit id: 40 lowercase hexadecimal digits."""
    return bool(_COMMIT.fullmatch(text))


def is_short_commit(text: str) -> bool:
    """Say whether `text` can be a commit id, whole or cut to 7 digits or more. A bare number of ours is no commit."""
    return bool(_SHORT.fullmatch(text))


def kind_of(ref: str, *, branches: str = "", tags: str = "") -> str:
    """Return `tag`, `branch`, `commit` or `` (cannot tell) by how a repository names its refs (glob patterns)."""
    if is_commit(ref):
        return "commit"
    if branches and fnmatch.fnmatchcase(ref, branches):
        return "branch"
    if tags and fnmatch.fnmatchcase(ref, tags):
        return "tag"
    if ref in HEADS:
        return "branch"
    return "commit" if is_short_commit(ref) else ""


def version_in(ref: str) -> str:
    """Return the version a ref speaks of (`core_r0.18.0` → `0.18.0`), or an empty string."""
    found = _VERSION.findall(ref)
    return found[-1] if found else ""
