"""GSM8K and DAPO-Math as the parquet verl reads, the check of such a file, and a trial of its reward function.

A row of verl's: prompt (chat messages), data_source (chooses the reward function), ability, reward_model (style,
ground_truth), extra_info (split, index). Files are read and written in batches, whatever their size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from recipes.errors import RecipeError
from recipes.finding import Finding

BATCH_ROWS = 1000

# One problem in so many is kept for validation when the source has no split for it.
HOLD_OUT_ONE_IN = 20

# The hub must say whether it has the data set within this time; the data itself may take `deadline` seconds.
CONTACT_SECONDS = 30
DOWNLOAD_SECONDS = 1800

# What a child may take to import verl (with torch, from a cold disk) and to score a few rows.
REWARD_SECONDS = 180


class Example(NamedTuple):
    """One problem: the chat messages that pose it and the answer a reward function compares with."""

    messages: tuple[tuple[str, str], ...]  # (role, content)
    answer: str
    solution: str = ""

    @property
    def checksum(self) -> int:
        """64 bits of the messages: the same problem has the same checksum wherever it stands."""
        text = json.dumps(self.messages, ensure_ascii=False).encode("utf-8", "replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


@dataclass(frozen=True)
class Task:
    """A data set: where it is, how one of its rows becomes an Example, and what chooses its reward function."""

    name: str
    hub: str
    config: str | None
    data_source: str  # verl's default_compute_score decides by this
    ability: str
    example: Callable[[Mapping[str, Any]], Example]


@dataclass(frozen=True)
class Made:
    """What was written. `repeated`: rows with a problem seen before; `shared`: training rows that are in validation."""

    train: Path
    validation: Path
    train_rows: int
    validation_rows: int
    repeated: int
    shared: int


@dataclass(frozen=True)
class RewardTrial:
    """Scores of one row's reward function: for its truth, for a wrong answer in the same form, and for nonsense."""

    data_source: str
    response: str  # the form of the truth that scored best
    truth: float
    wrong: float
    nonsense: float


def gsm8k_answer(text: str) -> str:
    """Return n of the last `#### n` of a GSM8K solution, without thousands separators: "1,450" is "1450".

    Raises ValueError when there is none. verl compares texts, so a sign, a point or a zero more would never match.
    """
    _, mark, tail = text.rpartition("####")
    number = tail.strip().replace(",", "").removeprefix("$")
    if not mark or not re.fullmatch(r"-?(\d+(\.\d+)?|\.\d+)", number):
        raise ValueError("its answer has no `#### number` at the end")
    return number


def _gsm8k(row: Mapping[str, Any]) -> Example:
    question, solution = str(row["question"]).strip(), str(row["answer"])
    asked = f'{question}\nReason step by step, then give the number alone on a last line that starts with "#### ".'
    return Example((("user", asked),), gsm8k_answer(solution), solution)


def _dapo(row: Mapping[str, Any]) -> Example:
    """A row of DAPO-Math-17k (verl's columns already), of its processed variants, or of AIME in either shape."""
    prompt = row.get("prompt") or row.get("problem") or row.get("question")
    reward = row.get("reward_model")
    answer = reward.get("ground_truth") if isinstance(reward, Mapping) else None
    for key in ("answer", "solution"):
        answer = row.get(key) if answer in (None, "") else answer
    if answer in (None, ""):
        raise ValueError("it has no answer (reward_model.ground_truth, answer or solution)")
    if isinstance(prompt, list):
        return Example(tuple((str(m["role"]), str(m["content"])) for m in prompt), str(answer))
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("it has no problem (prompt, problem or question)")
    asked = f'{prompt.strip()}\nReason step by step, then write a last line "Answer: " followed by the result alone.'
    return Example((("user", asked),), str(answer))


TASKS = {
    "gsm8k": Task("gsm8k", "openai/gsm8k", "main", "openai/gsm8k", "math", _gsm8k),
    "dapo-math": Task("dapo-math", "BytedTsinghua-SIA/DAPO-Math-17k", None, "math_dapo", "math", _dapo),
}


