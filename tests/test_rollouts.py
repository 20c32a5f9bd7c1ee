"""Rollout dumps of verl: read by step, flagged, ranked; untrusted text stays text."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from recipes import rollouts
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.rollouts import Counter, flags, folders, ranked, responses, show, some, summary

PROSE = "First we add the tens, then the ones; there is a carry, so the sum is one larger than it looks. "


def dump(folder, step, records, tail=""):
    """A dump as verl's `_write_generations` writes it: one object a line, not ASCII, NaN as NaN."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {"input": "What is 1 + 1?", "gts": "2", "step": step, "uid": f"q{i}_0_0"} | record, ensure_ascii=False
        )
        for i, record in enumerate(records)
    ]
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")
    return folder / f"{step}.jsonl"


@pytest.fixture
def run(tmp_path):
    first, second = (tmp_path / "run/attempts" / n / "rollouts" for n in "12")
    dump(first, 1, [{"output": "one", "score": 0.0}, {"output": PROSE, "score": 1.0}])
    dump(first, 2, [{"output": "of attempt 1", "score": 0.0}])
    dump(second, 2, [{"output": f"number {i}", "score": i / 10} for i in range(10)])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ("empty",)),
        (" \n\t", ("empty",)),
        ("12", ()),
        (PROSE, ()),
        ("Wait, let me check that again. " * 40, ("repetition",)),
        ("".join(f"Step {i}: {i * 37 % 101} and {i * i % 89}. " for i in range(90)) + "no no " * 400, ("repetition",)),
        ("等一下，让我再检查一遍。" * 60, ("repetition",)),
        ("a" * 100, ()),  # too short to be judged
        ("the answer is \ufffd\ufffd", ()),  # the limit cut a character in two
        ("the \ufffd\ufffd\ufffd answer", ("garble",)),
        ("x\x00\x01\x02", ("garble",)),
        ("line\nline\r\n\tline", ()),
        ("hello Привет שלום สวัสดี नमस्ते", ("garble",)),
        ("设 α 为 x 的值, so x = π/2 — дальше", ()),  # mathematics in three languages
    ],
)
def test_flags(text, found):
    assert flags(text) == found


def test_cut_needs_tokens_and_a_limit():
    assert flags("some words", 8, 8) == ("cut",)
    assert flags("some words", 7, 8) == flags("some words", 8, None) == flags("some words", None, 8) == ()


def test_the_later_attempt_wins(run):
    found = folders(run)
    assert list(found) == [1, 2]
    assert found[2].parent.parent.name == "2"
    assert [one.text for one in responses(found[1])] == ["one", PROSE]


def test_a_summary_and_its_order_of_worst_and_best(run):
    found = summary(folders(run)[2])
    assert (found.count, found.reward, found.unit) == (10, (0.0, pytest.approx(0.45), 0.9), "characters")
    assert found.length == (8, 8.0, 8)
    picked = ranked(folders(run)[2], worst=2, best=1)
    assert [one.reward for one in picked] == [0.0, 0.1, 0.9]
    assert [one.line for one in ranked(folders(run)[2], worst=99)] == list(range(1, 11))


def test_lines_that_are_none_and_rewards_that_are_none(tmp_path):
    file = dump(
        tmp_path / "dumps",
        3,
        [{"output": "a", "score": float("nan")}, {"output": "b", "score": 1}, {"output": "c", "score": None}],
        tail='[]\n{"input": "x", "out',
    )
    assert "NaN" in file.read_text()
    found = summary(file)
    assert (found.count, found.unreadable, found.reward, found.unrewarded) == (3, 2, (1.0, 1.0, 1.0), 2)
    assert found.to_dict()["unrewarded"] == 2
    assert "1.000 (1 to 1), 2 of 3 without" in show(tmp_path / "dumps").text()
    assert [one.text for one in ranked(file, worst=1)] == ["a"]  # no reward is worse than a low one
    assert "(2 lines unreadable)" in show(tmp_path / "dumps").text()


