"""Reading metrics: what was computed, what was not, what is not finite, and what can't be read are four things."""

import json
import math
import stat
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.atomic import replace_file
from recipes.metrics import JsonLines, Restart, as_metrics, parse_line, read_jsonl, write_csv

REAL = Path(__file__).parent / "data/metrics/verl_0.9.1_three_steps.jsonl"


def line(step, **data):
    return json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}}) + "\n"


def test_a_real_file_becomes_one_row_a_step_and_one_float_column_a_key():
    metrics = read_jsonl(REAL)
    assert metrics.state == "ok"
    assert metrics.table.index.tolist() == [1, 2, 3]
    assert metrics.table.index.name == "step"
    assert metrics.table.shape == (3, 90)
    assert {str(dtype) for dtype in metrics.table.dtypes} == {"float64"}
    assert metrics.table.columns[0] == "global_seqlen/min"  # the order in which verl wrote them
    assert metrics.table.at[3, "critic/rewards/mean"] == 0.025390625
    assert not metrics.nonfinite
    assert not metrics.broken
    assert not metrics.unfinished
    assert str(metrics).endswith("3 steps (1 to 3), 90 keys.")


def test_absent_is_neither_zero_nor_non_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(0, val=0.5) + line(1, loss=0.0) + line(2, loss=None) + line(3, loss=1.0))
    metrics = read_jsonl(path)
    assert metrics.table["loss"].isna().tolist() == [True, False, True, False]
    assert metrics.table.at[1, "loss"] == 0.0
    assert metrics.nonfinite == {"loss": (2,)}


def test_a_key_that_was_never_finite_is_still_a_column(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, norm=None) + line(2, norm=None))
    metrics = read_jsonl(path)
    assert list(metrics.table.columns) == ["norm"]
    assert metrics.nonfinite == {"norm": (1, 2)}
    assert "2 values are not finite" in str(metrics)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_other_spellings_of_non_finite_mean_the_same_as_null(text):
    assert parse_line(f'{{"step": 1, "data": {{"a": {text}}}}}'.encode()) == (1, {"a": None}, [])


def test_validation_and_training_of_one_step_merge_and_the_later_line_wins(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(10, val=0.6, shared=1.0) + line(10, reward=0.5, shared=2.0) + line(9, reward=0.4))
    metrics = read_jsonl(path)
    assert metrics.table.index.tolist() == [9, 10]
    assert metrics.table.loc[10].to_dict() == {"val": 0.6, "shared": 2.0, "reward": 0.5}


def test_the_order_of_keys_in_a_line_does_not_matter(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0, b=2.0) + line(2, b=20.0, a=10.0) + line(1, b=3.0, a=4.0) + line(2, a=5.0, b=6.0))
    assert read_jsonl(path).table.to_dict("index") == {1: {"a": 4.0, "b": 3.0}, 2: {"a": 5.0, "b": 6.0}}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 9))),
        min_size=1,
        max_size=20,
    )
)
def test_whatever_comes_in_whatever_order_the_later_value_wins(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    path.write_text("".join(line(step, **data) for step, data in records))
    expected = {}
    for step, data in records:
        expected.setdefault(step, {}).update(data)
    metrics = read_jsonl(path)
    assert metrics.table.index.tolist() == sorted(expected)
    lost = {(step, key) for key, steps in metrics.nonfinite.items() for step in steps}
    assert lost == {(step, key) for step, data in expected.items() for key, value in data.items() if value is None}
    for step, data in expected.items():
        assert metrics.table.loc[step].dropna().to_dict() == {k: v for k, v in data.items() if v is not None}


def test_a_value_written_again_replaces_a_non_finite_one_and_the_other_way_round(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=None, b=1.0) + line(1, a=2.0, b=None))
    metrics = read_jsonl(path)
    assert metrics.nonfinite == {"b": (1,)}
    assert metrics.table.at[1, "a"] == 2.0
    assert math.isnan(metrics.table.at[1, "b"])


def test_no_file_and_an_empty_file_are_empty_tables_that_say_so(tmp_path):
    missing = read_jsonl(tmp_path / "none.jsonl")
    assert (missing.state, len(missing.table)) == ("missing", 0)
    assert str(missing).endswith("none.jsonl does not exist yet.")
    (tmp_path / "empty.jsonl").touch()
    empty = read_jsonl(tmp_path / "empty.jsonl")
    assert (empty.state, len(empty.table), empty.unfinished) == ("empty", 0, False)
    assert str(empty).endswith("holds no step yet.")