def make(
    task: Task,
    out: Path,
    *,
    source: str | None = None,
    validation: str | None = None,
    hold_out: int = HOLD_OUT_ONE_IN,
    python: str = sys.executable,
    deadline: float = DOWNLOAD_SECONDS,
) -> Made:
    """Write `out`/train.parquet and `out`/test.parquet of a task, both or neither.

    `source` and `validation` are a file (.parquet, .jsonl), a directory of such files or of `datasets`, or a hub id;
    `source` defaults to the task's own hub id. Validation is, in this order: `validation`, the source's test split, one
    problem in `hold_out`, chosen by its checksum. A problem counts once; one that is in validation is not trained on.
    `python` is the interpreter that has `datasets` (asked only for hub ids), `deadline` its seconds.

    Raises RecipeError when a source cannot be read or reached, or a row has no problem or no answer.
    """
    _require("pyarrow")
    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=out, prefix=".making-")
    except OSError as fault:
        raise RecipeError(f"{out} cannot be written: {fault.strerror}.") from fault
    with scratch as folder, ExitStack() as closing:
        place = Path(folder)
        splits = _splits(source or task.hub, task, place, python, deadline)
        held = _splits(validation, task, place, python, deadline) if validation else {}
        train_from = splits.get("train") or next(iter(splits.values()))
        test_from = next((held.get(name) for name in ("test", "validation", "train") if name in held), None)
        test_from = test_from or splits.get("test") or splits.get("validation")
        if test_from is train_from:
            test_from = None
        train = closing.enter_context(_Writer(place / "train.parquet", task, "train"))
        test = closing.enter_context(_Writer(place / "test.parquet", task, "test"))
        seen: set[int] = set()
        tested: set[int] = set()
        repeated = shared = 0
        for example in _examples(task, test_from) if test_from else ():
            if example.checksum in tested:
                repeated += 1
                continue
            tested.add(example.checksum)
            test.add(example)
        for example in _examples(task, train_from):
            checksum = example.checksum
            if checksum in tested and test_from:
                shared += 1
            elif checksum in seen or checksum in tested:
                repeated += 1
            elif not test_from and zlib.crc32(checksum.to_bytes(8)) % hold_out == 0:
                tested.add(checksum)
                test.add(example)
            else:
                seen.add(checksum)
                train.add(example)
        if not (train.rows and test.rows):
            empty = "training" if not train.rows else "validation"
            raise RecipeError(
                f"{source or task.hub}: no problem is left for {empty} ({train.rows + test.rows} in all): "
                "give a larger source, another --validation or a smaller --hold-out."
            )
        closing.close()
        for name in ("train.parquet", "test.parquet"):
            (place / name).replace(out / name)
        return Made(out / "train.parquet", out / "test.parquet", train.rows, test.rows, repeated, shared)


def check_parquet(path: str | Path) -> list[Finding]:
    """Look for what verl could not train on in a parquet file: columns, their types, empty or missing values.

    Needs pyarrow and says so. Reads one batch at a time. Returns findings; none means the file is as verl wants it.
    """
    parquet, arrow = _require("pyarrow.parquet"), _require("pyarrow")
    path = Path(path)
    keys = {"file": str(path)}

    def finding(sentence: str, remedy: str = "", severity: str = "error") -> Finding:
        return Finding("data.schema", severity, keys, sentence, remedy, "first batch", "verl 0.9.1, RLHFDataset")

    if not path.is_file():
        return [finding("there is no such file.", "`recipes data` makes one.")]
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as fault:
        return [finding(f"it is no parquet file, or was not written to its end ({str(fault).splitlines()[0]}).")]
    with file:
        columns = file.schema_arrow
        wanted = ("prompt", "data_source", "reward_model")
        missing = [name for name in wanted if name not in columns.names]
        if missing:
            return [finding(f"it has no column {', '.join(missing)}; it has {', '.join(columns.names[:12])}.")]
        if file.metadata.num_rows == 0:
            return [finding("it has no row.")]
        found = []
        types = arrow.types
        messages = columns.field("prompt").type
        if not (types.is_list(messages) or types.is_large_list(messages)) or not types.is_struct(messages.value_type):
            found.append(finding(f"prompt is {messages}, not a list of messages (role, content).", "Make it again."))
        elif {"role", "content"} - {messages.value_type.field(i).name for i in range(messages.value_type.num_fields)}:
            found.append(finding(f"a message of prompt is {messages.value_type}, without role and content."))
        reward = columns.field("reward_model").type
        if not types.is_struct(reward) or reward.get_field_index("ground_truth") < 0:
            found.append(finding(f"reward_model is {reward}, without a ground_truth to compare with."))
        if found:
            return found
        if "extra_info" not in columns.names:
            found.append(finding("it has no extra_info: every row's index is then 0.", severity="warning"))
        return found + [finding(sentence) for sentence in _faulty_rows(file)]


def shared_prompts(train: str | Path, validation: str | Path) -> int:
    """Return how many rows of `validation` pose a problem that `train` poses too. Both are verl's parquet."""
    held = {_prompt_checksum(row["prompt"]) for row in _parquet_rows(Path(train), ["prompt"])}
    return sum(_prompt_checksum(row["prompt"]) in held for row in _parquet_rows(Path(validation), ["prompt"]))


