"""Diagnosis: what ended a log, told from what it survived, from what a model said, and from what only follows."""

from __future__ import annotations

import gzip
import random

import pytest
from known_lines import KNOWN_LINES

from recipes import diagnosis
from recipes.diagnosis import reader

STEP = "(TaskRunner pid=1) step:{} - actor/grad_norm:0.5 - critic/rewards/mean:0.5\n"
END = "(TaskRunner pid=1) Total training steps: 2\n" + STEP.format(1) + STEP.format(2)
RAISED = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/verl/trainer/main_ppo.py", line 31, in main\n'
    "    run_ppo(config)\n"
    '  File "/home/me/reward.py", line 3, in compute_score\n'
    "    return float(x)\n"
    "ValueError: could not convert string to float: 'abc'\n"
)
SAID = "ValueError: could not convert string to float: 'abc'"
OUT_OF_MEMORY = "(WorkerDict pid=8) RuntimeError: NPU out of memory. Tried to allocate 2 GiB\n"
DIED = KNOWN_LINES["worker-died"][1] + "\n"


@pytest.fixture
def diagnose(tmp_path):
    def one(text):
        path = tmp_path / "train.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return diagnosis.diagnose(path)

    return one


def said_by(writer, text=RAISED):
    return "".join(f"{writer}{line}\n" for line in text.splitlines())


# ---------------------------------------------------------------------------------------- lines of failing character


@pytest.mark.parametrize(
    "line",
    [
        "(Actor pid=3) [torch_memory_saver.cpp] cudaError error: 1 (invalid argument) file=csrc/core.cpp func=pause",
        "[ERROR] 2025-06-09-06:57:54 (PID:92380, Device:0, RankID:-1) ERR99999 UNKNOWN applicaiton exception",
        "FATAL: the launcher gave up",
        "Status message: Job entrypoint command failed with exit code 1",
        "2026-01-01 00:00:00,000 ERR cli.py:63 -- Job 'raysubmit_x' failed",
        "main_ppo.py: error: unrecognized arguments: --x",
        "the rank exited with code -9",
        "AclrtMalloc failed, error code is 207001",
        "EX0042: [PID: 7] of a kind nobody listed",
    ],
)
def test_a_line_of_failing_character_is_an_unknown_failure_and_is_quoted(line, diagnose):
    found = diagnose(f"loading\n{line}\n")
    assert (found.outcome, found.found) == ("unknown", True)
    assert found.ranked[0].line == 2
    assert found.ranked[0].text in line
    assert "says" in dict(found.rows())


@pytest.mark.parametrize(
    "line",
    [
        "INFO exit code 0",
        "it failed to find an optional file",
        "UserWarning: Error handling is experimental",
        "INFO loaded ErrorHandler",
        "export HCCL_EXEC_TIMEOUT=7200",
    ],
)
def test_a_line_that_only_complains_is_no_failure(line, diagnose):
    assert diagnose(f"{line}\n").outcome == "clean"


def test_what_failed_before_a_step_was_survived_and_what_failed_after_it_was_not(diagnose):
    error = "ERROR the store does not answer\n"
    assert diagnose(error + STEP.format(1)).outcome == "clean"
    found = diagnose(STEP.format(1) + error)
    assert (found.outcome, found.ranked[0].text) == ("unknown", error.strip())


def test_the_exceptions_of_a_group_are_told_and_not_the_group(diagnose):
    found = diagnose(
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/x/a.py", line 1, in f\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/x/b.py", line 2, in g\n'
        "    | ValueError: bad thing\n"
        "    +------------------------------------\n"
    )
    assert (found.outcome, found.raised.said, found.raised.frame) == (
        "unknown",
        "ValueError: bad thing",
        "/x/b.py, line 2, in g",
    )


def test_a_traceback_that_the_end_of_the_log_cuts_off_is_a_failure(diagnose):
    found = diagnose("".join(RAISED.splitlines(keepends=True)[:-1]))
    assert (found.outcome, found.raised.message) == ("unknown", "cut off before its exception")
    assert found.raised.frame == "/home/me/reward.py, line 3, in compute_score"


# ------------------------------------------------------------------------------------------------------------ prefixes

