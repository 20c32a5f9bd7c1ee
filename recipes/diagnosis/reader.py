"""Read a log of any size once, in bounded memory, and keep what may say why a run failed.

Most lines say nothing, so blocks are searched for a few literals and only lines around a find are looked at; where a
traceback is open, every line is. Nothing here is slower than linear in the text, whatever the text is.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO

from recipes.diagnosis.causes import CAUSES, Cause
from recipes.errors import RecipeError
from recipes.logtext import clean
from recipes.masking import mask

BLOCK = 1 << 20
# Bytes of one line looked at before and after what was found in it.
BEFORE, AFTER = 2048, 4096
# Characters of a line that are quoted.
QUOTE = 300
# Distinct exceptions, distinct lines to rank, and names of writers that are kept; more of them tell nothing new.
EXCEPTIONS, RANKED, WRITERS = 200, 2000, 1000
# Lines a traceback may have, and tracebacks that may be open at once (one a writer).
FRAMES, OPEN = 2000, 256

# Words of lines worth a look whether a pattern wants them or not: errors, tracebacks, steps, and the end.
_WORTH_A_LOOK = (
    *(
        "rror",
        "ERROR",
        "xception",
        "Traceback (",
        "atal ",
        "FATAL",
        "egmentation fault",
        "core dumped",
        "terminate called",
    ),
    *("ailed", "died", "killed", "Abort", "CRITICAL", "step:", "Total training steps", "Training Progress: 100%"),
    *("Final validation metrics", "refused", "timed out", "Unable to", "annot "),
)
# Words that many patterns share. Each literal costs a pass over the log: a few common ones beat a hundred exact ones.
_SHARED = (
    *(" not ", "EI00", "must be", "divisible", "memory", "open shared", "No module named", " could ", "only support"),
    *("ommInitRootInfo", "GLM52", " bus", "Bus", "port", "error code is", "device", "expert", "with ", " space "),
)


def _gates() -> tuple[bytes, ...]:
    """Return literals of which every line that matters holds one: the words above, and the parts they do not cover."""
    gates = [*_WORTH_A_LOOK, *_SHARED]
    for cause in CAUSES:
        for pattern in cause.patterns:
            if not any(gate in part for gate in gates for part in pattern.split("…")):
                gates.append(max(pattern.split("…"), key=len))
    return tuple(gate.encode() for gate in gates)


GATES = _gates()

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_CONTROLS = bytes(b for b in (*range(32), 127) if b not in b"\t\n\r")
_WRITER = re.compile(r"\s{0,3}\(([A-Za-z_][^()\n]{0,160})\) ?|\[(rank ?\d{1,6})\]:? ?|(worker-\d{1,6}): ")
_LEVEL = re.compile(r"(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]{1,80}\] ?")
_REPEATED = re.compile(r" \[repeated (\d{1,9})x across cluster\]")
_STEP = re.compile(r"(?<![\w/])step:(\d{1,12}) - ")
_TOTAL = re.compile(r"Total training steps: (\d{1,12})")
_FRAME = re.compile(r'\s+File "([^"\n]{1,400})", line (\d{1,9}), in (.{1,120})')
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit|Failed|Died|Warning|Timeout)|Exception)"
    r"(?:\([\w.]{1,80}\))?)"
    r"(?:: (.*)|:?$)"
)
_ENDING = re.compile(r"([A-Za-z_][\w.]{0,200}(?:\([\w.]{1,80}\))?)(?:: ?(.*)|$)")
_LIBRARY = ("site-packages", "dist-packages", "/lib/python3", "<frozen")
_ALARMS = (
    (4, ("Fatal ", "FATAL", "fatal error", "egmentation fault", "core dumped", "terminate called", "CRITICAL")),
    (3, ("ERROR", "Error")),
    (1, ("ailed", "refused", "timed out", "Unable to", "annot ", "killed", "died", "Abort")),
)


@dataclass
class Hit:
    """A cause found in the log: where first, in whose words, how often, and by whom."""

    cause: Cause
    line: int
    quotes: list[str]
    count: int = 0
    last: int = 0
    writers: dict[str, None] = field(default_factory=dict)


@dataclass
class Raised:
    """An exception with its traceback. `frame` is its innermost frame outside of libraries, or its innermost."""

    type: str
    message: str
    line: int
    end: int
    writer: str
    frame: str = ""
    count: int = 1
    ignored: bool = False

    @property
    def said(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass
class Ranked:
    """A line that may say something, where no known cause was found."""

    score: int
    line: int
    text: str
    writer: str
    count: int = 1


@dataclass
class Scan:
    """What one pass over a log kept. `damaged` says why a compressed log could not be read to its end."""

    hits: dict[str, Hit] = field(default_factory=dict)
    raised: dict[tuple[str, str], Raised] = field(default_factory=dict)
    ranked: dict[str, Ranked] = field(default_factory=dict)
    last_exception: tuple[int, str] | None = None
    lines: int = 0
    step: int | None = None
    step_line: int = 0
    total: int | None = None
    through: bool = False
    damaged: str = ""

    @property
    def ended_well(self) -> bool:
        """Whether the log itself shows the end of the training."""
        return self.through or (self.step is not None and self.step == self.total)


def scan(path: Path) -> Scan:
    """Read the log at `path`, plain or gzip. Raises RecipeError when it cannot be read at all."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            for number, block in _blocks(gzip.GzipFile(fileobj=file) if packed else file, reader.found):
                reader.block(number, block)
    except IsADirectoryError as fault:
        raise RecipeError(f"{path} is a directory, not a log.") from fault
    except OSError as fault:
        raise RecipeError(f"{path} cannot be read: {fault.strerror or fault}.") from fault
    return reader.found


