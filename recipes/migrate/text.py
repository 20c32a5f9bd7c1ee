"""A recipe file as text: nested where the schema has groups, flat where it has free mappings, quoted where needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.migrate import shell

# Groups of the schema whose keys are shown nested; everything else with a dot in it is one key.
FREE = ("verl", "env", "transformer")


def recipe_text(settings: Mapping[str, Any], *, bases: Sequence[str] = (), comments: Sequence[str] = ()) -> str:
    """Return a recipe file with dotted `settings` in their order. `comments` come first; a comment is one line."""
    lines = [f"# {_one_line(comment)}" for comment in comments]
    if bases:
        lines.append(f"defaults: [{', '.join(scalar(base) for base in bases)}]")
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        head, dot, tail = key.partition(".")
        if not dot:
            tree[key] = value
        else:
            tree.setdefault(head, {})[tail] = value
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            lines.append(f"{key}: {scalar(value)}")
            continue
        lines.append(f"{key}:")
        nested = value if key in FREE else _nest(value)
        lines += _block(nested, 1)
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """Write a value so that `params` reads back the same value of the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return re.sub(r"e([+-]?)0*(\d)", r"e\1\2", repr(value)).replace("e+", "e")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(str(k))}: {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(scalar, value)) + "]"
    text = str(value)
    # What a mark is replaced with later may hold anything.
    bare = re.fullmatch(r"[A-Za-z_./~][\w./@+-]*", text) and not shell.marks(text)
    if bare and text.lower() not in (
        "null",
        "none",
        "true",
        "false",
        "yes",
        "no",
        "on",
        "off",
        "y",
        "n",
        "~",
        "nan",
        "inf",
    ):
        return text
    return json.dumps(text, ensure_ascii=False)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, leaf = key.split(".")
        here = tree
        for group in groups:
            here = here.setdefault(group, {})
        here[leaf] = value
    return tree


def _block(tree: Mapping[str, Any], depth: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict) and value and not re.search(r"[^\w.-]", key):
            lines += [f"{'  ' * depth}{key}:", *_block(value, depth + 1)]
        else:
            shown = key if re.fullmatch(r"[A-Za-z_][\w.-]*", key) else scalar(key)
            lines.append(f"{'  ' * depth}{shown}: {scalar(value)}")
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())
