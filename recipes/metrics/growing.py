"""A text file that grows, line by line: only what was written since the last look is parsed, in pieces of bounded size.

A gzip file is unpacked on the way, and UTF-16, as PowerShell writes it, becomes UTF-8. Neither can be continued, so it
is read anew when it has changed.
"""

from __future__ import annotations

import codecs
import os
import zlib
from pathlib import Path
from typing import IO

from recipes.metrics.table import Broken, Metrics, Restart, Rows

PIECE = 2**17
"""Bytes read at once: lines and what is made of them stay in the processor's cache."""
MAX_LINE = 32 * 2**20
"""Bytes of the longest line that is looked at; a longer one is broken, and costs no memory."""

# The first line of a real run fits, and its timings differ from one start to the next.
_HEAD_BYTES = 4096
GZIP = b"\x1f\x8b"
CUT = "the gzip file has no end: it is being written, or was cut here"


def is_utf_16(head: bytes) -> bool:
    """Say whether a text begins as UTF-16 does: with its mark, and with a NUL byte in most of its characters."""
    return head.startswith((b"\xff\xfe", b"\xfe\xff")) and head.count(0) * 4 >= len(head) - 2


class Unpacked:
    """What a gzip file holds, as far as it goes. gzip.GzipFile would keep the last of it back if its end is missing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._input, self._inside = file, b"", False

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end. Raises EOFError at an end inside, zlib.error at damage."""
        while True:
            self._input = self._input or self._file.read(2**16)
            if not self._inside:  # a file may hold several, one after the other, and zeros behind the last
                self._input = self._input.lstrip(b"\0")
                self._inside, self._unpack = bool(self._input), zlib.decompressobj(wbits=31)
                if not self._inside:
                    if self._file.read(1):
                        self._file.seek(-1, os.SEEK_CUR)
                        continue
                    return b""
            ended = not self._input
            text = self._unpack.decompress(self._input, size)
            self._input = self._unpack.unconsumed_tail
            if self._unpack.eof:
                self._input, self._inside = self._unpack.unused_data, False
            if text:
                return text
            if ended:
                raise EOFError


class Recoded:
    """A text as UTF-8, if it begins with the mark of UTF-16; anything else as it is."""

    def __init__(self, file: IO[bytes] | Unpacked) -> None:
        self._file = file
        self._decode: codecs.IncrementalDecoder | None = None
        self._begun = False

    def read(self, size: int) -> bytes:
        """Return about `size` bytes, none at the end. Raises what the file raises."""
        while True:
            piece = self._file.read(size)
            if not self._begun and piece:
                self._begun = True
                if is_utf_16(piece):
                    self._decode = codecs.getincrementaldecoder("utf-16")("replace")
            if self._decode is None:
                return piece
            text = self._decode.decode(piece, final=not piece).encode(errors="replace")
            if text or not piece:
                return text


class GrowingText:
    """Reads the metrics of a file of lines; a subclass says what a line means.

    A writer that starts over truncates the file. The reader notices (the file got shorter, or begins otherwise) and
    starts over as well, so that two trainings are never mixed into one curve.
    """

    format = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.start_over()

    def start_over(self) -> None:
        """Forget everything."""
        self.rows = Rows()
        self.broken: list[Broken] = []
        self.restarts: list[Restart] = []
        self.rounded: set[str] = set()
        self.trainer = ""
        self._head = b""
        self._offset = 0  # of the first byte that was not taken yet, and the number of line ends before it
        self._lines = 0
        self._skipping = False
        self._anew = False
        self._seen: tuple[int, int] | None = None
        self._latest = Rows().metrics(source=self.path, state="missing", format=self.format)

    def take(self, text: bytes, number: int) -> None:
        """Parse whole lines, the end of the last one cut off; the first of them is line `number`."""
        raise NotImplementedError

    def take_tail(self, tail: bytes, number: int) -> bool:
        """Parse what follows the last line end, may be empty. True if it was taken for good, as if it had an end."""
        raise NotImplementedError

    def is_unfinished(self, tail: bytes) -> bool:
        """Say whether a tail that was not taken is a part of something."""
        return bool(tail)

    def settle(self) -> None:
        """Undo what the last look took only for the time being."""

    def read(self) -> Metrics:
        """Everything so far. The same object as the time before if nothing was written in between.

        Raises OSError if the file exists and can't be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return self._latest
        with file:
            head = file.read(_HEAD_BYTES)
            status = os.fstat(file.fileno())
            size = status.st_size
            anew = head.startswith(GZIP) or is_utf_16(head)
            # Only what is read anew is looked at by its time: a text that grows is known by its size.
            seen = (size, status.st_mtime_ns if anew else 0)
            same = head.startswith(self._head)
            if seen == self._seen and same:
                return self._latest
            if anew or self._anew or not same or size < self._offset:
                self.start_over()
            self._head, self._seen, self._anew = head, seen, anew
            self.settle()
            whole = True
            if anew:
                file.seek(0)
                tail, whole = self._read(Recoded(Unpacked(file) if head.startswith(GZIP) else file), None)
            else:
                file.seek(self._offset)
                tail, whole = self._read(file, size - self._offset)
        kept = self._skipping or self.take_tail(tail, self._lines + 1)
        if kept and not anew:
            self._offset += len(tail)
        self._latest = self.rows.metrics(
            broken=tuple(sorted(self.broken, key=lambda broken: broken.line)),
            unfinished=not whole or (not kept and self.is_unfinished(tail)),
            source=self.path,
            state="ok" if len(self.rows) else "empty",
            restarts=tuple(self.restarts),
            rounded=self.rounded,
            format=self.format,
            trainer=self.trainer,
        )
        return self._latest

    def _read(self, file: IO[bytes] | Recoded, limit: int | None) -> tuple[bytes, bool]:
        """Take all whole lines; returns what follows the last one, and whether a gzip file came to its end."""
        rest: list[bytes] = []
        waiting, left = 0, limit
        while left is None or left > 0:
            try:
                piece = file.read(PIECE if left is None else min(PIECE, left))
            except EOFError:
                self.broken.append(Broken(self._lines + 1, CUT))
                return b"".join(rest), False
            except zlib.error as error:
                self.broken.append(Broken(self._lines + 1, f"the gzip file is damaged from here on: {error}"))
                return b"".join(rest), False
            if not piece:
                break
            left = None if left is None else left - len(piece)
            end = piece.rfind(b"\n") + 1
            if end:
                text, first = b"".join([*rest, piece[: end - 1]]), self._lines + 1
                self._lines += text.count(b"\n") + 1
                self._offset += len(text) + 1
                if self._skipping:
                    self._skipping = False
                    text, first = text.partition(b"\n")[2], first + 1
                self.take(text, first)
                rest, waiting = [], 0
            rest.append(piece[end:])
            waiting += len(piece) - end
            if self._skipping or waiting > MAX_LINE:
                if not self._skipping:
                    megabytes = MAX_LINE // 2**20
                    self.broken.append(Broken(self._lines + 1, f"a line of more than {megabytes} MB"))
                self._skipping = True
                self._offset += waiting
                rest, waiting = [], 0
        return b"".join(rest), True
