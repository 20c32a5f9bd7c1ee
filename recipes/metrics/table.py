"""The table of metrics: a row per training step, a column per key, and what must not be confused with a number.

Three things are kept apart, whatever the source:

- a key that was not computed at a step is **absent** (NaN in the table);
- a value that was computed and is NaN or infinite is **non-finite** (NaN in the table, and its step is listed under
  its key in `Metrics.nonfinite`), so that a later judgement can fail on it;
- a line, a record or a field that can't be read is **broken** (listed with its place in `Metrics.broken`); nothing is
  guessed from it.

Keys of older versions of verl are folded into today's names (`FOLDED`), and `Metrics.folded` says which were.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
import re
import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.atomic import replace_file
from recipes.errors import RecipeError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MAX_STEP = 2**53
"""Steps from here on are not whole numbers in a float any more; no training gets there."""
_MAX_KEYS = 20_000  # a run logs some hundreds; a log that makes keys up would fill the memory with a table of holes

FOLDED: tuple[tuple[str, str], ...] = (
    ("mfu/", "perf/mfu/"),
    ("perf/max_memory_", "actor/perf/max_memory_"),
    ("timing/", "timing_s/"),
    ("val/test_score", "val-core"),
    ("test_score", "val-core"),
    ("num_turns/", "training/num_turns/"),
    ("actor/entropy_loss", "actor/entropy"),
)
"""Beginnings of keys of verl before 0.9, and how the same number is called today."""


NAMES: Mapping[str, Mapping[str, str]] = {
    # slime/backends/megatron_utils/{model,loss}.py and slime/observability/{rollout,train}_metric*.py. A raw reward is
    # one before KL; slime puts KL into the reward only with kl_coef, which is 0 unless set, as in verl. Not here, as
    # they are other measures: train_rollout_logprob_abs_diff (of logarithms; verl's is of probabilities),
    # rollout/advantages (a mean over responses; verl's is one over tokens), rollout/rewards (normalised in their group)
    # and perf/tokens_per_gpu_per_sec (of the rollout alone).
    "slime": {
        "rollout/raw_reward": "critic/rewards/mean",
        "rollout/response_len/mean": "response_length/mean",
        "rollout/response_len/max": "response_length/max",
        "rollout/response_len/min": "response_length/min",
        "rollout/response_lengths": "response_length/mean",
        "rollout/truncated_ratio": "response_length/clip_ratio",
        "rollout/truncated": "response_length/clip_ratio",
        "train/entropy_loss": "actor/entropy",
        "train/grad_norm": "actor/grad_norm",
        "train/kl_loss": "actor/kl_loss",
        "train/lr-pg_0": "actor/lr",
        "train/pg_clipfrac": "actor/pg_clipfrac",
        "train/pg_loss": "actor/pg_loss",
        "train/ppo_kl": "actor/ppo_kl",
        "perf/actor_train_time": "timing_s/update_actor",
        "perf/log_probs_time": "timing_s/old_log_prob",
        "perf/ref_log_probs_time": "timing_s/ref",
        "perf/rollout_time": "timing_s/gen",
        "perf/step_time": "timing_s/step",
    },
    # mindspeed_rl/trainer/utils/compute_utils.py, utils/utils.py, docs/zh/features/log_metrics.md; actor/* are called
    # as in verl, but pg_loss is an absolute value. Not here: e2e_tps, which is of the longest responses unless
    # log_max_throughput is off.
    "MindSpeed-RL": {
        **{
            f"grpo/{what}/{of}": f"critic/{what}/{of}"
            for what in ("score", "rewards", "advantages", "returns")
            for of in ("mean", "max", "min")
        },
        **{f"dapo/score/{of}": f"critic/score/{of}" for of in ("mean", "max", "min")},
        "grad_norm": "actor/grad_norm",
        "grpo/lr": "actor/lr",
        "timing/all": "timing_s/step",
        "timing/old_log_p": "timing_s/old_log_prob",
        "timing/reference_model": "timing_s/ref",
        "timing/rollout": "timing_s/gen",
        "timing/update": "timing_s/update_actor",
    },
}
"""Keys of other trainers that mean what a key of verl means, and that key. What means something else keeps its name."""
_SLIME_EVALUATION = re.compile(r"eval/(?!step$)([^/]+?)(?<!-truncated_ratio)")  # the mean reward of a data set


class Broken(NamedTuple):
    """A line, or one value of a line, that could not be read."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class Restart(NamedTuple):
    """A place at which the step went back: what follows is a resumption, or another training in the same source.

    The steps from `step` to `before` came twice, and their later values lie over the earlier ones. `line` is the line
    of the file, of TensorBoard the number of the record; `place` names the file where a source is several.
    """

    line: int
    before: int
    step: int
    place: str = ""

    def __str__(self) -> str:
        place = f"{self.place}, " if self.place else ""
        return f"{place}line {self.line}: the step went back from {self.before} to {self.step}"


