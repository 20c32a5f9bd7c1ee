"""Console logs: each trap of the formats seen in public logs of verl 0.1 to 0.9, slime and MindSpeed-RL."""

import gzip
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import metrics
from recipes.metrics import ConsoleLog, read_console


def table(tmp_path, content, name="train.log"):
    """A log → its metrics, and its rows as plain dicts without what is absent."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_console(path)
    return found, {step: row.dropna().to_dict() for step, row in found.table.iterrows()}


RAY = "\x1b[36m(TaskRunner pid=123)\x1b[0m "


@pytest.mark.parametrize(
    "before",
    [
        "",
        "(TaskRunner pid=123) ",
        RAY,
        RAY + RAY,
        "[36m(TaskRunner pid=123)[0m ",
        "(main_task pid=77, ip=10.0.0.1) ",
        "(TaskRunner pid=123) [repeated 3x across cluster] ",
        "Training Progress:   3%|▎         | 1/30 [00:07<03:24,  7.06s/it]",
        "(TaskRunner pid=123) Training Progress:  3%|▎  | 1/30 [00:07<03:24,  7.06s/it]\r",
        "INFO:2025-08-01 12:00:00,000:",
        "\0\0\0",
    ],
)
def test_a_step_is_found_behind_whatever_stands_before_it(tmp_path, before):
    found, rows = table(tmp_path, f"{before}step:2 - actor/lr:1e-06 - actor/ppo_kl:-2.5e-05\nother\n")
    assert rows == {2: {"actor/lr": 1e-06, "actor/ppo_kl": -2.5e-05}}
    assert not found.broken
    assert not found.unfinished


@pytest.mark.parametrize(
    "after", ["\x1b[32m [repeated 2x across cluster]\x1b[0m", "(WorkerDict pid=9) ", "\r", " ", "\r(Worker pid=2) busy"]
)
def test_what_follows_the_last_field_is_not_part_of_it(tmp_path, after):
    found, rows = table(tmp_path, f"{RAY}step:2 - a:1.5 - b:2{after}\n")
    assert rows == {2: {"a": 1.5, "b": 2.0}}
    assert not found.broken


@pytest.mark.parametrize("text", ["global_step:3 - a:1\n", "x/step:3 - a:1\n", "my-step:3 - a:1\n", "step:x - a:1\n"])
def test_other_words_that_end_in_step_begin_no_step(tmp_path, text):
    _, rows = table(tmp_path, "step:1 - training/global_step:7 - a:0.5\n" + text)
    assert rows == {1: {"training/global_step": 7.0, "a": 0.5}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0),
        ("-0.5", -0.5),
        ("-.02", -0.02),
        ("-1.5e-08", -1.5e-08),
        ("2E+03", 2000.0),
        ("5.", 5.0),
        ("np.float64(0.25)", 0.25),
        ("np.int64(-3)", -3.0),
        ("np.float64(1e-05)glued", 1e-05),
        ("tensor(0.5, device='npu')", 0.5),
        ("True", 1.0),
        ("12345678901234567890", 12345678901234567890.0),
    ],
)
@pytest.mark.parametrize("twice", [False, True])  # the second line of the same keys takes the fast path
def test_every_spelling_of_a_number(tmp_path, text, value, twice):
    first = "step:1 - a/b@1:1.0 - c:2.0\n" if twice else ""
    found, rows = table(tmp_path, f"{first}step:2 - a/b@1:{text} - c:1\n")
    assert rows[2] == {"a/b@1": value, "c": 1.0}
    assert not found.broken


@pytest.mark.parametrize("text", ["nan", "-inf", "inf", "np.float64(nan)", "NaN"])
@pytest.mark.parametrize("twice", [False, True])
def test_non_finite_is_on_record_and_is_not_absent(tmp_path, text, twice):
    first = "step:1 - a:1.0 - c:2.0\n" if twice else ""
    found, _ = table(tmp_path, f"{first}step:2 - a:{text} - c:1\nstep:3 - c:4\n")
    assert found.nonfinite == {"a": (2,)}
    assert math.isnan(found.table.at[2, "a"])
    assert math.isnan(found.table.at[3, "a"])
    assert not found.broken


@pytest.mark.parametrize(
    "text", ["1.2.3", "0x10", "1_000", "", "None", "0.5s", "1:2", "[1, 2]", "np.float64(x)", '"1"']
)
@pytest.mark.parametrize("twice", [False, True])
def test_a_field_that_is_no_number_is_broken_and_costs_only_itself(tmp_path, text, twice):
    first = "step:1 - a:1.0 - c:2.0\n" if twice else "noise\n"
    found, rows = table(tmp_path, f"{first}step:2 - a:{text} - c:1\n(Worker pid=1) noise\n")
    assert rows[2] == {"c": 1.0}
    (broken,) = found.broken
    assert broken.line == 2
    assert "at step 2" in broken.reason


def test_keys_hold_slashes_dashes_at_signs_brackets_dots_and_digits(tmp_path):
    key = "val-core/openai-gsm8k/acc/best@4(v1.5)/mean"
    _, rows = table(tmp_path, f"step:10 - {key}:0.5 - critic/rewards/mean:0.25\n" * 2)
    assert rows == {10: {key: 0.5, "critic/rewards/mean": 0.25}}


def test_bytes_that_are_no_text(tmp_path):
    noise = b"\xff\xfe\0\x80 \xc3(\n"
    found, rows = table(tmp_path, noise + b"step:1 - a:1\0.5 - k\xff:2 - c:3\n" + noise)
    assert rows == {1: {"a": 1.5, "c": 3.0}}
    assert [broken.line for broken in found.broken] == [2]
    assert str(found.broken[0]).isprintable()


WHOLE = (
    "step:12 - actor/entropy:0.4123 - actor/grad_norm:1.25e-05 - timing_s/gen:np.float64(20.5) - perf/throughput:812.75"
)


@pytest.mark.parametrize("width", [*range(20, 45), *range(45, len(WHOLE), 3), len(WHOLE) - 3])
@pytest.mark.parametrize("stripped", [False, True])
def test_a_paste_that_a_terminal_broke_is_joined_wherever_it_was_broken(tmp_path, width, stripped):
    pieces = [WHOLE[at : at + width] for at in range(0, len(WHOLE), width)]
    pieces = [piece.rstrip() for piece in pieces] if stripped else pieces
    found, rows = table(tmp_path, "\n".join(pieces) + "\n(TaskRunner pid=1) noise\n")
    whole = {"actor/entropy": 0.4123, "actor/grad_norm": 1.25e-05, "timing_s/gen": 20.5, "perf/throughput": 812.75}
    broken = []
    if len(pieces) == 2 and pieces[0][-1].isdecimal() and pieces[1].replace(".", "").isdecimal():
        # Only the last number is broken, once: nothing tells its rest from a number printed by somebody else.
        del whole["perf/throughput"]
        broken = [1]
    assert rows == {12: whole}
    assert [b.line for b in found.broken] == broken


def test_a_broken_field_is_not_mended_with_the_words_of_another_process(tmp_path):
    log = "step:1 - a:1 - actor/kl_lo\n(Worker pid=2) ss:0.5 - b:1\nstep:2 - a:2 - b\nLoading model - shard:1 of 2\n"
    found, rows = table(tmp_path, log)
    assert rows == {1: {"a": 1.0}, 2: {"a": 2.0}}
    assert [broken.line for broken in found.broken] == [1, 3]


@pytest.mark.parametrize(
    "after", ["noise", "7 warnings", "- item", "{'a': 1}", "INFO - lr:1", "2025-01-01 12:00:00 - a:1"]
)
def test_a_whole_step_does_not_take_the_next_line_for_its_own(tmp_path, after):
    found, rows = table(tmp_path, f"step:1 - actor/loss:0.25 - actor/kl:0.125\n{after}\nstep:2 - actor/loss:1\n")
    assert rows == {1: {"actor/loss": 0.25, "actor/kl": 0.125}, 2: {"actor/loss": 1.0}}
    assert not found.broken


def test_validation_and_training_of_a_step_merge_and_after_a_resume_the_later_wins(tmp_path):
    log = (
        "step:1 - loss:0.1\nstep:2 - val-core/x:0.5\nstep:2 - loss:0.2 - kl:1\nstep:3 - loss:0.3\n"
        "step:2 - val-core/x:0.6\nstep:2 - loss:0.25\n"
    )
    _, rows = table(tmp_path, log)
    assert rows == {1: {"loss": 0.1}, 2: {"val-core/x": 0.6, "loss": 0.25, "kl": 1.0}, 3: {"loss": 0.3}}


@pytest.mark.parametrize("between", ["(TaskRunner pid=1) ", "", "\x1b[36m(TaskRunner pid=1)\x1b[0m ", "\x1b[0m"])
def test_two_lines_glued_into_one_are_two_steps(tmp_path, between):
    found, rows = table(tmp_path, f"step:1 - a:1 - global_step:1.5{between}step:2 - a:2 - global_step:2\n")
    assert rows == {1: {"a": 1.0, "global_step": 1.5}, 2: {"a": 2.0, "global_step": 2.0}}
    assert not found.broken


def test_the_last_number_of_a_last_line_without_its_end_may_be_cut(tmp_path):
    found, rows = table(tmp_path, "step:1 - a:1 - b:2\nstep:2 - a:0.25 - b:0.1")
    assert rows == {1: {"a": 1.0, "b": 2.0}, 2: {"a": 0.25}}
    assert found.unfinished
    assert not found.broken
    found, rows = table(tmp_path, "step:1 - a:1 - b:2\nstep:2 - a:0.25 - b:np.float64(0.1)")
    assert rows[2] == {"a": 0.25, "b": 0.1}  # the bracket says that nothing is missing
    found, _ = table(tmp_path, "step:1 - a:1 - b:2\nSaving checkpoi")
    assert not found.unfinished


def test_zero_with_three_decimals_is_a_number_and_what_was_not_printed_is_none(tmp_path):
    found, _ = table(tmp_path, "step:1 - actor/lr:0.000 - b:1.000\nstep:2 - b:0.500\n")
    assert found.table.at[1, "actor/lr"] == 0.0
    assert math.isnan(found.table.at[2, "actor/lr"])
    assert not found.nonfinite


def test_names_of_older_versions_become_todays_where_these_are_absent(tmp_path):
    log = (
        "step:1 - mfu/actor:0.3 - perf/max_memory_allocated_gb:20 - timing/gen:5 - actor/entropy_loss:0.7"
        " - val/test_score/openai/gsm8k:0.4 - num_turns/mean:2\n"
        "step:2 - test_score/openai/gsm8k:0.5 - actor/entropy_loss:0.6 - actor/entropy:0.65 - timing_s/gen:6\n"
        "step:3 - mfu/actor_infer:0.1 - timings:1\n"
    )
    found, rows = table(tmp_path, log)
    assert rows[1] == {
        "perf/mfu/actor": 0.3,
        "actor/perf/max_memory_allocated_gb": 20.0,
        "timing_s/gen": 5.0,
        "actor/entropy": 0.7,
        "val-core/openai/gsm8k": 0.4,
        "training/num_turns/mean": 2.0,
    }
    assert rows[2] == {
        "val-core/openai/gsm8k": 0.5,
        "actor/entropy_loss": 0.6,  # today's key was there as well: both stay
        "actor/entropy": 0.65,
        "timing_s/gen": 6.0,
    }
    assert found.folded["actor/entropy_loss"] == "actor/entropy"
    assert found.folded["timing/gen"] == "timing_s/gen"
    assert "timings" in found.table


def test_folding_keeps_what_is_not_finite(tmp_path):
    found, _ = table(tmp_path, "step:1 - timing/gen:nan\nstep:2 - timing_s/gen:2.0\n")
    assert found.nonfinite == {"timing_s/gen": (1,)}
    assert list(found.table.columns) == ["timing_s/gen"]


def test_slime(tmp_path):
    log = (
        "[2025-08-01 12:00:00] data.py:200 - rollout 0: {'rollout/raw_reward': 0.5, 'rollout/lens': np.float64(12.5)}\n"
        "(MegatronTrainRayActor pid=5) step 0: {'train/loss': -1e-05, 'train/grad_norm': nan, 'train/name': 'x, y'}\n"
        "prompt: {'a': 1}\n"
        "rollout 1: {'rollout/raw_reward': 0.75, 'rollout/le\n"
        "step 1: {}\n"
    )
    found, rows = table(tmp_path, log)
    assert rows == {
        0: {"critic/rewards/mean": 0.5, "rollout/lens": 12.5, "train/loss": -1e-05},
        1: {"critic/rewards/mean": 0.75},
    }
    assert found.nonfinite == {"actor/grad_norm": (0,)}
    assert (found.format, found.trainer) == ("console log", "slime")
    assert [broken.line for broken in found.broken] == [2, 4]


def test_mindspeed_rl(tmp_path):
    log = (
        "(IntegratedWorker pid=1) iteration: 1 / 100 | actor/pg_loss : -0.01 | grpo/rewards/mean : 2.5E-01 | lr:1e-6\n"
        "(IntegratedWorker pid=1) iteration: 2 / 100 | actor/pg_loss : 0.02 | grpo/rewards/mean : nan | odd : x |\n"
        "iterations: 3 / 100 | a : 1\n"
    )
    found, rows = table(tmp_path, log)
    assert rows[1] == {"actor/pg_loss": -0.01, "critic/rewards/mean": 0.25, "lr": 1e-06}
    assert rows[2] == {"actor/pg_loss": 0.02}
    assert found.nonfinite == {"critic/rewards/mean": (2,)}
    assert found.folded == {"grpo/rewards/mean": "critic/rewards/mean"}
    assert (found.format, found.trainer) == ("console log", "MindSpeed-RL")
    assert [broken.line for broken in found.broken] == [2]


def test_a_growing_log_shows_at_every_cut_what_a_reader_of_that_much_sees(tmp_path):
    content = (
        f"noise\n{RAY}step:1 - a:1.25 - b:np.float64(2.5)\n"
        f"{RAY}step:2 - a:-1e-05 - actor/entr\nopy:0.12\n34 - c:1.5\nnoise\nstep:2 - d:x\n"
        "step:3 - a:1 - b:2(Worker pid=3)\n"
    ).encode()
    path = tmp_path / "train.log"
    path.touch()
    reader = ConsoleLog(path)
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        live, whole = reader.read(), read_console(path)
        assert live.table.equals(whole.table), cut
        assert (live.broken, live.unfinished, live.state) == (whole.broken, whole.unfinished, whole.state), cut
    assert reader.read().table.to_dict("index")[2]["actor/entropy"] == 0.1234
    assert reader.read() is reader.read()
    path.write_bytes(b"step:1 - a:7\n")  # another training
    assert reader.read().table.to_dict("index") == {1: {"a": 7.0}}


def test_gzip_of_a_log_whole_and_still_being_written(tmp_path):
    content = "".join(f"step:{step} - a:{step / 7!r} - b:{step % 13 / 3!r}\n" for step in range(2000)).encode()
    _, rows = table(tmp_path, content)
    packed = gzip.compress(content)
    found, same = table(tmp_path, packed, "train.log.gz")
    assert same == rows
    assert not found.unfinished
    found, part = table(tmp_path, packed[: len(packed) // 2], "cut")
    assert found.unfinished
    assert 0 < len(part) < 2000
    assert all(rows[step] == row for step, row in list(part.items())[:-1])
    damaged = bytearray(packed)
    damaged[len(damaged) // 2] ^= 0xFF
    found, _ = table(tmp_path, bytes(damaged), "damaged")
    assert "damaged" in found.broken[-1].reason


@pytest.mark.parametrize(
    "hostile",
    [
        b"step:1 - " + b"1" * 2_000_000 + b"x",
        b"step:1 - a:" + b"9" * 2_000_000 + b"x",
        b"1step:1 - " * 100_000,
        b"step:1" + b" " * 2_000_000 + b")",
        b"step:1 - a:" + b"(" * 1_000_000 + b")",
        b": {" * 500_000,
        b"iteration: 1 / 2 |" + b" " * 1_000_000 + b":" + b" " * 1_000_000,
        b"rollout 1: {" + b", " * 500_000,
        b"rollout 1: {'a': " + b"[" * 500_000,
        b"step:1 - a:1 - b\n" + b"-\n" * 200_000,
        b"step:1 - a:1 - b\n" + b"-" * 2_000_000,
        b"\x1b[" * 500_000 + b"step:1 - a:1",
        b"\r" * 500_000 + b"step:1 - a:1",
        b"step:" * 500_000,
    ],
    ids=range(14),
)
def test_a_hostile_line_takes_no_more_than_seconds_and_the_next_step_is_read(tmp_path, hostile):
    began = time.process_time()
    _, rows = table(tmp_path, hostile + b"\n(Worker pid=1) x\nstep:7 - a:0.5 - b:1\n")
    assert rows[7] == {"a": 0.5, "b": 1.0}
    assert time.process_time() - began < 5.0


def test_a_line_longer_than_any_metrics_is_left_out_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.metrics.growing.MAX_LINE", 2**20)
    found, rows = table(tmp_path, b"step:1 - a:1\nstep:2 - " + b"x" * 3_000_000 + b"\nstep:3 - a:3\n")
    assert rows == {1: {"a": 1.0}, 3: {"a": 3.0}}
    assert [broken.line for broken in found.broken] == [2]


KEYS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_/@().-", min_size=1, max_size=30)
VALUES = st.one_of(st.floats(), st.integers(-(2**70), 2**70))


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 10_000), st.dictionaries(KEYS, VALUES, min_size=1, max_size=12), min_size=1, max_size=12
    ),
    st.sampled_from(["", RAY, "(main_task pid=1, ip=1.2.3.4) ", "1/3 [00:01<00:02, 7.06s/it]"]),
    st.booleans(),
)
def test_any_metrics_in_verls_format_read_back_equal(tmp_path_factory, steps, prefix, numpy):
    def spell(value):
        return f"np.float64({value!r})" if numpy and isinstance(value, float) else repr(value)

    log = "".join(
        prefix + " - ".join([f"step:{step}", *(f"{key}:{spell(value)}" for key, value in data.items())]) + "\nnoise\n"
        for step, data in steps.items()
    )
    found, rows = table(tmp_path_factory.mktemp("log"), log)
    assert not found.broken
    undone = {new: old for old, new in found.folded.items()}
    expected = {
        step: {key: float(value) for key, value in data.items() if math.isfinite(value)} for step, data in steps.items()
    }
    assert {step: {undone.get(key, key): v for key, v in row.items()} for step, row in rows.items()} == expected
    lost = {(undone.get(key, key), step) for key, at in found.nonfinite.items() for step in at}
    assert lost == {(k, s) for s, data in steps.items() for k, v in data.items() if not math.isfinite(v)}


def test_read_takes_a_log_for_what_it_is_and_says_when_a_file_is_none(tmp_path):
    (tmp_path / "anything.txt").write_text("noise\n" * 50_000 + "step:1 - a:1\n")
    assert metrics.read(tmp_path / "anything.txt").table.at[1, "a"] == 1.0
