"""Limits, shared memory, disk and host memory: the numbers of the facts, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_node import compose, only, states

from recipes.doctor import machine
from recipes.preflight import subject

GIB = 2**30


def of(recipe, *overrides):
    return subject(compose(recipe, *overrides))


@pytest.mark.parametrize(
    ("soft", "hard", "state"),
    [
        (65536, 65536, "ok"),
        (-1, -1, "ok"),
        (1024, 1048576, "warning"),
        (20000, 20000, "warning"),
        (1024, 2048, "error"),
    ],
)
def test_open_files(soft, hard, state):
    (line,) = machine.open_files(soft, hard, 32768)
    assert line.state == state
    assert state == "ok" or "32768" in line.text


def test_processes_and_locked_memory():
    assert states(machine.processes(None, 16384), "processes") == ["ok"]
    assert states(machine.processes(4096, 16384), "processes") == ["warning"]
    assert states(machine.locked_memory(None, needed=True), "locked memory") == ["ok"]
    assert states(machine.locked_memory(65536, needed=True), "locked memory") == ["warning"]
    assert states(machine.locked_memory(65536, needed=False), "locked memory") == ["ok"]


def test_a_container_limits_processes_too(fake):
    fake.put("sys/fs/cgroup/pids.max", "500\n")
    line = only(machine._limits(fake.node("qwen3/grpo_8b_vllm_a2")), "processes")
    assert line.state == "warning"
    assert "=500" in line.text


@pytest.mark.parametrize(
    ("free", "ipc", "state"),
    [
        (32 * GIB, False, "ok"),
        (32 * GIB - 1, False, "error"),
        (64 * 2**20, None, "warning"),
        (64 * 2**20, True, "ok"),
    ],
)
def test_a_bucket_for_each_rank_of_the_node(free, ipc, state):
    (line,) = machine.weight_buckets(free, 2048, 16, ipc)
    assert line.state == state
    assert "16 ranks x 2048 MiB = 32.0 GiB" in line.text or ipc


def test_the_rollout_decides_whether_dev_shm_is_used(fake):
    (fake.root / "dev").mkdir(exist_ok=True)
    (fake.root / "dev" / "shm").mkdir()
    assert "another way" in only(machine._shm(fake.node("qwen3/grpo_30b_a3b_sglang_a3")), "/dev/shm").text
    assert only(machine._shm(fake.node()), "/dev/shm").state == "unseen"


def test_a_checkpoint_of_glm_5_2_by_its_parts():
    size = machine.checkpoint_size(of("glm5_2/grpo_a3_512"))
    assert size.bytes == 14 * 743_377_000_704
    assert size.formula.startswith("2 x 743.4e9 model + 12 x 743.4e9 optimizer = ")
    whole = machine.checkpoint_size(of("glm5_2/grpo_a3_512", "checkpoint.contents=[hf_model]"))
    assert whole.bytes >= 2 * 753_329_940_480
    assert "hf_model" in whole.formula


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["trainer.steps=30", "checkpoint.save_freq=10"], 3),
        (["trainer.steps=25", "checkpoint.save_freq=10"], 3),
        (["trainer.steps=30", "checkpoint.save_freq=1", "checkpoint.keep=2"], 3),
        (["trainer.steps=2", "checkpoint.save_freq=1", "checkpoint.keep=5"], 2),
    ],
)
def test_checkpoints_that_stand_at_once(overrides, kept):
    assert machine.checkpoints_kept(of("quickstart/grpo", *overrides).recipe) == kept


def test_checkpoints_without_an_end():
    saving = ("glm5_2/grpo_a3_512", "checkpoint.save_freq=10")
    assert machine.checkpoints_kept(of(*saving).recipe) is None
    assert machine.checkpoints_kept(of(*saving, "checkpoint.keep=2").recipe) == 3


@pytest.mark.parametrize(
    ("free", "kept", "nodes", "state"),
    [(99, 1, 1, "error"), (100, 1, 1, "ok"), (299, 3, 1, "warning"), (300, 3, 1, "ok"), (1000, None, 1, "warning")]
    + [(24, 1, 4, "error"), (25, 1, 4, "warning")],
)
def test_room_for_checkpoints(free, kept, nodes, state):
    (line,) = machine.room(free, Path("/checkpoints"), machine.Size(100, "formula"), kept, nodes)
    assert line.state == state
    assert "formula" in line.text


def test_nothing_saved_needs_no_room_and_a_missing_folder_is_looked_up_to_one_that_exists(fake):
    line = only(machine._disk(fake.node("quickstart/grpo")), "disk")
    assert line.state == "ok"
    assert " free at /;" in line.text
    saving = fake.node("quickstart/grpo", "checkpoint.save_freq=10")
    assert "2 x" in only(machine._disk(saving), "disk").text


def test_offload_of_glm_5_2_on_32_nodes():
    glm = of("glm5_2/grpo_a3_512")
    size = machine.offload_size(glm)
    optimizer = 12 * 743_377_000_704 // 32
    # Experts: 75 layers x 256 x three matrices of 6144 x 2048, over ETP 1 x EP 64 x PP 8; the rest over TP 8 x PP 8.
    experts = 75 * 256 * 3 * 6144 * 2048
    rank = experts / (64 * 8) + (743_377_000_704 - experts) / (8 * 8)
    assert size.bytes == pytest.approx(optimizer + 2 * 2 * rank * 16, rel=1e-6)
    assert "for the reference" in size.formula


def test_what_is_not_offloaded_takes_nothing():
    nothing = machine.offload_size(
        of("quickstart/grpo", "memory.optimizer_offload=false", "memory.param_offload=false")
    )
    assert nothing.bytes == 0
    (line,) = machine.host(100, 50, nothing, of("quickstart/grpo").recipe)
    assert line.state == "ok"


@pytest.mark.parametrize(
    ("everything", "available", "state"), [(99, 99, "error"), (200, 99, "warning"), (200, 100, "ok")]
)
def test_host_memory(everything, available, state):
    (line,) = machine.host(everything, available, machine.Size(100, "formula"), of("glm5_2/grpo_a3_512").recipe)
    assert line.state == state
    assert "formula" in line.text


def test_a_container_has_less_memory_than_its_host(fake):
    fake.put("sys/fs/cgroup/memory.max", f"{256 * 2**20}\n")
    fake.put("sys/fs/cgroup/memory.current", f"{200 * 2**20}\n")
    assert machine.host_memory(fake.node()) == (256 * 2**20, 56 * 2**20)
    fake.put("sys/fs/cgroup/memory.max", "max\n")
    assert machine.host_memory(fake.node())[0] > 256 * 2**20


def test_fully_async_counts_the_node_that_has_more_devices(fake):
    node = fake.node("glm5_2/fully_async", "devices=8")
    assert node.ranks == 16
    assert node.several
    assert not replace(node, subject=None).several