@dataclass(frozen=True)
class Metrics:
    """Everything known about a run's numbers at one moment.

    `table` is indexed by `step` (whole numbers, rising, each once) and holds one float64 column per key, in
    the order in which the keys first appeared. `nonfinite` maps a key to the steps at which its value was
    NaN or infinite; `infinite` says of these which were infinite and how (key → step → inf or -inf), the others
    were NaN, or null in verl's JSON lines, which do not say. `unfinished` is true while the source ends in the
    middle of a line: it is being written, or its writer was killed. `state` is `missing` (no such file), `empty`
    (no step yet) or `ok` (at least one step). `folded` maps a key of an older verl, or of another trainer, to the
    column that took its values. `attempts` maps a step to the number of the attempt it came from, for a run
    directory; it is empty otherwise.

    `restarts` are the places at which the step went back within one file or folder, in their order: a second
    training, or a resumption, is in it, and the table is no curve of one training unless these are explained.
    `rounded` holds the keys of which a value was printed as 0.000, as old versions of verl did, and MindSpeed-RL
    does with one decimal more: it is below half of its last digit, and nobody knows that it is zero. It stays 0 in
    the table, as the other numbers of such a log are rounded as well and a mean without it would be too high; but
    no rule for "is exactly zero" may be applied to these keys. `format` is what the source was read as (`JSON
    lines`, `console log`, `TensorBoard`, `CSV`, `Parquet`), and `trainer` whose it is (`verl`, `slime`,
    `MindSpeed-RL`, several joined by ` and `), empty where nothing says so.
    """

    table: pd.DataFrame
    nonfinite: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    broken: tuple[Broken, ...] = ()
    unfinished: bool = False
    source: Path | None = None
    state: str = "ok"
    folded: Mapping[str, str] = field(default_factory=dict)
    attempts: Mapping[int, int] = field(default_factory=dict)
    infinite: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    restarts: tuple[Restart, ...] = ()
    rounded: frozenset[str] = frozenset()
    format: str = ""
    trainer: str = ""

    def __str__(self) -> str:
        name = "the metrics" if self.source is None else str(self.source)
        if self.state == "missing":
            return f"{name} does not exist yet."
        if self.state == "empty":
            text = f"{name} holds no step yet"
        else:
            steps = self.table.index
            which = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
            text = f"{name}: {_count(len(steps), 'step')} ({which}), {_count(self.table.shape[1], 'key')}"
        if self.nonfinite:
            lost = sum(map(len, self.nonfinite.values()))
            text += f"; {_count(lost, 'value')} {'is' if lost == 1 else 'are'} not finite"
        if self.restarts:
            more = f" (the first of {len(self.restarts)} times)" if len(self.restarts) > 1 else ""
            text += f"; {self.restarts[0]}{more}"
        if self.broken:
            text += f"; {_count(len(self.broken), 'place')} could not be read (first: {self.broken[0]})"
        if self.unfinished:
            text += "; the last line is unfinished"
        return text + "."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _Block:
    """The rows that came with the very same keys: `values` holds len(keys) numbers a row, NaN for a non-finite one."""

    __slots__ = ("keys", "order", "pack", "pick", "size", "steps", "values")

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.steps, self.order, self.values = array("q"), array("q"), bytearray()
        self.pack: Callable[..., bytes] = struct.Struct(f"{len(keys)}d").pack
        # How many keys, and their values out of a mapping; an itemgetter of one key gives no tuple.
        self.size, self.pick = (len(keys), itemgetter(*keys)) if len(keys) > 1 else (-1, None)


