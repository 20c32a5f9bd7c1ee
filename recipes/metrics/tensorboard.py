"""TensorBoard event files → Metrics, many values at once.

An event file is a chain of records (length, checksum of the length, event, checksum of the event); an event of a scalar
is a few bytes of protobuf. A run writes the same few hundred shapes of event again and again, with another step and
another number. So the chain is walked record by record, and everything else is done for all records of one length
together, by NumPy: checksums, steps, numbers. What has another shape is parsed on its own.

Format: tensorflow/core/lib/io/record_writer.cc (framing, masked CRC-32C), tensorflow/core/util/event.proto and
framework/summary.proto (field numbers).
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from recipes.metrics.growing import CUT, GZIP, Unpacked
from recipes.metrics.table import MAX_STEP, Broken, Metrics, Restart, Rows, short, trainer_of

if TYPE_CHECKING:
    import numpy as np

_PIECE = 8 * 2**20
_FRAME = 16  # bytes of a record around its event
_MAX_EVENT = 64 * 2**20  # a picture or a graph may be large; a length beyond this is damage
_MAX_TAG = 200
NAMES = re.compile(r".*\.tfevents\..*|.*tfevents.*\.gz", re.DOTALL)


def read_tensorboard(path: str | os.PathLike[str]) -> Metrics:
    """Read the scalars of one event file, or of all event files of a folder, the earlier written first.

    Values of the same step and tag: the later one wins, as in the other formats. TensorBoard stores 32-bit floats.
    A record whose checksum is wrong is broken; after damage to a length nothing more can be found in that file. Where
    a tag goes back to an earlier step, in a file or from one to the next, a training was resumed, or runs share the
    folder: `Metrics.restarts` says so. Raises OSError if a file can't be read.
    """
    path = Path(path)
    files = event_files(path) if path.is_dir() else [path]
    rows, broken, restarts, unfinished = Rows(), [], [], False
    known = _Known()
    for file in files:
        known.back.clear()
        found, cut = _read_file(file, rows, known)
        place = file.name if len(files) > 1 else ""
        broken += [Broken(number, f"{place}: {reason}" if place else reason) for number, reason in found]
        restarts += [restart._replace(place=place) for restart in known.restarts()]
        unfinished = cut  # an earlier file whose end is missing was left by an attempt that was killed
    return rows.metrics(
        broken=tuple(broken),
        unfinished=unfinished,
        source=path,
        state="ok" if len(rows) else "empty",
        restarts=tuple(restarts),
        format="TensorBoard",
        trainer=trainer_of(rows.keys),
    )


def event_files(folder: Path) -> list[Path]:
    """The event files in a folder, in the order in which they were begun (the time stands in their names)."""
    found = [path for path in folder.iterdir() if NAMES.fullmatch(path.name) and path.is_file()]

    def begun(path: Path) -> tuple[float, str]:
        time = re.search(r"tfevents\.(\d+)", path.name)
        return (float(time[1]) if time else 0.0, path.name)

    return sorted(found, key=begun)


def is_event_file(head: bytes) -> bool:
    """Say whether a file that begins with these bytes is a chain of records: its first length has its checksum."""
    if len(head) < 12:
        return False
    return struct.unpack_from("<I", head, 8)[0] == _masked(_crc(head[:8]))


def _read_file(path: Path, rows: Rows, known: _Known) -> tuple[list[Broken], bool]:
    """Add the scalars of a file to the rows. Returns what is broken, and whether the file ends inside a record."""
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP
        raw.seek(0)
        file = Unpacked(raw) if packed else raw
        return _read_stream(file, rows, known)


def _read_stream(file: IO[bytes] | Unpacked, rows: Rows, known: _Known) -> tuple[list[Broken], bool]:
    broken: list[Broken] = []
    lengths: dict[bytes, int] = {}  # the twelve bytes before an event → its length, where the checksum is right
    rest, number = b"", 0
    while True:
        try:
            piece = file.read(_PIECE)
        except EOFError:
            broken.append(Broken(number + 1, CUT))
            return broken, True
        except zlib.error as error:
            broken.append(Broken(number + 1, f"the gzip file is damaged from here on: {error}"))
            return broken, False
        if not piece:
            return broken, bool(rest)
        data = rest + piece
        starts, places, at, size = [], [], 0, len(data)
        damage = None
        while at + 12 <= size:
            head = data[at : at + 12]
            length = lengths.get(head)
            if length is None:
                length = int.from_bytes(head[:8], "little")
                if int.from_bytes(head[8:], "little") != _masked(_crc(head[:8])):
                    damage = "the length of a record does not have its checksum; the rest of the file is left out"
                elif length > _MAX_EVENT:
                    damage = f"a record of {length} bytes; the rest of the file is left out"
                if damage:
                    break
                lengths[head] = length
            end = at + length + _FRAME
            if end > size:
                break
            starts.append(at + 12)
            places.append(length)
            at = end
        if starts:
            broken += _take(data, starts, places, number, rows, known)
            number += len(starts)
        if damage:
            broken.append(Broken(number + 1, damage))
            return broken, False
        rest = data[at:]


class _Known:
    """What is known of the events so far, over all files."""

    def __init__(self) -> None:
        # Shapes of events: what is left of one without time, step and number → its tag, or None.
        self.tags: dict[bytes, str | None] = {}
        self.steps: dict[str, int] = {}  # the last step of each tag
        self.back: list[tuple[Restart, bool]] = []  # where a tag of this file went back, and whether it is validation

    def went_back(self, tag: str, steps: np.ndarray, records: np.ndarray) -> None:
        """Note where the steps of a tag go back, from its earlier events on."""
        import numpy as np

        before = np.concatenate(([self.steps.get(tag, -1)], steps[:-1]))
        for i in np.flatnonzero(steps < before).tolist():
            self.back.append((Restart(int(records[i]), int(before[i]), int(steps[i])), tag.startswith("val-")))
        self.steps[tag] = int(steps[-1])

    def restarts(self) -> list[Restart]:
        """The places in this file, each once: tags go back together, validation with others tells nothing new."""
        trained = [restart for restart, validated in self.back if not validated]
        found: dict[tuple[int, int], Restart] = {}
        for restart in sorted(trained or [restart for restart, _ in self.back]):
            found.setdefault((restart.before, restart.step), restart)
        return sorted(found.values())


def _take(data: bytes, starts: list[int], lengths: list[int], number: int, rows: Rows, known: _Known) -> list[Broken]:
    """Add the events at `starts`, of `lengths`, to the rows; the first of them is record `number` + 1 of its file."""
    import numpy as np

    buffer = np.frombuffer(data, dtype=np.uint8)
    start, length = np.array(starts), np.array(lengths)
    broken: list[Broken] = []
    found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for size in np.unique(length).tolist():
        which = np.flatnonzero(length == size)
        events = buffer[start[which][:, None] + np.arange(size + 4)]
        stated = np.ascontiguousarray(events[:, size:]).view("<u4")[:, 0]
        right = _masked(_crcs(events[:, :size])) == stated
        for i in which[~right].tolist():
            broken.append(Broken(number + i + 1, "the checksum of the record is wrong; it is left out"))
        which, events = which[right], events[right, :size]
        for tag, at, steps, values in _scalars(events, known):
            found.setdefault(tag, []).append((which[at], steps, values))
    for tag, parts in found.items():
        at, steps, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(at, kind="stable")
        usable = (steps[order] >= 0) & (steps[order] < MAX_STEP)
        if not usable.all():
            bad = int(at[order][~usable][0])
            broken.append(Broken(number + bad + 1, f"{short(tag)} at a step that is no whole number from 0 up"))
        if usable.any():
            known.went_back(tag, steps[order][usable], number + 1 + at[order][usable])
        rows.extend(tag, steps[order][usable], values[order][usable])
    return sorted(broken)


def _scalars(events: np.ndarray, known: _Known) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Events of one length, (n, length) bytes → for each tag: rows of the events, steps, values."""
    import numpy as np

    n, length = events.shape
    simple = np.zeros(n, dtype=bool)
    if length > 20:
        # time: field 1, 8 bytes; step: field 2, a varint, left out when it is 0; then the summary to the end.
        timed = events[:, 0] == 0x09
        step, after = np.zeros(n, dtype="i8"), np.full(n, 9)
        counted = timed & (events[:, 9] == 0x10)
        going, shift = counted.copy(), 0
        after[counted] = 10
        for place in range(10, min(20, length)):
            byte = events[:, place]
            step[going] |= (byte[going].astype("i8") & 0x7F) << min(shift, 62)
            after[going] = place + 1
            going &= byte >= 0x80
            shift += 7
            if not going.any():
                break
        for begin in np.unique(after[timed]).tolist():
            which = np.flatnonzero(timed & (after == begin))
            if begin + 4 >= length:
                continue
            shape = np.ascontiguousarray(events[which, begin : length - 4])
            for first, members in _alike(shape):
                key = shape[first].tobytes()
                if key not in known.tags:
                    known.tags[key] = _tag_of_simple(key)
                tag = known.tags[key]
                if tag is None:
                    continue
                at = which[members]
                simple[at] = True
                values = np.ascontiguousarray(events[at, length - 4 :]).view("<f4")[:, 0]
                yield tag, at, step[at], values.astype("f8")
    for i in np.flatnonzero(~simple).tolist():
        for tag, step_of_event, value in _event(events[i].tobytes()):
            yield tag, np.array([i]), np.array([step_of_event], dtype="i8"), np.array([value])


