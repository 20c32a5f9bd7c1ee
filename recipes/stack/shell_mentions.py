"""What the commands of a script or Dockerfile clone, check out and install.

Lines are taken apart as a shell would (quotes, continuations, comments, `&&`), variables given a value in the file are
filled in, and a `git checkout` belongs to the repository whose folder it runs in. Loops and functions are not run.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from packaging.requirements import InvalidRequirement, Requirement

from recipes.stack import refs
from recipes.stack.mentions import Mention, Names, Source, repository_of

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
_INSTRUCTION = re.compile(r"\s*(RUN|ARG|ENV|FROM)\b", re.IGNORECASE)
_SEPARATORS = set(";&|()")
# Taking words apart costs most of the time, so only lines are that could set, enter, clone or install something.
_MATTERS = re.compile(r"\b(?:git|pip3?|cd|pushd|ARG|ENV)\b|[A-Za-z_]=", re.IGNORECASE)
# Options of git and pip that take the next word, so that it is not read as what is cloned or installed.
_GIT_VALUES = {"-C", "-c", "--depth", "-o", "--origin", "-j", "--jobs", "--filter", "--reference", "--git-dir"}
_PIP_VALUES = {
    *("-i", "--index-url", "--extra-index-url", "--trusted-host", "-f", "--find-links", "-r", "--requirement", "-c"),
    *("--constraint", "--target", "-t", "--prefix", "--root", "--timeout", "--retries", "--progress-bar", "--platform"),
}


@dataclass
class _State:
    """What has been said so far in one file: variables, clones by folder, and the folder commands run in."""

    variables: dict[str, str] = field(default_factory=dict)
    clones: dict[str, Mention] = field(default_factory=dict)
    folder: str = ""
    found: list[Mention] = field(default_factory=list)


def find(source: Source, known: Names) -> list[Mention]:
    """Return the mentions in a script or Dockerfile, in the order of their lines."""
    state = _State()
    for words, lines in commands(source.text, dockerfile=source.kind == "dockerfile"):
        _command(source, known, state, [_filled(word, state.variables) for word in words], lines)
    # A clone that no later command moved stays at the head of its default branch.
    return sorted([*state.found, *state.clones.values()], key=lambda m: m.line)


def commands(text: str, *, dockerfile: bool = False) -> Iterator[tuple[list[str], list[int]]]:
    """Yield each simple command as its words and the line (from 1) of each word."""
    for joined, first in _logical_lines(text, dockerfile=dockerfile):
        if not _MATTERS.search(joined):
            continue
        words: list[str] = []
        lines: list[int] = []
        for word, offset in _words(joined):
            if set(word) <= _SEPARATORS:
                if words:
                    yield words, lines
                words, lines = [], []
            else:
                words.append(word)
                lines.append(first + joined.count("\x00", 0, offset))
        if words:
            yield words, lines


def _logical_lines(text: str, *, dockerfile: bool) -> Iterator[tuple[str, int]]:
    """Yield continued lines as one, with its first line's number; NUL stands where a line ended."""
    held, first = "", 0
    for number, line in enumerate(text.replace("\x00", "").split("\n"), 1):
        comment = line.lstrip().startswith("#")
        if comment and held and dockerfile:  # Docker drops comment lines inside a continued instruction
            held += "\x00"
            continue
        if not held:
            first = number
        if line.rstrip().endswith("\\") and not comment:
            held += line.rstrip()[:-1] + "\x00"
            continue
        yield held + line, first
        held = ""
    if held:
        yield held, first


def _words(joined: str) -> Iterator[tuple[str, int]]:
    """Yield (word, offset of its end) of one logical line; of one with open quotes, what blanks part."""
    stream = io.StringIO(joined.replace("\x00", " "))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    found: list[tuple[str, int]] = []
    try:
        while (word := lexer.get_token()) is not None:
            found.append((word, stream.tell() - 1))
    except ValueError:  # a quote that closes on another line, or an apostrophe in prose
        found = [(match[0].strip("'\""), match.end() - 1) for match in re.finditer(r"[;&|()]+|[^\s;&|()]+", joined)]
    yield from found


def _filled(word: str, variables: dict[str, str]) -> str:
    """Return `word` with the variables of the file filled in; one that is not set keeps its dollar."""

    def value(match: re.Match) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, word)


