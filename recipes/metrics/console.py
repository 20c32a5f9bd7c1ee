"""Console logs: the lines in which trainers print a step, among everything else a training prints.

    verl        step:3 - actor/entropy:0.41 - critic/rewards/mean:np.float64(0.5) - …
    slime       rollout 3: {'rollout/raw_reward': 0.5, …}      step 3: {'train/loss': 0.1, …}
    MindSpeed-RL  iteration: 3 / 100 | actor/pg_loss : 0.1 | grpo/rewards/mean : 0.5 | …

A log is bytes from many processes: prefixes of Ray, colours, progress bars that share a line with a step, two lines
glued into one, lines that a terminal broke, NUL bytes after a crash. A number is taken where it stands whole; a field
that is anything else goes on record as broken, with its line. Of a record that may still go on, that is said for the
time being: the next look takes it back and reads again.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from recipes.metrics.growing import GrowingText
from recipes.metrics.table import MAX_STEP, Broken, Metrics, Restart, short

# The escape character is lost in some copies; what stays of a colour is taken out as well.
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_BARE_COLOUR = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m(?=[(\s]|step:)")
# `(TaskRunner pid=12)`, `(main_task pid=12, ip=10.0.0.1)`, `[repeated 3x across cluster]`: whose words these are.
_PREFIX = re.compile(rb"\s*(?:\([^()\n]{0,80}\bpid=\d+[^()\n]{0,80}\)|\[repeated \d+x across cluster\][^\[\]-]{0,40})")
# The same inside a line: from here on it is not the trainer's words.
_OTHERS = re.compile(rb"\([^()\n]{0,80}\bpid=\d+[^()\n]{0,80}\)|\[repeated \d+x across cluster\]")
_LEAD = 120  # bytes before a head in which the prefix of its line is looked for

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
_ROUNDED = re.compile(r"-?0\.00+")  # Python prints a zero in full as 0.0: this is a number below half of its last digit
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
    the later value wins, and `Metrics.restarts` says where the step went back. Of a last line without its end, the last
    field is left out unless it is closed: its number may be cut. Raises OSError if the file exists and can't be read.
    """
    return ConsoleLog(path).read()


class _Record(NamedTuple):
    """The text of one step, from its head on, and the line where it starts."""

    line: int
    text: bytes
    width: int  # bytes of its first line, as a terminal showed it
    last: int  # bytes of its last line
    lead: bytes  # what stood before it, with the prefix of the process that printed it
    torn: bool  # the words of another process follow its last field directly: its rest may be in the next line
    ended: bool  # something follows its last field: that is whole, even if the line has no end yet
    lines: int = 1
    doubtful: bool = False  # the next line is a number alone: it may be the rest of the last field, or not


