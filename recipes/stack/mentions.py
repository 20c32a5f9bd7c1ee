"""Mentions: where a checkout's Dockerfiles, scripts, requirements and documents say which ref or version to use."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from recipes.errors import RecipeError
from recipes.logtext import clean
from recipes.stack.table import Stack

# Larger files of these kinds are generated or data; nobody keeps a ref in them.
MAX_BYTES = 1_000_000
SKIPPED_FOLDERS = {"node_modules", "__pycache__", "build", "dist", "site-packages"}


@dataclass(frozen=True)
class Mention:
    """One place that says what to use of one thing.

    `what` is ref, commit, version, specifier, head (a clone that names nothing) or shallow (a cut-off history).
    """

    file: str
    line: int
    subject: str  # the table's name for it, or what the file calls it where the table has no such thing
    what: str
    text: str
    where: str  # clone, checkout, pip, requirement, table, prose, image
    date: str = ""  # of the changelog entry it stands in, as YYYY-MM-DD


@dataclass(frozen=True)
class Names:
    """What each thing of a stack may be called: repository, owner/repository, distribution, alias, package."""

    known: Mapping[str, str] = field(default_factory=dict)

    def find(self, text: str) -> str:
        """Return the table's name for `text`, or an empty string. Case, `_` and `-` make no difference."""
        return self.known.get(_key(text), "")


@dataclass(frozen=True)
class Source:
    """A file of the checkout: its path inside it, its kind, its text without control characters."""

    path: str
    kind: str  # dockerfile, shell, document, requirements, setup, pyproject
    text: str


def names(stack: Stack) -> Names:
    """Return how the things of `stack` may be called."""
    known: dict[str, str] = {}
    for package in stack.packages:
        known[_key(package)] = package
    for r in stack.repositories.values():
        owner = r.url.split("/")[-2]
        for called in (r.name, f"{owner}/{r.name}", r.distribution, *r.aliases):
            if called:
                known[_key(called)] = r.name
    return Names(known)


def sources(root: Path, exclude: Iterable[str] = ()) -> Iterator[Source]:
    """Yield the files under `root` that can mention refs, by path. Hidden folders and symbolic links are left out.

    `exclude` are globs of paths inside the checkout. Raises RecipeError when `root` is no folder.
    """
    if not root.is_dir():
        raise RecipeError(f"{root} is no folder to look for refs in.")
    globs = tuple(exclude)
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            inside = path.relative_to(root).as_posix()
            kind = kind_of(inside)
            if not kind or path.is_symlink() or any(fnmatch.fnmatch(inside, glob) for glob in globs):
                continue
            if path.stat().st_size <= MAX_BYTES:
                yield Source(inside, kind, clean(path.read_text(encoding="utf-8", errors="replace")))


def kind_of(path: str) -> str:
    """Return what kind of file a path names, or an empty string for one that mentions no refs."""
    name = PurePosixPath(path).name.lower()
    if name.startswith(("dockerfile", "containerfile")) or name.endswith((".dockerfile", ".containerfile")):
        return "dockerfile"
    if name.endswith((".sh", ".bash")):
        return "shell"
    if name.endswith((".md", ".rst")):
        return "document"
    if re.fullmatch(r"(requirements|constraints)[\w.-]*\.(txt|in)", name):
        return "requirements"
    return {"setup.py": "setup", "pyproject.toml": "pyproject"}.get(name, "")


def repository_of(url: str, known: Names) -> str:
    """Return what the repository at `url` is called: by the table, or by the last part of the URL."""
    path = (
        re.sub(r"^[a-z+]+://[^/]*/|^git@[^:]*:", "", url.split("?")[0].split("#")[0]).rstrip("/").removesuffix(".git")
    )
    last = path.rsplit("/", 1)[-1]
    return known.find(last) or last


def _key(text: str) -> str:
    return text.lower().replace("_", "-")
