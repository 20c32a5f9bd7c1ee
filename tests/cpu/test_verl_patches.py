"""A run repeats itself with the same seed, and ends when it cannot go on."""

import json

import pytest

from recipes.cpu.verl_patches import trajectory_seed

TRAJECTORY = {"step": 3, "sample_index": 41, "rollout_n": 0, "validate": False}


def test_each_trajectory_has_a_seed_of_its_own_and_always_the_same():
    seeds = [
        trajectory_seed(run, TRAJECTORY | change, sample)
        for run in (1, 2)
        for change in ({}, {"step": 4}, {"sample_index": 42}, {"validate": True})
        for sample in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert trajectory_seed(1, dict(TRAJECTORY), 0) == seeds[0]


def test_a_sample_of_a_stream_is_known_by_its_name():
    """The fully asynchronous entry counts no steps: each is -1, and a row of the data set comes again every epoch."""
    streamed = TRAJECTORY | {"step": -1}
    names = ("uid_sample_0_41 0", "uid_sample_0_41 1", "uid_sample_1_41 0")
    assert len({trajectory_seed(1, streamed, name) for name in names}) == 3


REPLAY = """
import json, os
os.environ["RECIPES_CPU_DEADLINE"] = "0.2"
import verl
from verl.trainer.ppo.v1 import replay_buffer as module

def buffer(**state):
    made = module.ReplayBuffer(
        trainer_mode="sync", trainer_config=None, sampler_kwargs=None,
        max_off_policy_threshold=8, max_off_policy_strategy="drop",
    )
    vars(made).update(state)
    return made

report = {"poll": buffer().poll_interval}

class Queue:  # what the buffer asks of TransferQueue
    def __init__(self, tags): self.tags = tags
    def kv_list(self): return {"train": self.tags}
    def kv_clear(self, partition_id, keys): pass

prompt = {"is_prompt": True, "global_steps": 1}
arrived = ["bb_1_0", "aa_10_0", "bb_0_0", "aa_2_0"]
module.tq = Queue({uid: prompt | {"status": "finished"} for uid in ("bb", "aa")} | {key: {} for key in arrived})
sampled, _ = buffer().sample(global_steps=1, partition_id="train", batch_size=2)
report["order"] = sampled.keys

failed = prompt | {"status": "failure"}
module.tq = Queue({
    "late": failed | {"failed_because": "ValueError: second", "failed_at": 9.0},
    "soon": failed | {"failed_because": "LookupError: first", "failed_at": 8.0},
    "fine": prompt | {"status": "finished"}, "fine_0_0": {},
})
for refill in (False, True):
    made = buffer(sync_refill_failed_groups=refill)
    try:
        made._sync_metadata_from_transfer_queue()
        report[f"refill {refill}"] = sorted(made.failure_keys["train"])
    except Exception as error:
        report[f"refill {refill}"] = f"{type(error).__name__}: {error}"

module.tq = Queue({"slow": prompt | {"status": "running"}})
try:
    buffer().sample(global_steps=1, partition_id="train", batch_size=1)
except Exception as error:
    report["stuck"] = f"{type(error).__name__}: {error}"
print("REPORT", json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(child):
    result = child("-c", REPLAY, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


@pytest.mark.slow
def test_trajectories_are_trained_on_in_the_order_their_prompts_were_drawn(report):
    assert report["order"] == ["bb_0_0", "bb_1_0", "aa_2_0", "aa_10_0"]


@pytest.mark.slow
def test_the_first_failure_ends_a_synchronous_run(report):
    assert report["refill False"].startswith("RolloutFailed: ")
    assert report["refill False"].endswith("LookupError: first")


@pytest.mark.slow
def test_a_run_that_refills_failed_groups_goes_on(report):
    assert report["refill True"] == ["late", "soon"]


@pytest.mark.slow
def test_waiting_without_progress_ends_with_a_sentence(report):
    assert report["stuck"].startswith("NoProgress: No response arrived for ")
    assert "1 running" in report["stuck"]
    assert "RECIPES_CPU_DEADLINE" in report["stuck"]


@pytest.mark.slow
def test_the_trainer_looks_often(report):
    assert report["poll"] == pytest.approx(0.1)