def try_reward(
    path: str | Path,
    *,
    python: str,
    function: str | None = None,
    name: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rows: int = 4,
    deadline: float = REWARD_SECONDS,
) -> list[RewardTrial]:
    """Score the truth, a wrong answer and nonsense for up to `rows` rows of a parquet file, one per data source first.

    Runs in a child of the training interpreter `python`: verl's default function, or `function` (pkg://module or a
    file) and its `name`, loaded as verl's load_extern_object does, without verl's ten seconds of imports. The form a
    function expects (#### n, Answer: n, \\boxed{n}, …) is not declared anywhere, so several are tried and the best
    counts.

    Raises RecipeError when the file cannot be read, or the function cannot be loaded, fails, or takes too long.
    """
    told = {"rows": _sample(Path(path), rows), "function": function, "name": name or "compute_score"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "scores.json"
        told |= {"kwargs": dict(kwargs or {}), "answer": str(answer)}
        label = function or "verl's reward function"
        try:
            done = subprocess.run(
                [python, "-c", _TRY],
                input=json.dumps(told),
                capture_output=True,
                text=True,
                timeout=deadline,
                check=False,
            )
        except subprocess.TimeoutExpired as fault:
            raise RecipeError(f"{label} gave no score within {deadline:g} s.") from fault
        except OSError as fault:
            raise RecipeError(f"The training interpreter {python!r} cannot be started: {fault.strerror}.") from fault
        if done.returncode != 0 or not answer.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RecipeError(f"{label} cannot score the rows of {path}: {last}")
        return [RewardTrial(**trial) for trial in json.loads(answer.read_text(encoding="utf-8"))]


def judge_reward(trials: Sequence[RewardTrial]) -> list[Finding]:
    """Return what is wrong with a reward function by its trials: a curve at zero for ever has no other message."""
    found = []
    for trial in trials:
        keys = {"data_source": trial.data_source, "truth": trial.truth, "nonsense": trial.nonsense}

        def finding(severity: str, sentence: str, remedy: str = "", keys: Mapping[str, Any] = keys) -> Finding:
            return Finding(
                "reward.trial", severity, keys, sentence, remedy, "never: the reward stays flat", "tried here"
            )

        if trial.truth <= trial.nonsense:
            sentence = f"the truth scores {trial.truth:g} and nonsense {trial.nonsense:g}: nothing can be learnt."
            found.append(
                finding("error", sentence, "Check data_source, ground_truth and the form the function expects.")
            )
        elif trial.truth <= trial.wrong:
            found.append(finding("error", f"a wrong answer scores {trial.wrong:g}, as much as the truth."))
        elif trial.nonsense > 0:
            found.append(finding("warning", f"nonsense scores {trial.nonsense:g}, not 0."))
        elif trial.truth != 1:
            found.append(finding("warning", f"the truth scores {trial.truth:g}, not 1: curves are scaled by it."))
    return found


# ------------------------------------------------------------------------------------------------------ reading


def _examples(task: Task, rows: Callable[[], Iterator[Mapping[str, Any]]]) -> Iterator[Example]:
    for number, row in enumerate(rows(), 1):
        try:
            yield task.example(row)
        except KeyError as fault:
            raise RecipeError(
                f"{task.name}: row {number} has no {fault}; it has {', '.join(map(str, row))}."
            ) from fault
        except (ValueError, TypeError, AttributeError) as fault:
            raise RecipeError(f"{task.name}: row {number} cannot be used: {fault}.") from fault


_Rows = Callable[[], Iterator[Mapping[str, Any]]]


def _splits(source: str, task: Task, scratch: Path, python: str, deadline: float) -> dict[str, _Rows]:
    """Return readers by split name (train, test, validation; `train` where nothing says)."""
    path = Path(source).expanduser()
    if path.is_file():
        return {"train": lambda: _file_rows(path)}
    if path.is_dir():
        return _folder(path, task)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise RecipeError(f"{source!r} is no file or directory here, and no hub id such as {task.hub}.")
    config = task.config if source == task.hub else None
    return _folder(_download(source, config, scratch, python, deadline), task)


def _folder(path: Path, task: Task) -> dict[str, _Rows]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path)
    files = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".jsonl", ".json") and p.is_file())
    files = [p for p in files if not p.name.startswith(("dataset_info", "."))]
    inside = [p for p in files if task.config and task.config in p.relative_to(path).parts[:-1]]
    by_split: dict[str, list[Path]] = {}
    for file in inside or files:
        words = re.split(r"[^a-z]+", file.relative_to(path).as_posix().lower())
        split = next((w for w in reversed(words) if w in ("train", "test", "validation", "val")), "train")
        by_split.setdefault("validation" if split == "val" else split, []).append(file)
    if not by_split:
        raise RecipeError(f"{path} holds no .parquet or .jsonl file.")
    return {split: _chain(found) for split, found in by_split.items()}


