"""The metrics of a run as one table, whatever wrote them: a row per training step, a column per key, in verl's names.

    read(path)          → Metrics   a run directory, JSON lines, TensorBoard, a console log, our CSV; gzip of a file
    of_run(path)        → Metrics   a run directory: its attempts as one curve
    one_curve(parts, path)          the same of attempts that were read already
    JsonLines(path)     → .read()   a file that grows, read again and again: JSON lines
    ConsoleLog(path)    → .read()   the same for a console log
    write_csv(metrics, path)

`recipes.metrics.table` says what a Metrics is. Neither numpy nor pandas is imported before something is read.
"""

from recipes.metrics.console import ConsoleLog, read_console
from recipes.metrics.jsonl import JsonLines, parse_line, read_jsonl
from recipes.metrics.source import of_run, one_curve, read
from recipes.metrics.table import Broken, Metrics, Restart, Rows, as_metrics, write_csv
from recipes.metrics.tensorboard import read_tensorboard

__all__ = [
    "Broken",
    "ConsoleLog",
    "JsonLines",
    "Metrics",
    "Restart",
    "Rows",
    "as_metrics",
    "of_run",
    "one_curve",
    "parse_line",
    "read",
    "read_console",
    "read_jsonl",
    "read_tensorboard",
    "write_csv",
]
