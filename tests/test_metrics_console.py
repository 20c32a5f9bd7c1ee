"""Console logs: each trap of the formats seen in public logs of verl 0.1 to 0.9, slime and MindSpeed-RL."""

import gzip
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import metrics
from recipes.metrics import ConsoleLog, Restart, read_console


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


def test_slimes_and_mindspeeds_names_become_verls_where_they_mean_the_same(tmp_path):
    log = (
        "perf 0: {'rollout/response_len/mean': 50.0, 'rollout/truncated_ratio': 0.5, 'perf/rollout_time': 9.0}\n"
        "step 0: {'train/train_rollout_logprob_abs_diff': 0.01, 'train/lr-pg_0': 1e-06}\n"
        "eval 0: {'eval/aime': 0.25, 'eval/aime-truncated_ratio': 0.5, 'eval/aime/response_len/max': 9}\n"
    )
    _, rows = table(tmp_path, log)
    assert rows[0] == {
        "response_length/mean": 50.0,
        "response_length/clip_ratio": 0.5,
        "timing_s/gen": 9.0,
        "train/train_rollout_logprob_abs_diff": 0.01,  # of logarithms: not verl's difference of probabilities
        "actor/lr": 1e-06,
        "val-core/aime": 0.25,
        "eval/aime-truncated_ratio": 0.5,
        "eval/aime/response_len/max": 9.0,
    }
    _, rows = table(
        tmp_path, "iteration: 1 / 9 | timing/all : 9.5 | timing/adv : 0.5 | grpo/score/max : 1.0 | e2e_tps : 7 \n"
    )
    assert rows[1] == {"timing_s/step": 9.5, "timing_s/adv": 0.5, "critic/score/max": 1.0, "e2e_tps": 7.0}
    # The same keys in a log of verl are somebody's own.
    _, rows = table(tmp_path, "step:1 - train/grad_norm:0.5\n")
    assert rows[1] == {"train/grad_norm": 0.5}


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


GROWING = (
    f"{RAY}step:1 - critic/rewards/mean:0.5 - actor/bad:1.2.3 - a/none:None - actor/kl:0.000\n"
    f"{RAY}step:2 - critic/rewards/mean:0.25 - actor/grad_n(WorkerDict pid=9) INFO - foo\norm:1.25 - actor/kl:0.3\n"
    f"(TaskRunner pid=123) step:3 - critic/rewards/mean:0.5 - actor/gra\n(TaskRunner pid=123) d_norm:1.5 - a:1\n"
    f"{RAY}step:4 - critic/rewards/mean:0.5 - actor/grad_norm:12\n345.5\n"
    f"{RAY}step:2 - critic/rewards/mean:inf - a:1 (TaskRunner pid=123) WARNING - foo\r\n"
    "rollout 3: {'rollout/raw_reward': 0.5, 'b': 1}\nstep 9: {'train/ppo_kl': 0.25}\nrollout 2: {'b': 2}\n"
    "iteration: 4 / 9 | grpo/score/mean : 0.5 | x : y | z : 3 \nstep:5 - a:1 - b - c:2"
).encode()


def test_what_is_broken_rounded_or_goes_back_is_the_same_at_every_cut_of_a_growing_log(tmp_path):
    path = tmp_path / "train.log"
    path.touch()
    reader = ConsoleLog(path)
    told = ("broken", "restarts", "rounded", "unfinished", "state", "nonfinite", "infinite", "folded", "trainer")
    for cut in range(len(GROWING) + 1):
        path.write_bytes(GROWING[:cut])
        live, whole = reader.read(), read_console(path)
        assert live.table.equals(whole.table), cut
        assert [getattr(live, name) for name in told] == [getattr(whole, name) for name in told], cut
    assert [b.line for b in live.broken] == [1, 1, 6, 12, 13]
    assert [str(restart) for restart in live.restarts] == [
        "line 8: the step went back from 4 to 2",
        "line 11: the step went back from 3 to 2",
    ]
    assert live.trainer == "verl and slime and MindSpeed-RL"
    assert live.unfinished


