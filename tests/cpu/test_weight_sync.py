"""The checkpoint engine: weights arrive as they were sent, in few messages, and one that is not there is said."""

import json

import pytest

pytestmark = pytest.mark.slow  # importing verl takes ten seconds

SYNC = """
import asyncio, json, os, threading
import verl
from verl.utils.import_utils import import_external_libs
import_external_libs("recipes.cpu.weight_sync")
import ray, torch
from verl.checkpoint_engine import CheckpointEngineRegistry

ray.util.get_node_ip_address = lambda: "127.0.0.1"  # there is no Ray here
Engine = CheckpointEngineRegistry.get("gloo")
report = {}

def sync(weights, bucket_size, trainers=2, replicas=2):
    "What verl's CheckpointEngineManager does, with a thread for each rank."
    ranks = [Engine(bucket_size, is_master=place == 0) for place in range(trainers)]
    ranks += [Engine(bucket_size) for _ in range(replicas)]
    told = Engine.build_topology(trainers, replicas, [engine.prepare() for engine in ranks])
    kwargs = [{k: v[i] for k, v in group.items()} for group, n in zip(told, (trainers, replicas)) for i in range(n)]
    messages, drawn, arrived = [], [], {}
    broadcast = ranks[0]._broadcast

    async def counted(tensor):
        messages.append(tensor.nbytes)
        await broadcast(tensor)

    ranks[0]._broadcast = counted

    def run(place, engine):
        engine.init_process_group(**kwargs[place])
        async def receive():
            return {name: weight.clone() async for name, weight in engine.receive_weights(global_steps=1)}
        if place < trainers:
            gathered = (drawn.append(place) or item for item in weights.items())
            asyncio.run(engine.send_weights(gathered, global_steps=1))
        else:
            arrived[place] = asyncio.run(receive())
        engine.finalize()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(ranks)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    same = [
        [(n, w.dtype, w.shape) for n, w in found.items()] == [(n, w.dtype, w.shape) for n, w in weights.items()]
        and all(found[name].equal(weight) for name, weight in weights.items())
        for found in arrived.values()
    ]
    return {"same": same, "drawn": sorted(set(drawn)), "messages": messages}

generator = torch.Generator().manual_seed(1)
weights = {
    "odd": torch.randn(3, generator=generator).bfloat16(),           # 6 bytes: what follows is not aligned
    "router_bias": torch.randn(4, generator=generator),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "turned": torch.randn(8, 4, generator=generator).T,              # not contiguous
    "large": torch.randn(100, generator=generator),                  # more than a small bucket holds
    "trained": torch.nn.Parameter(torch.randn(2, 2, generator=generator)),
}
report["one bucket"] = sync(weights, 1 << 20)
report["small buckets"] = sync(weights, 96)
report["again"] = sync({name: weight.detach() + 1 for name, weight in weights.items()}, 1 << 20, trainers=1, replicas=1)

os.environ["RECIPES_CPU_DEADLINE"] = "1"
lonely = Engine(1 << 20, is_master=True)
meeting = lonely.prepare()
other = Engine(1 << 20)
joined = threading.Thread(target=other.init_process_group, args=(1, 2, meeting))
joined.start()
lonely.init_process_group(0, 2, meeting)
joined.join()
async def receive():
    return [name async for name, _ in other.receive_weights()]
try:
    report["alone"] = asyncio.run(receive())  # nobody sends
except Exception as error:
    report["alone"] = f"{type(error).__name__}: {error}"
print("REPORT", json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(child):
    result = child("-c", SYNC, timeout=180)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


def test_every_replica_gets_every_weight_with_its_type_and_shape(report):
    assert report["one bucket"]["same"] == report["small buckets"]["same"] == [True, True]
    assert report["again"]["same"] == [True]


def test_all_ranks_that_train_gather_and_one_sends(report):
    assert report["one bucket"]["drawn"] == [0, 1]


def test_weights_share_a_message_until_a_bucket_is_full(report):
    whole, small = report["one bucket"]["messages"], report["small buckets"]["messages"]
    assert len(whole) == 3 + 1  # sizes, description, bytes; and the end
    assert whole[2] == 6 + 16 + 8 + 128 + 400 + 16
    assert max(small[2::3]) <= 96
    assert sum(small[2::3]) == whole[2]


def test_a_weight_that_does_not_come_ends_the_run_with_a_sentence(report):
    assert report["alone"].startswith("NoProgress: The weights did not get from the trainer to every rollout replica")
    assert "RECIPES_CPU_DEADLINE" in report["alone"]