def test_a_file_that_exists_and_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_jsonl(tmp_path)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"not json", "not a JSON object"),
        (b'{"step": 2, "data": {"a": 1', "not a JSON object"),
        (b'{"step": 2}', "expected"),
        (b"[1, 2]", "expected"),
        (b'{"step": 2.5, "data": {"a": 1}}', "whole number"),
        (b'{"step": -1, "data": {"a": 1}}', "whole number"),
        (b'{"step": true, "data": {"a": 1}}', "whole number"),
        (b'{"step": 1000000000000000000000, "data": {}}', "whole number"),
        (b"\x00\x00\x00\x00", "not a JSON object"),
        (b'{"step": 2, "data": {"\xff\xfe": 1}}', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
    ],
)
def test_a_broken_line_is_reported_by_number_and_the_rest_is_read(tmp_path, bad, reason):
    path = tmp_path / "m.jsonl"
    path.write_bytes(line(1, a=1.0).encode() + bad + b"\n" + line(3, a=3.0).encode())
    metrics = read_jsonl(path)
    assert metrics.table["a"].to_dict() == {1: 1.0, 3: 3.0}
    (broken,) = metrics.broken
    assert broken.line == 2
    assert reason in broken.reason
    assert len(str(broken)) < 250  # a message, not the line again
    assert str(broken).isprintable()


def test_one_value_that_is_no_number_costs_only_itself(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a="0.5", b=2.0, c=[1.0], d=True) + '{"step": 2, "data": {"a": ' + "9" * 400 + "}}\n")
    metrics = read_jsonl(path)
    assert metrics.table.loc[1].to_dict() == {"b": 2.0, "d": 1.0}
    assert [broken.line for broken in metrics.broken] == [1, 1, 2]
    assert metrics.broken[0].reason == 'a at step 1 is not a number: "0.5"'


def test_a_truncated_last_line_is_unfinished_not_broken(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0) + '{"step": 2, "data": {"a": 0.')
    metrics = read_jsonl(path)
    assert metrics.table.index.tolist() == [1]
    assert metrics.unfinished
    assert not metrics.broken


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0).rstrip("\n"))
    metrics = read_jsonl(path)
    assert metrics.table.index.tolist() == [1]
    assert not metrics.unfinished


@pytest.mark.parametrize("text", ['{"step": 3.5, "data": {"a": 1}}', '{"step": 3, "data": {"a": "x"}}', '{"a": 1}'])
def test_a_last_line_that_is_whole_and_wrong_is_broken_without_its_newline(tmp_path, text):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0) + text)
    reader = JsonLines(path)
    assert [b.line for b in reader.read().broken] == [2]
    assert not reader.read().unfinished
    path.write_text(line(1, a=1.0) + text + "\n" + line(2, a=1.0))
    assert [b.line for b in reader.read().broken] == [2]


def test_nul_bytes_around_a_line_cost_it_nothing_and_a_line_of_them_is_reported(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"\0\0\0" + line(1, a=1.0).encode() + b"\0\0\n" + line(2, a=2.0).strip().encode() + b"\0\0\n")
    metrics = read_jsonl(path)
    assert metrics.table["a"].to_dict() == {1: 1.0, 2: 2.0}
    assert [b.line for b in metrics.broken] == [2]
    assert "utf-32" not in str(metrics.broken[0])


def test_json_lines_in_utf_16_are_read(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0) + line(2, a=2.0), encoding="utf-16")
    assert read_jsonl(path).table["a"].to_dict() == {1: 1.0, 2: 2.0}


def test_a_step_that_goes_back_is_told_with_its_line_once_and_for_all(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(0, val=1.0) + line(1, a=1.0) + line(2, a=None) + line(2, val=1.0) + "x\n" + line(1, a=None))
    reader = JsonLines(path)
    assert reader.read().restarts == (Restart(6, 2, 1),)
    with path.open("a") as file:
        file.write(line(2, a=3.0) + line(0, a=3.0))
    metrics = reader.read()
    assert metrics.restarts == (Restart(6, 2, 1), Restart(8, 2, 0))
    assert "; line 6: the step went back from 2 to 1 (the first of 2 times); 1 place could not be read" in str(metrics)


def test_one_of_each_is_said_in_the_singular(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(5, a=None) + "x\n")
    said = str(read_jsonl(path))
    assert ": 1 step (5), 1 key; 1 value is not finite; 1 place could not be read (first: line 2: " in said


def test_a_line_seen_before_its_newline_is_taken_once(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a="text").rstrip("\n"))
    reader = JsonLines(path)
    reader.read()
    path.write_text(line(1, a="text") + "broken\n")
    assert [broken.line for broken in reader.read().broken] == [1, 2]