def _command(source: Source, known: Names, state: _State, words: list[str], lines: list[int]) -> None:
    if source.kind == "dockerfile":
        if words[0].upper() == "FROM":
            return
        if words[0].upper() in ("RUN", "ARG", "ENV"):
            words, lines = words[1:], lines[1:]
    while words and (
        words[0] in ("sudo", "exec", "then", "do", "else", "!", "$", "export") or words[0].startswith("--mount")
    ):
        words, lines = words[1:], lines[1:]
    while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
        state.variables[assigned[1]] = assigned[2]
        words, lines = words[1:], lines[1:]
    if not words:
        return
    program = words[0].rsplit("/", 1)[-1]
    if program == "cd" or program == "pushd":
        state.folder = words[1].rstrip("/").rsplit("/", 1)[-1] if len(words) > 1 else ""
    elif program == "git":
        _git(source, known, state, words, lines)
    elif "install" in words[:5] and ("pip" in program or "pip" in words[:4]):
        start = words.index("install") + 1
        state.found += _pip(source, known, words[start:], lines[start:])


def _git(source: Source, known: Names, state: _State, words: list[str], lines: list[int]) -> None:
    folder, position = state.folder, 1
    while position < len(words) and words[position].startswith("-"):
        if words[position] == "-C" and position + 1 < len(words):
            folder = words[position + 1].rstrip("/").rsplit("/", 1)[-1]
        position += 2 if words[position] in ("-C", "-c") else 1
    if position >= len(words):
        return
    verb, rest, rest_lines = words[position], words[position + 1 :], lines[position + 1 :]
    if verb == "clone":
        _clone(source, known, state, rest, rest_lines)
    elif verb in ("checkout", "switch", "reset") and folder in state.clones:
        for word, line in zip(rest, rest_lines, strict=True):
            if word.startswith("-") or _unknown(word):
                continue
            clone = state.clones[folder]
            what = "commit" if refs.is_short_commit(word) else "ref"
            text = word.removeprefix("origin/").removeprefix("tags/")
            state.clones[folder] = replace(clone, line=line, what=what, text=text, where="checkout")
            break


def _clone(source: Source, known: Names, state: _State, words: list[str], lines: list[int]) -> None:
    ref, ref_line, urls, cut = "", 0, [], 0
    position = 0
    while position < len(words):
        word, line = words[position], lines[position]
        if word in ("-b", "--branch") and position + 1 < len(words):
            ref, ref_line = words[position + 1], lines[position + 1]
            position += 1
        elif word.startswith("--branch="):
            ref, ref_line = word.removeprefix("--branch="), line
        elif word in _GIT_VALUES:
            cut = line if word == "--depth" else cut
            position += 1
        elif word.startswith("--depth="):
            cut = line
        elif not word.startswith("-"):
            urls.append((word, line))
        position += 1
    if not urls or _unknown(urls[0][0]) or _unknown(ref) or "/" not in urls[0][0]:
        return
    url, url_line = urls[0]
    subject = repository_of(url, known)
    folder = (urls[1][0] if len(urls) > 1 else url).rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    if folder in state.clones:  # cloned again: what was said before stands too
        state.found.append(state.clones[folder])
    what = "ref" if ref else "head"
    state.clones[folder] = Mention(source.path, ref_line or url_line, subject, what, ref, "clone")
    if cut:
        state.found.append(Mention(source.path, cut, subject, "shallow", "--depth", "clone"))


def _pip(source: Source, known: Names, words: list[str], lines: list[int]) -> Iterator[Mention]:
    skip = False
    for word, line in zip(words, lines, strict=True):
        if skip or word.startswith("-"):
            skip = not skip and word in _PIP_VALUES
            continue
        if not re.search(r"[$`*{}]", word):
            yield from requirement(source.path, line, word, known, "pip")


def requirement(path: str, line: int, text: str, known: Names, where: str) -> Iterator[Mention]:
    """Yield what one requirement (PEP 508, or a bare git+URL) says of a package."""
    if text.startswith("git+"):
        yield _from_git(path, line, "", text, known, where)
        return
    try:
        parsed = Requirement(text)
    except InvalidRequirement:
        return
    subject = known.find(parsed.name) or parsed.name
    if parsed.url and parsed.url.startswith("git+"):
        yield _from_git(path, line, subject, parsed.url, known, where)
    elif parsed.specifier:
        yield Mention(path, line, subject, "specifier", str(parsed.specifier), where)


def _from_git(path: str, line: int, subject: str, url: str, known: Names, where: str) -> Mention:
    address = url.removeprefix("git+").split("#")[0]
    # The @ of a ref stands in the path; that of git@host, before it.
    host, inside = re.fullmatch(r"([a-z]+://[^/]*/)?(.*)", address, re.DOTALL).groups()
    before, _, ref = inside.partition("@") if host else (inside, "", "")
    subject = subject or repository_of(before, known)
    what = "head" if not ref else "commit" if refs.is_short_commit(ref) else "ref"
    return Mention(path, line, subject, what, ref, where)


def _unknown(word: str) -> bool:
    """Say whether a word still has a variable or a glob in it, so that what it names cannot be told from the text."""
    return bool(re.search(r"[$`*{}<>]", word))