def test_tokens_are_counted_by_the_run_s_own_tokenizer(run, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    (tmp_path / "model").mkdir()
    tokenizer = Tokenizer(models.WordLevel({"number": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    assert "no recipe.yaml" in show(run).text()
    recipe = f"data: {{max_response_length: 2}}\nmodel: {{path: {tmp_path}/model}}\n"
    (run / "recipe.yaml").write_text(recipe)
    shown = show(run, step=2)
    assert shown.summaries[0].length == (2, 2.0, 2)
    assert shown.summaries[0].flagged == {"cut": 10}
    (tmp_path / "model/tokenizer.json").write_text("{")
    assert "cannot be read" in show(run).text()
    assert Counter(tmp_path / "none.json").why


def test_of_very_many_bytes_some_steps_are_read_and_it_says_so(tmp_path):
    for step in range(1, 21):
        dump(tmp_path, step, [{"output": "x" * 100, "score": 0}])
    found = folders(tmp_path)
    size = found[1].stat().st_size
    assert list(some(found, 5 * size + 20)) == [1, 6, 11, 15, 20]
    assert some(found) == found


def test_nothing_found_says_which_setting_keeps_them(tmp_path):
    for path, words in ((tmp_path, "rollout_dump=true"), (tmp_path / "none", "does not exist")):
        with pytest.raises(RecipeError, match=words):
            folders(path)
    (tmp_path / "train.log").write_text("x")
    with pytest.raises(RecipeError, match=r"STEP\.jsonl"):
        folders(tmp_path / "train.log")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)


def test_what_is_shown_is_escaped_masked_and_without_control_characters(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=y>\x1b[31m HF_TOKEN=hf_" + "a1B2" * 9 + " \u202e end"
    dump(tmp_path, 1, [{"output": evil + " and so on " * 50, "input": evil, "gts": evil, "score": 0.5}])
    shown = show(tmp_path, worst=1)
    bundle = shown._repr_mimebundle_()
    tags = Tags()
    tags.feed(bundle["text/html"])
    assert tags.seen <= {"style", "div", "table", "tr", "td", "th", "p", "pre", "details", "summary"}
    for text in (*bundle.values(), json.dumps(shown.to_dict(), ensure_ascii=False)):
        assert "hf_a1B2" not in text
    assert not {"\x1b", "\u202e"} & set("".join(bundle.values()))


def test_the_command(run):
    said = CliRunner().invoke(main, ["rollouts", str(run)])
    assert said.exit_code == 0
    assert [line.split()[:2] for line in said.output.splitlines()[1:3]] == [["1", "2"], ["2", "10"]]
    said = CliRunner().invoke(main, ["rollouts", str(run), "--step", "1", "--best", "1"])
    assert "step 1, line 2: reward 1" in said.output
    assert PROSE.strip() in said.output
    told = json.loads(CliRunner().invoke(main, ["rollouts", str(run), "--json", "--worst", "2"]).output)
    assert [one["reward"] for one in told["responses"]] == [0.0, 0.1]
    said = CliRunner().invoke(main, ["rollouts", str(run), "--step", "7"])
    assert said.exit_code == 2
    assert "there are 2, 1 to 2" in said.output


@pytest.mark.parametrize("trainer", ["ray_trainer.py", "v1/trainer_base.py"])
def test_dumps_are_read_as_verl_writes_them(tmp_path, trainer):
    """Against the installed verl's own writer, cut out of its file: importing the trainer takes a minute."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.origin
    tree = ast.parse((Path(verl.origin).parent / "trainer/ppo" / trainer).read_text())
    [writer] = [node for node in ast.walk(tree) if getattr(node, "name", "") == "_write_generations"]
    writer.decorator_list = []
    scope = {"os": os, "json": json, "np": np}
    exec(compile(ast.Module([writer], []), trainer, "exec"), scope)
    scope["_write_generations"](["q"], ["an\nanswer é"], ["2"], [0.5], {"acc": [True]}, str(tmp_path), 4)
    [one] = responses(rollouts.folders(tmp_path)[4])
    assert (one.step, one.prompt, one.text, one.truth, one.reward) == (4, "q", "an\nanswer é", "2", 0.5)
    assert one.others == {"acc": True}
