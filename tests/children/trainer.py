"""A child process that stands for the trainer in the tests of supervision: `TRAINER` says what it does.

It is no verl; tests with the real one are marked slow. `train` makes steps as verl does, as far as a supervisor can
see: a line of metrics a step, a checkpoint a step, its tracker file, and going on from a checkpoint it is given.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

script = os.environ["TRAINER"]
print("argv:", sys.argv[1:], flush=True)


def given(key: str) -> str:
    found = [text.partition("=")[2] for text in sys.argv[1:] if text.lstrip("+").startswith(f"{key}=")]
    return found[-1].strip("'").replace("\\'", "'") if found else ""


# What else the verdict looks at, as a healthy run shows it.
HEALTHY = {
    "actor/entropy": 1.0,
    "actor/grad_norm": 0.5,
    "actor/pg_loss": 0.01,
    "actor/ppo_kl": 1e-5,
    "training/rollout_probs_diff_mean": 1e-3,
    "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
    "response_length/clip_ratio": 0.01,
    "response/aborted_ratio": 0.0,
}


def write(step: int, text: str | None = None) -> None:
    data = {"critic/rewards/mean": 0.5 + step / 100, "timing_s/step": 0.1}
    data |= HEALTHY if "healthy" in script else {}
    data |= json.loads(os.environ.get("TRAINER_DATA", "{}"))  # what is sick about each step
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("a") as file:
        file.write((text or json.dumps({"step": step, "data": data})) + "\n")


def checkpoint(step: int) -> None:
    folder = Path(given("trainer.default_local_dir")) / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "model.safetensors").write_bytes(b"weights")
    (folder / "data.pt").write_bytes(b"order")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(step))


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("reward function broke on <b>& $(x)")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit3":
        sys.exit(3)
    if how == "hang":
        time.sleep(600)
    if how == "pause":
        time.sleep(6)
    if how == "full":
        try:
            with (Path(given("trainer.default_local_dir")).parent / "filler").open("wb") as file:
                while True:
                    file.write(b"\0" * 65536)
        finally:
            raise OSError(28, "No space left on device")
    if how == "broken":
        write(0, '{"step": 4, "data": {"critic/rew')
        time.sleep(600)
    if how == "memory":  # into a control group with too little, then more than it has
        Path(os.environ["TRAINER_GROUP"]).write_text(str(os.getpid()))
        held = [bytearray(8 << 20) for _ in range(32)]
        print(len(held))


if "takes" in script:  # devices of a cluster, as verl does: counts what is free, then a placement group a node
    import ray

    ray.init(address="auto", log_to_driver=False)
    nodes, each = int(given("trainer.nnodes")), int(given("trainer.n_gpus_per_node"))
    free = sum(node.get("cpu_rank", 0) for node in ray._private.state.available_resources_per_node().values())
    if free < nodes * each:
        raise ValueError(f"Total available GPUs {free} is less than total desired GPUs {nodes * each}")
    time.sleep(3)
    groups = [ray.util.placement_group([{"cpu_rank": 1}] * each, strategy="STRICT_PACK") for _ in range(nodes)]
    ray.get([group.ready() for group in groups], timeout=60)

    class Rank:
        """A worker, which the driver asks at each step and whose death ends it."""

        def step(self) -> None:
            pass

    ranks = [
        ray.remote(num_cpus=0, resources={"cpu_rank": 1})(Rank).options(placement_group=group).remote()
        for group in groups
        for _ in range(each)
    ]
if "train" in script:
    start = int(given("trainer.resume_from_path").rpartition("global_step_")[2] or 0)
    for step in range(start + 1, int(given("trainer.total_training_steps")) + 1):
        if step == int(os.environ.get("TRAINER_FAILS_AT", 0)) and not start:
            fail(os.environ["TRAINER_FAILS"])
        while (Path(os.environ.get("TRAINER_HOLD", "")) / f"before-{step}").exists():  # a test lets go by removing it
            time.sleep(0.05)
        if "takes" in script:
            ray.get([rank.step.remote() for rank in ranks])
        write(step)
        checkpoint(step)
        time.sleep(float(os.environ.get("TRAINER_STEP_SECONDS", "0.1")))
if "metrics" in script:
    for step in (1, 2):
        write(step)
if "shm" in script:
    import mmap

    with Path(os.environ["TRAINER_SHM"]).open("wb+") as file:
        file.write(b"\0" * 4096)
        file.flush()
        kept = mmap.mmap(file.fileno(), 4096)
if "leak" in script:  # as a client library's error message does
    raise RuntimeError(f"401 for token {os.environ['HF_TOKEN']}, environment {dict(os.environ)}")
if "child" in script:  # one that leaves our session and hides, as Ray's daemons do
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if "count" in script:
    for number in range(12):
        print("count", number, flush=True)
        time.sleep(1)
if "deaf" in script:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "sleep" in script:
    time.sleep(600)
for how in ("raise", "die", "exit3"):
    if how in script.split():
        fail(how)
