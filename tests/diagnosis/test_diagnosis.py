"""Diagnosis: the first cause wins, noise is named as noise, the unknown is said to be so, and no text breaks it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import re
import resource
import time
import typing

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from known_lines import KNOWN_LINES

from recipes import diagnosis, notebook
from recipes.cli import main
from recipes.diagnosis import reader
from recipes.diagnosis.causes import CAUSES, KINDS, NOISE
from recipes.errors import RecipeError
from recipes.run.causes import in_words
from recipes.run.directory import write_json
from recipes.schema import Recipe

BY_ID = {cause.id: cause for cause in CAUSES}
LINES = [(name, line) for name, lines in KNOWN_LINES.items() for line in lines]
STEPS = (
    "Total training steps: 2\n(TaskRunner pid=7) step:1 - actor/loss:0.1\n(TaskRunner pid=7) step:2 - actor/loss:0.1\n"
)
OUT_OF_MEMORY = "(WorkerDict pid=9, ip=10.0.0.2) RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n"


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "train.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def run_directory(path, text, state="failed", code=1, attempts=1, **more):
    entries = []
    for number in range(1, attempts + 1):
        (path / "attempts" / str(number)).mkdir(parents=True)
        (path / "attempts" / str(number) / "train.log").write_text(text if number == attempts else OUT_OF_MEMORY)
        entries.append({"number": number, "exit_code": code, "state": state, "cause": "exit code 1", "ended": None})
    write_json(path / "run.json", {"state": state, "cause": "exit code 1", "attempts": entries, **more})
    return path


# ---------------------------------------------------------------------------------------------------------- the table


def test_each_cause_has_an_id_of_its_own_and_says_what_to_do():
    assert len(BY_ID) == len(CAUSES)
    for cause in CAUSES:
        assert cause.kind in KINDS
        assert cause.patterns and cause.cause.endswith(".") and cause.remedy
        assert cause.source == "" or cause.source.startswith("https://")


@pytest.mark.parametrize("name", BY_ID)
def test_related_keys_are_keys_of_a_recipe(name):
    for key in BY_ID[name].keys:
        kind = Recipe
        for part in key.split("."):
            assert part in kind.__dataclass_fields__, key
            kind = typing.get_type_hints(kind)[part]
        assert not dataclasses.is_dataclass(kind), f"{key} is a group, not a key"


@pytest.mark.parametrize("name", BY_ID)
def test_every_pattern_has_a_line_that_shows_it(name):
    for pattern in BY_ID[name].patterns:
        parts = [re.escape(part) for part in pattern.split("…")]
        assert any(re.search(".*".join(parts), line) for line in KNOWN_LINES[name]), pattern


@pytest.mark.parametrize(("name", "line"), LINES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(LINES)])
def test_a_known_line_in_a_log_is_found_as_what_it_is_and_nothing_else(name, line, log):
    found = diagnosis.diagnose(log(f"loading\n{line}\nshutting down\n"))
    cause = BY_ID[name]
    if cause.kind == "noise":
        assert [hit.cause.id for hit in found.noise] == [name]
        assert (found.outcome, found.first, found.found) == ("noise", None, False)
        return
    hit = found.doubts[0] if cause.kind == "doubt" else found.first
    assert hit.cause.id == name
    assert (hit.line, hit.count) == (2, 1)
    assert hit.quotes[0].strip("…") in line
    assert found.outcome == ("doubtful" if cause.kind == "doubt" else "cause")
    assert not found.followed and not found.noise
    assert found.remedy == cause.remedy


def test_the_list_of_causes_names_each_with_its_texts():
    shown = CliRunner().invoke(main, ["diagnose", "--list"])
    assert shown.exit_code == 0
    for cause in CAUSES:
        assert f"### {cause.id}\n" in shown.output
        assert all(f"- `{pattern}`" in shown.output for pattern in cause.patterns)


# -------------------------------------------------------------------------------------------------- what comes first


def test_the_earliest_cause_wins_and_the_later_ones_follow_from_it(log):
    disk = KNOWN_LINES["disk"][0]
    found = diagnosis.diagnose(log(f"{disk}\n{OUT_OF_MEMORY}{KNOWN_LINES['engine-died'][0]}\n"))
    assert found.first.cause.id == "disk"
    assert [hit.cause.id for hit in found.followed] == ["npu-memory", "engine-died"]
    other = diagnosis.diagnose(log(f"{OUT_OF_MEMORY}{disk}\n"))
    assert other.first.cause.id == "npu-memory"


def test_noise_before_the_cause_does_not_hide_it(log):
    noise = "\n".join(KNOWN_LINES[cause.id][0] for cause in NOISE)
    found = diagnosis.diagnose(log(f"{noise}\n{OUT_OF_MEMORY}"))
    assert found.first.cause.id == "npu-memory"
    assert len(found.noise) == len(NOISE)


def test_what_one_rank_sees_of_another_s_trouble_is_no_cause_where_there_is_one(log):
    waiting = KNOWN_LINES["hccl-socket"][2]
    found = diagnosis.diagnose(log(f"{waiting}\n{OUT_OF_MEMORY}"))
    assert found.first.cause.id == "npu-memory"
    assert [hit.cause.id for hit in found.followed] == ["hccl-socket"]


def test_a_code_of_hccl_below_a_traceback_says_what_the_exception_is_about(log):
    found = diagnosis.diagnose(
        log(
            "[rank1]: Traceback (most recent call last):\n"
            '[rank1]:   File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2501, in all_reduce\n'
            "[rank1]:     work = group.allreduce([tensor], opts)\n"
            "[rank1]: RuntimeError: OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6\n"
            "[rank1]: [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.\n"
            "[rank1]: EI0006: [PID: 1292363] Getting socket times out. Reason: Remote Rank did not send.\n"
        )
    )
    assert (found.outcome, found.first.cause.id, found.first.line) == ("cause", "hccl-socket", 6)
    assert list(found.first.writers) == ["rank1"]


def test_an_unknown_exception_outweighs_the_death_it_led_to(log):
    died = KNOWN_LINES["actor-died"][0]
    found = diagnosis.diagnose(
        log(
            "(WorkerDict pid=9) Traceback (most recent call last):\n"
            '(WorkerDict pid=9)   File "/home/me/reward.py", line 3, in compute_score\n'
            "(WorkerDict pid=9) ZeroDivisionError: division by zero\n"
            f"{died}\n"
        )
    )
    assert (found.outcome, found.raised.said) == ("unknown", "ZeroDivisionError: division by zero")
    assert [hit.cause.id for hit in found.followed] == ["actor-died"]


def test_repeats_are_counted_and_the_ranks_that_said_it_are_named(log):
    lines = [OUT_OF_MEMORY.replace("pid=9", f"pid={pid}") for pid in range(5)]
    lines.append(OUT_OF_MEMORY.rstrip() + " [repeated 11x across cluster] (Ray deduplicates logs by default.)\n")
    found = diagnosis.diagnose(log("".join(lines)))
    assert found.first.count == 16
    assert list(found.first.writers)[:2] == ["WorkerDict pid=0, ip=10.0.0.2", "WorkerDict pid=1, ip=10.0.0.2"]
    assert "and 3 others" in found.text()
    assert len(found.first.quotes) == 1


# ------------------------------------------------------------------------------------------------------ ends and noise


def test_a_run_that_went_on_over_a_skipped_update_finished_but(log, tmp_path):
    text = f"{KNOWN_LINES['skipped-step'][0]}\n{STEPS}"
    for found in (
        diagnosis.diagnose(log(text)),
        diagnosis.diagnose(run_directory(tmp_path / "r", text, "finished", 0)),
    ):
        assert found.outcome == "doubtful" and found.found
        assert found.sentence.startswith("The run finished, but: A gradient was not finite")


@pytest.mark.parametrize("name", [cause.id for cause in CAUSES if cause.ends_well])
def test_what_dies_after_the_last_step_is_noise_and_before_it_is_not(name, log):
    line = KNOWN_LINES[name][0]
    after = diagnosis.diagnose(log(f"{STEPS}{line}\n"))
    assert (after.outcome, [hit.cause.id for hit in after.noise]) == ("noise", [name])
    half = STEPS.replace("step:2", "step:1")
    before = diagnosis.diagnose(log(f"{half}{line}\n"))
    assert (before.outcome, before.first.cause.id) == ("cause", name)


def test_a_clean_log_says_so(log):
    assert diagnosis.diagnose(log(STEPS)).outcome == "clean"
    assert diagnosis.diagnose(log("")).outcome == "clean"


def test_an_exception_a_finished_run_got_over_does_not_count(tmp_path):
    found = diagnosis.diagnose(run_directory(tmp_path / "r", WRAPPED + STEPS, "finished", 0))
    assert (found.outcome, found.found) == ("clean", False)


def test_a_stopped_run_has_nobody_to_blame(tmp_path):
    found = diagnosis.diagnose(run_directory(tmp_path / "r", STEPS.replace("step:2", "step:1"), "stopped", -15))
    assert (found.outcome, found.found) == ("stopped", False)


def test_a_kill_is_known_by_its_exit_code_alone(tmp_path):
    for code in (-9, 137):
        found = diagnosis.diagnose(run_directory(tmp_path / str(code), "nothing of note\n", "failed", code))
        assert (found.outcome, found.first.cause.id) == ("cause", "killed")


def test_what_only_the_supervisor_saw_is_taken_from_run_json(tmp_path):
    (tmp_path / "log").write_text("nothing of note\n")
    words = {
        "host-memory": in_words(1, tmp_path / "log", killed_for_memory=2),
        "hang": "it hangs: no step for 1800 s; the stacks of 9 processes are in attempts/1/stacks/x.txt",
        "disk": "exit code 1; the disk of the run directory is full (0 bytes left)",
    }
    for name, cause in words.items():
        path = run_directory(tmp_path / name, "nothing of note\n", cause=cause)
        found = diagnosis.diagnose(path)
        assert (found.outcome, found.first.cause.id, found.first.line) == ("cause", name, 0)
        assert f"run.json: {cause}" in found.short()
        (path / "attempts" / "1" / "train.log").write_text(OUT_OF_MEMORY)
        assert diagnosis.diagnose(path).first.cause.id == "npu-memory"  # the log says more, where it says anything
        (path / "attempts" / "1" / "train.log").write_text(WRAPPED)
        raised = diagnosis.diagnose(path)
        if name == "hang":
            assert (raised.first.cause.id, raised.others[0].type) == ("hang", "LookupError")
        else:
            assert raised.outcome == "unknown"


# --------------------------------------------------------------------------------------------------------- the unknown

WRAPPED = """\
(AgentLoopWorker pid=2) Traceback (most recent call last):
(AgentLoopWorker pid=2)   File "/v/site-packages/verl/agent_loop.py", line 1026, in _compute_score
(AgentLoopWorker pid=2)     result = await worker.compute_score.remote(data)
(AgentLoopWorker pid=2) ray.exceptions.RayTaskError(LookupError): ray::RewardLoopWorker.compute_score() (pid=1)
(AgentLoopWorker pid=2)   File "/v/site-packages/verl/reward.py", line 38, in _call_with_kwargs
(AgentLoopWorker pid=2)   File "/home/me/reward.py", line 2, in compute_score
(AgentLoopWorker pid=2)     raise LookupError('no such answer')
(AgentLoopWorker pid=2) LookupError: no such answer
Traceback (most recent call last):
  File "/v/site-packages/ray/_private/worker.py", line 1053, in get_objects
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(RolloutFailed): ray::TaskRunner.run() (pid=3, ip=10.0.0.1)
  File "/v/site-packages/verl/trainer.py", line 155, in run