class ConsoleLog(GrowingText):
    """A console log that grows: each `read()` parses only what was written since the one before."""

    format = "console log"

    def start_over(self) -> None:
        super().start_over()
        self._open: _Record | None = None  # the last record: the next line may go on with it
        self._layouts: dict[tuple[bytes, ...], tuple[str, ...]] = {}
        self._steps: dict[bytes, int] = {}  # the last step by the word it stood behind: each counts on its own
        self._trainers: dict[str, None] = {}
        # What the last look took only for the time being: the keys of its rows, and what was known before it.
        self._tentative: list[tuple[str, ...]] = []
        self._before: tuple[int, int, dict[bytes, int], set[str], dict[str, None]] | None = None

    def settle(self) -> None:
        for keys in reversed(self._tentative):
            self.rows.withdraw(keys)
        self._tentative.clear()
        if self._before is not None:
            broken, restarts, self._steps, self.rounded, self._trainers = self._before
            del self.broken[broken:], self.restarts[restarts:]
            self._before = None

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
        self._before = len(self.broken), len(self.restarts), self._steps.copy(), self.rounded.copy(), {**self._trainers}
        records = [self._open] if self._open is not None else []
        tailed: list[_Record] = []
        if tail:
            if records and (longer := self._joined(records[0], tail)) is not None:
                tailed, records = [longer], []
            else:
                tailed = list(_records(tail, number))
            records += tailed[:-1]
        for record in records:
            self._parse(record, tentative=True)
        if tailed:
            self._parse(tailed[-1], tentative=True, cut=True)
        # An object that is closed has its end, with or without a newline.
        self._cut = bool(tailed) and not tailed[-1].text.endswith(b"}")
        self.trainer = " and ".join(self._trainers)
        return not tail

    def is_unfinished(self, tail: bytes) -> bool:
        return self._cut

    def _close(self) -> None:
        if self._open is not None:
            self._parse(self._open)
            self._open = None

    def _joined(self, record: _Record, line: bytes) -> _Record | None:
        """The record with the next line, if a terminal or another process broke that line off it, else None."""
        text = record.text
        if record.doubtful or len(text) > _MAX_JOINED or not text.startswith(b"step:"):
            return None
        line = _clean(line).rstrip(b"\r")
        halved = False
        if prefix := _PREFIX.match(line):
            if prefix[0].strip() not in record.lead:
                return None
            # The same process goes on in a line of its own: Ray read the first half before the second was written.
            halved, line = True, line[prefix.end() :].removeprefix(b" ")
            if b" - " not in line and not _REST_OF_NUMBER.match(line[:_MAX_FIELD]):
                return None
        if not line.strip() or _PREFIX.match(line) or _heads(line):
            return None
        torn = False
        if b"pid=" in line and (others := _OTHERS.search(line)):
            torn = not line[: others.start()].endswith(b" ")
            line = line[: others.start()].rstrip()
        first = line
        if text.endswith(b" -") and not line.startswith(b" "):
            first = b" " + line  # the blank at the end of the line was lost in copying
        elif line.startswith(b"- ") and not text.endswith(b" "):
            first = b" " + line
        whole = text + first
        start = text.rfind(b" - ", 0, len(text) - 1) + 3
        if len(text) - start > _MAX_FIELD:
            return None
        before = text[start:].decode(errors="replace")
        after, *following = (part.decode(errors="replace") for part in whole[start:].split(b" - ", 2)[:2])
        after = after.rstrip().removesuffix(" -")
        half = text.endswith((b" -", b" - ")) or _field(before) is None
        full = record.lines > 1 and record.last == record.width and _REST_OF_NUMBER.match(line[:_MAX_FIELD])
        goes_on = record.width >= _WRAP_AT_LEAST and _GOES_ON.match(line[:_MAX_FIELD])
        # The field is whole now, or it may be with the line after the next. A key of several words is none: these are
        # the words of somebody else, glued to a half.
        mended = _field(after) is not None and " " not in after.partition(":")[0]
        followed = bool(following) and _field(following[0]) is not None
        if halved or record.torn:
            # Much stands in logs between and behind such halves: they are one only if whole fields follow.
            joins = mended and followed
        else:
            later = half and b" " not in line.strip() and b" - " not in whole[start:]
            joins = later or (mended and (half or full or goes_on or (before.endswith(".") and after != before)))
        if joins:
            return record._replace(
                text=whole, last=len(line), lines=record.lines + 1, torn=torn, ended=line.endswith(b" ")
            )
        number = mended and not half and not before.endswith(")") and _REST_OF_NUMBER.match(line[:_MAX_FIELD])
        if number and (record.torn or record.width >= _WRAP_AT_LEAST):
            return record._replace(lines=record.lines + 1, doubtful=True)
        if half and followed and b" " not in line.partition(b" - ")[0]:
            place = record.line + record.lines
            self.broken.append(Broken(place, f"looks like the rest of line {record.line}, left out: {short(line)}"))
        return None

    def _parse(self, record: _Record, *, tentative: bool = False, cut: bool = False) -> None:
        """Add the fields of a record to the rows. The last one is left out if it may be `cut`."""
        if not cut and not record.doubtful and self._parse_at_once(record, tentative):
            return
        word, step, fields, closed = _fields(record.text)
        if step >= MAX_STEP:
            self.broken.append(Broken(record.line, f"no number of a step: {short(record.text)}"))
            return
        if cut and fields and not closed and not record.ended and not record.doubtful:
            last = fields.pop()
            # What a bracket closes is whole even so.
            if last.endswith(")") and _field(last) is not None:
                fields.append(last)
        if record.doubtful:
            last = fields.pop()
            self.broken.append(
                Broken(record.line, f"the next line may be the rest of a number at step {step}: {short(last)}")
            )
        values: dict[str, float] = {}
        for text in fields:
            found = _field(text)
            if found is not None:
                values[found[0]] = found[1]
                if found[1] == 0 and _ROUNDED.fullmatch(text.partition(":")[2]):
                    self.rounded.add(found[0])
            else:
                self.broken.append(Broken(record.line, f"no number under a key at step {step}: {short(text)}"))
        if values:
            keys = tuple(values)
            self.rows.add(step, keys, list(values.values()))
            self._came(word, step, record.line)
            if tentative:
                self._tentative.append(keys)
            if not cut and not record.doubtful:
                self._remember(record.text, keys)

    def _came(self, word: bytes, step: int, line: int) -> None:
        """Note a step, and whether it went back: of a validation and a training at the same step it did not."""
        last = self._steps.get(word)
        if last is None:
            self._trainers[_TRAINERS.get(word, "slime")] = None
        elif step < last:
            self.restarts.append(Restart(line, last, step))
        self._steps[word] = step

    def _parse_at_once(self, record: _Record, tentative: bool) -> bool:
        """Parse a record of verl whose keys came before, several times as fast. False if it is not as simple as that.

        JSON's notion of a number is stricter than ours; orjson checks and converts all of them in one go.
        """
        from orjson import loads

        text = record.text
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
        if 0.0 in values:
            spelled = zip(keys, values, parts[3::2], strict=True)
            self.rounded.update(key for key, value, raw in spelled if not value and _ROUNDED.fullmatch(raw.decode()))
        self._came(b"step:", step, record.line)
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
    pieces = _clean(line).split(b"\r")
    last = len(pieces) - 1
    for place, shown in enumerate(pieces):
        heads = _heads(shown)
        if not heads:
            continue
        ends = [head.start() for head in heads[1:]] + [len(shown)]
        for head, end in zip(heads, ends, strict=True):
            text = shown[head.start() : end]
            if b"[" in text:
                text = _BARE_COLOUR.sub(b"", text)
            torn, ended = False, place < last or text.endswith((b" ", b"|"))
            # One byte is found several times as fast as a word, and few records hold one of these.
            if (b"=" in text or b"[" in text) and (others := _OTHERS.search(text)):
                text = text[: others.start()]
                ended = text[-1:].isspace() or others[0].startswith(b"[")
                torn, text = not ended, text.rstrip()
            if end != len(shown):
                text, ended = text.rstrip(), True
            lead = shown[max(0, head.start() - _LEAD) : head.start()]
            yield _Record(number, text, len(shown), len(shown), lead, torn, ended)


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


