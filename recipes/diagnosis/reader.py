"""Read a log of any size once, in bounded memory, and keep what may say why a run failed.

Most lines say nothing, so blocks are searched for a few literals and only lines around a find are looked at; where a
traceback is open, every line is. Nothing here is slower than linear in the text, whatever the text is.

What stands before a step was survived: the training made that step all the same. So each find remembers after which
step it came last, its epoch, and only what is of the last epoch can have ended the run. What a model said, which verl
prints, and what a configuration holds is no find at all.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path

from recipes.diagnosis.causes import CAUSES, Cause
from recipes.errors import RecipeError
from recipes.logtext import clean
from recipes.masking import mask

BLOCK = 1 << 20
# Bytes of one line looked at before and after what was found in it.
BEFORE, AFTER = 2048, 4096
# A step has hundreds of metrics in one line: so much of it is looked at, where its head stands so near to its start.
STEP, HEAD = 1 << 16, 512
# Characters of a line that are quoted.
QUOTE = 300
# Distinct exceptions, distinct lines to rank, and names of writers that are kept; more of them tell nothing new.
EXCEPTIONS, RANKED, WRITERS = 200, 2000, 1000
# Lines a traceback may have, and tracebacks that may be open at once (one a writer).
FRAMES, OPEN = 2000, 256
# Lines after a traceback in which the same writer may still say what the exception was about (HCCL's codes follow it).
EXPLAINED_WITHIN = 20
# Lines a printed prompt or response may have before its end is given up, and those between its ground truth and its
# score; lines that are kept meanwhile, should it turn out to be none.
PRINTED, SCORED, HELD = 5000, 100, 1000
# Keys of values that are not finite.
BROKEN = 50

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
    *("ailed", "died", "illed", "Abort", "CRITICAL", "step:", "Total training steps", "Training Progress: 100%"),
    *("Final validation metrics", "refused", "timed out", "Unable to", "annot ", '", line ', "exit", "CANCELLED"),
    *(" ERR ", "ut Of Memory", "[prompt]", "[response]", "[ground_truth]", "[score]", "KeyboardInterrupt", "[PID: "),
)
# Words that many patterns share. Each literal costs a pass over the log: a few common ones beat a hundred exact ones.
_SHARED = (
    *(" not ", "EI00", "must be", "divisible", "memory", "open shared", "No module named", " could ", "only support"),
    *("ommInitRootInfo", "9999: ", "9999): ", "ERR0", "error code:", "runtime result = ", "HCCL_EXEC_TIMEOUT"),
    *("GLM52", " bus", "Bus", "port", "error code is", "device", "expert", "with ", " space "),
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
# What other programs put before a line: who says it, and when. Ray, torchrun, mpirun, srun --label; time stamps of
# logging, of Kubernetes (with the stream), of syslog (with host and program) and of the kernel.
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_DAY = r"\d{4}[-/]\d\d[-/]\d\d"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_PREFIX = re.compile(
    r"\s{0,3}\((?P<actor>[A-Za-z_][^()\n]{0,160})\) ?"
    r"|\[(?P<rank>(?:rank|default) ?\d{1,6})\]:? ?"
    r"|(?P<worker>worker-\d{1,6}): "
    r"|\[\d{1,4},(?P<process>\d{1,6})\]<std(?:out|err)>: ?"
    r"|(?P<task>\d{1,5}): "
    rf"|(?:\[{_DAY}[T _-]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]|{_DAY}[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?=[ |]))"
    r"(?: std(?:out|err) [FP](?= ))?(?: - | \| | )?"
    rf"|\[{_CLOCK}\] ?|{_CLOCK} "
    rf"|{_MONTH} [ \d]\d {_CLOCK} (?:[\w.-]{{1,64}} )?[\w./-]{{1,64}}(?:\[\d{{1,7}}\])?: "
    rf"|\[[A-Z][a-z]{{2}} {_MONTH} [ \d]\d {_CLOCK} \d{{4}}\] |\[ {{0,8}}\d{{1,9}}\.\d{{6}}\] "
)
# A bare number before a line is a label of srun only where such a line follows: else it is what the line says.
_AFTER_A_LABEL = re.compile(
    r'Traceback \(most|\s{2,8}File "|step:\d|[A-Za-z_][\w.]{0,200}(?:Error|Exception)\b'
    r"|\d{4}-\d\d-\d\d[T ]|\[(?:rank|default)? ?\d|\(\w{1,80} pid="
)
_LEVEL = re.compile(r"(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]{1,80}\] ?")
_REPEATED = re.compile(r" \[repeated (\d{1,9})x across cluster\]")
_STEP = re.compile(r"(?<![\w/])step:(\d{1,12}) - ")
_TOTAL = re.compile(r"Total training steps: (\d{1,12})")
# A value of a step that is no number; NumPy and torch say its type as well.
_NOT_FINITE = re.compile(r" - ([^\s:]{1,120}):(?:[\w.]{1,20}\()?([+-]?(?:nan|inf(?:inity)?))(?=[\s),]|$)", re.I)
_FRAME = re.compile(r'\s+File "([^"\n]{1,400})", line (\d{1,9}), in (.{1,120})')
# The margin that Python draws beside the exceptions of an ExceptionGroup.
_MARGIN = re.compile(r"\s{1,80}\| ?")
# What verl prints of a sample, in this order: prompt, response, ground_truth, then score or the keys of a score.
_SAMPLE = ("prompt", "response", "ground_truth", "score")
_PRINTS = re.compile(r"\[([a-z_][a-z0-9_]{0,40})\](?: |$)")
# A line of a printed configuration: it begins with a quoted key, or is a quoted text and nothing else; an object of
# JSON may be a record of a log. A command that a shell traces (set -x) is of the same kind.
_QUOTES = re.compile(
    r"""(?:[\s{(\[]{0,200}'[^'\n]{0,500}'|\s{0,200}"[^"\n]{0,500}")\s{0,9}(?::|[,)\]}]{0,20}\s*$)"""
    r"|\+{1,4} (?!Exception Group)"
)
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit|Failed|Died|Warning|Timeout)|Exception)"
    r"(?:\([\w.]{1,80}\))?)"
    r"(?:: (.*)|:?$)"
)
_ENDING = re.compile(r"([A-Za-z_][\w.]{0,200}(?:\([\w.]{1,80}\))?)(?:: ?(.*)|$)")
_FROM_RAY = re.compile(r"(?:[A-Za-z_]\w{0,40}\.){0,4}RayTaskError\(")
_LIBRARY = ("site-packages", "dist-packages", "/lib/python3", "<frozen")
# How much a line says about a failure, an exception aside (5): 4 and 3 are of failing character, the rest complains.
FAILING, FATAL = 3, 4
_ALARMS = (
    (
        FATAL,
        re.compile(
            r"Fatal |FATAL|fatal error|egmentation fault|core dumped|terminate called|CRITICAL|\bKilled\b|\bAborted\b"
            r"|\bSIG(?:KILL|SEGV|ABRT|BUS|ILL|FPE)\b|oom[-_]kill|[Oo]ut [Oo]f [Mm]emory|CANCELLED|\bJob '[^']+' failed"
            r"|\bexit(?:ed|s)?(?: with)?(?: an?)?(?: exit)?[ _-]?(?:code|status)?[:=]? ?-?[1-9]\d{0,9}\b"
            r"|\bE[A-Z0-9]\d{4}\)?: |\bERR\d{5} |\berror code(?: is |:)\d|\bruntime result = \d|[Cc]uda[Ee]rror"
        ),
    ),
    (
        FAILING,
        re.compile(r"\bERROR\b|\bERR\b|Error\b(?=[:(\s\]]|$)|\b[Ee]rror: |\[E\d{3,4} \d|Exception Group Traceback"),
    ),
    (2, re.compile(r"Error")),
    (1, re.compile(r"ailed|refused|timed out|Unable to|annot |killed|died|Abort")),
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
    epoch: int = 0
    again: Hit | None = None  # the same, of its last epoch only

    @property
    def latest(self) -> Hit:
        """What of it came after the last step before its end."""
        return self.again or self

    def add(self, number: int, quote: str, writer: str, times: int) -> None:
        if number < self.line:
            self.line = number
            self.quotes.insert(0, quote)
        elif quote not in self.quotes:
            self.quotes.append(quote)
        del self.quotes[3:]
        self.count += times
        self.last = max(self.last, number)
        if writer and len(self.writers) < WRITERS:
            self.writers[writer] = None


@dataclass
class Raised:
    """An exception with its traceback. `frame` is its innermost frame outside of libraries, or its innermost.

    `explained` says that the table knows what it is about: a cause stands in its lines, or right after them.
    """

    type: str
    message: str
    line: int
    end: int
    writer: str
    frame: str = ""
    count: int = 1
    ignored: bool = False
    explained: bool = False
    epoch: int = 0

    @property
    def said(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass
class Ranked:
    """A line that may say something, where no known cause was found. `ends` a traceback, or stands alone."""

    score: int
    line: int
    text: str
    writer: str
    count: int = 1
    ends: bool = False


@dataclass
class Scan:
    """What one pass over a log kept. `damaged` says why a compressed log could not be read to its end.

    `ranked` and `last_exception` are of the time after the last step, `before` is `ranked` of the time before it.
    `broken` holds the keys of values that were not finite: step, line and value of the first, and `broken_last` those
    of the last step.
    """

    hits: dict[str, Hit] = field(default_factory=dict)
    raised: dict[tuple[str, str], Raised] = field(default_factory=dict)
    ranked: dict[str, Ranked] = field(default_factory=dict)
    before: dict[str, Ranked] = field(default_factory=dict)
    broken: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    broken_last: set[str] = field(default_factory=set)
    epoch: int = 0
    binary: bool = False
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
        reader.finish()
    except IsADirectoryError as fault:
        raise RecipeError(f"{path} is a directory, not a log.") from fault
    except OSError as fault:
        raise RecipeError(f"{path} cannot be read: {fault.strerror or fault}.") from fault
    return reader.found


def _blocks(file: BufferedIOBase, found: Scan) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines with the number of their first line. A line above four blocks is cut, not kept."""
    number, rest = 1, b""
    while True:
        chunk = _chunk(file, found)
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


def _chunk(file: BufferedIOBase, found: Scan) -> bytes:
    """Read a block; of a damaged file, what there is before the damage."""
    parts, size = [], 0
    while size < BLOCK and not found.damaged:
        try:
            part = file.read1(BLOCK - size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
            found.damaged = str(fault)
            break
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


@dataclass
class _Traceback:
    """A traceback that is being printed. One without its heading is `sure` only where an exception ends it."""

    line: int
    sure: bool
    frame: str = ""
    own: str = ""
    lines: int = 0
    indent: int = 0
    explained: bool = False


@dataclass
class _Printed:
    """A prompt or response that is being printed: its latest mark, and its lines, should it prove to be none."""

    line: int
    closing: bool = False
    held: list[tuple[int, str, str]] = field(default_factory=list)


class _Reader:
    """Takes blocks in order and fills a Scan."""

    def __init__(self) -> None:
        self.found = Scan()
        self.open: dict[str, _Traceback] = {}
        self.ignoring: set[str] = set()
        self.groups: set[str] = set()
        self.labels: set[str] = set()
        self.printing: dict[str, _Printed] = {}
        self.recent: dict[str, Raised] = {}
        self.held = 0
        self.fresh = 0  # distinct exceptions of this epoch

    def block(self, number: int, block: bytes) -> None:
        if number == 1:
            self.found.binary = _is_binary(block[: 1 << 16])
        if b"\x1b" in block:
            block = _ESCAPE.sub(b"", block)
        block = block.translate(None, _CONTROLS)
        following = self.open or any(head in block for head in (b"Traceback (", b"RayTaskError(", b'", line '))
        at = 0
        for start, end in _lines(block) if following and self.fresh < EXCEPTIONS else _spots(block):
            number += block.count(b"\n", at, start)
            at = start
            for piece in block[start:end].split(b"\r"):
                if piece:
                    self.line(number, piece)

    def line(self, number: int, raw: bytes) -> None:
        text = clean(raw.decode("utf-8", errors="replace")).replace("\n", " ")
        writer, said = writer_of(text, self.labels)
        if (self.printing or said.startswith("[")) and self._is_printed(number, writer, said):
            return
        self._take(number, writer, said)

    def finish(self) -> None:
        """Take what was held back, and the tracebacks that the end of the log cut off."""
        for writer in list(self.printing):
            self._release(writer)
        if not any(raised.epoch == self.found.epoch for raised in self.found.raised.values()):
            for writer, block in list(self.open.items())[:8]:
                if block.sure and block.frame:
                    self._raise(block.line + block.lines, writer, block, "Traceback", "cut off before its exception")

    def _take(self, number: int, writer: str, said: str) -> None:
        times = 1
        if "[repeated " in said and (repeated := _REPEATED.search(said)):
            times = max(1, int(repeated[1]))
            said = said[: repeated.start()]
        if "step" in said:
            self._progress(number, said)
        elif "Training Progress: 100%" in said or "Final validation metrics" in said:
            self.found.through = True
        bare = _LEVEL.sub("", said, count=1) if " [" in said[:80] else said
        if _QUOTES.match(bare):
            return
        inside, raised = self._traceback(number, writer, bare)
        cause = None if bare.startswith("Error executing job with overrides:") else match(said)
        if cause is not None:
            self._hit(cause, number, writer, said, times)
            if cause.kind in ("noise", "doubt"):
                return
        if not inside:
            self._rank(number, writer, said, bare.strip(), times, known=cause is not None, ends=raised)

    def _is_printed(self, number: int, writer: str, said: str) -> bool:
        """Whether the line is of a sample that verl prints: whatever a model or a prompt says, it happened to nobody.

        Where a sample ends is known only when its score comes. Until then its lines are held, and taken after all when
        none does; a step of the same writer ends it too.
        """
        mark = _PRINTS.match(said)
        name = mark[1] if mark else ""
        open_ = self.printing.get(writer)
        if open_ and (name in _SAMPLE or (name and open_.closing) or _STEP.search(said)):
            self.held -= len(open_.held)  # it was a sample up to here
            open_.held.clear()
        if name in ("prompt", "response"):
            if open_ or len(self.printing) < OPEN:
                self.printing[writer] = _Printed(number)
            return True
        if open_ is None:
            return name in _SAMPLE
        if name in _SAMPLE or (name and open_.closing):
            self.printing[writer] = _Printed(number, True)
            if name == "score":
                del self.printing[writer]
            return True
        if _STEP.search(said):
            del self.printing[writer]
            return False
        if number - open_.line > (SCORED if open_.closing else PRINTED):
            self._release(writer)
            return False
        if self.held < HELD:
            self.held += 1
            open_.held.append((number, writer, said))
        return True

    def _release(self, writer: str) -> None:
        held = self.printing.pop(writer).held
        self.held -= len(held)
        for line in held:
            self._take(*line)

    def _progress(self, number: int, said: str) -> None:
        found = self.found
        step = _STEP.search(said)
        if step:
            found.step, found.step_line = int(step[1]), number
            found.epoch += 1
            self.fresh = 0
            if found.ranked:
                found.before, found.ranked = found.ranked, {}
            found.last_exception = None
            broken = {m[1]: m[2] for m in _NOT_FINITE.finditer(said, step.end() - 3)} if _may_break(said) else {}
            found.broken_last = set(broken)
            for key, value in broken.items():
                if key not in found.broken and len(found.broken) < BROKEN:
                    found.broken[key] = (int(step[1]), number, value)
        elif total := _TOTAL.search(said):
            found.total = int(total[1])

    def _hit(self, cause: Cause, number: int, writer: str, said: str, times: int) -> None:
        epoch = self.found.epoch
        hit = self.found.hits.get(cause.id)
        quote = cut(around(said.strip(), cause))
        if hit is None:
            hit = self.found.hits[cause.id] = Hit(cause, number, [], epoch=epoch)
        if hit.epoch != epoch:
            hit.epoch, hit.again = epoch, Hit(cause, number, [], epoch=epoch)
        for each in (hit, hit.again):
            if each:
                each.add(number, quote, writer, times)
        if cause.kind not in ("noise", "doubt"):
            self._explain(cause, number, writer)

    def _explain(self, cause: Cause, number: int, writer: str) -> None:
        """Mark the exceptions that this line is about: one whose traceback it stands in, ends, or follows closely."""
        if block := self.open.get(writer):
            block.explained = True
        for name in {writer, ""} if writer else list(self.recent):
            raised = self.recent.get(name)
            if raised is None:
                continue
            if number > raised.end + EXPLAINED_WITHIN:
                del self.recent[name]
            elif number == raised.end or (cause.kind in ("cause", "symptom") and not cause.vague):
                raised.explained = True

    def _traceback(self, number: int, writer: str, said: str) -> tuple[bool, bool]:
        """Follow tracebacks, one a writer. Says whether the line is part of one, and whether it is its last line.

        The last line, which names the exception, is part of one only where Python itself ignored the exception. Pasted
        logs lack the heading, or are indented: a frame, or an exception that Ray passes on, opens one as well.
        """
        if said.startswith("Exception ignored in"):
            self.ignoring.add(writer)
        if writer in self.groups:
            if said and not said[0].isspace():
                self.groups.discard(writer)
            elif margin := _MARGIN.match(said):
                said = said[margin.end() :]
        if "Traceback (most recent call last)" in said:
            if "Exception Group" in said and len(self.groups) < OPEN:
                self.groups.add(writer)
            return self._open(writer, _Traceback(number, True)), False
        block = self.open.get(writer)
        frame = _FRAME.match(said) if said[:1].isspace() else None
        from_ray = _FROM_RAY.match(said)
        if block is None:
            if frame or from_ray:
                self._open(writer, block := _Traceback(number, False))
                if frame:
                    _add_frame(block, frame, said)
            return frame is not None, False
        block.lines += 1
        exception = None
        if not said or said[0].isspace() or said[0] in "^~|+":
            if frame:
                _add_frame(block, frame, said)
            elif 0 < len(said) - len(said.lstrip()) < block.indent:
                exception = _EXCEPTION.match(said.strip())
            if not exception:
                if block.lines > FRAMES:
                    del self.open[writer]
                return True, False
        elif from_ray:
            # Ray quotes the traceback of the process that failed after its own: the original follows.
            block.frame = block.own = ""
            return False, False
        del self.open[writer]
        ending = exception or (_ENDING if block.sure else _EXCEPTION).match(said)
        if not ending or not (block.sure or block.frame):
            return False, False
        return self._raise(number, writer, block, ending[1], ending[2] or ""), True

    def _open(self, writer: str, block: _Traceback) -> bool:
        if len(self.open) < OPEN or writer in self.open:
            self.open[writer] = block
        return True

    def _raise(self, number: int, writer: str, block: _Traceback, kind: str, message: str) -> bool:
        """Keep an exception. Says whether Python itself ignored it."""
        ignored = writer in self.ignoring
        self.ignoring.discard(writer)
        raised, epoch = self.found.raised, self.found.epoch
        short, message = kind.rpartition(".")[2], cut(message.rstrip())
        known = raised.get((short, message))
        if known is None and self.fresh >= EXCEPTIONS:
            return ignored
        if known is None or known.epoch != epoch:
            self.fresh += 1
            # What was raised again after a step stands where it was raised then: the earlier one was survived.
            frame = cut(block.own or block.frame)
            count = known.count + 1 if known else 1
            ignored_all = ignored and (known is None or known.ignored)
            raised.pop((short, message), None)
            while len(raised) >= EXCEPTIONS:
                del raised[next(iter(raised))]
            raised[short, message] = known = Raised(
                short, message, block.line, number, writer, frame, count, ignored_all, block.explained, epoch
            )
        else:
            known.count += 1
            known.ignored &= ignored
            known.explained |= block.explained
        if len(self.recent) >= OPEN and writer not in self.recent:
            del self.recent[next(iter(self.recent))]
        self.recent[writer] = known
        return ignored

    def _rank(self, number: int, writer: str, said: str, bare: str, times: int, known: bool, ends: bool) -> None:
        exception = _EXCEPTION.match(bare)
        if exception and not exception[1].endswith("Warning"):
            score = 5
            self.found.last_exception = (number, cut(bare))
        elif "Warning" in said or "WARNING" in said:
            return
        else:
            score = next((points for points, words in _ALARMS if words.search(said)), 0)
        if not score or known:  # what the table knows is told in its words
            return
        key = re.sub(r"\d+", "0", bare[:QUOTE])
        ranked = self.found.ranked.get(key)
        if ranked:
            ranked.count += times
        elif len(self.found.ranked) < RANKED:
            self.found.ranked[key] = Ranked(score, number, cut(bare), writer, times, ends)


def _add_frame(block: _Traceback, frame: re.Match[str], said: str) -> None:
    words = f"{frame[1]}, line {frame[2]}, in {frame[3].rstrip()}"
    block.frame, block.indent = words, len(said) - len(said.lstrip())
    if not any(part in frame[1] for part in _LIBRARY):
        block.own = words


def _may_break(said: str) -> bool:
    lower = said.lower()
    return ":nan" in lower or "inf" in lower or "(nan" in lower


def _is_binary(start: bytes) -> bool:
    """Whether a file begins as no text does: a third of it is no UTF-8."""
    start = start.replace(b"\x00", b"")
    return len(start) > 256 and start.decode("utf-8", errors="replace").count("\ufffd") > len(start) / 3


def _lines(block: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of every line, cut to what is looked at."""
    start, size = 0, len(block)
    while start < size:
        end = block.find(b"\n", start)
        end = size if end < 0 else end
        whole = block.find(b"step:", start, min(end, start + HEAD)) >= 0
        yield start, min(end, start + (STEP if whole else BEFORE + AFTER))
        start = end + 1


def _spots(block: bytes) -> list[tuple[int, int]]:
    """Return start and end of each line that holds a gate, in order; of a long line, the part around it."""
    spots: dict[int, int] = {}
    size = len(block)
    for gate in GATES:
        after = STEP if gate == b"step:" else AFTER
        at = block.find(gate)
        while at >= 0:
            floor = max(0, at - BEFORE)
            start = max(block.rfind(b"\n", floor, at) + 1, floor)
            end = block.find(b"\n", at, at + after)
            end = min(size, at + after) if end < 0 else end
            spots[start] = max(end, spots.get(start, 0))
            at = block.find(gate, max(end, at + 1))
    return sorted(spots.items())


def writer_of(text: str, labels: set[str] | None = None) -> tuple[str, str]:
    """Split off what others put before a line: who said it, `(WorkerDict pid=7) words` or `[rank3]: words`, and when.

    `labels` are the bare numbers known to be labels of srun; new ones are added.
    """
    writers, at = [], 0
    for _ in range(8):
        found = _PREFIX.match(text, at)
        if not found:
            break
        actor, label = found["actor"], found["task"]
        if actor and "pid=" not in actor and actor not in ("raylet", "autoscaler"):
            break
        if label:
            if labels is None or (label not in labels and not _AFTER_A_LABEL.match(text, found.end())):
                break
            if len(labels) < WRITERS:
                labels.add(label)
        if name := actor or found["rank"] or found["worker"] or found["process"] or label:
            writers.append(name)
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
    """Return a line from a little before what the cause was found by, where the line is too long to be quoted whole.

    What a vague cause was found by says the least of its line.
    """
    if len(text) <= QUOTE or cause.vague:
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
