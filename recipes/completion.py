"""What the shell completes after `recipes`: names of recipes and stacks, keys, values that are one of a few, runs.

click does the rest, commands and options included. Switched on by `eval "$(_RECIPES_COMPLETE=bash_source recipes)"`.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

# What a function needs is imported inside it, as in recipes.cli: most commands complete nothing.

SET_AT_LAUNCH = ("recipe", "run_dir", "work")


def recipe(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of `recipes list` with their titles; files, where no name begins like this."""
    from recipes import params

    if ctx.params.get("resumed") is not None:  # recipes run --resume RUN key=value
        return override(ctx, parameter, incomplete)
    found = [name for name in params.names() if name.startswith(incomplete)]
    return [CompletionItem(name, help=params.title(name)) for name in found] or _files(incomplete)


def key(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the recipe that was named, a group at a time."""
    return [CompletionItem(name, help=words) for name, words in _next(_keys(ctx.params.get("name")), incomplete)]


def override(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`key=`, or after it the values there are, where there are few."""
    name, equals, value = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{name}={one}") for one in _values(name) if one.startswith(value)]
    known = {one: words for one, words in _keys(ctx.params.get("name")).items() if one not in SET_AT_LAUNCH}
    found = _next(known, name)
    return [CompletionItem(one if one.endswith(".") else f"{one}=", help=words) for one, words in found]


def stack(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names under params/stacks."""
    return _facts("stacks", incomplete)


def hardware(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names under params/hardware."""
    return _facts("hardware", incomplete)


def run(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Run directories of this workbook, the newest first; files, where none begins like this."""
    from recipes import params

    root = params.home() / "runs"
    states = sorted(root.glob("*/*/run.json"), key=lambda file: file.parent.stat().st_mtime, reverse=True)
    near = root if not root.is_relative_to(Path.cwd()) else root.relative_to(Path.cwd())
    found = [str(near / file.parent.relative_to(root)) for file in states]
    return [CompletionItem(path) for path in found if path.startswith(incomplete)] or _files(incomplete)


def _files(incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def _facts(folder: str, incomplete: str) -> list[CompletionItem]:
    from recipes import params

    return [CompletionItem(name) for name in params.fact_names(folder) if name.startswith(incomplete)]


def _keys(name: str | None) -> dict[str, str]:
    """Every key of the schema and every short name with its meaning, and what the recipe sets besides."""
    from recipes import params
    from recipes.errors import RecipeError

    declared = params.declared_keys()
    known = {**{short: declared[full] for short, full in params.SHORT_NAMES.items()}, **declared}
    try:
        recipe = params.to_dict(params.compose(name).recipe) if name else {}
    except RecipeError:  # it is still to be put right
        recipe = {}
    return {**dict.fromkeys((key for key, _ in params.flatten(recipe)), ""), **known}


def _next(known: dict[str, str], incomplete: str) -> Iterable[tuple[str, str]]:
    """Each key that begins like this, up to its next dot: 300 keys are too many to show at once."""
    found: dict[str, str] = {}
    for name, words in sorted(known.items()):
        if name.startswith(incomplete):
            group, dot, _ = name[len(incomplete) :].partition(".")
            found.setdefault(f"{incomplete}{group}{dot}", "" if dot else words)
    return found.items()


def _values(name: str) -> list[str]:
    from recipes import params
    from recipes.schema import Recipe, metadata

    name = params.SHORT_NAMES.get(name, name)
    if name in ("stack", "hardware"):
        return params.fact_names({"stack": "stacks"}.get(name, name))
    if name not in params.declared_keys():
        return []
    kind, choices = Recipe, ()
    for part in name.split("."):
        choices, kind = metadata(kind, part)["choices"], typing.get_type_hints(kind)[part]
    if not choices and bool in (kind, *typing.get_args(kind)):
        return ["true", "false"]
    return list(choices)


class Bash(BashComplete):
    """bash takes `=` for the end of a word, both in what it asks about and in what it puts the answer in place of."""

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            plain) COMPREPLY+=("$value"); [[ $value == *[=.] ]] && compopt -o nospace ;;
        esac
    done < <(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one, with what `=` has parted put together again."""
        words = split_arg_string(os.environ["COMP_WORDS"])
        place = int(os.environ["COMP_CWORD"])
        words = words[1 : place + 1] if place < len(words) else [*words[1:], ""]
        whole: list[str] = []
        for word in words:
            if whole and (word == "=" or whole[-1].endswith("=")) and word:
                whole[-1] += word
            else:
                whole.append(word)
        return whole[:-1], whole[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Return `kind,value`; of `key=value` only the value, for bash has the rest already."""
        value = item.value
        _, equals, after = value.partition("=")
        return f"{item.type},{after if equals and after else value}"


add_completion_class(Bash)