def _chain(files: Sequence[Path]) -> _Rows:
    return lambda: (row for file in files for row in _file_rows(file))


def _saved(path: Path) -> dict[str, _Rows]:
    """A directory written by `datasets` (save_to_disk): memory-mapped, so nothing is read before it is asked for."""
    found = _require("datasets").load_from_disk(str(path))
    return (
        {k: (lambda v=v: iter(v)) for k, v in found.items()}
        if hasattr(found, "items")
        else {"train": lambda: iter(found)}
    )


def _file_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise RecipeError(f"{path}:{number} is no JSON object: one problem a line is wanted.")
                yield row
    except json.JSONDecodeError as fault:
        raise RecipeError(f"{path}:{number} is no JSON ({fault.msg}): one JSON object a line is wanted.") from fault
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeError(f"{path} cannot be read: {fault}.") from fault


def _parquet_rows(path: Path, columns: list[str] | None = None) -> Iterator[Mapping[str, Any]]:
    parquet, arrow = _require("pyarrow.parquet"), _require("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (arrow.ArrowInvalid, OSError) as fault:
        raise RecipeError(f"{path} cannot be read as parquet: {str(fault).splitlines()[0]}.") from fault


def _faulty_rows(file: Any) -> Iterator[str]:
    """Say how many rows lack a message, a data source or a ground truth, and which is the first."""
    counts: dict[str, list[int]] = {}
    number = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=["prompt", "data_source", "reward_model"]):
        for row in batch.to_pylist():
            messages = row["prompt"] or []
            if not messages or not all(m and m["role"] and m["content"] for m in messages):
                counts.setdefault("no message with role and content", []).append(number)
            if not row["data_source"]:
                counts.setdefault("no data_source", []).append(number)
            if (row["reward_model"] or {}).get("ground_truth") in (None, ""):
                counts.setdefault("no reward_model.ground_truth", []).append(number)
            number += 1
    for what, rows in counts.items():
        yield f"{len(rows)} of {number} rows have {what}; the first is row {rows[0]}."


def _prompt_checksum(messages: Any) -> int:
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        return zlib.crc32(repr(messages).encode())
    return Example(tuple((str(m.get("role")), str(m.get("content"))) for m in messages), "").checksum