def _blocks(file: IO[bytes], found: Scan) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines with the number of their first line. A line above four blocks is cut, not kept."""
    number, rest = 1, b""
    while True:
        try:
            chunk = file.read(BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
            found.damaged, chunk = str(fault), b""
        if not chunk:
            break
        block = rest + chunk
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) < 4 * BLOCK:
                rest = block
                continue
            end = len(block)
        yield number, block[:end]
        number += block.count(b"\n", 0, end)
        rest = block[end:]
    if rest:
        yield number, rest
        number += 1
    found.lines = number - 1


class _Reader:
    """Takes blocks in order and fills a Scan."""

    def __init__(self) -> None:
        self.found = Scan()
        self.open: dict[str, dict] = {}
        self.ignoring: set[str] = set()

    def block(self, number: int, block: bytes) -> None:
        if b"\x1b" in block:
            block = _ESCAPE.sub(b"", block)
        block = block.translate(None, _CONTROLS)
        following = self.open or b"Traceback (" in block
        at = 0
        for start, end in _lines(block) if following and len(self.found.raised) < EXCEPTIONS else _spots(block):
            number += block.count(b"\n", at, start)
            at = start
            for piece in block[start:end].split(b"\r"):
                if piece:
                    self.line(number, piece)

    def line(self, number: int, raw: bytes) -> None:
        text = clean(raw.decode("utf-8", errors="replace")).replace("\n", " ")
        writer, said = writer_of(text)
        times = 1
        if "[repeated " in said and (repeated := _REPEATED.search(said)):
            times = max(1, int(repeated[1]))
            said = said[: repeated.start()]
        if "step" in said:
            self._progress(number, said)
        elif "Training Progress: 100%" in said or "Final validation metrics" in said:
            self.found.through = True
        bare = _LEVEL.sub("", said, count=1) if " [" in said[:80] else said
        inside = self._traceback(number, writer, bare)
        cause = match(said)
        if cause is not None:
            self._hit(cause, number, writer, said, times)
            if cause.kind in ("noise", "doubt"):
                return
        if not inside:
            self._rank(number, writer, bare.strip(), times)

    def _progress(self, number: int, said: str) -> None:
        step = _STEP.search(said)
        if step:
            self.found.step, self.found.step_line = int(step[1]), number
        elif total := _TOTAL.search(said):
            self.found.total = int(total[1])

    def _hit(self, cause: Cause, number: int, writer: str, said: str, times: int) -> None:
        hit = self.found.hits.get(cause.id)
        quote = cut(around(said.strip(), cause))
        if hit is None:
            hit = self.found.hits[cause.id] = Hit(cause, number, [quote])
        elif len(hit.quotes) < 3 and quote not in hit.quotes:
            hit.quotes.append(quote)
        hit.count += times
        hit.last = number
        if writer and len(hit.writers) < WRITERS:
            hit.writers[writer] = None

    def _traceback(self, number: int, writer: str, said: str) -> bool:
        """Follow tracebacks, one a writer. Says whether the line is part of one, its last line aside."""
        if said.startswith("Exception ignored in"):
            self.ignoring.add(writer)
        if "Traceback (most recent call last)" in said:
            if len(self.open) < OPEN or writer in self.open:
                self.open[writer] = {"line": number, "frame": "", "own": "", "lines": 0}
            return True
        block = self.open.get(writer)
        if block is None:
            return False
        block["lines"] += 1
        if not said or said[0].isspace() or said[0] in "^~|+":
            frame = _FRAME.match(said)
            if frame:
                words = f"{frame[1]}, line {frame[2]}, in {frame[3]}"
                block["frame"] = words
                if not any(part in frame[1] for part in _LIBRARY):
                    block["own"] = words
            if block["lines"] > FRAMES:
                del self.open[writer]
            return True
        ending = _ENDING.match(said)
        if ending and ending[1].rpartition(".")[2].startswith("RayTaskError("):
            # Ray quotes the traceback of the process that failed after its own: the original follows.
            block["frame"] = block["own"] = ""
            return True
        del self.open[writer]
        if not ending:
            return False
        self._raise(number, writer, block, ending[1], ending[2] or "")
        return False

    def _raise(self, number: int, writer: str, block: dict, kind: str, message: str) -> None:
        ignored = writer in self.ignoring
        self.ignoring.discard(writer)
        short, message = kind.rpartition(".")[2], cut(message)
        known = self.found.raised.get((short, message))
        if known:
            known.count += 1
            known.ignored &= ignored
        elif len(self.found.raised) < EXCEPTIONS:
            frame = block["own"] or block["frame"]
            self.found.raised[short, message] = Raised(
                short, message, block["line"], number, writer, cut(frame), ignored=ignored
            )

    def _rank(self, number: int, writer: str, said: str, times: int) -> None:
        exception = _EXCEPTION.match(said)
        if exception and not exception[1].endswith("Warning"):
            score = 5
            self.found.last_exception = (number, cut(said))
        elif "Warning" in said or "WARNING" in said:
            return
        else:
            score = next((points for points, words in _ALARMS if any(word in said for word in words)), 0)
        if not score:
            return
        key = re.sub(r"\d+", "0", said[:QUOTE])
        known = self.found.ranked.get(key)
        if known:
            known.count += times
        elif len(self.found.ranked) < RANKED:
            self.found.ranked[key] = Ranked(score, number, cut(said), writer, times)


def _lines(block: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of every line, cut to what is looked at."""
    start, size = 0, len(block)
    while start < size:
        end = block.find(b"\n", start)
        end = size if end < 0 else end
        yield start, min(end, start + BEFORE + AFTER)
        start = end + 1