def test_a_broken_field_of_the_last_record_is_reported_whether_or_not_its_line_is_closed(tmp_path):
    first = "(TaskRunner pid=1) step:1 - critic/rewards/mean:0.5 - critic/bad:1.2.3 - a/none:None - a/w:3"
    for end, kept in (("\n", {"a/w": 3.0}), ("", {}), ("\nSaving", {"a/w": 3.0}), ("\nstep:", {"a/w": 3.0})):
        found, rows = table(tmp_path, first + end)
        assert rows == {1: {"critic/rewards/mean": 0.5} | kept}
        assert [str(b) for b in found.broken] == [
            "line 1: no number under a key at step 1: critic/bad:1.2.3",
            "line 1: no number under a key at step 1: a/none:None",
        ]
        assert found.unfinished == (not end)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("actor/grad_n(WorkerDict pid=9) INFO foo", "orm:1.25 - actor/entropy:0.5"),
        ("actor/grad_norm:1.2(WorkerDict pid=9) INFO 5 foo", "5 - actor/entropy:0.5"),
        ("actor/grad_norm:1.25(WorkerDict pid=9) foo", " - actor/entropy:0.5"),
        ("actor/grad_norm:1.25 - (WorkerDict pid=9) foo", "actor/entropy:0.5 - b:1"),
        ("actor/gra", "(TaskRunner pid=1) d_norm:1.25 - actor/entropy:0.5"),
        ("actor/grad_norm:1.2", "(TaskRunner pid=1) 5 - actor/entropy:0.5(WorkerDict pid=9) x - y:1"),
    ],
)
def test_a_step_that_another_process_cut_in_two_goes_on_where_whole_fields_follow(tmp_path, first, second):
    log = f"(TaskRunner pid=1) step:1 - critic/rewards/mean:0.5 - {first}\n{second}\n(TaskRunner pid=1) step:2 - a:1\n"
    found, rows = table(tmp_path, log)
    whole = {"critic/rewards/mean": 0.5, "actor/grad_norm": 1.25, "actor/entropy": 0.5}
    assert rows == {1: whole | ({"b": 1.0} if "b:1" in second else {}), 2: {"a": 1.0}}
    assert not found.broken


@pytest.mark.parametrize(
    ("first", "second", "broken", "more"),
    [
        # The words of others never become part of a key, and what is lost with them is told.
        ("actor/grad_nINFO foo", "orm:1.25 - actor/entropy:0.5", [1, 2], {}),
        ("actor/grad_n(WorkerDict pid=9) foo", "Loading model:1 - shards:2", [1], {}),
        ("actor/grad_n(WorkerDict pid=9) foo", "orm:1.25", [1], {}),
        ("actor/gra", "(WorkerDict pid=9) d_norm:1.25 - actor/entropy:0.5", [1], {}),
        ("actor/gra", "(TaskRunner pid=1) done", [1], {}),
        # A number alone in the next line may be the rest, or somebody else's.
        ("actor/grad_norm:12", "345.5", [1], {}),
        ("actor/grad_norm:12", "42", [1], {}),
        ("actor/grad_norm:1.2(WorkerDict pid=9) INFO", "5", [1], {}),
        ("actor/grad_norm:12", "(TaskRunner pid=1) 345", [1], {}),
        ("actor/grad_norm:1.5", "3.2", [], {"actor/grad_norm": 1.5}),
        ("actor/grad_norm:12", "7 warnings", [], {"actor/grad_norm": 12.0}),
        ("actor/grad_norm:12", "(WorkerDict pid=9) 345", [], {"actor/grad_norm": 12.0}),
        ("actor/grad_norm:np.float64(12)", "345", [], {"actor/grad_norm": 12.0}),
        # Two lines of Ray in one: what stands before the second prefix is whole.
        ("actor/grad_norm:12 (TaskRunner pid=1) WARNING hello - there", "x", [], {"actor/grad_norm": 12.0}),
        ("actor/grad_norm:12(WorkerDict pid=9) foo", "x", [], {"actor/grad_norm": 12.0}),
    ],
)
def test_a_half_is_reported_and_not_mended_where_nothing_tells_its_rest(tmp_path, first, second, broken, more):
    log = f"(TaskRunner pid=1) step:1 - critic/rewards/mean:0.5 - {first}\n{second}\n(TaskRunner pid=1) step:2 - a:1\n"
    found, rows = table(tmp_path, log)
    assert rows == {1: {"critic/rewards/mean": 0.5} | more, 2: {"a": 1.0}}
    assert [b.line for b in found.broken] == broken


