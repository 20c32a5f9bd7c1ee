"""Rows of the data files and what the prompt length leaves, with a fake `transformers` that counts words."""

from __future__ import annotations

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from fake_node import only, states

from recipes.doctor import data
from recipes.errors import RecipeError

FAKE_TRANSFORMERS = '''
"""A fake transformers: a token is a word, and a message of the role `odd` is refused."""
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, path, local_files_only):
        assert local_files_only
        return cls()
    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **options):
        if messages[0]["role"] == "odd":
            raise ValueError("unknown role")
        return " ".join([*(m["content"] for m in messages), "answer:", *options])
    def __call__(self, text, add_special_tokens):
        return {"input_ids": text.split()}
'''


def rows(path, *lengths, role="user"):
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": role, "content": " ".join(["word"] * length)}],
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"index": 0},
        }
        for length in lengths
    ]
    parquet.write_table(arrow.Table.from_pylist(table), path)
    return path


@pytest.fixture
def make(fake, tmp_path):
    """Make the node of a recipe with these files and a limit of four tokens, one of which the template takes."""
    fake.put("fakes/transformers.py", FAKE_TRANSFORMERS)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")

    def made(train, val, *overrides):
        files = [f"data.train_files={train}", f"data.val_files={val}", f"model.path={model}"]
        asked = [*files, "data.max_prompt_length=4", "batch.train=2", "batch.mini=2", *overrides]
        return fake.node("qwen3/grpo_0_6b_vllm_a2", *asked, PYTHONPATH=str(fake.root / "fakes"))

    return made


def test_rows_that_fit_are_in_order(make, tmp_path):
    node = make(rows(tmp_path / "a.parquet", 1, 2, 3), rows(tmp_path / "b.parquet", 3))
    lines = list(data.look(node, 60))
    assert {line.state for line in lines} == {"ok"}
    assert "3 rows, the longest prompt has 4 tokens of 4" in only(lines, "rows of data.train_files").text


def test_longer_prompts_that_nothing_filters_are_cut(make, tmp_path):
    files = rows(tmp_path / "a.parquet", 1, 4, 9), rows(tmp_path / "b.parquet", 3)
    node = make(*files, "data.filter_overlong_prompts=false")
    line = only(data.look(node, 60), "rows of data.train_files")
    assert line.state == "warning"
    assert "2 of 3 prompts are longer (the longest has 10 tokens)" in line.text


def test_a_filter_that_leaves_less_than_a_batch(make, tmp_path):
    train, val = rows(tmp_path / "a.parquet", 1, 4, 9), rows(tmp_path / "b.parquet", 9)
    line = only(data.look(make(train, val, "data.filter_overlong_prompts=true"), 60), "rows of data.train_files")
    assert line.state == "error"
    assert "leaves 1 rows" in line.text
    enough = make(rows(tmp_path / "c.parquet", 1, 2, 9), val, "data.filter_overlong_prompts=true")
    assert "the filter leaves 2" in only(data.look(enough, 60), "rows of data.train_files").text


def test_options_of_the_chat_template_count(make, tmp_path):
    node = make(
        rows(tmp_path / "a.parquet", 3),
        rows(tmp_path / "b.parquet", 3),
        "data.chat_template_kwargs={enable_thinking: 0}",
        "data.filter_overlong_prompts=false",
    )
    assert only(data.look(node, 60), "rows of data.val_files").state == "warning"


def test_messages_the_template_refuses(make, tmp_path):
    node = make(rows(tmp_path / "a.parquet", 1, 1, role="odd"), rows(tmp_path / "b.parquet", 3))
    line = only(data.look(node, 60), "rows of data.train_files")
    assert line.state == "error"
    assert line.finding.keys == {"data.train_files": "2 of 2 rows"}


def test_what_was_not_counted_is_said_and_estimated(make, tmp_path):
    counted = data.Counted(rows=200, longer=50, failed=0, longest=9, whole=False, total=1000)
    assert counted.left == 750
    node = make("a", "b", "data.filter_overlong_prompts=true")
    (line,) = data.left(node, "data.train_files", counted)
    assert "200 of 1000 rows counted" in line.text
    assert data.Counted(0, 0, 0, 0, False, 5).left == 0


def test_a_file_that_is_not_there_is_an_error_and_no_row_is_counted(make, tmp_path):
    lines = list(data.look(make(tmp_path / "no.parquet", tmp_path / "no.parquet"), 60))
    assert states(lines, "data.train_files") == ["error"]
    assert not any(line.subject.startswith("rows") for line in lines)


def test_without_a_tokenizer_rows_are_unseen(make, tmp_path):
    (tmp_path / "model" / "tokenizer.json").unlink()
    node = make(rows(tmp_path / "a.parquet", 1), rows(tmp_path / "b.parquet", 1))
    line = only(data.look(node, 60), "rows left")
    assert line.state == "unseen"
    assert "no tokenizer" in line.text


def test_a_tokenizer_that_fails_or_is_slow_is_unseen(make, fake, tmp_path):
    node = make(rows(tmp_path / "a.parquet", 1), rows(tmp_path / "b.parquet", 1))
    fake.put("fakes/transformers.py", "raise ImportError('no tokenizers here')")
    assert "ImportError: no tokenizers here" in only(data.look(node, 60), "rows left").text
    fake.put("fakes/transformers.py", "import time; time.sleep(60)")
    with pytest.raises(RecipeError, match="not ready within 2 s"):
        data.count(node, [tmp_path / "a.parquet"], 2)


def test_no_recipe_names_no_file(fake):
    (line,) = data.look(fake.node(), 1)
    assert line.state == "unseen"