def _spots(block: bytes) -> list[tuple[int, int]]:
    """Return start and end of each line that holds a gate, in order; of a long line, the part around it."""
    spots: dict[int, int] = {}
    size = len(block)
    for gate in GATES:
        at = block.find(gate)
        while at >= 0:
            floor = max(0, at - BEFORE)
            start = max(block.rfind(b"\n", floor, at) + 1, floor)
            end = block.find(b"\n", at, at + AFTER)
            end = min(size, at + AFTER) if end < 0 else end
            spots[start] = max(end, spots.get(start, 0))
            at = block.find(gate, max(end, at + 1))
    return sorted(spots.items())


def writer_of(text: str) -> tuple[str, str]:
    """Split off who printed a line: `(WorkerDict pid=7, ip=10.0.0.1) words` or `[rank3]: words`; up to three deep."""
    writers, at = [], 0
    for _ in range(3):
        found = _WRITER.match(text, at)
        if not found or (found[1] and "pid=" not in found[1] and found[1] not in ("raylet", "autoscaler")):
            break
        writers.append(found[1] or found[2] or found[3])
        at = found.end()
    return " ".join(writers), text[at:]


@lru_cache(maxsize=20_000)
def match(text: str) -> Cause | None:
    """Return the first entry of the table that one line belongs to."""
    if not _ANY.search(text):
        return None
    for cause, patterns in _COMPILED:
        for parts in patterns:
            at = 0
            for part in parts:
                at = text.find(part, at)
                if at < 0:
                    break
                at += len(part)
            else:
                return cause
    return None


def around(text: str, cause: Cause) -> str:
    """Return a line from a little before what the cause was found by, where the line is too long to be quoted whole."""
    if len(text) <= QUOTE:
        return text
    starts = [text.find(parts[0]) for each, patterns in _COMPILED if each is cause for parts in patterns]
    start = min((at for at in starts if at >= 0), default=0) - QUOTE // 4
    return "…" + text[start + 1 :] if start > 0 else text


_COMPILED = [(cause, [tuple(filter(None, p.split("…"))) for p in cause.patterns]) for cause in CAUSES]
# One look that tells most lines from those worth the table: the longest part of each pattern.
_ANY = re.compile("|".join({re.escape(max(parts, key=len)) for _, patterns in _COMPILED for parts in patterns}))


def cut(text: str, width: int = QUOTE) -> str:
    """Return text fit to show in one line: printable characters only, secrets masked, cut to `width`."""
    # Masked before it is cut: half a token looks like none.
    text = mask("".join(c if c.isprintable() else " " for c in text[: 4 * width]))
    return text if len(text) <= width else text[: width - 1] + "…"
