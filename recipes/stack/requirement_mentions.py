"""What requirement files and package metadata ask for. setup.py is read, never run."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from recipes.stack.mentions import Mention, Names, Source
from recipes.stack.shell_mentions import requirement


def find(source: Source, known: Names) -> list[Mention]:
    """Return the mentions in requirements*.txt, setup.py (install_requires) or pyproject.toml (dependencies)."""
    read = {"requirements": _lines, "setup": _setup, "pyproject": _pyproject}[source.kind]
    found = (m for line, text in read(source.text) for m in requirement(source.path, line, text, known, "requirement"))
    # A file asks for many things that no stack speaks of; two files asking for them differently is their affair.
    return [m for m in found if m.subject in known.known.values() or m.what in ("head", "ref", "commit")]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*", "", line).strip()
        if bare and not bare.startswith("-"):
            yield number, bare


def _setup(text: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        values = []
        if isinstance(node, ast.Assign):
            named = any(isinstance(t, ast.Name) and t.id.lower() == "install_requires" for t in node.targets)
            values = [node.value] if named else []
        elif isinstance(node, ast.Call):
            values = [k.value for k in node.keywords if k.arg == "install_requires"]
        for value in values:
            for item in ast.walk(value):
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.lineno, item.value


def _pyproject(text: str) -> Iterator[tuple[int, str]]:
    try:
        asked = tomllib.loads(text).get("project", {}).get("dependencies", [])
    except tomllib.TOMLDecodeError:
        return
    lines = text.splitlines()
    for item in asked if isinstance(asked, list) else []:
        # tomllib keeps no line numbers, so the first line that has the text is taken.
        number = next((n for n, line in enumerate(lines, 1) if isinstance(item, str) and item in line), 1)
        yield number, str(item)
