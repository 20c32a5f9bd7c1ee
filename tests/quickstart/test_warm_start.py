"""The warm start and `prepare`: deterministic, whole or absent, kept when they are there.

A few optimizer steps show all of this; what the full warm start reaches is shown by the last, slow test.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from recipes.quickstart import prepare as prepare_module
from recipes.quickstart import task, warm_start
from recipes.quickstart.warm_start import IGNORED, RECORD, Refused, Settings, write_warm_start

pytest.importorskip("torch")

SHORT = Settings(steps=3, batch_size=4)


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("warm") / "a model's home"
    return directory, write_warm_start(directory, SHORT)


def test_the_loss_is_about_the_response_alone():
    ids, labels = warm_start.training_batch(random.Random(0), 8, worked_share=1.0)
    assert ids.shape == labels.shape
    for row, marked in zip(ids.tolist(), labels.tolist(), strict=True):
        text = "".join(task.WORDS[index] for index in row)
        response = "".join(task.WORDS[index] for index in marked if index != IGNORED)
        assert text.rstrip().replace(task.PAD, "").endswith(response)
        assert response.startswith(tuple("0123456789"))
        assert response.endswith(task.END)
        assert "user" not in response


def test_no_held_out_problem_is_shown():
    rng = random.Random(3)
    for _ in range(100):
        ids, _ = warm_start.training_batch(rng, 8, worked_share=0.0)
        for row in ids.tolist():
            words = task.text(row).split("is ")[1].split("?")[0].split(" + ")
            assert not task.Problem(*map(int, words)).held_out


def test_the_share_of_worked_solutions_is_the_one_asked_for():
    _, labels = warm_start.training_batch(random.Random(1), 400, worked_share=0.35)
    worked = sum(task.WORD_IDS["="] in row for row in labels.tolist()) / 400
    assert 0.28 < worked < 0.42


def test_a_checkpoint_transformers_loads_and_generates_with(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, record = made
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.num_parameters() == record["parameters"]
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(directory))
    assert model.config.eos_token_id == task.WORD_IDS[task.END]


def test_the_record_says_what_was_made_and_measured(made):
    directory, record = made
    assert json.loads((directory / RECORD).read_text()) == record
    assert record["settings"]["steps"] == 3
    assert set(record["measured"]) >= {"accuracy", "worked_share", "accuracy_if_worked"}
    assert record["versions"]["torch"]


def test_the_same_seed_gives_the_same_weights_and_measurements_another_seed_others(made, tmp_path):
    directory, record = made
    again = write_warm_start(tmp_path / "again", SHORT)
    assert weights(tmp_path / "again") == weights(directory)
    assert again["measured"] == record["measured"]
    write_warm_start(tmp_path / "other", replace(SHORT, seed=2))
    assert weights(tmp_path / "other") != weights(directory)


def test_the_callers_random_stream_and_threads_are_left_alone(tmp_path):
    import torch

    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    threads = torch.get_num_threads()
    write_warm_start(tmp_path / "model", SHORT)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_complete_one_is_kept(made):
    directory, record = made
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert write_warm_start(directory, SHORT) == record
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_one_of_other_settings_is_refused_by_name_and_replaced_when_asked(tmp_path):
    directory = tmp_path / "model"
    write_warm_start(directory, SHORT)
    first = weights(directory)
    with pytest.raises(Refused, match=r"other settings \(seed\).*--remake"):
        write_warm_start(directory, replace(SHORT, seed=2))
    assert weights(directory) == first
    assert write_warm_start(directory, replace(SHORT, seed=2), remake=True)["settings"]["seed"] == 2
    assert weights(directory) != first
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("content", [None, "", "[1]", '{"settings": 3}', "not json"])
def test_a_directory_that_is_no_warm_start_is_never_touched_even_to_remake(content, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "thesis.tex").write_text("years of work")
    if content is not None:
        (directory / RECORD).write_text(content)
    with pytest.raises(Refused, match="no warm start"):
        write_warm_start(directory, SHORT, remake=True)
    assert (directory / "thesis.tex").read_text() == "years of work"


def test_an_interrupted_one_leaves_nothing(tmp_path):
    def interrupt(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_warm_start(tmp_path / "model", SHORT, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_seed_is_a_sentence_and_an_exit_code(tmp_path, capsys):
    assert warm_start.main([str(tmp_path / "model"), "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "No warm start: The seed is -1; give a whole number from 0 up.\n"


def test_a_file_in_the_way_is_a_sentence_and_an_exit_code(tmp_path, capsys):
    (tmp_path / "occupied").write_text("")
    assert prepare_module.main([str(tmp_path / "occupied"), "--steps", "2"]) == 2
    assert "Nothing prepared" in capsys.readouterr().err


def test_prepare_twice_gives_the_same_files_and_the_second_writes_none(tmp_path, capsys):
    directory = tmp_path / "it's here"
    assert prepare_module.main([str(directory), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Prepared {directory}: the model answers ")
    assert said.count("\n") == 1
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".prepare.lock"]
    assert {"train.parquet", "val.parquet", "model.safetensors", "tokenizer.json", RECORD} <= {
        path.name for path in files
    }
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert prepare_module.main([str(directory), "--steps", "2"]) == 0
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


def test_prepare_of_another_seed_in_the_same_directory_is_refused(tmp_path, capsys):
    assert prepare_module.main([str(tmp_path), "--steps", "2"]) == 0
    assert prepare_module.main([str(tmp_path), "--steps", "2", "--seed", "5"]) == 2
    assert "made with other settings (seed)" in capsys.readouterr().err


@pytest.mark.slow
def test_two_at_once_make_one_and_both_end_well(tmp_path):
    both = [start("recipes.quickstart.prepare", str(tmp_path), "--steps", "20") for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]  # the seconds in it too: the second kept what the first made
    assert sum("waiting for it" in errors for _, errors in said) == 1
    assert sum("step 20/20" in errors for _, errors in said) == 1


@pytest.mark.slow
def test_after_a_kill_the_next_one_clears_up_and_finishes(tmp_path):
    process = start("recipes.quickstart.prepare", str(tmp_path), "--steps", "100000", process_group=0)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(".model.*.partial")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "model").exists()
    assert prepare_module.main([str(tmp_path), "--steps", "2"]) == 0
    assert (tmp_path / "model" / RECORD).exists()
    assert list(tmp_path.glob(".model.*")) == []


@pytest.mark.slow
def test_the_full_warm_start_can_work_and_mostly_does_not(tmp_path):
    measured = write_warm_start(tmp_path / "model", Settings())["measured"]
    assert 0.2 <= measured["accuracy"] <= 0.45
    assert 0.2 <= measured["worked_share"] <= 0.5
    assert measured["accuracy_if_worked"] >= 0.85
    assert measured["accuracy_if_straight"] <= 0.1