@pytest.mark.parametrize(
    ("last", "kept", "unfinished"),
    [
        ("eval 3: {'a': 0.25, 'b': 0.5}", 0.5, False),
        ("eval 3: {'a': 0.25, 'b': 0.5", None, True),
        ("iteration: 3 / 9 | a : 0.25 | b : 0.5 |", 0.5, True),
        ("iteration: 3 / 9 | a : 0.25 | b : 0.5 ", 0.5, True),
        ("iteration: 3 / 9 | a : 0.25 | b : 0.5", None, True),
        ("step:3 - a:0.25 - b:0.5 - ", 0.5, True),
        ("step:3 - a:0.25 - b:0.5 -", 0.5, True),
        ("step:3 - a:0.25 - b:0.5\r", 0.5, True),
        ("step:3 - a:0.25 - b:0.5 (Worker pid=3) x", 0.5, True),
        ("step:3 - a:0.25 - b:0.5(Worker pid=3) x", None, True),
    ],
)
def test_a_last_field_that_is_closed_counts_without_the_end_of_its_line(tmp_path, last, kept, unfinished):
    found, rows = table(tmp_path, last)
    assert rows == {3: {"a": 0.25} | ({} if kept is None else {"b": kept})}
    assert not found.broken
    assert found.unfinished is unfinished


def test_a_second_training_in_a_log_is_told_by_the_step_that_went_back(tmp_path):
    training = "".join(f"{RAY}step:{step} - a:{step}\n" for step in (1, 2, 3))
    found, rows = table(tmp_path, training + "noise\n" + f"{RAY}step:1 - a:7\n{RAY}step:2 - a:8\n")
    assert rows == {1: {"a": 7.0}, 2: {"a": 8.0}, 3: {"a": 3.0}}
    assert found.restarts == (Restart(5, 3, 1),)
    assert "; line 5: the step went back from 3 to 1." in str(found)
    # Validation before training at the same step, and counters of slime that run side by side, do not go back.
    slime = "rollout 0: {'a': 1}\nstep 0: {'b': 1}\nstep 1: {'b': 1}\nrollout 1: {'a': 1}\neval 1: {'eval/x': 1}\n"
    for log in ("step:0 - val-core/x:1\n" + training + "step:3 - val-core/x:1\n", slime):
        assert table(tmp_path, log)[0].restarts == ()


@pytest.mark.parametrize("twice", [False, True])  # the second line of the same keys takes the fast path
def test_a_number_printed_as_0_000_stays_zero_and_its_key_is_marked(tmp_path, twice):
    first = "step:1 - actor/lr:1.000 - a:1 - entropy:0.5 - timing/x:2\n" if twice else ""
    found, rows = table(tmp_path, f"{first}step:2 - actor/lr:0.000 - a:0.0 - entropy:0 - timing/x:-0.0000\n")
    assert rows[2] == {"actor/lr": 0.0, "a": 0.0, "entropy": 0.0, "timing_s/x": 0.0}
    assert found.rounded == {"actor/lr", "timing_s/x"}
    assert table(tmp_path, "iteration: 1 / 9 | a : 0.0000 | b : 0.1000 ")[0].rounded == {"a"}


def test_a_log_in_utf_16_is_read_as_any_other(tmp_path):
    text = "".join(f"(TaskRunner pid=1) step:{step} - a:{step / 8} - b:é\r\n" for step in range(1, 4))
    for encoding in ("utf-16-le", "utf-16-be"):
        mark = "\ufeff".encode(encoding)
        found, rows = table(tmp_path, mark + text.encode(encoding))
        assert rows == {1: {"a": 0.125}, 2: {"a": 0.25}, 3: {"a": 0.375}}
        assert [b.line for b in found.broken] == [1, 2, 3]
        path = tmp_path / "train.log"
        reader = ConsoleLog(path)
        for cut in (0, 1, 2, 3, 101, 150, 200, 1000):
            path.write_bytes((mark + text.encode(encoding))[:cut])
            live = reader.read()
        assert live.table.equals(found.table)
        assert metrics.read(path).table.equals(found.table)


def test_gzip_of_a_log_whole_and_still_being_written(tmp_path):
    content = "".join(f"step:{step} - a:{step / 7!r} - b:{step % 13 / 3!r}\n" for step in range(2000)).encode()
    _, rows = table(tmp_path, content)
    packed = gzip.compress(content)
    found, same = table(tmp_path, packed, "train.log.gz")
    assert same == rows
    assert not found.unfinished
    found, part = table(tmp_path, packed[: len(packed) // 2], "cut")
    assert found.unfinished
    assert "the gzip file has no end" in found.broken[-1].reason
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
