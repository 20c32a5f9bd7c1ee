"""Any source, the same table: one real run three ways, TensorBoard's format, what a path is, and `recipes metrics`."""

import gzip
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from recipes import metrics
from recipes.cli import main
from recipes.cli_metrics import _folders
from recipes.errors import RecipeError
from recipes.metrics import tensorboard
from recipes.metrics.tensorboard import _crc, _masked, read_tensorboard

ONE_RUN = Path(__file__).parent / "data/metrics/one_run"
"""The first steps of a real quickstart run (verl 0.9.1): what its three loggers wrote."""


def line(step, **data):
    return json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}}) + "\n"


def record(event):
    head = struct.pack("<Q", len(event))
    return head + struct.pack("<I", _masked(_crc(head))) + event + struct.pack("<I", _masked(_crc(event)))


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def part(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def scalar(step, tag, value):
    """An event as TensorBoard's writer makes it: no step if it is 0."""
    told = part(1, part(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
    return b"\x09" + struct.pack("<d", 1.7e9) + (b"\x10" + varint(step) if step else b"") + part(5, told)


VERSION = b"\x09" + struct.pack("<d", 1.7e9) + part(3, b"brain.Event:2")


def rows(found):
    return {step: row.dropna().to_dict() for step, row in found.table.iterrows()}


# --- one real run, three ways ---


def test_json_lines_console_and_tensorboard_of_a_real_run_are_the_same_table():
    lines, log, events = (metrics.read(ONE_RUN / name) for name in ("metrics.jsonl", "train.log", "tensorboard"))
    assert lines.table.index.tolist() == [0, 1, 2, 3]
    assert lines.table.shape[1] == 96
    for other in (log, events):
        assert not other.broken
        assert not other.unfinished
        assert other.state == "ok"
    # verl prints a number in full, so nothing is lost on the console; TensorBoard keeps 32 bits.
    pd.testing.assert_frame_equal(log.table[lines.table.columns], lines.table, check_exact=True)
    pd.testing.assert_frame_equal(events.table[lines.table.columns], lines.table, rtol=1e-6)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "tensorboard/events.out.tfevents.17.sample.1.0"])
def test_a_packed_file_under_any_name_is_the_same(tmp_path, name):
    packed = tmp_path / "something"
    packed.write_bytes(gzip.compress((ONE_RUN / name).read_bytes()))
    pd.testing.assert_frame_equal(metrics.read(packed).table, metrics.read(ONE_RUN / name).table)


# --- TensorBoard's format ---


def test_tensorboards_own_writer_and_reader_agree_with_ours(tmp_path):
    """What they write we read, value by value what they read."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    numbers = np.random.default_rng(0)
    path = tmp_path / "events.out.tfevents.1.x"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for step in (0, 1, 5, 127, 128, 300, 70_000, 2**33):
            values = [Summary.Value(tag=f"a/{n}", simple_value=float(numbers.normal())) for n in range(3)]
            for value in values[:2]:
                writer.write(Event(wall_time=1.0, step=step, summary=Summary(value=[value])).SerializeToString())
            writer.write(Event(wall_time=1.0, step=step, summary=Summary(value=values[2:] * 2)).SerializeToString())
    theirs = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    found = read_tensorboard(path)
    for tag in ("a/0", "a/1", "a/2"):
        assert found.table[tag].to_dict() == {event.step: event.value for event in theirs.Scalars(tag)}


def test_values_that_are_zero_not_finite_or_given_twice(tmp_path):
    path = tmp_path / "e.tfevents"
    events = [scalar(1, "loss", 0.0), scalar(1, "norm", math.nan), scalar(2, "norm", 1.0), scalar(2, "loss", 1.0)]
    events += [scalar(2, "loss", 2.5), scalar(3, "norm", math.inf), scalar(0, "val", 0.5)]
    path.write_bytes(b"".join(map(record, [VERSION, *events])))
    found = metrics.read(path)
    assert rows(found) == {0: {"val": 0.5}, 1: {"loss": 0.0}, 2: {"norm": 1.0, "loss": 2.5}, 3: {}}
    assert found.nonfinite == {"norm": (1, 3)}


def test_scalars_of_tensorflow_2_are_tensors_and_pictures_are_none(tmp_path):
    one = part(1, part(1, b"a/tensor") + part(8, b"\x08\x01" + part(2, b"") + part(4, struct.pack("<f", 0.5))))
    double = part(1, part(1, b"a/double") + part(8, b"\x08\x02" + part(6, struct.pack("<d", 0.1))))
    picture = part(1, part(1, b"a/picture") + part(4, b"\x08\x01" + part(4, b"PNG")))
    vector = part(1, part(1, b"a/vector") + part(8, b"\x08\x01" + part(2, part(2, b"\x08\x02")) + part(4, bytes(8))))
    event = b"\x09" + bytes(8) + b"\x10\x07" + part(5, one + double + picture + vector)
    path = tmp_path / "e.tfevents"
    path.write_bytes(record(VERSION) + record(event))
    assert rows(metrics.read(path)) == {7: {"a/tensor": 0.5, "a/double": 0.1}}


def test_damage_is_reported_by_record_and_nothing_is_read_from_it(tmp_path):
    good = [record(VERSION), *(record(scalar(step, "loss", step)) for step in range(1, 6))]
    path = tmp_path / "e.tfevents"
    flipped = bytearray(good[2])
    flipped[-6] ^= 1  # in the number
    path.write_bytes(b"".join([*good[:2], flipped, *good[3:]]))
    found = metrics.read(path)
    assert found.table.index.tolist() == [1, 3, 4, 5]
    assert [broken.line for broken in found.broken] == [3]
    flipped = bytearray(good[2])
    flipped[0] ^= 1  # in the length
    path.write_bytes(b"".join([*good[:2], flipped, *good[3:]]))
    found = metrics.read(path)
    assert found.table.index.tolist() == [1]
    assert "the rest of the file is left out" in found.broken[0].reason
    for cut in range(len(b"".join(good[:2])) + 1, len(b"".join(good[:3]))):
        path.write_bytes(b"".join(good)[:cut])
        found = metrics.read(path)
        assert found.table.index.tolist() == [1]
        assert found.unfinished
        assert not found.broken


def test_hostile_events_are_left_out(tmp_path):
    path = tmp_path / "e.tfevents"
    events = [b"", b"\xff" * 40, b"\x09" * 30, b"\x2a\xff\xff\xff\xff\x0f" + bytes(30), b"\x10" + b"\xff" * 30]
    events += [scalar(1, "x" * 5000, 1.0), b"\x09" + bytes(8) + b"\x10" + b"\xff" * 9 + b"\x01" + scalar(0, "n", 1)[9:]]
    path.write_bytes(b"".join(map(record, [VERSION, *events, scalar(2, "loss", 0.5)])))
    found = metrics.read(path)
    assert rows(found) == {2: {"loss": 0.5}}
    assert all(str(broken).isprintable() for broken in found.broken)


def test_pieces_may_end_anywhere(tmp_path, monkeypatch):
    path = tmp_path / "e.tfevents"
    path.write_bytes(b"".join(record(scalar(step, f"a/{n}", step + n)) for step in range(20) for n in range(3)))
    whole = metrics.read(path)
    assert whole.table.shape == (20, 3)
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(tensorboard, "_PIECE", size)
        pd.testing.assert_frame_equal(metrics.read(path).table, whole.table)


def test_the_event_files_of_a_folder_are_one_curve_and_the_later_written_wins(tmp_path):
    later, earlier = (tmp_path / f"events.out.tfevents.{time}.host.1.0" for time in (1_700_000_100, 999_999_999))
    earlier.write_bytes(b"".join(record(scalar(step, "loss", 1.0)) for step in (1, 2, 3)))
    later.write_bytes(b"".join(record(scalar(step, "loss", 2.0)) for step in (3, 4)))
    assert metrics.read(tmp_path).table["loss"].to_dict() == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


# --- what a path is ---


def test_csv_of_ours_reads_back_equal(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(line(1, a__b=0.1 + 0.2, c=None) + line(2, a__b=1e-300) + line(4, c=3))
    first = metrics.read(path)
    second = metrics.read(metrics.write_csv(first, tmp_path / "curves"))
    pd.testing.assert_frame_equal(second.table, first.table, check_exact=True)
    assert second.nonfinite == first.nonfinite == {"c": (1,)}
    assert second.format == "CSV"
    (tmp_path / "odd.csv").write_text('step,"a,b",c\n1,0.5,x\nsecond,1,2\n3,1\n4,,2\n')
    odd = metrics.read(tmp_path / "odd.csv")
    assert rows(odd) == {1: {"a,b": 0.5}, 4: {"c": 2.0}}
    assert [broken.line for broken in odd.broken] == [2, 3, 4]


INFINITE = (
    "step:1 - a:nan - b:-inf - c:1\nstep:2 - a:inf - c:nan\nstep:3 - timing/b:inf - a:1\n"
    "step:4 - c:nan\nstep:4 - c:inf\n"
)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_is_exported_reads_back_equal_with_absent_nan_and_both_infinities(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "train.log").write_text(INFINITE)
    first = metrics.read(tmp_path / "train.log")
    assert first.nonfinite == {"a": (1, 2), "b": (1,), "c": (2, 4), "timing_s/b": (3,)}
    assert first.infinite == {"a": {2: math.inf}, "b": {1: -math.inf}, "c": {4: math.inf}, "timing_s/b": {3: math.inf}}
    assert run("metrics", tmp_path / "train.log", "-o", tmp_path / f"m.{ending}").exit_code == 0
    second = metrics.read(tmp_path / f"m.{ending}")
    pd.testing.assert_frame_equal(second.table, first.table, check_exact=True)
    assert (second.nonfinite, second.infinite) == (first.nonfinite, first.infinite)
    if ending == "csv":
        rows = (tmp_path / "m.csv").read_text().splitlines()
        assert rows == ["step,a,b,c,timing_s/b", "1,nan,-inf,1.0,", "2,inf,,nan,", "3,1.0,,,inf", "4,,,inf,"]
        (tmp_path / "m.csv").write_text((tmp_path / "m.csv").read_text(), encoding="utf-16")
        assert metrics.read(tmp_path / "m.csv").infinite == first.infinite
    else:
        (tmp_path / "cut").write_bytes((tmp_path / "m.parquet").read_bytes()[:-9])
        with pytest.raises(RecipeError, match="cannot be read as Parquet"):
            metrics.read(tmp_path / "cut")


def test_parquet_of_something_else_is_refused_in_a_sentence(tmp_path):
    pytest.importorskip("pyarrow")
    for columns in ({"a": [1.0]}, {"step": [-1], "a": [1.0]}, {"step": [1], "a": ["x"]}, {"step": [1.5], "a": [1.0]}):
        pd.DataFrame(columns).to_parquet(tmp_path / "m.parquet", index=False)
        with pytest.raises(RecipeError, match="is no table of metrics"):
            metrics.read(tmp_path / "m.parquet")


def test_runs_that_share_a_folder_of_tensorboard_are_told(tmp_path):
    earlier, later = (tmp_path / f"events.out.tfevents.{time}.host.1.0" for time in (1_700_000_100, 1_700_000_200))
    tags = ("loss", "critic/rewards/mean")
    earlier.write_bytes(b"".join(record(scalar(s, tag, 1.0)) for s in (1, 2, 3) for tag in (*tags, "val-core/x")))
    later.write_bytes(record(VERSION) + b"".join(record(scalar(s, tag, 2.0)) for s in (2, 3, 1) for tag in tags))
    found = metrics.read(tmp_path)
    assert [tuple(restart) for restart in found.restarts] == [(2, 3, 2, later.name), (6, 3, 1, later.name)]
    assert (found.format, found.trainer) == ("TensorBoard", "")
    later.write_bytes(b"".join(record(scalar(s, tag, 2.0)) for s in (3, 4) for tag in tags))
    assert metrics.read(tmp_path).restarts == ()


def test_tensorboard_of_slime_has_verls_names(tmp_path):
    events = [scalar(1, "rollout/raw_reward", 0.5), scalar(1, "train/grad_norm", 0.25)]
    (tmp_path / "events.out.tfevents.17.h").write_bytes(b"".join(map(record, events)))
    found = metrics.read(tmp_path)
    assert rows(found) == {1: {"critic/rewards/mean": 0.5, "actor/grad_norm": 0.25}}
    assert found.trainer == "slime"


def test_a_packed_file_without_its_end_says_so(tmp_path):
    (tmp_path / "m.jsonl").write_text("".join(line(step, a=step / 7) for step in range(3000)))
    (tmp_path / "e.tfevents").write_bytes(b"".join(record(scalar(step, "a", step / 7)) for step in range(3000)))
    (tmp_path / "m.csv").write_text("step,a\n" + "".join(f"{step},{step / 7}\n" for step in range(3000)))
    for name in ("m.jsonl", "e.tfevents", "m.csv"):
        packed = gzip.compress((tmp_path / name).read_bytes())
        (tmp_path / "cut").write_bytes(packed[: len(packed) // 2])
        found = metrics.read(tmp_path / "cut")
        assert 0 < len(found.table) < 3000
        assert "the gzip file has no end" in found.broken[-1].reason


def test_a_first_line_that_is_broken_does_not_hide_what_a_file_is(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\0\0\0\n{broken\n" + line(3, a=1.0).encode())
    assert rows(metrics.read(tmp_path / "a.txt")) == {3: {"a": 1.0}}
    (tmp_path / "b.txt").write_text('{"step": 1, "data": {"a": 0.')  # its first line is being written
    assert metrics.read(tmp_path / "b.txt").unfinished


def test_an_empty_file_is_empty_and_what_is_no_metrics_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "empty").touch()
    assert metrics.read(tmp_path / "empty").state == "empty"
    (tmp_path / "picture.jsonl").write_bytes(b"\x89PNG\r\n" + bytes(range(256)) * 50)
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8bnonsense")
    for name, words in (
        ("picture.jsonl", "holds no step of a training"),
        ("cut.gz", "holds no step of a training"),
        ("nothing", "does not exist"),
        ("", "holds no run, no metrics.jsonl and no TensorBoard event file"),
    ):
        with pytest.raises(RecipeError, match=words) as refusal:
            metrics.read(tmp_path / name)
        assert "\n" not in str(refusal.value)


def test_a_folder_of_several_trainings_is_not_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1.h").write_bytes(record(scalar(1, "loss", 1.0)))
    with pytest.raises(RecipeError, match="events of 2 trainings; name one of them: a, b"):
        metrics.read(tmp_path)
    shutil.rmtree(tmp_path / "b")
    assert rows(metrics.read(tmp_path)) == {1: {"loss": 1.0}}


def test_a_log_with_a_long_beginning_is_found_out(tmp_path):
    (tmp_path / "anything").write_text("noise\n" * 50_000 + "step:1 - a:1\n")
    assert rows(metrics.read(tmp_path / "anything")) == {1: {"a": 1.0}}


# --- a run directory ---


def attempts(path, *contents):
    for number, content in enumerate(contents, 1):
        folder = path / "attempts" / str(number)
        folder.mkdir(parents=True)
        if content is not None:
            (folder / "metrics.jsonl").write_text(content)
    return path


def test_attempts_are_one_curve_in_the_order_of_their_numbers(tmp_path):
    first = line(0, val__x=0.1) + "".join(line(step, loss=1.0, old=1.0) for step in (1, 2, 3, 4)) + "broken\n"
    resumed = line(2, **{"val-core__x": 0.5}) + line(3, loss=None, kl=2.0) + line(5, loss=2.0)
    run = attempts(tmp_path, first, resumed, *[None] * 7, line(6, loss=10.0))  # the tenth comes after the second
    found = metrics.read(run)
    assert found.table["loss"].dropna().to_dict() == {1: 1.0, 2: 1.0, 4: 1.0, 5: 2.0, 6: 10.0}
    assert found.nonfinite == {"loss": (3,)}  # what the later attempt lost does not come back from the earlier one
    assert found.table.at[2, "val-core/x"] == 0.5
    assert found.attempts == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 2, 6: 10}
    assert list(found.table.columns) == ["val/x", "loss", "old", "val-core/x", "kl"]
    assert "attempts/1/metrics.jsonl" in found.broken[0].reason


def test_attempts_keep_what_their_files_say(tmp_path):
    infinite = '{"step": 2, "data": {"loss": Infinity, "kl": -Infinity}}\n'
    again = '{"step": 3, "data": {"loss": NaN, "kl": Infinity}}\n' + line(1, loss=1.0)
    found = metrics.of_run(attempts(tmp_path, line(1, loss=1.0) + infinite, line(2, loss=None) + again))
    assert found.nonfinite == {"loss": (2, 3), "kl": (2, 3)}
    assert found.infinite == {"kl": {2: -math.inf, 3: math.inf}}
    assert [str(restart) for restart in found.restarts] == [
        "attempts/2/metrics.jsonl, line 3: the step went back from 3 to 1"
    ]
    assert (found.format, found.trainer) == ("JSON lines", "verl")


def test_one_attempt_is_what_its_file_is(tmp_path):
    run = attempts(tmp_path, line(1, a=1.0) + line(2, a=None) + "broken\n")
    found, alone = metrics.of_run(run), metrics.read_jsonl(run / "attempts/1/metrics.jsonl")
    pd.testing.assert_frame_equal(found.table, alone.table)
    assert (found.nonfinite, found.broken, found.source) == (alone.nonfinite, alone.broken, alone.source)
    assert found.attempts == {1: 1, 2: 1}


def test_a_run_without_metrics_yet(tmp_path):
    found = metrics.of_run(attempts(tmp_path, None, None))
    assert (found.state, len(found.table)) == ("missing", 0)
    with pytest.raises(RecipeError, match="it has no attempts"):
        metrics.of_run(tmp_path / "none")


# --- recipes metrics, recipes plot ---


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "step:1 - critic/rewards/mean:0.25 - timing/gen:5 - odd:x\n"
        "step:2 - critic/rewards/mean:nan - timing_s/gen:6.5\n"
        "step:1 - actor/lr:0.000 - actor/kl:inf\n"
    )
    return path


def test_the_summary_says_what_is_there_and_what_is_not_in_order(log):
    result = run("metrics", log)
    assert result.exit_code == 0
    for words in (
        "2 steps (1 to 2), 4 keys",
        "critic/rewards/mean        1          0.25",
        "read as console log of verl",
        "critic/rewards/mean: nan at step 2",
        "printed as 0.000, which is rounded and may not be zero:\n  actor/lr",
        "the later values lie over the earlier:\n  line 3: the step went back from 2 to 1",
        "line 1: no number under a key at step 1: odd:x",
        "timing/gen → timing_s/gen",
    ):
        assert words in result.output
    told = json.loads(run("metrics", log, "--json").output)
    assert told["steps"] == {"count": 2, "first": 1, "last": 2}
    assert told["nonfinite"] == {"critic/rewards/mean": [2], "actor/kl": [1]}
    assert told["infinite"] == {"actor/kl": {"1": "inf"}}
    assert told["rounded"] == ["actor/lr"]
    assert told["restarts"] == [{"line": 3, "before": 2, "step": 1, "place": ""}]
    assert (told["format"], told["trainer"]) == ("console log", "verl")
    told = json.loads(run("metrics", log, "--json", "--keys", "timing*").output)
    assert (told["infinite"], told["rounded"], len(told["restarts"])) == ({}, [], 1)
    assert told["keys"]["timing_s/gen"] == {"count": 2, "first": 5.0, "last": 6.5, "min": 5.0, "max": 6.5}


def test_csv_to_stdout_and_parquet_to_a_file(log, tmp_path):
    head = "step,critic/rewards/mean,timing_s/gen,actor/lr,actor/kl\n"
    assert run("metrics", log, "-o", "-").output == head + "1,0.25,5.0,0.0,inf\n2,nan,6.5,,\n"
    assert run("metrics", log, "-o", "-", "--keys", "timing*").output == "step,timing_s/gen\n1,5.0\n2,6.5\n"
    pq = pytest.importorskip("pyarrow.parquet")
    result = run("metrics", log, "-o", tmp_path / "m.parquet")
    assert result.exit_code == 0, result.output
    table = pq.read_table(tmp_path / "m.parquet")
    assert table.column_names == ["step", "critic/rewards/mean", "timing_s/gen", "actor/lr", "actor/kl"]
    first, second = table["critic/rewards/mean"].to_pylist()
    assert first == 0.25
    assert math.isnan(second)  # non-finite is NaN, absent would be null
    assert table["critic/rewards/mean"].null_count == 0


def test_parquet_tells_absent_from_not_finite_and_says_what_it_needs(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "m.jsonl").write_text(line(1, a=None, b=1.0) + line(2, b=2.0))
    assert run("metrics", tmp_path / "m.jsonl", "-o", tmp_path / "m.parquet").exit_code == 0
    assert pq.read_table(tmp_path / "m.parquet")["a"].to_pylist()[1] is None
    (tmp_path / "m.parquet").unlink()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("metrics", tmp_path / "m.jsonl", "-o", tmp_path / "m.parquet")
    assert result.exit_code == 2
    assert "Parquet needs pyarrow" in result.output
    assert not (tmp_path / "m.parquet").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-o", "m.xlsx"], "-o m.xlsx must end in .csv or .parquet"),
        (["-o", "/proc/none/m.csv"], "-o /proc/none/m.csv cannot be written"),
        (["--keys", "critic/reward/mean"], "did you mean critic/rewards/mean"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused_in_a_sentence(log, words, sentence):
    result = run("metrics", log, *words)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert sentence in result.output


def test_plot_draws_any_log(log, tmp_path):
    result = run("plot", log, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    names = ["curves-dark.png", "curves.csv", "curves.png", "curves.svg"]
    assert [Path(text).name for text in result.output.splitlines() if "curves" in text] == names
    assert all((tmp_path / "out" / name).stat().st_size for name in names)


def test_plot_gives_each_of_several_sources_a_folder_of_its_own():
    assert _folders((Path("/r/a/train.log"),)) == ["train.log"]
    assert _folders((Path("/r/a/train.log"), Path("/r/b/train.log"), Path("/r/c"))) == [
        "a-train.log",
        "b-train.log",
        "c",
    ]
    assert len(set(_folders((Path("/r/a"), Path("/r/a"))))) == 2


def test_plot_of_nothing_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    for name, words in (("none", "does not exist"), ("empty", "There is nothing to draw")):
        result = run("plot", tmp_path / name, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert words in result.output
    assert not (tmp_path / "out").exists()


def test_help_of_the_command_line_stays_light():
    code = "import sys, recipes.cli; print([m for m in ('pandas', 'numpy', 'orjson', 'pyarrow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