class Rows:
    """What a source has reported so far, in the order in which it did.

    Rows are kept by their set of keys, as bare numbers: 8 bytes a value. The same step may come again, with other keys
    or the same: values are merged key by key, and the later one wins.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._keys: dict[str, None] = {}
        self._count = 0
        self._last = _Block(("no such",))

    def __len__(self) -> int:
        return sum(len(block.steps) for block in self._blocks.values())

    def add(self, step: int, keys: tuple[str, ...], values: Collection[float]) -> None:
        """Add one row. Raises struct.error, and adds nothing, if a value is None, text or anything but a number."""
        block = self._last
        if block.keys != keys:
            block = self._blocks.get(keys) or _Block(keys)
        packed = block.pack(*values)
        if block is not self._last:
            self._last = self._registered(block)
        block.values += packed
        block.steps.append(step)
        block.order.append(self._count)
        self._count += 1

    def add_object(self, step: int, data: dict[str, Any]) -> None:
        """Add one row from a mapping, as `add` does. The next row mostly has the same keys: that is tried first."""
        block = self._last
        if len(data) != block.size:
            self.add(step, tuple(data), data.values())
            return
        try:
            block.values += block.pack(*block.pick(data))
        except KeyError:
            self.add(step, tuple(data), data.values())
            return
        block.steps.append(step)
        block.order.append(self._count)
        self._count += 1

    def put(self, step: int, data: Mapping[str, float | None]) -> None:
        """Add one row, None for a value that is not finite."""
        self.add(step, tuple(data), [math.nan if value is None else value for value in data.values()])

    def extend(self, key: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Add many values of one key."""
        block = self._registered(self._blocks.get((key,)) or _Block((key,)))
        block.steps.frombytes(steps.astype("<i8").tobytes())
        block.values += values.astype("<f8").tobytes()
        block.order.extend(range(self._count, self._count + len(steps)))
        self._count += len(steps)

    def _registered(self, block: _Block) -> _Block:
        if block.keys not in self._blocks:
            self._blocks[block.keys] = block
            self._keys.update(dict.fromkeys(block.keys))
            if len(self._keys) > _MAX_KEYS:
                raise RecipeError(f"More than {_MAX_KEYS} different keys: these are not the metrics of a training.")
        return block

    def withdraw(self, keys: tuple[str, ...]) -> None:
        """Take back the row of these keys that was added last."""
        block = self._blocks[keys]
        del block.steps[-1:], block.order[-1:], block.values[-8 * len(keys) :]
        if not block.steps:
            del self._blocks[keys]
            self._last = _Block(("no such",))
            self._keys = dict.fromkeys(key for keys in self._blocks for key in keys)

    @property
    def keys(self) -> Collection[str]:
        """All keys so far, as the source has them."""
        return self._keys.keys()

    def metrics(self, *, rounded: Collection[str] = (), trainer: str = "", **about: Any) -> Metrics:
        """Everything so far as a Metrics, keys of older versions and of the other trainers in `trainer` folded."""
        import numpy as np
        import pandas as pd

        blocks = [b for b in self._blocks.values() if b.steps]
        steps = np.unique(np.concatenate([np.array(b.steps, dtype="i8") for b in blocks] or [np.empty(0, "i8")]))
        column = {key: i for i, key in enumerate(self._keys)}
        values = np.full((len(steps), len(column)), np.nan)
        odd = False
        for b in blocks:
            data = np.frombuffer(b.values, "f8").reshape(len(b.steps), len(b.keys))
            # Of a step that comes twice in a block, the assignment keeps the later row.
            rows = np.searchsorted(steps, np.array(b.steps, dtype="i8"))
            if not np.isfinite(data).all():
                odd, data = True, np.where(np.isnan(data), _lost(), data)
            if b.keys == tuple(column) and np.array_equal(rows, np.arange(len(steps))):
                values[:] = data  # the ordinary case: every step once, in order, with every key
            else:
                values[np.ix_(rows, [column[key] for key in b.keys])] = data
            del data  # a bytearray that is looked at can't grow
        for row, b, data in self._again(blocks, steps):
            values[row, [column[key] for key in b.keys]] = [_lost() if v != v else v for v in data]
        names, values, folded = _fold(list(column), values, trainer)
        nonfinite: dict[str, tuple[int, ...]] = {}
        infinite: dict[str, dict[int, float]] = {}
        if odd:
            lost = ~np.isfinite(values) & ~_absent(values)
            for i, name in enumerate(names):
                if lost[:, i].any():
                    nonfinite[name] = tuple(steps[lost[:, i]].tolist())
                    if (endless := np.isinf(values[:, i])).any():
                        infinite[name] = dict(zip(steps[endless].tolist(), values[endless, i].tolist(), strict=True))
            values[lost] = np.nan
        table = pd.DataFrame(
            values, index=pd.Index(steps, dtype="int64", name="step"), columns=pd.Index(names, dtype=object)
        )
        return Metrics(
            table,
            nonfinite,
            folded=folded,
            infinite=infinite,
            rounded=frozenset(folded.get(key, key) for key in rounded),
            trainer=trainer,
            **about,
        )

    def _again(self, blocks: list[_Block], steps: np.ndarray) -> list[tuple[int, _Block, Sequence[float]]]:
        """The rows of steps that came in several blocks with a key in common, in the order in which they came."""
        import numpy as np

        owners: dict[str, int] = {}
        for b in blocks:
            for key in b.keys:
                owners[key] = owners.get(key, 0) + 1
        shared = [b for b in blocks if any(owners[key] > 1 for key in b.keys)]
        if len(shared) < 2:
            return []
        times = np.zeros(len(steps), dtype="i8")
        places = [np.searchsorted(steps, np.array(b.steps, dtype="i8")) for b in shared]
        for rows in places:
            times[np.unique(rows)] += 1
        found = []
        for b, rows in zip(shared, places, strict=True):
            width = 8 * len(b.keys)
            for i in np.flatnonzero(times[rows] > 1).tolist():
                data = struct.unpack(f"{len(b.keys)}d", b.values[width * i : width * (i + 1)])
                found.append((b.order[i], int(rows[i]), b, data))
        found.sort(key=lambda entry: entry[0])
        return [entry[1:] for entry in found]


