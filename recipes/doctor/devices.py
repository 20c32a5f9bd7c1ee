"""The NPUs of the node: as many as the recipe wants, of its kind, healthy, visible, and with free memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from recipes.doctor import npu
from recipes.doctor.lines import Line, Section
from recipes.doctor.node import Node
from recipes.errors import RecipeError

SECTION = Section("devices")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

# A rollout takes this share of device memory when the recipe leaves it to verl (rollout.yaml of verl 0.9.1).
VERL_MEMORY_SHARE = 0.5

# An idle device shows about 3 GB in use (firmware and driver); a leftover process holds more. Of the samples in
# tests/doctor, the largest idle device shows 3,419 of 65,536 MB.
IDLE_SHARE = 0.08


def look(node: Node) -> Iterator[Line]:
    """Yield what is to be said of the node's devices. Sizes are those of npu-smi, MB meaning MiB."""
    present = sorted(node.file("dev").glob("davinci[0-9]*"))
    if node.without_npu:
        yield from _without(node, len(present))
        return
    try:
        info = npu.parse_info(npu.ask(node, "info"))
    except RecipeError as fault:
        if node.subject and not present:
            yield SECTION.fault(
                "devices",
                {"hardware": node.subject.recipe.hardware},
                "this machine shows no NPU (there is no /dev/davinci0).",
                "Run this on a node that has them; in a container, pass the devices in.",
                noticed="launch",
                source="Ascend's driver names its devices /dev/davinciN",
            )
        yield SECTION.unseen("devices, health, memory, processes", str(fault))
        yield from _visible(node, None)
        return
    yield from _kind(node, info)
    yield from _health(info)
    yield from _visible(node, info)
    yield from _memory(node, info)


def _without(node: Node, present: int) -> Iterator[Line]:
    if present:
        yield SECTION.fault(
            "devices",
            {"hardware": node.subject.recipe.hardware},
            f"the recipe is for a machine without an accelerator, and this one shows {present} NPUs.",
            "Choose a recipe for them: what makes verl train without an accelerator does nothing where one is.",
            severity="warning",
            noticed="engine start",
            source="recipes.cpu.adaptor",
        )
    else:
        yield SECTION.unseen("devices", "the recipe is for a machine without an accelerator")


def _kind(node: Node, info: npu.Info) -> Iterator[Line]:
    names = ", ".join(f"{count} x {name}" for name, count in Counter(c.name for c in info.chips).items())
    said = f"{len(info.chips)} ({names}), npu-smi {info.version or 'of unknown version'}"
    if node.subject is None:
        yield SECTION.ok("devices", said)
        return
    wanted, hardware = node.ranks, node.subject.recipe.hardware
    found = _hardware(info)
    if found and hardware in ("atlas_a2", "atlas_a3") and found != hardware:
        yield SECTION.fault(
            "kind",
            {"hardware": hardware},
            f"npu-smi shows {names}, which are of {found}.",
            f"Choose a recipe for {found}, or set hardware={found} and the layout with it.",
            noticed="import of operators built for the other kind",
            source="npu-smi: one chip 910B* an NPU on A2, two chips Ascend910 an NPU on A3",
        )
    elif not found:
        yield SECTION.unseen("kind", f"nothing tells A2 from A3 by the names {names}")
    if len(info.chips) < wanted:
        yield SECTION.fault(
            "devices",
            {"devices": wanted},
            f"this node shows {len(info.chips)} devices to npu-smi.",
            "Pass all devices into the container, or take fewer devices and another layout.",
            noticed="engine start: Ray has fewer devices than asked for",
            source="npu-smi info",
        )
    else:
        yield SECTION.ok("devices", f"{said}; the recipe uses {wanted}")
    sizes = [c.hbm_total for c in info.chips if c.hbm_total]
    facts = node.subject.hardware.memory_gb
    if sizes and facts and min(sizes) * 2**20 < facts * 1e9 * 0.95:
        yield SECTION.fault(
            "size",
            {"hardware": hardware},
            f"a device has {min(sizes)} MB of memory, and this kind of node is known to have {facts:g} GB.",
            "Shard the model over more devices, or take nodes with the larger devices.",
            severity="warning",
            noticed="model build or first step: out of memory",
            source="the hardware's facts",
        )


def _hardware(info: npu.Info) -> str | None:
    """Names alone deceive: a 910B3 is an A2. What tells an A3 is two chips called Ascend910 on one NPU."""
    two = max(Counter(c.npu for c in info.chips).values()) > 1
    names = {c.name for c in info.chips}
    if all(name.startswith("910B") for name in names) and not two:
        return "atlas_a2"
    return "atlas_a3" if names == {"Ascend910"} and two else None


