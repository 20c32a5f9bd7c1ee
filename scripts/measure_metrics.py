"""The figures on reading metrics, for `scripts/measure.py metrics`. Each reading happens in a child process of its own.

Made data: random numbers under keys as verl names them. Seconds are those of the reading alone, without start-up and
imports, the files in the page cache: on the clock, and of the processor, which other work on the machine disturbs less.
Memory is the growth of the child's peak resident set while it reads.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS = [f"{group}/metric_{i}/mean" for i in range(10) for group in ("actor", "critic", "perf", "timing_s", "a", "b")]

CHILD = """
import json, resource, sys, time
sys.path.insert(0, {root!r})
import matplotlib.figure, numpy, orjson, pandas
{before}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start, began, busy = peak(), time.perf_counter(), time.process_time()
{reading}
took, busy = time.perf_counter() - began, time.process_time() - busy
print(json.dumps({{"s": took, "cpu": busy, "MB": peak() - start, {more}}}))
"""


def measure(root: Path, steps: int, megabytes: int) -> None:
    """Print a table: `steps` steps of 60 metrics as JSON lines, a tenth of them as TensorBoard events, a console log.

    TensorBoard's own reader takes a hundred microseconds a number: of all the steps it would take a quarter of an hour.
    """
    print(
        "| what | size, MB | s | processor, s | memory, MB | of it the table, MB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        lines = json_lines(Path(folder) / "metrics.jsonl", steps)
        ours = "from recipes import metrics, curves, drawing"
        table = '"table": m.table.memory_usage().sum() / 2**20'
        read = f"m = metrics.read({str(lines)!r})"
        row(f"JSON lines, {steps} steps x 60: read", lines, child(root, ours, read, table))
        row("the same: read and drawn", lines, child(root, ours, f"{read}; drawing.png(curves.figure(m))", table))
        lines.unlink()

        steps //= 10
        events = tensorboard(Path(folder) / "events", steps)
        mine = child(root, ours, f"m = metrics.read({str(events)!r})", table)
        row(f"TensorBoard, {steps} steps x 60: read", events, mine)
        accumulator = "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator"
        all_of_it = f"a = EventAccumulator({str(events)!r}, size_guidance={{'scalars': 0}}).Reload()"
        # Its scalars as lists of step and value, which is the least a table needs.
        lists = "; d = {t: [(e.step, e.value) for e in a.Scalars(t)] for t in a.Tags()['scalars']}"
        theirs = child(root, accumulator, all_of_it + lists, '"table": 0')
        row("the same by TensorBoard's EventAccumulator", events, theirs)
        print(f"| ratio | | {theirs['s'] / mine['s']:.1f} | {theirs['cpu'] / mine['cpu']:.1f} | | |", flush=True)
        for file in events.iterdir():
            file.unlink()

        log = console(Path(folder) / "train.log", megabytes)
        row("console log: read", log, child(root, ours, f"m = metrics.read({str(log)!r})", table))


def row(what: str, path: Path, found: dict) -> None:
    size = sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path])) / 2**20
    print(
        f"| {what} | {size:.0f} | {found['s']:.2f} | {found['cpu']:.2f} | {found['MB']:.0f} | {found['table']:.0f} |",
        flush=True,
    )


def child(root: Path, before: str, reading: str, more: str) -> dict:
    code = CHILD.format(root=str(root), before=before, reading=reading, more=more)
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)


def json_lines(path: Path, steps: int) -> Path:
    numbers = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            data = {key: numbers.gauss(0, 1) for key in KEYS}
            file.write(json.dumps({"step": step, "data": data}, separators=(",", ":")) + "\n")
    return path


def tensorboard(folder: Path, steps: int) -> Path:
    """Event files by TensorBoard's own writer."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    numbers = random.Random(0)
    folder.mkdir()
    with (folder / "events.out.tfevents.1700000000.host.1.0").open("wb") as file:
        writer = RecordWriter(file)
        for step in range(1, steps + 1):
            for key in KEYS:
                value = Summary.Value(tag=key, simple_value=numbers.gauss(0, 1))
                event = Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value]))
                writer.write(event.SerializeToString())
    return folder


def console(path: Path, megabytes: int) -> Path:
    """A log as Ray prints it: a step of 60 metrics, then forty lines of other processes, some of them progress bars."""
    numbers = random.Random(0)
    other = "".join(
        f"\x1b[36m(WorkerDict pid={n})\x1b[0m INFO 09-01 12:00:{n:02} [engine.py:{n}] running {n} requests, "
        f"step 12 of the {n}th stage, cache usage 3.{n}%\n"
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m Training Progress:  3%|▎| 1/30 [00:07<03:24, 7.0{n % 10}s/it]\r"
        for n in range(40)
    ).encode()
    written = step = 0
    with path.open("wb") as file:
        while written < megabytes * 2**20:
            step += 1
            fields = " - ".join(
                f"{key}:np.float64({numbers.gauss(0, 1)})" if i % 6 == 0 else f"{key}:{numbers.gauss(0, 1)}"
                for i, key in enumerate(KEYS)
            )
            written += file.write(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - {fields}\n".encode() + other)
    return path