# In a table that is being made, absent is the ordinary NaN, and a NaN that was computed is one with other bits.
_LOST_BITS = 0x7FF8000000000001


@functools.cache
def _lost() -> float:
    return struct.unpack("<d", struct.pack("<Q", _LOST_BITS))[0]


def _absent(values: np.ndarray) -> np.ndarray:
    """Where nothing was computed, of an array of float64."""
    import numpy as np

    return np.isnan(values) & (np.ascontiguousarray(values).view("u8") != _LOST_BITS)


def today(key: str, trainer: str = "") -> str | None:
    """How today's verl calls a key of an older version, or of `trainer`; None if it is called so, or by no name."""
    for other in trainer.split(" and "):
        if new := NAMES.get(other, {}).get(key):
            return new
        if other == "slime" and (evaluation := _SLIME_EVALUATION.fullmatch(key)):
            return f"val-core/{evaluation[1]}"
    for old, new in FOLDED:
        if key == old or (key.startswith(old) and (old[-1] in "/_" or key[len(old)] == "/")):
            return new + key[len(old) :]
    return None


def trainer_of(keys: Collection[str]) -> str:
    """Whose metrics these are by keys that no other trainer has, empty if they do not tell."""
    if "train/train_rollout_logprob_abs_diff" in keys or "rollout/raw_reward" in keys:
        return "slime"
    return "MindSpeed-RL" if any(key.startswith("grpo/score/") for key in keys) else ""