PREFIXES = {
    "[2026-03-11 17:47:54] ": "",
    "[2026-03-11 17:47:54,123] ": "",
    "2026-03-11T17:47:54.123456789Z ": "",
    "2026-03-11T17:47:54.123456789Z stderr F ": "",
    "2026-03-11 17:47:54,123 - ": "",
    "2026-03-11 17:47:54+08:00 | ": "",
    "[17:47:54] ": "",
    "17:47:54 ": "",
    "Mar 11 17:47:54 node-1 python3[77]: ": "",
    "[Wed Mar 11 17:47:54 2026] ": "",
    "[default0]:": "default0",
    "[rank12]: ": "rank12",
    "[1,3]<stderr>:": "3",
    "0: ": "0",
    "worker-2: ": "worker-2",
    "(TaskRunner pid=12) ": "TaskRunner pid=12",
    "[2026-03-11 17:47:54] (TaskRunner pid=12, ip=10.0.0.1) ": "TaskRunner pid=12, ip=10.0.0.1",
    "3: 2026-03-11 17:47:54 (Worker pid=12) [rank1]: ": "3 Worker pid=12 rank1",
    "(Worker pid=12) [2026-03-11 17:47:54] [rank1]: ": "Worker pid=12 rank1",
    "\x1b[36m(Worker pid=12)\x1b[0m ": "Worker pid=12",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_traceback_is_read_behind_what_others_put_before_its_lines(prefix, diagnose):
    found = diagnose(said_by(prefix))
    assert (found.outcome, found.raised.said) == ("unknown", SAID)
    assert found.raised.frame == "/home/me/reward.py, line 3, in compute_score"
    assert (found.raised.line, found.raised.end, found.raised.writer) == (1, 6, PREFIXES[prefix])
    step = diagnose(said_by(prefix, RAISED) + prefix + "step:1 - a:1\n")
    assert step.outcome == "clean"


@pytest.mark.parametrize(
    "text",
    [
        "3: the number of the answer",
        "404: Not Found",
        "(see below) it failed",
        "[rank] 3",
        "[1, 2] are the ranks",
        "2026 was a year",
        "12:30 is the time",
        "May 3 be the answer",
        "[0.5] is the score",
        "2026-03-11 is the day",
        "3: [a, b] are the keys",
    ],
)
def test_ordinary_text_loses_nothing_before_it(text):
    assert reader.writer_of(text, set()) == ("", text)


def test_a_number_is_a_label_of_srun_once_it_has_stood_before_a_traceback():
    labels = set()
    assert reader.writer_of("7: 12 of 30 done", labels) == ("", "7: 12 of 30 done")
    assert reader.writer_of("7: Traceback (most recent call last):", labels)[0] == "7"
    assert reader.writer_of("7: 12 of 30 done", labels) == ("7", "12 of 30 done")


# ------------------------------------------------------------------------------------- which of several is the cause


def test_a_cause_that_steps_were_made_after_is_a_remark(diagnose):
    early = KNOWN_LINES["hccl-port"][4] + ", retrying\n"
    found = diagnose(early + STEP.format(1) + STEP.format(2) + OUT_OF_MEMORY)
    assert (found.first.cause.id, found.first.line, found.followed) == ("npu-memory", 4, ())
    assert [(hit.cause.id, hit.line) for hit in found.survived] == [("hccl-port", 1)]
    assert "steps were made after it" in found.text()
    alone = diagnose(early + STEP.format(1) + STEP.format(2))
    assert (alone.outcome, alone.first) == ("clean", None)
    assert [hit.cause.id for hit in alone.survived] == ["hccl-port"]


def test_the_exception_that_ended_the_log_beats_a_cause_it_got_over(diagnose):
    handled = said_by(
        "(WorkerDict pid=3) ",
        'Traceback (most recent call last):\n  File "/x/opt.py", line 3, in try_import\n'
        "ModuleNotFoundError: No module named 'vllm_ascend.optional'\n",
    )
    end = "Error executing job with overrides: []\nray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run()\n"
    found = diagnose(f"{handled}falling back\n{STEP.format(300)}{RAISED}{end}")
    assert (found.outcome, found.raised.said) == ("unknown", SAID)
    assert [hit.cause.id for hit in found.survived] == ["no-vllm-ascend"]


def test_what_happens_again_after_the_last_step_is_told_where_it_did(diagnose):
    found = diagnose(OUT_OF_MEMORY + STEP.format(1) + OUT_OF_MEMORY.replace("pid=8", "pid=9"))
    assert (found.first.line, found.first.count, list(found.first.writers)) == (3, 1, ["WorkerDict pid=9"])
    assert not found.survived
    raised = diagnose(RAISED + STEP.format(1) + RAISED)
    assert (raised.raised.line, raised.raised.count) == (8, 2)


def test_a_cause_right_before_a_step_is_the_cause_where_only_its_consequence_follows(diagnose):
    """What different processes print comes in any order."""
    found = diagnose(STEP.format(1) + OUT_OF_MEMORY + STEP.format(2) + DIED)
    assert (found.first.cause.id, found.first.line) == ("npu-memory", 2)
    assert [hit.cause.id for hit in found.followed] == ["worker-died"]
    long_ago = diagnose(OUT_OF_MEMORY + STEP.format(1) + STEP.format(2) + DIED)
    assert long_ago.first.cause.id == "worker-died"


def test_an_exception_that_the_log_ends_with_beats_a_cause_that_came_after_it(diagnose):
    end = f"ray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run()\n{SAID}\n"
    found = diagnose(said_by("(TaskRunner pid=1) ") + OUT_OF_MEMORY + end)
    assert (found.outcome, found.raised.said) == ("unknown", SAID)
    assert [hit.cause.id for hit in found.followed] == ["npu-memory"]


def test_other_exceptions_are_listed_beside_a_known_cause(diagnose):
    found = diagnose(OUT_OF_MEMORY + RAISED)
    assert (found.first.cause.id, [other.said for other in found.others]) == ("npu-memory", [SAID])
    assert f"also     line 7: {SAID}" in found.text()


SAMPLE = (
    '[prompt] Explain the Linux error "No space left on device" and Bus error\n'
    "[response] The error NPU out of memory means this.\n"
    "Traceback (most recent call last):\n"
    '  File "a.py", line 1, in f\n'
    "RuntimeError: NPU out of memory. Tried to allocate 2 GiB\n"
    "step:7 is what you do next\n"
    "[ground_truth] Too many open files\n"
    "Segmentation fault\n"
    "[score] 0.0\n"
)


@pytest.mark.parametrize("writer", ["", "(AgentLoopWorker pid=4) ", "[2026-03-11 17:47:54] (RewardLoop pid=4) "])
def test_what_a_model_says_happened_to_nobody(writer, diagnose):
    sample = said_by(writer, SAMPLE)
    well = diagnose(sample + END)
    assert (well.outcome, well.doubts, well.survived) == ("clean", (), ())
    after = diagnose(END.replace("step:2", "step:1") + sample)
    assert (after.outcome, after.first, after.ranked) == ("clean", None, ())
    failed = diagnose(STEP.format(1) + sample + RAISED)
    assert (failed.outcome, failed.raised.said) == ("unknown", SAID)


def test_a_score_of_several_keys_ends_a_sample_too(diagnose):
    several = SAMPLE.replace("[score] 0.0\n", "[score] 0.0\n[acc] False\n[pred] Bus error\n")
    assert diagnose(several.replace("[pred] Bus error", "[pred] 3") + OUT_OF_MEMORY).first.line == 12
    without = SAMPLE.replace("[score] 0.0\n", "[acc] False\n[pred] Bus error\n")
    assert diagnose(without).outcome == "clean"


def test_a_failure_in_the_middle_of_a_sample_is_one_after_all(diagnose):
    found = diagnose("[prompt] What is a Bus error?\n" + RAISED)
    assert (found.outcome, found.raised.said, found.raised.line) == ("unknown", SAID, 2)
    other = diagnose("(AgentLoopWorker pid=4) [prompt] What?\n" + OUT_OF_MEMORY)
    assert (other.first.cause.id, other.first.line) == ("npu-memory", 2)


def test_words_of_a_printed_configuration_are_no_cause(diagnose):
    dump = (
        "(TaskRunner pid=1) {'actor_rollout_ref': {'hint': 'set it by using HCCL_EXEC_TIMEOUT',\n"
        "(TaskRunner pid=1)                        'note': 'NPU out of memory',\n"
        "(TaskRunner pid=1)                                'Bus error'}}\n"
        "+ python3 -m verl.trainer.main_ppo '+note=Too many open files'\n"
        "Error executing job with overrides: ['+note=No space left on device']\n"
    )
    found = diagnose(dump + RAISED)
    assert (found.outcome, found.raised.said, found.followed) == ("unknown", SAID, ())


# ------------------------------------------------------------------------------------------- the end, well and not so


def test_an_exception_after_the_last_step_means_that_the_run_did_not_finish(diagnose):
    benign = KNOWN_LINES["dataloader-worker"][0] + "\n" + KNOWN_LINES["engine-died"][1] + "\n"
    found = diagnose(END + benign + RAISED)
    assert (found.outcome, found.raised.said) == ("unknown", SAID)
    assert [hit.cause.id for hit in found.noise] == ["dataloader-worker", "engine-died"]
    full = diagnose(END + "OSError: [Errno 28] No space left on device: '/ckpt/x'\n")
    assert (full.outcome, full.first.cause.id) == ("cause", "disk")
    bare = diagnose(END + "OSError: cannot write the export\n")
    assert (bare.outcome, bare.ranked[0].text) == ("unknown", "OSError: cannot write the export")


def test_processes_that_lose_each_other_at_the_end_are_benign(diagnose):
    killed = KNOWN_LINES["dataloader-worker"]
    lines = [
        *(said_by("", RAISED.replace(SAID, f"RuntimeError: {line.partition(': ')[2]}")) for line in killed),
        "Exception ignored in: <function Pool.__del__>\n" + RAISED,
        RAISED.replace(SAID, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        KNOWN_LINES["resource-tracker"][0] + "\n",
        KNOWN_LINES["hccl-socket"][2] + "\n",
        "ERROR the log server is gone\n",
        *(f"{line}\n" for line in KNOWN_LINES["worker-died"]),
    ]
    found = diagnose(END + "".join(lines))
    assert (found.outcome, found.found) == ("noise", False)
    assert "recipes judge" in found.sentence


def test_a_log_that_somebody_interrupted_says_so(diagnose):
    found = diagnose(
        STEP.format(2) + '^CTraceback (most recent call last):\n  File "/x/m.py", line 3, in f\nKeyboardInterrupt\n'
    )
    assert (found.outcome, found.found) == ("stopped", False)
    assert found.sentence == "Nothing failed: it was interrupted (line 4)."
    assert diagnose(RAISED + "KeyboardInterrupt\n").raised.said == SAID


def test_an_empty_log_and_what_is_no_log_are_called_so(diagnose):
    assert diagnose("").sentence == "The log is empty: 0 bytes."
    assert diagnose(random.Random(0).randbytes(5000)).sentence == "The file is no log: it is not text."
    assert diagnose("步骤一完成，一切正常。\n" * 100).sentence == "The log shows nothing that failed."


def test_of_a_damaged_log_all_is_read_that_is_whole(diagnose):
    body = OUT_OF_MEMORY.encode() + random.Random(0).randbytes(50_000).hex().encode()
    assert diagnose(gzip.compress(body)[:20_000]).first.cause.id == "npu-memory"
    assert diagnose(gzip.compress(body)[:12]).sentence == "Nothing of the log can be read."


# ---------------------------------------------------------------------------------------------- the vague and the exact


def test_a_code_of_its_own_beats_a_vague_one_of_the_same_moment(diagnose):
    begins = KNOWN_LINES["hccl-init"][0] + "\n" + KNOWN_LINES["hccl-init"][2] + "\n"
    process = diagnose(begins + KNOWN_LINES["hccl-process"][2] + "\n")
    assert process.first.cause.id == "hccl-process"
    assert "last training process is running" in process.short()
    socket = diagnose(begins + KNOWN_LINES["hccl-socket"][0] + "\n")
    assert socket.first.cause.id == "hccl-socket"
    apart = diagnose(begins + "fine\n" * 100 + KNOWN_LINES["hccl-socket"][0] + "\n")
    assert apart.first.cause.id == "hccl-init"
    inner = diagnose(KNOWN_LINES["cann-internal"][3] + "\n" + KNOWN_LINES["stream-timeout"][7] + "\n")
    assert inner.first.cause.id == "stream-timeout"


def test_an_exception_says_more_than_a_vague_code_below_it(diagnose):
    found = diagnose(RAISED + KNOWN_LINES["cann-internal"][-1] + "\n")
    assert (found.outcome, found.raised.said) == ("unknown", SAID)
    assert [hit.cause.id for hit in found.followed] == ["cann-internal"]


def test_a_vague_line_is_quoted_from_its_start(diagnose):
    line = "RuntimeError: aclrtDeviceEnablePeerAccess failed, " + "x" * 400 + " ERR00100 PTA call acl api failed"
    assert diagnose(f"{line}\n").first.quotes[0].startswith("RuntimeError: aclrtDeviceEnablePeerAccess failed")


def test_where_only_a_consequence_is_known_the_lines_that_say_most_are_shown(diagnose):
    says = "ERROR 09-03 11:03:37 [core.py:712] The card of this node is on fire"
    found = diagnose(f"{says}\n{KNOWN_LINES['engine-start'][0]}\n")
    assert (found.first.cause.id, found.ranked[0].text) == ("engine-start", "The card of this node is on fire")
    assert "on fire" in found.text()


def test_a_signal_that_stands_in_the_log_is_named(diagnose):
    for name in ("crashed", "aborted", "killed"):
        for line in KNOWN_LINES[name]:
            for text in (f"{line}\n{DIED}", f"{DIED}{line}\n"):
                found = diagnose(text)
                assert (found.first.cause.id, [hit.cause.id for hit in found.followed]) == (name, ["worker-died"])
    assert diagnose(RAISED + "terminate called after throwing an instance of 'c10::Error'\n").raised.said == SAID


# ----------------------------------------------------------------------------------------------- values that are none

BROKEN = "(TaskRunner pid=1) step:{} - actor/lr:1e-06 - actor/grad_norm:nan - actor/pg_loss:np.float64(inf)\n"


def test_values_that_are_not_finite_are_named_with_their_first_step(diagnose):
    found = diagnose(STEP.format(1) + BROKEN.format(2) + BROKEN.format(3))
    assert (found.outcome, found.found) == ("doubtful", True)
    assert "actor/grad_norm and 1 more, first at step 2." in found.sentence
    assert found.doubts[0].line == 2
    assert found.doubts[0].quotes == ["step:2 - actor/grad_norm:nan", "step:2 - actor/pg_loss:inf"]
    assert "optimizer.lr" in found.keys
    finished = diagnose(END + BROKEN.format(2))
    assert finished.sentence.startswith("The run finished, but: A value of the training is not finite: actor/grad_norm")


def test_a_failure_after_values_that_are_not_finite_follows_from_them(diagnose):
    found = diagnose(BROKEN.format(1) + RAISED)
    assert (found.outcome, found.first.cause.id, found.first.line) == ("cause", "not-finite", 1)
    assert [other.said for other in found.others] == [SAID]
    assert (found.doubts, dict(found.rows())["cause"]) == ((), "not-finite, line 1")
    died = diagnose(BROKEN.format(1) + DIED)
    assert died.first.cause.id == "not-finite"
    healed = diagnose(BROKEN.format(1) + STEP.format(2) + RAISED)
    assert (healed.outcome, healed.raised.said, len(healed.doubts)) == ("unknown", SAID, 1)
    known = diagnose(BROKEN.format(1) + OUT_OF_MEMORY)
    assert (known.first.cause.id, len(known.doubts)) == ("npu-memory", 1)


def test_a_value_nobody_watches_and_one_far_down_a_long_step(diagnose):
    assert diagnose("step:1 - timing_s/x:nan - info:fine - actor/name:nano\n").outcome == "clean"
    many = " - ".join(f"perf/of_no_interest_{i}:0.5" for i in range(500))
    assert diagnose(f"step:1 - {many} - actor/grad_norm:nan\n").outcome == "doubtful"


# ------------------------------------------------------------------------------------------- logs that were pasted in


def test_frames_without_a_heading_and_frames_that_are_indented_are_found(diagnose):
    ray = "ray.exceptions.RayTaskError(IndexError): ray::WorkerDict.compute() (pid=1, ip=10.0.0.1)\n"
    frames = '  File "/x/rope.py", line 90, in x\n    return func(*args)\nIndexError: too many indices for a tensor\n'
    for text in (ray + frames, frames, said_by("  ", ray + frames), ray + said_by("  ", frames)):
        found = diagnose(text)
        assert (found.outcome, found.raised.said) == ("unknown", "IndexError: too many indices for a tensor")
        assert found.raised.frame == "/x/rope.py, line 90, in x"
    assert diagnose(ray + "Loading: done\n").raised is None