def _health(info: npu.Info) -> Iterator[Line]:
    ill = [c for c in info.chips if c.health.upper() != "OK"]
    for chip in ill:
        yield SECTION.fault(
            "health",
            {f"device {chip.device} (NPU {chip.npu}, chip {chip.chip})": chip.health},
            "the driver does not call this device well.",
            f"See `npu-smi info -t health -i {chip.npu}`; leave it out of {VISIBLE}, or take the node out.",
            severity="warning" if chip.health.lower() == "warning" else "error",
            noticed="first collective, or a run that hangs",
            source="npu-smi info, column Health",
        )
    if not ill:
        yield SECTION.ok("health", f"npu-smi says OK of all {len(info.chips)}")


def visible(text: str) -> tuple[int, ...]:
    """Read a list of device ids. Raises ValueError saying what is no list: CANN takes 0,1,2 and no ranges."""
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,4}", word)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no device id; write them out, such as 0,1,2,3")
    ids = tuple(map(int, words))
    twice = [number for number, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"device {twice[0]} is named twice")
    return ids


def _visible(node: Node, info: npu.Info | None) -> Iterator[Line]:
    text = node.environment.get(VISIBLE)
    if text is None and info is None:
        yield SECTION.unseen("visible", f"{VISIBLE} is unset and no device could be listed")
        return
    if text is None:
        yield SECTION.ok("visible", f"{VISIBLE} is unset: every device is")
        return
    source, noticed, keys = "CANN: ASCEND_RT_VISIBLE_DEVICES", "engine start", {VISIBLE: text}
    try:
        ids = visible(text)
    except ValueError as fault:
        yield SECTION.fault("visible", keys, f"{fault}.", "Correct or unset it.", noticed=noticed, source=source)
        return
    if info and (beyond := [i for i in ids if i >= len(info.chips)]):
        yield SECTION.fault(
            "visible",
            keys,
            f"there is no device {', '.join(map(str, beyond))}; they are 0 to {len(info.chips) - 1}.",
            "Correct or unset it.",
            noticed=noticed,
            source=source,
        )
    elif node.subject and len(ids) < node.ranks:
        yield SECTION.fault(
            "visible",
            {**keys, "devices": node.ranks},
            f"{len(ids)} devices are visible, and the recipe uses {node.ranks} on a node.",
            f"Name {node.ranks}, unset it, or set devices={len(ids)} with a layout for them.",
            noticed="engine start: Ray has fewer devices than asked for",
            source=source,
        )
    else:
        wanted = f"; the recipe uses {node.ranks}" if node.subject else ""
        yield SECTION.ok("visible", f"{len(ids)} devices by {VISIBLE}{wanted}")


def _memory(node: Node, info: npu.Info) -> Iterator[Line]:
    for process in info.processes:
        chip = info.of(process)
        where = f"device {chip.device}" if chip else f"NPU {process.npu}, chip {process.chip}"
        yield SECTION.fault(
            "processes",
            {where: f"process {process.pid}{f' ({process.name})' if process.name else ''}"},
            f"it holds {process.memory} MB there.",
            "Wait for it, or end it if it is yours and left over.",
            severity="warning",
            noticed="rollout start: out of memory",
            source="npu-smi info",
        )
    if not info.processes:
        yield SECTION.ok("processes", "none is on any device")
    known = [c for c in info.chips if c.hbm_used is not None and c.hbm_total]
    if not known:
        yield SECTION.unseen("free memory", "npu-smi shows no HBM-Usage here")
        return
    try:
        ids = visible(node.environment.get(VISIBLE) or ",".join(str(c.device) for c in info.chips))
    except ValueError:
        ids = tuple(c.device for c in info.chips)
    asked = [c for c in known if c.device in ids]
    if node.subject is None:
        share, wanted = 1 - IDLE_SHARE, len(asked)
    else:
        set_share = node.subject.recipe.rollout.memory
        share, wanted = VERL_MEMORY_SHARE if set_share is None else set_share, node.ranks
    short = [c for c in asked if c.hbm_total - c.hbm_used < share * c.hbm_total]
    if asked and len(asked) - len(short) < wanted and short:
        named = ", ".join(f"{c.device}: {c.hbm_total - c.hbm_used} of {c.hbm_total}" for c in short[:8])
        more = f" and {len(short) - 8} more" if len(short) > 8 else ""
        key = {"rollout.memory": share} if node.subject else {"free": f"less than {share:.0%}"}
        yield SECTION.fault(
            "free memory",
            key,
            f"too few devices have that share free (MB, device: free of all): {named}{more}.",
            "End what is on them, or choose other devices.",
            severity="error" if node.subject else "warning",
            noticed="rollout start",
            source="vLLM refuses to start with less free memory than its share; idle devices show 3 GB in use",
        )
    elif asked:
        least = min(c.hbm_total - c.hbm_used for c in asked)
        yield SECTION.ok("free memory", f"{least} MB at least on each visible device")
