"""The parquet files, read the way verl reads them."""

import pandas as pd
import pytest

from recipes.quickstart import data
from recipes.quickstart.data import TRAIN_COUNT, VALIDATION_COUNT, write_data
from recipes.quickstart.reward import compute_score

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data with spaces"))


def numbers(row) -> frozenset[int]:
    return frozenset(int(word) for word in row["prompt"][0]["content"].removesuffix("?").split() if word.isdigit())


def test_the_columns_are_those_of_verl(files):
    for path, split, count in zip(files, ("train", "val"), (TRAIN_COUNT, VALIDATION_COUNT), strict=True):
        table = pd.read_parquet(path)
        assert list(table.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert len(table) == count
        assert [one["index"] for one in table["extra_info"]] == list(range(count))
        assert {one["split"] for one in table["extra_info"]} == {split}
        assert {len(prompt) for prompt in table["prompt"]} == {1}
        assert {prompt[0]["role"] for prompt in table["prompt"]} == {"user"}


def test_every_ground_truth_is_the_sum_its_prompt_asks_for(files):
    for path in files:
        for _, row in pd.read_parquet(path).iterrows():
            words = row["prompt"][0]["content"].removesuffix("?").split()
            truth = row["reward_model"]["ground_truth"]
            assert truth == str(int(words[2]) + int(words[4]))
            assert compute_score(row["data_source"], f"#### {truth}", truth)["score"] == 1.0


def test_no_validation_pair_is_trained_on(files):
    train, validation = ({numbers(row) for _, row in pd.read_parquet(path).iterrows()} for path in files)
    assert not train & validation


def test_the_same_bytes_every_time(files, tmp_path):
    for first, again in zip(files, write_data(tmp_path), strict=True):
        assert first.read_bytes() == again.read_bytes()


def test_what_is_there_and_right_is_left_alone_and_what_is_wrong_is_replaced(tmp_path):
    train, validation = write_data(tmp_path)
    before = train.stat().st_ino
    good = validation.read_bytes()
    validation.write_bytes(good[:-100])
    write_data(tmp_path)
    assert train.stat().st_ino == before
    assert validation.read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.parquet", "val.parquet"]


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    train, _ = write_data(tmp_path)
    good = train.read_bytes()

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.Path, "replace", killed)
    monkeypatch.setattr(data, "TRAIN_SEED", 101)
    with pytest.raises(KeyboardInterrupt):
        write_data(tmp_path)
    assert train.read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.parquet", "val.parquet"]


def test_verl_reads_the_prompts_and_drops_none_for_length(files, tmp_path):
    dataset = pytest.importorskip("verl.utils.dataset.rl_dataset")
    from omegaconf import OmegaConf

    from recipes.quickstart import task

    config = OmegaConf.create(
        {
            "max_prompt_length": task.MAX_PROMPT_TOKENS,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": 1,
            "cache_dir": str(tmp_path),
        }
    )
    read = dataset.RLHFDataset([str(files[1])], task.tokenizer(), config)
    assert len(read) == VALIDATION_COUNT
    assert read[0]["reward_model"]["ground_truth"].isdigit()