def test_a_reader_sees_the_same_at_every_cut_as_one_that_reads_at_the_end(tmp_path):
    """The file of a real run, handed over in pieces that end anywhere."""
    content = REAL.read_bytes()
    path = tmp_path / "m.jsonl"
    path.touch()
    reader = JsonLines(path)
    ends = [content.index(b"\n", at) for at in (0, content.index(b"\n") + 1)]
    for cut in (0, 1, 700, ends[0], ends[0] + 1, ends[0] + 2, ends[1], ends[1] + 1, len(content) - 1, len(content)):
        path.write_bytes(content[:cut])
        live, whole = reader.read(), read_jsonl(path)
        pd.testing.assert_frame_equal(live.table, whole.table)
        assert (live.broken, live.unfinished, live.state) == (whole.broken, whole.unfinished, whole.state)
    pd.testing.assert_frame_equal(reader.read().table, read_jsonl(REAL).table)


def test_a_reader_parses_only_what_is_new(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0) + line(2, a=2.0))
    reader = JsonLines(path)
    first = reader.read()
    parsed = []
    take = reader.take
    monkeypatch.setattr(reader, "take", lambda text, number: parsed.extend(text.split(b"\n")) or take(text, number))
    assert reader.read() is first
    with path.open("a") as file:
        file.write("broken\n" + line(3, a=3.0))
    assert reader.read().table.index.tolist() == [1, 2, 3]
    assert len(parsed) == 2
    assert reader.read().broken[0].line == 3
    assert first.table.index.tolist() == [1, 2]  # a table once handed out does not change


def test_a_reader_waits_for_a_file_and_starts_over_when_another_training_truncates_it(tmp_path):
    path = tmp_path / "m.jsonl"
    reader = JsonLines(path)
    assert reader.read().state == "missing"
    path.write_text(line(1, a=1.0) + line(2, a=2.0) + "broken\n")
    assert reader.read().table.index.tolist() == [1, 2]
    path.write_text("")
    assert reader.read().state == "empty"
    path.write_text(line(1, a=7.0, other=1.0) + line(2, a=8.0) + line(3, a=9.0))  # longer than what was there before
    metrics = reader.read()
    assert metrics.table["a"].tolist() == [7.0, 8.0, 9.0]
    assert not metrics.broken


def test_a_file_cut_short_is_read_anew(tmp_path):
    """A copy restored after a full disk, say: the same beginning, less of it."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(REAL.read_bytes())
    reader = JsonLines(path)
    assert reader.read().table.index.tolist() == [1, 2, 3]
    path.write_bytes(REAL.read_bytes()[:7000])
    metrics = reader.read()
    assert metrics.table.index.tolist() == [1, 2]
    assert metrics.unfinished


def test_a_longer_file_written_between_two_looks_is_not_taken_for_a_continuation(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a=1.0))
    reader = JsonLines(path)
    reader.read()
    path.write_text(line(1, a=5.0) + line(2, a=6.0))
    assert reader.read().table["a"].tolist() == [5.0, 6.0]


def test_csv_keeps_every_number_and_tells_absent_from_non_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a__b=0.1 + 0.2, c=None) + line(2, a__b=1e-300))
    csv = write_csv(read_jsonl(path), tmp_path / "out" / "curves.csv")
    assert csv.read_text() == "step,a/b,c\n1,0.30000000000000004,nan\n2,1e-300,\n"
    back = pd.read_csv(csv, index_col="step")
    assert back["a/b"].tolist() == [0.1 + 0.2, 1e-300]


def test_csv_of_a_real_run_reads_back_equal(tmp_path):
    metrics = read_jsonl(REAL)
    back = pd.read_csv(write_csv(metrics, tmp_path / "m.csv"), index_col="step")
    pd.testing.assert_frame_equal(back.astype("float64"), metrics.table, check_exact=True, check_column_type=False)


def test_csv_of_nothing_has_a_header(tmp_path):
    assert write_csv(read_jsonl(tmp_path / "none"), tmp_path / "m.csv").read_text() == "step\n"


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "m.csv"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written is left behind
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_written_file_is_as_readable_as_any_other(tmp_path):
    path = replace_file(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_a_bare_table_is_taken_with_infinite_as_non_finite():
    table = pd.DataFrame({"a": [1, 2], "b": [math.inf, math.nan]}, index=[5, 3])
    metrics = as_metrics(table)
    assert metrics.table.index.tolist() == [3, 5]
    assert metrics.nonfinite == {"b": (5,)}
    assert metrics.infinite == {"b": {5: math.inf}}
    assert metrics.table["b"].isna().all()
    assert as_metrics(metrics) is metrics


def test_a_table_that_is_not_one_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"these come more often: \[2\]"):
        as_metrics(pd.DataFrame({"a": [1.0, 2.0]}, index=[2, 2]))
    with pytest.raises(TypeError, match="Column 'a' of a table of metrics must hold numbers"):
        as_metrics(pd.DataFrame({"a": ["x"]}, index=[1]))


def test_importing_the_module_is_light():
    code = "import sys, recipes.metrics; print([m for m in ('pandas', 'numpy', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
