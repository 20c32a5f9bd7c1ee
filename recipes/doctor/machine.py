"""Limits, shared memory, disk and host memory, against what the recipe will ask of one node."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes import models
from recipes.doctor import versions
from recipes.doctor.lines import Line, Section, gib
from recipes.doctor.node import Node
from recipes.preflight import Subject
from recipes.schema import Recipe

SECTION = Section("machine")

# Open files: what Ascend's published instructions for several nodes set, and what Ray itself recommends (it complains
# below). Ray raises the soft limit to the hard one where it starts by itself.
OPEN_FILES = {"npu": 32768, "cpu": 8192}

# Processes and threads of the user: sixteen ranks, as many rollout processes and Ray's workers with their pools of
# threads. Our estimate; a container's pids.max counts as well.
PROCESSES = {"npu": 16384, "cpu": 4096}

# What verl takes when the recipe leaves them to it (verl 0.9.1: rollout.yaml, actor.yaml).
VERL_BUCKET_MB = 2048
VERL_CONTENTS = ("model", "optimizer", "extra")

# Bytes a parameter. Weights are bf16; the optimizer keeps fp32 weights and two fp32 moments, once in the whole run
# (Megatron's distributed optimizer), on the host while it is off the device and in a checkpoint as well.
WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12


def look(node: Node) -> Iterator[Line]:
    """Yield what is to be said of limits, /dev/shm, disk and host memory."""
    yield from _limits(node)
    yield from _shm(node)
    yield from _disk(node)
    yield from _memory(node)


# ----------------------------------------------------------------------------------------------------------- limits


def _limits(node: Node) -> Iterator[Line]:
    device = "cpu" if node.without_npu else "npu"
    limits = {name: resource.getrlimit(number) for name, number in _RESOURCES.items()}
    soft, hard = limits["nofile"]
    yield from open_files(soft, hard, OPEN_FILES[device])
    pids = (node.read("sys/fs/cgroup/pids.max") or "").strip()
    allowed = [n for n in (_plain(limits["nproc"][0]), int(pids) if pids.isdigit() else None) if n is not None]
    yield from processes(min(allowed) if allowed else None, PROCESSES[device])
    yield from locked_memory(_plain(limits["memlock"][0]), needed=not node.without_npu)


def open_files(soft: int, hard: int, wanted: int) -> Iterator[Line]:
    """Judge the limit of open files (`ulimit -n`); -1 or RLIM_INFINITY is no limit."""
    low, high = _plain(soft), _plain(hard)
    if low is None or low >= wanted:
        yield SECTION.ok("open files", f"{low or 'no limit'}")
        return
    beyond = high is None or high >= wanted
    remedy = f"Run `ulimit -n {wanted}` before the launch and before `ray start`."
    yield SECTION.fault(
        "open files",
        {"ulimit -n": low},
        f"a run opens more; {wanted} are wanted{'' if beyond else f', and {high} is the most this shell may set'}.",
        remedy if beyond else f"Raise it where the container or login is set up (--ulimit nofile={wanted}).",
        severity="warning" if beyond or low >= 4096 else "error",
        noticed="some time into the run: too many open files",
        source="Ascend's instructions for several nodes; Ray's own recommendation",
    )


def processes(limit: int | None, wanted: int) -> Iterator[Line]:
    """Judge the limit of processes and threads (`ulimit -u`, pids.max of the container); None is no limit."""
    if limit is None or limit >= wanted:
        yield SECTION.ok("processes", f"{limit or 'no limit'}")
        return
    yield SECTION.fault(
        "processes",
        {"ulimit -u or pids.max": limit},
        f"ranks, rollout and Ray together may start about {wanted} threads.",
        "Raise it (--ulimit nproc, --pids-limit of the container).",
        severity="warning",
        noticed="engine or rollout start: cannot start a thread",
        source="our estimate for one node",
    )


def locked_memory(limit: int | None, *, needed: bool) -> Iterator[Line]:
    """Judge the limit of locked memory in bytes (`ulimit -l`); None is no limit."""
    if limit is None:
        yield SECTION.ok("locked memory", "no limit")
    elif not needed:
        yield SECTION.ok("locked memory", f"{gib(limit)}; a run without an accelerator locks none")
    else:
        yield SECTION.fault(
            "locked memory",
            {"ulimit -l": gib(limit)},
            "offloading and weight transfers may pin more host memory than that.",
            "Start the container with --ulimit memlock=-1.",
            severity="warning",
            noticed="first offload or weight sync, if at all",
            source="usual setting of Ascend containers",
        )


_RESOURCES = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}


def _plain(limit: int) -> int | None:
    return None if limit in (-1, resource.RLIM_INFINITY) else limit


# ---------------------------------------------------------------------------------------------------- shared memory


def _shm(node: Node) -> Iterator[Line]:
    place = node.file("dev/shm")
    try:
        usage = shutil.disk_usage(place)
    except OSError as fault:
        yield SECTION.unseen("/dev/shm", f"it cannot be asked ({fault.strerror})")
        return
    said = f"{gib(usage.free)} of {gib(usage.total)} free"
    if node.subject is None:
        yield SECTION.unseen("/dev/shm", f"no recipe says how much is wanted ({said})")
        return
    recipe = node.subject.recipe
    if recipe.rollout.engine != "vllm":
        yield SECTION.ok("/dev/shm", f"{said}; rollout.engine={recipe.rollout.engine} gets its weights another way")
        return
    yield from weight_buckets(
        usage.free, recipe.rollout.update_bucket_mb or VERL_BUCKET_MB, node.ranks, versions.ipc(node)
    )


def weight_buckets(free: int, bucket_mb: int, ranks: int, ipc: bool | None) -> Iterator[Line]:
    """Judge the free bytes of /dev/shm. `bucket_mb`: MiB, one a rank; `ipc`: whether verl needs none there."""
    need = bucket_mb * 2**20 * ranks
    formula = f"{ranks} ranks x {bucket_mb} MiB = {gib(need)}"
    if free >= need:
        yield SECTION.ok("/dev/shm", f"{gib(free)} free; weight sync needs at most {formula}")
    elif ipc:
        yield SECTION.ok("/dev/shm", f"{gib(free)} free; driver and CANN pass weights in device memory instead")
    else:
        unsure = "may need" if ipc is None else "needs"
        yield SECTION.fault(
            "/dev/shm",
            {"rollout.update_bucket_mb": bucket_mb},
            f"weight sync {unsure} {formula} in /dev/shm, and {gib(free)} are free"
            + ("." if ipc is False else "; whether driver and CANN pass weights in device memory is not known here."),
            f"Start the container with --shm-size={-(-need // 2**30) + 1}g, or make the buckets smaller; "
            f"a driver from {versions.IPC_DRIVER} with CANN from {versions.IPC_CANN} on needs none.",
            severity="warning" if ipc is None else "error",
            noticed="first weight sync: bus error",
            source="verl 0.9.1, BucketedWeightSender",
        )


# ------------------------------------------------------------------------------------------------------------- disk


@dataclass(frozen=True)
class Size:
    """An estimate in bytes and the formula it comes from."""

    bytes: int
    formula: str


def checkpoint_size(subject: Subject) -> Size:
    """Estimate one whole checkpoint, of all ranks together.

    Weights 2 bytes a parameter (model, and hf_model with the MTP layers once more), optimizer 12: fp32 weights and two
    moments. Random states and schedules (extra) are too small to count.
    """
    counted, recipe = models.parameters(subject.model), subject.recipe
    contents = tuple(recipe.checkpoint.contents) or VERL_CONTENTS
    parts = []
    if "model" in contents:
        parts.append((f"{WEIGHT_BYTES} x {_billions(counted.total)} model", WEIGHT_BYTES * counted.total))
    if "hf_model" in contents:
        parts.append((f"{WEIGHT_BYTES} x {_billions(counted.checkpoint)} hf_model", WEIGHT_BYTES * counted.checkpoint))
    if "optimizer" in contents:
        parts.append((f"{OPTIMIZER_BYTES} x {_billions(counted.total)} optimizer", OPTIMIZER_BYTES * counted.total))
    total = sum(size for _, size in parts)
    return Size(total, f"{' + '.join(text for text, _ in parts) or 'nothing large'} = {gib(total)}")


def checkpoints_kept(recipe: Recipe) -> int | None:
    """Return how many checkpoints stand at once at most, the one being written included. None: without end."""
    steps, every, keep = recipe.trainer.steps, recipe.checkpoint.save_freq, recipe.checkpoint.keep
    written = None if steps is None else max(1, -(-steps // every))
    if keep is None:
        return written
    return keep + 1 if written is None else min(keep + 1, written)


def _disk(node: Node) -> Iterator[Line]:
    if node.subject is None:
        free, place = _free(node.folder)
        yield SECTION.unseen("disk", f"no recipe says what is written ({gib(free)} free at {place})")
        return
    recipe = node.subject.recipe
    free, place = _free(Path(recipe.checkpoint.directory if recipe.run_dir else node.folder))
    if recipe.checkpoint.save_freq <= 0:
        yield SECTION.ok(
            "disk", f"{gib(free)} free at {place}; checkpoint.save_freq={recipe.checkpoint.save_freq} saves none"
        )
        return
    size, kept, nodes = checkpoint_size(node.subject), checkpoints_kept(recipe), recipe.nodes
    yield from room(free, Path(recipe.checkpoint.directory), size, kept, nodes)


def room(free: int, place: Path, size: Size, kept: int | None, nodes: int) -> Iterator[Line]:
    """Judge `free` bytes at `place` for checkpoints of `size`, `kept` at once (None: no end), written by `nodes`.

    Where nodes do not share the directory each writes its part, so only less than a node's part is surely too little.
    """
    keys = {"checkpoint.directory": place}
    each = f"one checkpoint is about {size.formula}"
    source = "estimate: bytes a parameter times parameters, weights bf16, optimizer fp32"
    if free < size.bytes / nodes:
        part = f", {gib(size.bytes / nodes)} of it on each of {nodes} nodes" if nodes > 1 else ""
        yield SECTION.fault(
            "disk",
            keys,
            f"{each}{part}, and {gib(free)} are free.",
            "Choose another directory, or save less (checkpoint.contents).",
            noticed="the first checkpoint",
            source=source,
        )
    elif kept is None or free < size.bytes * kept:
        all_of_them = (
            "without checkpoint.keep they add up without end"
            if kept is None
            else (f"{kept} of them are {gib(size.bytes * kept)}")
        )
        yield SECTION.fault(
            "disk",
            keys,
            f"{each}; {all_of_them}, and {gib(free)} are free.",
            "Set checkpoint.keep (2 at least), or choose another directory.",
            severity="warning",
            noticed="a later checkpoint",
            source=source,
        )
    else:
        yield SECTION.ok("disk", f"{gib(free)} free at {place}; {each}, {kept} at once at most")


def _free(place: Path) -> tuple[int, Path]:
    """Free bytes where `place` is or will be: its nearest folder that exists."""
    place = place.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free, place


# ------------------------------------------------------------------------------------------------------ host memory


def offload_size(subject: Subject) -> Size:
    """Estimate the least host memory a node needs for what the recipe keeps there, in bytes.

    Optimizer state stands once in the run, so a node has 12 bytes x parameters / nodes. Weights stand on every rank as
    its own part of the model (dense over tensor x pipeline, experts over expert tensor x expert x pipeline), once for
    the policy and once more for a reference policy. Gradients and copies in flight come on top.
    """
    recipe, facts, p = subject.recipe, subject.model, subject.recipe.parallel
    total = models.parameters(facts).total
    parts = []
    on_host = str(recipe.optimizer.options.get("optimizer_cpu_offload", "")).lower() == "true"
    if recipe.memory.optimizer_offload or on_host:
        size = OPTIMIZER_BYTES * total // recipe.nodes
        parts.append((f"optimizer {OPTIMIZER_BYTES} x {_billions(total)} / {recipe.nodes} nodes", size))
    if recipe.memory.param_offload:
        experts = sum(t.elements for t in models.tensors(facts) if t.expert and t.part == "model")
        dense_ways = p.tensor * p.pipeline
        expert_ways = (p.expert_tensor or p.tensor) * p.expert * p.pipeline
        on_rank = (total - experts) / dense_ways + experts / expert_ways
        copies = 2 if recipe.algorithm.kl_loss_coef is not None else 1
        size = int(WEIGHT_BYTES * copies * on_rank * subject.devices_per_node)
        text = f"weights {WEIGHT_BYTES} x {_billions(on_rank)} a rank x {subject.devices_per_node} ranks"
        parts.append((f"{text}{' x 2 for the reference' if copies == 2 else ''}", size))
    total_bytes = sum(size for _, size in parts)
    return Size(total_bytes, f"{' + '.join(text for text, _ in parts)} = {gib(total_bytes)}")


def host_memory(node: Node) -> tuple[int, int]:
    """Return (all, available) bytes of host memory; a container's limit counts where it is lower."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = ((node.read(f"sys/fs/cgroup/memory.{name}") or "").strip() for name in ("max", "current"))
    if not limit.isdigit() or int(limit) >= memory.total:
        return memory.total, memory.available
    left = int(limit) - (int(used) if used.isdigit() else 0)
    return int(limit), max(0, min(memory.available, left))


