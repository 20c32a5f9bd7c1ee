"""Training and validation problems as parquet files in verl's schema."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from recipes.atomic import replace_file
from recipes.quickstart.task import Problem, problems

DATA_SOURCE = "addition"
TRAIN_COUNT, VALIDATION_COUNT = 2048, 100
# The problems do not depend on the seed of a run: the curves of two seeds are about the same questions.
TRAIN_SEED, VALIDATION_SEED = 100, 200


def rows(chosen: list[Problem], split: str) -> list[dict[str, Any]]:
    """One row a problem: the columns verl's ``RLHFDataset`` and reward loop read."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(chosen)
    ]


def write_parquet(table: list[dict[str, Any]], path: Path) -> None:
    """Write rows to ``path`` in one move: a reader sees the old file or the whole new one.

    A file that already holds these bytes is left alone, its time of change included.
    """
    import pandas as pd

    file = io.BytesIO()
    pd.DataFrame(table).to_parquet(file, index=False)
    if not path.exists() or path.read_bytes() != file.getvalue():
        replace_file(path, file.getvalue())


def write_data(directory: Path) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet`` into ``directory`` and return their paths.

    The same call writes the same bytes. Raises ImportError when pandas finds no parquet engine (pyarrow).
    """
    directory.mkdir(parents=True, exist_ok=True)
    train, validation = directory / "train.parquet", directory / "val.parquet"
    write_parquet(rows(problems(TRAIN_COUNT, TRAIN_SEED, held_out=False), "train"), train)
    write_parquet(rows(problems(VALIDATION_COUNT, VALIDATION_SEED, held_out=True), "val"), validation)
    return train, validation
