"""The data files: columns and rows as verl wants them, and how many rows the prompt length leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import data
from recipes.doctor import child
from recipes.doctor.lines import Line, Section, shown
from recipes.doctor.node import Node
from recipes.errors import RecipeError

SECTION = Section("data")

# Share of the deadline for counting; the rest is for importing transformers, which may take a minute from cold disks.
COUNTING_SHARE = 0.5
MARK = "recipes-doctor:"

# Counts as verl 0.9.1 does: the chat template with the generation prompt, and a row that fails counts as too long.
_COUNT = """
import json, sys, time
told = json.loads(sys.argv[1])
import pyarrow.parquet as parquet
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(told["model"], local_files_only=True)
end = time.monotonic() + told["seconds"]
answers = []
for place, name in enumerate(told["files"], 1):
    # Later files have what earlier ones left over, and a fair share at least.
    until = time.monotonic() + (end - time.monotonic()) / (len(told["files"]) - place + 1)
    rows = longer = failed = longest = 0
    whole = True
    with parquet.ParquetFile(name) as file:
        for batch in file.iter_batches(batch_size=200, columns=["prompt"]):
            if rows and time.monotonic() > until:
                whole = False
                break
            for messages in batch.column(0).to_pylist():
                rows += 1
                try:
                    text = tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=False, **told["kwargs"])
                    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
                except Exception:
                    failed += 1
                    continue
                longest = max(longest, length)
                longer += length > told["limit"]
        answers.append({"rows": rows, "longer": longer, "failed": failed, "longest": longest, "whole": whole,
                        "total": file.metadata.num_rows})
print("\\nMARK" + json.dumps(answers))
"""


@dataclass(frozen=True)
class Counted:
    """Rows of a file by the length of their prompts, in tokens. `rows` of `total` were counted before time was up."""

    rows: int
    longer: int
    failed: int
    longest: int
    whole: bool
    total: int

    @property
    def left(self) -> int:
        """Rows a filter would leave, of all; where not all were counted, by their share."""
        kept = self.rows - self.longer - self.failed
        return kept if self.whole or not self.rows else kept * self.total // self.rows


def look(node: Node, deadline: float) -> Iterator[Line]:
    """Yield what is to be said of the data files. `deadline`: seconds for counting their rows."""
    if node.subject is None:
        yield SECTION.unseen("files", "no recipe names any")
        return
    wanted = node.subject.recipe.data
    readable = {}
    for key, name in {"data.train_files": wanted.train_files, "data.val_files": wanted.val_files}.items():
        lines = list(_file(key, name))
        yield from lines
        if all(line.state in ("ok", "warning") for line in lines):
            readable[key] = name
    if readable:
        yield from _rows(node, readable, deadline)


def _file(key: str, name: str) -> Iterator[Line]:
    try:
        found = data.check_parquet(name)
    except RecipeError as fault:
        yield SECTION.unseen(key, str(fault))
        return
    for one in found:
        yield SECTION.fault(
            key,
            {key: name},
            one.sentence,
            one.remedy,
            severity=one.severity,
            noticed=one.noticed,
            source=one.source,
        )
    if any(one.severity == "error" for one in found):
        return
    yield SECTION.ok(key, f"{name}: columns and rows as verl wants them")


def _rows(node: Node, files: Mapping[str, str], deadline: float) -> Iterator[Line]:
    model = Path(node.subject.recipe.model.path)
    if not (model / "tokenizer_config.json").is_file() and not (model / "tokenizer.json").is_file():
        yield SECTION.unseen("rows left", f"there is no tokenizer in {model} to count tokens with")
        return
    try:
        counted = count(node, tuple(files.values()), deadline)
    except RecipeError as fault:
        yield SECTION.unseen("rows left", str(fault))
        return
    for key, one in zip(files, counted, strict=True):
        yield from left(node, key, one)


def count(node: Node, names: Sequence[str], deadline: float) -> list[Counted]:
    """Count the rows of parquet files by the length of their prompts, in one child of the training interpreter.

    Counting stops after half of `deadline` seconds and says so. Raises RecipeError when the tokenizer or the file
    cannot be read there, or the child takes longer than `deadline`.
    """
    recipe = node.subject.recipe
    told: dict[str, Any] = {
        "model": recipe.model.path,
        "files": [str(name) for name in names],
        "limit": recipe.data.max_prompt_length,
        "kwargs": dict(recipe.data.chat_template_kwargs),
        "seconds": deadline * COUNTING_SHARE,
    }
    # The run's external modules patch engines, and a tokenizer needs none.
    environment = {**node.environment, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    argv = [node.python, "-c", _COUNT.replace("MARK", MARK), json.dumps(told, default=str)]
    ended = child.run(argv, environment=environment, deadline=deadline)
    if ended.code is None:
        raise RecipeError(f"the tokenizer was not ready within {deadline:g} s")
    answers = [line for line in ended.output.splitlines() if line.startswith(MARK)]
    if ended.code != 0 or not answers:
        raise RecipeError(f"the tokenizer in {recipe.model.path} cannot count tokens ({shown(ended.last, 200)})")
    return [Counted(**one) for one in json.loads(answers[-1].removeprefix(MARK))]


def left(node: Node, key: str, counted: Counted) -> Iterator[Line]:
    """Judge what the prompt length leaves of a file."""
    recipe = node.subject.recipe
    limit, filtered = recipe.data.max_prompt_length, recipe.data.filter_overlong_prompts
    seen = f"{counted.rows} of {counted.total} rows counted" if not counted.whole else f"{counted.total} rows"
    said = f"{seen}, the longest prompt has {counted.longest} tokens of {limit}"
    noticed, source = "first batch", "verl 0.9.1, RLHFDataset"
    if counted.failed:
        yield SECTION.fault(
            f"rows of {key}",
            {key: f"{counted.failed} of {counted.rows} rows"},
            "the chat template refuses their messages.",
            "Look at their roles and their order; the template of the model says what it takes.",
            severity="error" if counted.failed == counted.rows else "warning",
            noticed=noticed,
            source=source,
        )
        if counted.failed == counted.rows:
            return
    train = key.startswith("data.train")
    if filtered and train and recipe.batch.train and counted.left < recipe.batch.train:
        yield SECTION.fault(
            f"rows of {key}",
            {"data.max_prompt_length": limit, "batch.train": recipe.batch.train},
            f"the filter leaves {counted.left} rows, fewer than one step takes: the training file counts as empty.",
            "Raise data.max_prompt_length, take a smaller batch, or other data.",
            noticed="engine start: Train dataloader is empty",
            source="verl 0.9.1, RayPPOTrainer",
        )
    elif counted.longer and not filtered:
        yield SECTION.fault(
            f"rows of {key}",
            {"data.max_prompt_length": limit, "data.filter_overlong_prompts": filtered},
            f"{counted.longer} of {counted.rows} prompts are longer (the longest has {counted.longest} tokens) and "
            "nothing filters them.",
            "Set data.filter_overlong_prompts=true, or raise data.max_prompt_length.",
            severity="warning",
            noticed="never: their beginning is cut off, whatever data.truncation says",
            source="verl 0.9.1, AgentLoopWorker",
        )
    elif not counted.failed:
        kept = f"; the filter leaves {counted.left}" if filtered else ""
        yield SECTION.ok(f"rows of {key}", f"{said}{kept}")
