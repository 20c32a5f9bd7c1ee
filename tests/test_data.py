"""verl's parquet: made from what people have, checked before a run, and its reward function tried on real answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recipes import cli_tools, data
from recipes.errors import RecipeError

GSM8K, DAPO = data.TASKS["gsm8k"], data.TASKS["dapo-math"]


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k_rows(numbers):
    return [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n:,}"} for n in numbers]


@pytest.fixture
def source(tmp_path):
    jsonl(tmp_path / "gsm8k" / "train.jsonl", gsm8k_rows(range(900, 1000)))
    jsonl(tmp_path / "gsm8k" / "test.jsonl", gsm8k_rows(range(10)))
    return tmp_path / "gsm8k"


def prompts(path):
    return {row["prompt"][-1]["content"] for row in pq.read_table(path).to_pylist()}


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("one\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### -3", "-3"),
        ("#### $18", "18"),
        ("#### 0.5 \n", "0.5"),
        ("#### .5", ".5"),
        ("not #### 1 but\n#### 2", "2"),
    ],
)
def test_the_answer_is_the_number_after_the_last_mark(solution, answer):
    assert data.gsm8k_answer(solution) == answer


@pytest.mark.parametrize("solution", ["72", "#### ", "#### seven", "#### 1 2", "#### 5.", "#### 1\nmore"])
def test_a_solution_without_a_number_is_refused_not_guessed(solution):
    with pytest.raises(ValueError, match="####"):
        data.gsm8k_answer(solution)


def test_the_columns_are_verls(source, tmp_path):
    made = data.make(GSM8K, tmp_path / "out", source=str(source))
    assert (made.train_rows, made.validation_rows) == (100, 10)
    row = pq.read_table(made.train).to_pylist()[-1]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "openai/gsm8k"
    assert [m["role"] for m in row["prompt"]] == ["user"]
    assert row["prompt"][0]["content"].startswith("What is 999 plus 999?")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1998"}
    assert row["extra_info"] == {"split": "train", "index": 99, "answer": "999+999=1998\n#### 1,998"}
    assert data.check_parquet(made.train) == data.check_parquet(made.validation) == []


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub snapshot", "datasets"])
def test_every_form_of_a_local_copy_gives_the_same_rows(form, tmp_path):
    train, test = gsm8k_rows(range(900, 1000)), gsm8k_rows(range(10))
    folder = tmp_path / "copy"
    if form == "jsonl":
        jsonl(folder / "train.jsonl", train)
        jsonl(folder / "test.jsonl", test)
    elif form == "parquet":
        folder.mkdir()
        for split, rows in (("train", train), ("test", test)):
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    elif form == "hub snapshot":
        for config, part in (("main", train), ("socratic", [])):
            for split, rows in (("train", part), ("test", test)):
                (folder / config).mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.Table.from_pylist(rows or test), folder / config / f"{split}-00000-of-00001.parquet")
    else:
        import datasets

        made = {"train": datasets.Dataset.from_list(train), "test": datasets.Dataset.from_list(test)}
        datasets.DatasetDict(made).save_to_disk(str(folder))
    made = data.make(GSM8K, tmp_path / "out", source=str(folder))
    assert (made.train_rows, made.validation_rows, made.shared) == (100, 10, 0)


def test_validation_is_never_training(tmp_path):
    """The published runs validated on their training file; here a problem in both is taken out of training."""
    folder = tmp_path / "both"
    jsonl(folder / "train.jsonl", gsm8k_rows([*range(50), 3, 4]))
    jsonl(folder / "test.jsonl", gsm8k_rows(range(40, 60)))
    made = data.make(GSM8K, tmp_path / "out", source=str(folder))
    assert (made.train_rows, made.validation_rows, made.shared, made.repeated) == (40, 20, 10, 2)
    assert prompts(made.train) & prompts(made.validation) == set()
    assert data.shared_prompts(made.train, made.validation) == 0


def dapo_rows(count, copies):
    for _ in range(copies):
        for n in range(count):
            yield {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": f"Solve {n}. Answer: $Answer"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"id-{n}"},
            }


def test_dapo_math_counts_a_problem_once_and_holds_some_out(tmp_path):
    pq.write_table(pa.Table.from_pylist(list(dapo_rows(400, 5))), tmp_path / "dapo.parquet")
    made = data.make(DAPO, tmp_path / "out", source=str(tmp_path / "dapo.parquet"), hold_out=10)
    assert made.train_rows + made.validation_rows == 400
    assert made.repeated == 1600
    assert 20 <= made.validation_rows <= 60
    assert prompts(made.train) & prompts(made.validation) == set()
    again = data.make(DAPO, tmp_path / "again", source=str(tmp_path / "dapo.parquet"), hold_out=10)
    assert prompts(again.validation) == prompts(made.validation)


def test_dapo_math_in_its_other_shape_and_validation_from_elsewhere(tmp_path):
    train = jsonl(tmp_path / "d.jsonl", [{"prompt": f"Solve {n}.", "solution": str(n)} for n in range(20)])
    aime = jsonl(tmp_path / "aime.jsonl", [{"problem": f"AIME {n}", "answer": n} for n in range(5)])
    made = data.make(DAPO, tmp_path / "out", source=str(train), validation=str(aime))
    assert (made.train_rows, made.validation_rows) == (20, 5)
    row = pq.read_table(made.validation).to_pylist()[2]
    assert (row["reward_model"]["ground_truth"], row["extra_info"]["split"]) == ("2", "test")


def test_batches_are_written_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BATCH_ROWS", 8)
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": f"Solve {n}.", "solution": str(n)} for n in range(100)])
    made = data.make(DAPO, tmp_path / "out", source=str(path), hold_out=50)
    assert pq.ParquetFile(made.train).num_row_groups >= made.train_rows // 8


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"question": "q"}\n', "row 1 has no 'answer'; it has question"),
        ('{"question": "q", "answer": "72"}\n', "row 1 cannot be used: its answer has no `#### number`"),
        ('{"question": "q", "answer": "#### 1"}\n{x\n', ":2 is no JSON"),
        ("[1]\n", ":1 is no JSON object"),
        ("", "no problem is left for training"),
        ('{"question": "q", "answer": "#### 1"}\n', "no problem is left for"),
    ],
)
def test_a_source_that_cannot_be_used_says_which_row_and_writes_nothing(tmp_path, lines, words):
    path = tmp_path / "x.jsonl"
    path.write_text(lines)
    with pytest.raises(RecipeError) as refused:
        data.make(GSM8K, tmp_path / "out", source=str(path))
    assert words in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_source_that_is_not_there_is_no_hub_id_either(tmp_path):
    with pytest.raises(RecipeError, match="no file or directory here, and no hub id"):
        data.make(GSM8K, tmp_path / "out", source="/no/such/file.jsonl")


def test_a_hub_that_cannot_be_reached_is_one_sentence_in_good_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody answers
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    began = time.monotonic()
    with pytest.raises(RecipeError) as refused:
        data.make(GSM8K, tmp_path / "out")
    assert time.monotonic() - began < data.CONTACT_SECONDS + 5
    assert str(refused.value).startswith("The hub gives no openai/gsm8k (")
    assert "Give a local copy" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(data, "CONTACT_SECONDS", 0.5)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(RecipeError, match=r"did not give openai/gsm8k within 0\.5 s"):
        data.make(GSM8K, tmp_path / "out", python=str(slow))


def parquet(path, rows, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


GOOD = {
    "prompt": [{"role": "user", "content": "q"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "1"},
    "extra_info": {"index": 0},
}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{**GOOD, "prompt": "q"}], "prompt is string, not a list of messages"),
        ([{**GOOD, "prompt": [{"role": "user", "text": "q"}]}], "without role and content"),
        ([{k: v for k, v in GOOD.items() if k != "data_source"}], "it has no column data_source"),
        ([{**GOOD, "reward_model": {"style": "rule"}}], "without a ground_truth"),
        ([GOOD, {**GOOD, "prompt": []}], "1 of 2 rows have no message with role and content; the first is row 1."),
        ([{**GOOD, "reward_model": {"style": "rule", "ground_truth": None}}, GOOD], "1 of 2 rows have no reward_model"),
        ([{**GOOD, "data_source": ""}], "1 of 1 rows have no data_source"),
        ([{k: v for k, v in GOOD.items() if k != "extra_info"}], "no extra_info"),
    ],
)
def test_a_file_verl_could_not_use_is_found_before_the_run(tmp_path, rows, words):
    (finding,) = data.check_parquet(parquet(tmp_path / "x.parquet", rows))
    assert words in finding.sentence
    assert finding.severity == ("warning" if "extra_info" in words else "error")


def test_no_file_an_empty_file_and_a_truncated_file(tmp_path):
    assert "no such file" in data.check_parquet(tmp_path / "none.parquet")[0].sentence
    empty = parquet(tmp_path / "empty.parquet", [], pa.Table.from_pylist([GOOD]).schema)
    assert data.check_parquet(empty)[0].sentence == "it has no row."
    whole = parquet(tmp_path / "whole.parquet", [GOOD])
    whole.write_bytes(whole.read_bytes()[:-20])
    assert "no parquet file" in data.check_parquet(whole)[0].sentence


@pytest.mark.slow
def test_verls_own_reward_function_gives_the_truth_one_and_nonsense_none(source, tmp_path):
    made = data.make(GSM8K, tmp_path / "out", source=str(source))
    (trial, *_) = trials = data.try_reward(made.train, python=sys.executable, rows=2)
    assert (trial.truth, trial.wrong, trial.nonsense) == (1, 0, 0)
    assert data.judge_reward(trials) == []


@pytest.mark.slow
def test_dapos_reward_function_punishes_nonsense(tmp_path):
    pq.write_table(pa.Table.from_pylist(list(dapo_rows(40, 1))), tmp_path / "dapo.parquet")
    trials = data.try_reward(tmp_path / "dapo.parquet", python=sys.executable, rows=1)
    assert (trials[0].truth, trials[0].nonsense) == (1, -1)
    assert data.judge_reward(trials) == []


@pytest.mark.slow
def test_a_function_that_teaches_nothing_is_found_out(tmp_path):
    right = "solution_str.endswith(' ' + ground_truth)"
    kinds = {
        "zero": ("0.0", "nothing can be learnt"),
        "one": ("1.0", "nothing can be learnt"),
        "form": ("1.0 * ('####' in solution_str)", "a wrong answer scores 1"),
        "gift": (f"0.1 + 0.9 * {right}", "nonsense scores 0.1"),
        "scaled": ("{'score': 5.0 * %s}" % right, "the truth scores 5"),  # noqa: UP031 (braces)
    }
    cases = "\n".join(f"    if data_source == {kind!r}: return {body}" for kind, (body, _) in kinds.items())
    file = tmp_path / "mine.py"
    file.write_text(f"async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n{cases}\n")
    rows = parquet(tmp_path / "x.parquet", [{**GOOD, "data_source": kind} for kind in kinds])
    trials = data.try_reward(rows, python=sys.executable, function=str(file))
    assert [trial.data_source for trial in trials] == list(kinds)
    for trial, (_, words) in zip(trials, kinds.values(), strict=True):
        (finding,) = data.judge_reward([trial])
        assert words in finding.sentence


@pytest.mark.slow
def test_a_function_that_fails_hangs_or_is_not_there_is_a_sentence(tmp_path):
    rows = parquet(tmp_path / "x.parquet", [{**GOOD, "data_source": "mine"}])
    with pytest.raises(RecipeError, match="NotImplementedError"):
        data.try_reward(rows, python=sys.executable)
    with pytest.raises(RecipeError, match="cannot score the rows"):
        data.try_reward(rows, python=sys.executable, function=str(tmp_path / "none.py"))
    with pytest.raises(RecipeError, match=r"no score within 0\.2 s"):
        data.try_reward(rows, python=sys.executable, deadline=0.2)
    with pytest.raises(RecipeError, match="cannot be started"):
        data.try_reward(rows, python="/no/python")


def test_the_commands_make_check_and_tell_by_their_exit_code(source, tmp_path):
    out = tmp_path / "out"
    made = CliRunner().invoke(cli_tools.data_commands, ["gsm8k", str(source), "-o", str(out), "--no-try"])
    assert (made.exit_code, "100 problems" in made.output) == (0, True)
    train = str(out / "train.parquet")
    fine = CliRunner().invoke(cli_tools.data_commands, ["check", train, str(out / "test.parquet"), "--no-try"])
    same = CliRunner().invoke(cli_tools.data_commands, ["check", train, train, "--no-try"])
    assert (fine.exit_code, same.exit_code) == (0, 1)
    assert "100 problems" in same.output
    assert "validation would be memory" in same.output


def test_importing_needs_no_pyarrow_and_its_absence_is_a_sentence(tmp_path):
    code = (
        "import sys; sys.modules['pyarrow'] = None; import pathlib\n"
        "from recipes import data\n"
        "try: data.make(data.TASKS['gsm8k'], pathlib.Path(sys.argv[1]))\n"
        "except data.RecipeError as fault: print(fault)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "pyarrow is not installed" in done.stdout
    assert done.stderr == ""