verl.RolloutFailed: A response could not be scored: LookupError: no such answer
"""


def test_an_unknown_failure_is_called_unknown_and_its_first_exception_named(log):
    found = diagnosis.diagnose(log(WRAPPED))
    assert found.outcome == "unknown" and found.sentence.startswith("Unknown")
    assert found.raised.said == "LookupError: no such answer"
    assert found.raised.frame == "/home/me/reward.py, line 2, in compute_score"
    assert found.raised.line == 1
    assert list(found.keys) == ["reward.function"]
    assert [other.type for other in found.others] == ["RolloutFailed"]


def test_noise_right_after_an_exception_does_not_explain_it(log):
    """Seen in a real log: another process goes on printing what it has to say."""
    noise = KNOWN_LINES["optional-engine"][0]
    raised = (
        'Traceback (most recent call last):\n  File "/x/node.py", line 440, in __init__\nException: it did not start\n'
    )
    found = diagnosis.diagnose(log(f"{raised}{noise}\n"))
    assert (found.outcome, found.raised.said) == ("unknown", "Exception: it did not start")
    without = diagnosis.diagnose(log(f"Exception: it did not start\n{noise}\n"))
    assert [line.text for line in without.ranked] == ["Exception: it did not start"]


def test_an_exception_that_was_ignored_is_not_the_one(log):
    ignored = "Exception ignored in atexit callback: <function shutdown>\nTraceback (most recent call last):\n"
    found = diagnosis.diagnose(log(f'{ignored}  File "a.py", line 1, in f\nValueError: at exit\n{WRAPPED}'))
    assert found.raised.type == "LookupError"


def test_without_a_traceback_the_lines_that_say_most_come_first(log):
    found = diagnosis.diagnose(log("it failed to connect\nINFO fine\nERROR a thing\nFooError: the thing itself\n"))
    assert found.outcome == "unknown"
    assert [line.text for line in found.ranked] == [
        "FooError: the thing itself",
        "ERROR a thing",
        "it failed to connect",
    ]


# -------------------------------------------------------------------------------------------------------- run and log


def test_a_run_shows_its_own_values_beside_the_keys(tmp_path):
    path = run_directory(tmp_path / "r", OUT_OF_MEMORY)
    (path / "recipe.yaml").write_text("rollout: {memory: 0.9}\n")
    found = diagnosis.diagnose(path)
    assert found.keys["rollout.memory"] == 0.9
    assert "rollout.memory=0.9" in found.short()


def test_the_last_attempt_is_the_one_unless_another_is_asked_for(tmp_path):
    path = run_directory(tmp_path / "r", f"{KNOWN_LINES['disk'][0]}\n", attempts=10)
    assert diagnosis.diagnose(path).first.cause.id == "disk"
    assert diagnosis.diagnose(path).log == path / "attempts" / "10" / "train.log"
    assert diagnosis.diagnose(path, attempt=2).first.cause.id == "npu-memory"
    with pytest.raises(RecipeError, match="attempt 11 of the run has printed nothing"):
        diagnosis.diagnose(path, attempt=11)


def test_a_compressed_log_is_read_and_a_damaged_one_as_far_as_it_goes(tmp_path):
    whole = gzip.compress(OUT_OF_MEMORY.encode() + random.Random(0).randbytes(100_000))
    path = tmp_path / "log.gz"
    path.write_bytes(whole)
    assert diagnosis.diagnose(path).first.cause.id == "npu-memory"
    path.write_bytes(whole[:-50_000])
    found = diagnosis.diagnose(path)
    assert found.damaged and "to a part only" in found.text()


def test_exit_codes_and_json(log, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(main, ["diagnose", *map(str, arguments)])

    assert invoke(log(STEPS)).exit_code == 0
    bad = invoke(log(OUT_OF_MEMORY), "--json")
    assert bad.exit_code == 1
    told = json.loads(bad.output)
    assert (told["outcome"], told["first"]["id"], told["first"]["line"]) == ("cause", "npu-memory", 1)
    assert told["first"]["writers"] == ["WorkerDict pid=9, ip=10.0.0.2"]
    for arguments in ([], [tmp_path / "nowhere"], [tmp_path], [log(STEPS), "--attempt", 2]):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")


def test_a_notebook_shows_it_with_the_words_of_the_log_escaped(tmp_path):
    path = run_directory(tmp_path / "r", OUT_OF_MEMORY.replace("2.00 GiB", "<b>&</b>"), id="0", recipe="r")
    shown = notebook.diagnose(path)._repr_mimebundle_()
    assert "NPU out of memory" in shown["text/html"] and "npu-memory" in shown["text/plain"]
    assert "&lt;b&gt;" in shown["text/html"] and "<b>" not in shown["text/html"]


@pytest.mark.slow
def test_a_run_that_failed_says_why_in_a_notebook_and_in_a_terminal(tmp_path):
    path = run_directory(tmp_path / "r", OUT_OF_MEMORY, id="0", recipe="r")
    with pytest.raises(
        notebook.RunEnded, match=r"The run failed: exit code 1\. Its log says why: A device has no memory"
    ):
        notebook.watch(path)
    watched = CliRunner().invoke(main, ["watch", str(path)])
    assert watched.exit_code == 1
    assert "A device has no memory left. [npu-memory]\n  line 1: RuntimeError: NPU out of memory." in watched.stdout


# ------------------------------------------------------------------------------------------------------- hostile text


def test_colours_carriage_returns_and_nul_bytes_do_not_hide_a_cause(log):
    raw = (
        b"\x1b[36m(WorkerDict pid=9)\x1b[0m  50%|#####     |\rNPU out\x1b[1m of\x00 memory. Tried\x1b]0;title\x07 to\n"
    )
    found = diagnosis.diagnose(log(raw))
    assert found.first.cause.id == "npu-memory"
    assert found.first.quotes == ["NPU out of memory. Tried to"]


def test_an_escape_that_never_ends_hides_nothing_below_it(log):
    assert diagnosis.diagnose(log(b"\x1b]0;\n" + OUT_OF_MEMORY.encode())).first.cause.id == "npu-memory"


@pytest.mark.parametrize(
    "text",
    [
        b"A" * 9_000_000 + b" NPU out of memory " + b"B" * 1_000_000,
        b"(" * 1_000_000 + b"\nNPU out of memory\n",
        b"a." * 500_000 + b"Error\nNPU out of memory\n",
        b"\x1b[" * 500_000 + b"\nNPU out of memory\n",
        b"Traceback (most recent call last):\n" * 20_000 + b"NPU out of memory\n",
        b"n_gpus (" * 100_000 + b"\nNPU out of memory\n",
        b"\r" * 2_000_000 + b"NPU out of memory\n",
    ],
    ids=["one long line", "brackets", "dots", "escapes", "tracebacks", "half a pattern", "carriage returns"],
)
def test_text_made_to_be_slow_is_not(log, text):
    path = log(text)
    began = time.process_time()
    found = diagnosis.diagnose(path)
    assert found.first.cause.id == "npu-memory"
    assert time.process_time() - began < 8
    assert len(found.text()) < 5000


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.text(max_size=60).map(lambda text: text.encode("utf-8", errors="replace")),
            st.sampled_from([line.encode() for _, line in LINES]),
            st.sampled_from(
                [b"Traceback (most recent call last):", b'  File "a.py", line 1, in f', b"step:1 - a:1", b"\x1b["]
            ),
        ),
        max_size=30,
    ),
    st.sampled_from([b"\n", b"\r", b"\r\n", b""]),
)
def test_no_text_breaks_it_and_what_it_shows_can_be_shown(tmp_path_factory, lines, end):
    path = tmp_path_factory.getbasetemp() / "property.log"
    path.write_bytes(end.join(lines))
    found = diagnosis.diagnose(path)
    assert found.outcome in ("cause", "unknown", "doubtful", "noise", "clean")
    for line in (*found.text().split("\n"), *found.short().split("\n")):
        assert line.isprintable()
    json.dumps(found.to_dict())
    assert found.first is None or found.first.cause.kind not in ("noise", "doubt")


def test_memory_stays_bounded_where_every_line_is_new(tmp_path):
    path = tmp_path / "many.log"
    with path.open("w") as file:
        for number in range(20_000):
            name = f"e{number:x}".translate(str.maketrans("0123456789", "ghijklmnop"))
            file.write(f"Traceback (most recent call last):\n  File 'x', line 1\n{name}Error: {name}\n")
    found = reader.scan(path)
    assert len(found.raised) <= reader.EXCEPTIONS and len(found.ranked) <= reader.RANKED


@pytest.mark.slow
def test_a_log_of_200_mb_is_read_in_bounded_memory(tmp_path):
    path, random_ = tmp_path / "big.log", random.Random(0)
    block = "".join(
        f"\x1b[36m(WorkerDict pid={random_.randrange(9999)}, ip=10.0.0.{i % 32})\x1b[0m INFO 11-29 18:33:17 [r.py:{i}] "
        f"{random_.random()} requests, {random_.random()} tokens a second\n"
        for i in range(10_000)
    ).encode()
    with path.open("wb") as file:
        for _ in range(200_000_000 // len(block) + 1):
            file.write(block)
        file.write(OUT_OF_MEMORY.encode())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = diagnosis.diagnose(path)
    seconds = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert found.first.cause.id == "npu-memory"
    assert found.first.line == block.count(b"\n") * (200_000_000 // len(block) + 1) + 1
    assert grown < 64, f"{grown:.0f} MiB"
    assert seconds < 60, f"{seconds:.1f} s"
    print(f"{path.stat().st_size / 1e6:.0f} MB in {seconds:.1f} s, {grown:.0f} MiB more")