def _sample(path: Path, count: int) -> list[dict[str, Any]]:
    """The first row of each data source, then the first rows, `count` in all; from the first batches only."""
    first: dict[str, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such file.")
    for number, row in enumerate(_parquet_rows(path)):
        reward = row.get("reward_model") or {}
        if "data_source" not in row or "ground_truth" not in reward:
            raise RecipeError(f"{path} has no data_source and reward_model.ground_truth to try a reward function on.")
        kept = {
            "data_source": row["data_source"],
            "ground_truth": reward["ground_truth"],
            "extra_info": row.get("extra_info") or {},
        }
        if row["data_source"] not in first:
            first[row["data_source"]] = kept
        elif len(others) < count:
            others.append(kept)
        if number >= 20 * BATCH_ROWS:
            break
    if not first:
        raise RecipeError(f"{path} has no row to try a reward function on.")
    return [*first.values(), *others][: max(count, len(first))]


# ------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """A parquet file of verl's schema that is written a batch at a time."""

    def __init__(self, path: Path, task: Task, split: str) -> None:
        arrow, parquet = _require("pyarrow"), _require("pyarrow.parquet")
        text = arrow.string()
        message = arrow.struct([("role", text), ("content", text)])
        extra = arrow.struct([("split", text), ("index", arrow.int64()), ("answer", text)])
        self.schema = arrow.schema(
            [
                ("data_source", text),
                ("prompt", arrow.list_(message)),
                ("ability", text),
                ("reward_model", arrow.struct([("style", text), ("ground_truth", text)])),
                ("extra_info", extra),
            ]
        )
        self.task, self.split, self.rows, self.batch = task, split, 0, []
        self.file, self.table = parquet.ParquetWriter(path, self.schema), arrow.Table

    def add(self, example: Example) -> None:
        self.batch.append(
            {
                "data_source": self.task.data_source,
                "prompt": [{"role": role, "content": content} for role, content in example.messages],
                "ability": self.task.ability,
                "reward_model": {"style": "rule", "ground_truth": example.answer},
                "extra_info": {"split": self.split, "index": self.rows, "answer": example.solution or example.answer},
            }
        )
        self.rows += 1
        if len(self.batch) == BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        if self.batch:
            self.file.write_table(self.table.from_pylist(self.batch, schema=self.schema))
            self.batch = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.flush()
        self.file.close()


def _require(module: str) -> Any:
    """Import a package the light core does not bring, or say in one sentence which is missing."""
    try:
        return import_module(module)
    except ImportError as fault:
        package = module.partition(".")[0]
        raise RecipeError(f"{package} is not installed in {sys.executable}: `pip install {package}`.") from fault


# ------------------------------------------------------------------------------------------------------ children

_CONTACT = """
import sys
from huggingface_hub import HfApi
HfApi().dataset_info(sys.argv[1], timeout=10)
"""

# Rows are streamed to JSON lines: neither side ever holds more than one.
_DOWNLOAD = """
import json, os, pathlib, sys
import datasets
name, config, out = sys.argv[1], sys.argv[2] or None, pathlib.Path(sys.argv[3])
offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
for split, rows in datasets.load_dataset(name, config, streaming=not offline).items():
    with open(out / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\\n")
"""

_TRY = r"""
import asyncio, inspect, json, sys
told = json.load(sys.stdin)
place = told["function"]
if place and place.startswith("pkg://"):
    import importlib
    function = getattr(importlib.import_module(place.removeprefix("pkg://").replace("/", ".")), told["name"])
elif place:
    import importlib.util
    spec = importlib.util.spec_from_file_location("custom_module", place.removeprefix("file://"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, told["name"])
else:
    from verl.utils.reward_score import default_compute_score as function
FORMS = ("{}", "#### {}", "Answer: {}", "\\boxed{{{}}}", "The answer is \\boxed{{{}}}.", "<answer>{}</answer>")
NONSENSE = "colourless green ideas sleep furiously"
def score(row, text):
    result = function(data_source=row["data_source"], solution_str=text, ground_truth=row["ground_truth"],
                      extra_info=dict(row["extra_info"]), **told["kwargs"])
    if inspect.isawaitable(result):
        result = asyncio.run(result)
    return float(result["score"] if isinstance(result, dict) else result)
trials = []
for row in told["rows"]:
    truth, solution = str(row["ground_truth"]), str(row["extra_info"].get("answer") or "")
    wrong = "7919" if truth != "7919" else "7907"
    best = None
    for form in (*FORMS, None):
        text = form.format(truth) if form else solution
        if not text:
            continue
        reached = score(row, text)
        if best is None or reached > best["truth"]:
            other = form.format(wrong) if form else solution.replace(truth, wrong)
            best = {"response": text, "truth": reached, "wrong": score(row, other)}
    trials.append(best | {"data_source": str(row["data_source"]), "nonsense": score(row, NONSENSE)})
with open(told["answer"], "w", encoding="utf-8") as file:
    json.dump(trials, file)
"""


def _download(name: str, config: str | None, scratch: Path, python: str, deadline: float) -> Path:
    """Stream a hub data set into JSON lines, by a child that may be ended at any time. Returns their directory."""
    place = scratch / name.replace("/", "--")
    place.mkdir()
    way_out = "Give a local copy (a directory with its parquet or jsonl files) instead."
    environment = {"HF_HUB_DOWNLOAD_TIMEOUT": "10", "HF_HUB_ETAG_TIMEOUT": "10", **os.environ}
    steps = [(_CONTACT, [name], CONTACT_SECONDS), (_DOWNLOAD, [name, config or "", str(place)], deadline)]
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        del steps[0]
    for code, arguments, seconds in steps:
        try:
            done = subprocess.run(
                [python, "-c", code, *arguments],
                capture_output=True,
                text=True,
                timeout=seconds,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as fault:
            raise RecipeError(f"The hub did not give {name} within {seconds:g} s. {way_out}") from fault
        except OSError as fault:
            raise RecipeError(f"The interpreter {python!r} cannot be started: {fault.strerror}.") from fault
        if done.returncode != 0:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no message"]
            reason = next(
                (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Timeout)\b", line)), lines[-1]
            )
            if "No module named" in reason:
                raise RecipeError(
                    f"{python} lacks what fetches from the hub ({reason}): pip install datasets. {way_out}"
                )
            raise RecipeError(f"The hub gives no {name} ({reason.strip()[:200].rstrip('.')}). {way_out}")
    return place
