"""What a document (Markdown or reStructuredText) says to use: in its commands, its tables and its sentences.

In a changelog only the newest entry about a thing counts; the older ones are history, not advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from recipes.stack import conflict, shell_mentions
from recipes.stack.mentions import Mention, Names, Source

_COMMAND = re.compile(r"\s*(?:[$#>]\s+)?(?:sudo\s+)?(?:git|cd|pip3?|uv|python3?|RUN|ARG|export|[A-Z_]+=)\b.*")
_VERSION = r"(?:core_[rv]|releases?/v?|v)?\d+\.\d+(?:\.\d+)*(?:\.?(?:post|rc|dev|RC)\d*)*(?:\+\w+)?"
_TOKEN = re.compile(rf"(?<![\w./-])(?:{_VERSION}|[0-9a-f]{{7,40}}|main|master)(?![\w/-]|\.\w)")
_SPECIFIER = re.compile(r"[<>=!~]=?\s*\d[\w.]*(?:\s*,\s*[<>=!~]=?\s*\d[\w.]*)*")
# "0.1 to 0.9": what is spoken of, not what is to be installed.
_RANGE = re.compile(r"\s*(?:to|through|until|bis|到|至|-|–|—|…|\.\.\.?)\s*v?\d")
_DATE = re.compile(r"^[-*+#\s]*\W{0,3}(20\d\d)[-/.](\d\d?)[-/.](\d\d?)\b")
_BULLET = re.compile(r"^\s*(?:[-*+]\s|#+\s|$)")
_RULE = re.compile(r"^[\s|+:=-]+$")


@dataclass(frozen=True)
class Row:
    """One row of a table: its line, its cells, and the heads of its columns where the table has them."""

    line: int
    cells: tuple[str, ...]
    heads: tuple[str, ...] = ()


def find(source: Source, known: Names, cann: str = "") -> list[Mention]:
    """Return the mentions of a document, in the order of its lines.

    A table that names another CANN than `cann` speaks of another stack and is left out.
    """
    lines = source.text.split("\n")
    commands = "\n".join(line if _is_command(line, lines, index) else "" for index, line in enumerate(lines))
    found = shell_mentions.find(replace(source, kind="shell", text=commands), known)
    in_tables = {row.line for table in tables(source) for row in table}
    found += in_tables_of(source, known, cann)
    date = ""
    for number, line in enumerate(lines, 1):
        dated = _DATE.match(line)
        if dated:
            date = f"{dated[1]}-{int(dated[2]):02}-{int(dated[3]):02}"
        elif _BULLET.match(line):
            date = ""
        if number not in in_tables and not _is_command(line, lines, number - 1):
            found += [replace(m, date=date) for m in _sentence(source, number, line, known)]
    return sorted(_newest(found), key=lambda m: m.line)


def in_tables_of(source: Source, known: Names, cann: str = "") -> list[Mention]:
    """Return what the tables of a document, or of a script's comments, say; see `find`."""
    found: list[Mention] = []
    for table in tables(source):
        said = [m for row in table for m in _row(source, row, known)]
        others = [m.text for m in said if m.subject == "CANN"]
        if not (cann and others) or any(conflict.possible([text, cann]) for text in others if _is_pep440(text)):
            found += said
    return found


def tables(source: Source) -> list[list[Row]]:
    """Return the tables of a document: pipes and grids, columns under rules of `=`, and list-tables."""
    lines = source.text.split("\n")
    return [*_piped(lines), *_ruled(lines), *_listed(lines)]


def plain(cell: str) -> str:
    """Return a cell without backticks, emphasis, links and escapes: what a reader sees."""
    cell = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)  # Markdown link
    cell = re.sub(r"`([^`<]*)<[^>]*>`_*", r"\1", cell)  # reStructuredText link
    return re.sub(r"[`*\\]", "", cell).strip()


def _is_command(line: str, lines: list[str], index: int) -> bool:
    if _COMMAND.fullmatch(line):
        return True
    above = lines[index - 1] if index else ""
    return above.rstrip().endswith("\\") and _is_command(above, lines, index - 1)