def _alike(shape: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Groups of equal rows: a row of each, and all its rows in order."""
    import numpy as np

    # Rows are told apart by a hash, then compared byte by byte with the first of their group.
    weights = np.random.default_rng(0).integers(1, 2**63, size=shape.shape[1], dtype=np.uint64) | np.uint64(1)
    hashes = np.zeros(len(shape), dtype=np.uint64)
    for column, weight in zip(shape.T, weights, strict=True):
        hashes += column * weight
    order = np.argsort(hashes, kind="stable")
    edges = np.flatnonzero(np.diff(hashes[order])) + 1
    for members in np.split(order, edges):
        if not len(members):
            continue
        if (shape[members] == shape[members[0]]).all():
            yield int(members[0]), members
        else:
            for i in members.tolist():
                yield i, np.array([i])


def _tag_of_simple(shape: bytes) -> str | None:
    """The tag, if these bytes and four more are a summary of one value with a tag and a simple_value, else None."""
    try:
        values = list(_summary_of(shape + b"\0\0\0\0"))
    except ValueError:
        return None
    return values[0][0] if len(values) == 1 and shape[-1:] == b"\x15" and values[0][1] == 0.0 else None


def _event(event: bytes) -> list[tuple[str, int, float]]:
    """Any event → the scalars in it: tag, step, value. Nothing, if it is something else or can't be parsed."""
    step, found = 0, []
    try:
        for field, value in _message(event):
            if field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                found += _summary(value)
    except ValueError:
        return []
    if step >= MAX_STEP:
        step = -1
    return [(tag, step, value) for tag, value in found]


def _summary_of(event: bytes) -> Iterator[tuple[str, float]]:
    for field, value in _message(event):
        if field != 5 or not isinstance(value, bytes):
            raise ValueError("not a summary alone")
        yield from _summary(value)


def _summary(summary: bytes) -> list[tuple[str, float]]:
    """A Summary → tag and value of each scalar: a simple_value, or a tensor of one number as TensorFlow 2 writes it."""
    found = []
    for field, value in _message(summary):
        if field != 1 or not isinstance(value, bytes):
            continue
        tag, number = "", None
        for part, content in _message(value):
            if part == 1 and isinstance(content, bytes):
                tag = content.decode()  # UnicodeDecodeError is a ValueError
            elif part == 2 and isinstance(content, bytes) and len(content) == 4:
                number = struct.unpack("<f", content)[0]
            elif part == 8 and isinstance(content, bytes):
                number = _tensor(content)
        if number is not None and 0 < len(tag) <= _MAX_TAG and tag.isprintable():
            found.append((tag, number))
    return found


def _tensor(tensor: bytes) -> float | None:
    """A TensorProto → its one number, float or double; None if it holds anything else."""
    kind, content, listed = 0, b"", []
    for field, value in _message(tensor):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 2 and isinstance(value, bytes) and len(value) > 2:
            return None  # a shape other than that of a scalar
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field in (5, 6) and isinstance(value, bytes):
            listed.append(value)
    form = {1: "<f", 2: "<d"}.get(kind)
    content = content or b"".join(listed)
    if form is None or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])