_TRAINERS = {b"step:": "verl", b"iteration:": "MindSpeed-RL"}


def _fields(text: bytes) -> tuple[bytes, int, list[str], bool]:
    """A record → the word before its step, the step, its fields as `key:value`, and whether the last one is closed."""
    head = _HEAD.match(text)
    assert head is not None and head.lastgroup is not None
    word, step = head[0][: head.start(head.lastgroup) - head.start()].strip(), int(head[head.lastgroup])
    body = text[head.end() :].decode(errors="replace")
    if head.lastgroup == "slime":
        body = body.strip()
        closed = body.endswith("}")
        parts = re.split(r",\s+(?=['\"])", body.removeprefix("{").removesuffix("}"))
        fields = [re.sub(r"^(['\"])(.*)\1:\s*", r"\2:", part.strip()) for part in parts]
        if not closed and fields:
            fields[-1] += " …"  # cut: a field that is not whole
    elif head.lastgroup == "mindspeed":
        closed = False  # a bar or a blank behind the last number is seen in the record
        fields = [":".join(word.strip() for word in part.split(":")) for part in body.split("|")]
    else:
        closed = body.endswith(" -")
        fields = [part.strip() for part in body.removesuffix(" -").split(" - ")]
    return word, step, [part for part in fields if part], closed


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