def _memory(node: Node) -> Iterator[Line]:
    everything, available = host_memory(node)
    said = f"{gib(available)} of {gib(everything)} available"
    if node.subject is None:
        yield SECTION.unseen("host memory", f"no recipe says how much is wanted ({said})")
        return
    if node.without_npu:
        yield SECTION.unseen("host memory", f"offloading means nothing where the host is the device ({said})")
        return
    yield from host(everything, available, offload_size(node.subject), node.subject.recipe)


def host(everything: int, available: int, need: Size, recipe: Recipe) -> Iterator[Line]:
    """Judge host memory in bytes against what offloading keeps there at least."""
    if not need.bytes:
        yield SECTION.ok("host memory", f"{gib(available)} of {gib(everything)} available; nothing is offloaded")
        return
    if available >= need.bytes:
        yield SECTION.ok("host memory", f"{gib(available)} available; offloading takes at least {need.formula}")
        return
    whole = everything < need.bytes
    yield SECTION.fault(
        "host memory",
        {
            "memory.optimizer_offload": recipe.memory.optimizer_offload,
            "memory.param_offload": recipe.memory.param_offload,
        },
        f"offloading takes at least {need.formula} on this node, and "
        + (f"it has {gib(everything)}." if whole else f"{gib(available)} of {gib(everything)} are available."),
        "Take more nodes, or offload less." if whole else "End what else uses it, or raise the container's limit.",
        severity="error" if whole else "warning",
        noticed="first offload: the kernel ends a process",
        source="estimate: bytes a parameter times parameters; Megatron's distributed optimizer",
    )


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f}e9" if count >= 1e8 else f"{count / 1e6:.2f}e6"