def _message(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """A protobuf message → field numbers and values; fixed 32 and 64 bit values as their bytes. Raises ValueError."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("a group, or no protobuf")
        if at + length > size:
            raise ValueError("cut")
        yield field, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("cut")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


@functools.cache
def _table() -> list[int]:
    """CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The table of bytes, and one of pairs of bytes: half as many look-ups."""
    import numpy as np

    one = np.array(_table(), dtype=np.uint32)
    pair = np.arange(2**16, dtype=np.uint32)
    for _ in range(2):
        pair = one[pair & 0xFF] ^ pair >> 8
    return one, pair


def _crc(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crcs(events: np.ndarray) -> np.ndarray:
    """CRC-32C of every row of bytes."""
    import numpy as np

    one, pair = _tables()
    n, size = events.shape
    crc = np.full(n, 0xFFFFFFFF, dtype=np.uint32)
    words = np.ascontiguousarray(events[:, : size - size % 2]).view("<u2").T
    for word in np.ascontiguousarray(words):
        crc = pair[(crc ^ word) & 0xFFFF] ^ crc >> 16
    if size % 2:
        crc = one[(crc ^ events[:, -1]) & 0xFF] ^ crc >> 8
    return ~crc


def _masked(crc):
    """A CRC as it is stored: rotated and shifted, so that a CRC over CRCs is still one. Integers or uint32 arrays."""
    if isinstance(crc, int):
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return (crc >> 15 | crc << 17) + crc.dtype.type(0xA282EAD8)