def _row(source: Source, row: Row, known: Names) -> Iterator[Mention]:
    """A row whose first cell is exactly the name of a thing speaks of it; the cells after that say ref and commit."""
    name = plain(row.cells[0])
    subject = known.find(name) or {"cann": "CANN", "python": "python"}.get(name.lower(), "")
    if not subject:
        return
    for cell in row.cells[1:]:
        text = plain(cell)
        if any(c in text for c in "<>=!~") and (asked := _SPECIFIER.search(text)):
            yield Mention(source.path, row.line, subject, "specifier", asked[0].replace(" ", ""), "table")
            return
        for token in _TOKEN.findall(text)[:1]:
            yield Mention(source.path, row.line, subject, _what(token), token, "table")


def _sentence(source: Source, number: int, line: str, known: Names) -> Iterator[Mention]:
    """Names directly followed by a version: "torch_npu ``2.10.0.post2``", "Megatron-LM core_r0.16.0"."""
    for match in re.finditer(r"[A-Za-z][\w-]*(?:/[A-Za-z][\w-]*)?", line):
        subject = known.find(match[0])
        if not subject:
            continue
        gap = re.match(r"[\s`'\"*\\:：=（(@]{1,6}", line[match.end() :])
        token = _TOKEN.match(line, match.end() + gap.end()) if gap else None
        if token and token[0] not in ("main", "master") and not _RANGE.match(line, token.end()):
            yield Mention(source.path, number, subject, _what(token[0]), token[0], "prose")


def _is_pep440(text: str) -> bool:
    return bool(re.fullmatch(r"[<>=!~]*\s*\d+(\.\d+)*((rc|RC|\.post)\d+)?(,.*)?", text))


def _what(token: str) -> str:
    if re.fullmatch(r"[0-9a-f]{7,40}", token) and not re.fullmatch(r"\d{1,8}", token):
        return "commit"
    return "version" if re.fullmatch(r"\d+(\.\d+)+\S*", token) else "ref"


def _newest(found: list[Mention]) -> list[Mention]:
    """Drop what older entries of a changelog say of a thing that a newer entry speaks of."""
    newest: dict[str, str] = {}
    for mention in found:
        newest[mention.subject] = max(newest.get(mention.subject, ""), mention.date)
    return [m for m in found if not m.date or m.date == newest[m.subject]]


def _piped(lines: list[str]) -> Iterator[list[Row]]:
    block: list[Row] = []
    for number, line in enumerate([*lines, ""], 1):
        stripped = re.sub(r"^\s*#\s?", "", line).strip()  # tables stand in the comments of scripts, too
        if stripped.startswith("|") and stripped.count("|") >= 3:
            if not _RULE.fullmatch(stripped):
                block.append(Row(number, tuple(cell.strip() for cell in stripped.strip("|").split("|"))))
        elif not (stripped.startswith("+") and _RULE.fullmatch(stripped)):
            if block:
                yield _headed(block)
            block = []


def _ruled(lines: list[str]) -> Iterator[list[Row]]:
    """Columns under rules such as `===== ======`: the rule says where each column starts."""
    block: list[Row] = []
    starts: list[int] = []
    for number, line in enumerate([*lines, ""], 1):
        if re.fullmatch(r"\s*=+(\s+=+)+\s*", line):
            if not block:
                starts = [match.start() for match in re.finditer(r"=+", line)]
        elif starts and line.strip():
            # Cells are wider than they look where characters are, so blanks part them, not the rule's columns.
            cells = re.split(r"\s{2,}|\t", line.strip())
            block.append(Row(number, tuple(cells)))
        else:
            if block:
                yield _headed(block)
            block, starts = [], []


def _listed(lines: list[str]) -> Iterator[list[Row]]:
    """Rows of a list-table: `* - first` and then `  - next`."""
    block: list[Row] = []
    for number, line in enumerate([*lines, "end"], 1):
        first, following = re.match(r"\s*\* - (.*)", line), re.match(r"\s+- (.*)", line)
        if first:
            block.append(Row(number, (first[1].strip(),)))
        elif following and block:
            block[-1] = replace(block[-1], cells=(*block[-1].cells, following[1].strip()))
        elif line.strip():
            if block:
                yield _headed(block)
            block = []


def _headed(rows: list[Row]) -> list[Row]:
    heads = tuple(plain(cell) for cell in rows[0].cells)
    return [rows[0], *(replace(row, heads=heads) for row in rows[1:])]