def _fold(names: list[str], values: np.ndarray, trainer: str) -> tuple[list[str], np.ndarray, dict[str, str]]:
    """Move values under older keys to today's, where these are absent. What today's key holds already stays apart."""
    import numpy as np

    folded: dict[str, str] = {}
    place = {name: i for i, name in enumerate(names)}
    emptied = []
    for i, old in enumerate(names):
        new = today(old, trainer)
        if new is None:
            continue
        if new not in place:
            place[new], names[i] = i, new
            folded[old] = new
            continue
        target = place[new]
        free = _absent(values[:, target]) & ~_absent(values[:, i])
        if free.any():
            values[free, target] = values[free, i]
            values[free, i] = np.nan
            folded[old] = new
            if _absent(values[:, i]).all():
                emptied.append(i)
    if emptied:
        values = np.delete(values, emptied, axis=1)
        names = [name for i, name in enumerate(names) if i not in emptied]
    return names, values, folded


def short(value: object, limit: int = 80) -> str:
    """Untrusted text, bytes or an error for a message: on one line, printable, bounded."""
    text = value[: 4 * limit].decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_metrics(table: pd.DataFrame | Metrics) -> Metrics:
    """A Metrics as it is; a bare table (index: steps, columns: keys, NaN: absent, ±inf: non-finite) as one.

    Raises ValueError if a step comes twice, TypeError if a column is not numeric.
    """
    if isinstance(table, Metrics):
        return table
    import numpy as np
    import pandas as pd

    if table.index.has_duplicates:
        twice = table.index[table.index.duplicated()].unique().tolist()[:5]
        raise ValueError(f"A step comes once in a table of metrics; these come more often: {twice}.")
    for key in table.columns:
        if not pd.api.types.is_numeric_dtype(table[key]):
            raise TypeError(f"Column {key!r} of a table of metrics must hold numbers, not {table[key].dtype}.")
    table = table.astype("float64").sort_index().rename_axis(index="step")
    infinite = np.isinf(table.to_numpy())
    nonfinite = {
        key: tuple(table.index[infinite[:, i]].tolist()) for i, key in enumerate(table.columns) if infinite[:, i].any()
    }
    endless = {key: {step: float(table.at[step, key]) for step in steps} for key, steps in nonfinite.items()}
    return Metrics(table.mask(infinite), nonfinite, state="ok" if len(table) else "empty", infinite=endless)


def write_csv(table: pd.DataFrame | Metrics, path: str | os.PathLike[str]) -> Path:
    """Write the table as CSV: first column `step`, absent values as empty fields, others as `nan`, `inf` or `-inf`.

    Numbers are written in full (they read back equal). The file is replaced as a whole.
    """
    return replace_file(path, csv_text(as_metrics(table)).encode())


def csv_text(metrics: Metrics) -> str:
    """The CSV of `write_csv`."""
    lost = {
        (step, key): repr(metrics.infinite.get(key, {}).get(step, math.nan))
        for key, steps in metrics.nonfinite.items()
        for step in steps
    }
    keys = list(metrics.table.columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *keys])
    for step, row in zip(metrics.table.index.tolist(), metrics.table.to_numpy().tolist(), strict=True):
        cells = (
            repr(value) if math.isfinite(value) else lost.get((step, key), "")
            for key, value in zip(keys, row, strict=True)
        )
        writer.writerow([step, *cells])
    return text.getvalue()
