"""Console logs: the lines in which trainers print a step, among everything else a training prints.

    verl        step:3 - actor/entropy:0.41 - critic/rewards/mean:np.float64(0.5) - …
    slime       rollout 3: {'rollout/raw_reward': 0.5, …}      step 3: {'train/loss': 0.1, …}
    MindSpeed-RL  iteration: 3 / 100 | actor/pg_loss : 0.1 | grpo/rewards/mean : 0.5 | …

A log is bytes from many processes: prefixes of Ray, colours, progress bars that share a line with a step, two lines
glued into one, lines that a terminal broke, NUL bytes after a crash. A number is taken where it stands whole; a field
that is anything else goes on record as broken, with its line.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from recipes.metrics.growing import GrowingText
from recipes.metrics.table import MAX_STEP, Broken, Metrics, short

# The escape character is lost in some copies; what stays of a colour is taken out as well.
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_BARE_COLOUR = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m(?=[(\s]|step:)")
# `(TaskRunner pid=12)`, `(main_task pid=12, ip=10.0.0.1)`, `[repeated 3x across cluster]`: whose words these are.
_PREFIX = re.compile(rb"\s*(?:\([^()\n]{0,80}\bpid=\d+[^()\n]{0,80}\)|\[repeated \d+x across cluster\][^\[\]-]{0,40})")
_SUFFIX = re.compile(rb"(?:\s*(?:\([^()\n]{0,80}\bpid=\d+[^()\n]{0,80}\)|\[repeated \d+x across cluster\]))+\s*$")

_HEAD = re.compile(
    rb"step:(?P<verl>\d{1,16})(?=\s+-\s|\s+-?$|$)"
    rb"|(?<![\w/.-])(?:rollout|step|eval|perf) (?P<slime>\d{1,16}): (?=\{)"
    rb"|(?<![\w/.-])iteration:\s*(?P<mindspeed>\d{1,16})\s*/\s*\d+\s*(?=\|)"
)
# Searching for a word is many times as fast as for a pattern: a head is looked for around these, and nowhere else.
_WORDS_OF_HEADS = (b"step:", b"iteration:", b": {")
_LONGEST_HEAD = 32  # bytes before `: {`

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
# NumPy from version 2 and torch say the type of a number; text glued after the bracket is none of it.
_WRAPPED = re.compile(r"(?:(?:np|numpy)\.\w+|tensor)\(\s*([^(),\s]+)\s*(?:,[^()]*)?\)")
_WRAPPED_BYTES = re.compile(rb":np\.\w+\(([^(),\s:]+)\)(?= - |$)")
_WORDS = {"True": 1.0, "False": 0.0, "true": 1.0, "false": 0.0}
_MAX_KEY = 200
_MAX_FIELD = 600  # nothing of what patterns are tried on is longer: a hostile line can't make them slow

# How a line begins that a terminal broke off the one before: the rest of a key or a number, then a separator.
_GOES_ON = re.compile(rb"[^\s:]*(?::\S+)? ?- ?[^\s:]+:\S")
_REST_OF_NUMBER = re.compile(rb"[\d.eE+-]*\d\)?\s*$")
_WRAP_AT_LEAST = 20  # columns of the narrowest terminal
_MAX_JOINED = 2**16


def read_console(path: str | os.PathLike[str]) -> Metrics:
    """Read the console log of a training, finished or still being written, packed by gzip or not.

    Steps that come twice are merged key by key (validation and training; the tail of an attempt and its resumption);
    the later value wins. Of a last line without its end, the last field is left out: its number may be cut. Raises
    OSError if the file exists and can't be read.
    """
    return ConsoleLog(path).read()


class _Record(NamedTuple):
    """The text of one step, from its head on, and the line where it starts."""

    line: int
    text: bytes
    width: int  # bytes of its first line, as a terminal showed it
    last: int  # bytes of its last line
    joined: bool = False


class ConsoleLog(GrowingText):
    """A console log that grows: each `read()` parses only what was written since the one before."""

    def start_over(self) -> None:
        super().start_over()
        self._open: _Record | None = None  # the last record: the next line may go on with it
        self._layouts: dict[tuple[bytes, ...], tuple[str, ...]] = {}
        self._tentative: list[tuple[str, ...]] = []

    def settle(self) -> None:
        for keys in reversed(self._tentative):
            self.rows.withdraw(keys)
        self._tentative.clear()

    def take(self, text: bytes, number: int) -> None:
        # Most lines hold no step. They are never looked at one by one: the few words a step begins with are searched.
        hits = sorted({hit for word in _WORDS_OF_HEADS for hit in _hits(text, word)})
        at = self._go_on(text, 0)
        counted = 0
        for hit in hits:
            if hit < at:
                continue
            begin = text.rfind(b"\n", 0, hit) + 1
            end = text.find(b"\n", hit)
            end = len(text) if end < 0 else end
            number, counted = number + text.count(b"\n", counted, begin), begin
            for record in _records(text[begin:end], number):
                self._close()
                self._open = record
            at = self._go_on(text, end + 1)

    def _go_on(self, text: bytes, at: int) -> int:
        """Join the lines from `at` on to the open record, as far as they belong to it; returns where they end."""
        while self._open is not None and at <= len(text):
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end
            longer = self._joined(self._open, text[at:end])
            if longer is None:
                self._close()
                break
            self._open, at = longer, end + 1
        return at

    def take_tail(self, tail: bytes, number: int) -> bool:
        # What is here now is shown, and taken back at the next look: the line may go on, and so may the last record.
        records = [self._open] if self._open is not None else []
        if tail:
            if records and (longer := self._joined(records[0], tail)) is not None:
                tailed = [longer]
                records = []
            else:
                tailed = list(_records(tail, number))
            records += tailed[:-1]
            self._cut = bool(tailed)
        else:
            tailed, self._cut = [], False
        for record in records:
            self._parse(record, tentative=True)
        if tailed:
            self._parse(tailed[-1], tentative=True, cut=True)
        return not tail

    def is_unfinished(self, tail: bytes) -> bool:
        return self._cut

    def _close(self) -> None:
        if self._open is not None:
            self._parse(self._open)
            self._open = None

    def _joined(self, record: _Record, line: bytes) -> _Record | None:
        """The record with the next line, if a terminal broke that line off it, else None."""
        line = _clean(line).rstrip(b"\r")
        if not line.strip() or len(record.text) > _MAX_JOINED or not record.text.startswith(b"step:"):
            return None
        if _PREFIX.match(line) or _heads(line):
            return None
        text, first = record.text, line
        if text.endswith(b" -") and not line.startswith(b" "):
            first = b" " + line  # the blank at the end of the line was lost in copying
        elif line.startswith(b"- ") and not text.endswith(b" "):
            first = b" " + line
        whole = text + first
        start = text.rfind(b" - ", 0, len(text) - 1) + 3
        if len(text) - start > _MAX_FIELD:
            return None
        before = text[start:].decode(errors="replace")
        after = whole[start:].split(b" - ")[0].decode(errors="replace").rstrip().removesuffix(" -")
        half = text.endswith((b" -", b" - ")) or _field(before) is None
        full = record.joined and record.last == record.width and _REST_OF_NUMBER.match(line[:_MAX_FIELD])
        goes_on = record.width >= _WRAP_AT_LEAST and _GOES_ON.match(line[:_MAX_FIELD])
        # The field is whole now, or it may be with the line after the next.
        mended = _field(after) is not None
        later = half and b" " not in line.strip() and b" - " not in whole[start:]
        if later or (mended and (half or full or goes_on or (before.endswith(".") and after != before))):
            return _Record(record.line, whole, record.width, len(line), True)
        return None

    def _parse(self, record: _Record, *, tentative: bool = False, cut: bool = False) -> None:
        """Add the fields of a record to the rows. The last one is left out if it may be `cut`."""
        if not cut and self._parse_at_once(record.text, tentative):
            return
        step, fields = _fields(record.text)
        if step >= MAX_STEP:
            return
        if cut:
            last = fields[-1:]
            fields = fields[:-1]
            # What a bracket closes is whole even so.
            if last and last[0].endswith((")", "}")) and _field(last[0].rstrip("}")) is not None:
                fields = [*fields, last[0]]
        values: dict[str, float] = {}
        for text in fields:
            found = _field(text)
            if found is not None:
                values[found[0]] = found[1]
            elif not tentative:
                self.broken.append(Broken(record.line, f"no number under a key at step {step}: {short(text)}"))
        if values:
            keys = tuple(values)
            self.rows.add(step, keys, list(values.values()))
            if tentative:
                self._tentative.append(keys)
            if not cut:
                self._remember(record.text, keys)

    def _parse_at_once(self, text: bytes, tentative: bool) -> bool:
        """Parse a record of verl whose keys came before, several times as fast. False if it is not as simple as that.

        JSON's notion of a number is stricter than ours; orjson checks and converts all of them in one go.
        """
        from orjson import loads

        if b"np." in text:
            text = _WRAPPED_BYTES.sub(rb":\1", text)
        parts = text.replace(b" - ", b":").split(b":")
        keys = self._layouts.get(tuple(parts[::2]))
        if keys is None:
            return False
        try:
            step, *values = loads(b"[%b]" % b",".join(parts[1::2]))
            if type(step) is not int or len(values) != len(keys):
                return False
            self.rows.add(step, keys, values)
        except (ValueError, struct.error):
            return False
        if tentative:
            self._tentative.append(keys)
        return True

    def _remember(self, text: bytes, keys: tuple[str, ...]) -> None:
        parts = _WRAPPED_BYTES.sub(rb":\1", text).replace(b" - ", b":").split(b":")
        raw = tuple(parts[::2])
        if len(raw) == len(keys) + 1 == len(parts) // 2 and raw[1:] == tuple(key.encode() for key in keys):
            if len(self._layouts) > 1000:
                self._layouts.clear()
            self._layouts[raw] = keys


def _hits(text: bytes, word: bytes) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def _clean(line: bytes) -> bytes:
    if b"\0" in line:
        line = line.replace(b"\0", b"")
    if b"\x1b" in line:
        line = _ESCAPE.sub(b"", line)
    return line


def _records(line: bytes, number: int) -> Iterator[_Record]:
    """The steps in one line of the file; a carriage return starts a new line on the screen, as a line end does."""
    for shown in _clean(line).split(b"\r"):
        heads = _heads(shown)
        if not heads:
            continue
        ends = [head.start() for head in heads[1:]] + [len(shown)]
        for head, end in zip(heads, ends, strict=True):
            text = shown[head.start() : end]
            if b"[" in text:
                text = _BARE_COLOUR.sub(b"", text)
            if text.endswith((b")", b"]", b" ")):
                text = text[:-_MAX_FIELD] + _SUFFIX.sub(b"", text[-_MAX_FIELD:])
            if end != len(shown):
                text = text.rstrip()
            yield _Record(number, text, len(shown), len(shown))


def _heads(line: bytes) -> list[re.Match[bytes]]:
    """Where steps begin in a line, from left to right."""
    found = []
    for word in _WORDS_OF_HEADS:
        for hit in _hits(line, word):
            first = max(0, hit - _LONGEST_HEAD) if word == b": {" else hit
            head = _HEAD.search(line, first, hit + 3) if word == b": {" else _HEAD.match(line, hit)
            if head and head.end() >= hit and _is_head(line, head):
                found.append(head)
    return sorted({head.start(): head for head in found}.values(), key=re.Match.start)


def _is_head(line: bytes, head: re.Match[bytes]) -> bool:
    """Say whether `step:` is a word of its own: not the end of `global_step:`, but glued text may stand before it."""
    if head.lastgroup != "verl" or head.start() == 0:
        return True
    before = line[head.start() - 1 : head.start()]
    if before.isdigit():  # two lines glued into one: `…perf/throughput:347.2step:2 - `
        field = line[max(0, head.start() - _MAX_FIELD) : head.start()].rsplit(b" - ", 1)[-1].decode(errors="replace")
        return _field(field) is not None
    return not (before.isalpha() or before in b"_/.-")


def _fields(text: bytes) -> tuple[int, list[str]]:
    """A record → its step and its fields, each `key:value`."""
    head = _HEAD.match(text)
    assert head is not None and head.lastgroup is not None
    step = int(head[head.lastgroup])
    body = text[head.end() :].decode(errors="replace")
    if head.lastgroup == "slime":
        body = body.strip()
        parts = re.split(r",\s+(?=['\"])", body.removeprefix("{").removesuffix("}"))
        fields = [re.sub(r"^(['\"])(.*)\1:\s*", r"\2:", part.strip()) for part in parts]
        if not body.endswith("}") and fields:
            fields[-1] += " …"  # cut: a field that is not whole
    elif head.lastgroup == "mindspeed":
        fields = [":".join(word.strip() for word in part.split(":")) for part in body.split("|")]
    else:
        fields = [part.strip() for part in body.removesuffix(" -").split(" - ")]
    return step, [part for part in fields if part]


def _field(text: str) -> tuple[str, float] | None:
    """`key:value` → key and value; None unless it is exactly one colon between a key and a whole number."""
    key, colon, value = text.strip().partition(":")
    if not colon or not key or len(key) > _MAX_KEY or not key.isprintable() or "\ufffd" in key or key != key.strip():
        return None
    value = value[:_MAX_FIELD]
    if wrapped := _WRAPPED.match(value):
        value = wrapped[1]
    if _NUMBER.fullmatch(value):
        return key, float(value)
    return (key, _WORDS[value]) if value in _WORDS else None
