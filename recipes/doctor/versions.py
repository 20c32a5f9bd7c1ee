"""Driver, firmware and CANN: are they there, do they fit each other, and are they what the stack wants?"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from recipes.doctor import npu
from recipes.doctor.lines import Line, Section
from recipes.doctor.node import Node
from recipes.errors import RecipeError

SECTION = Section("versions")

# The oldest driver (Ascend HDK) each CANN release runs on: table "CANN and Ascend HDK Version Compatibility" of the
# release notes of CANN 9.1.0, and of 8.5.0 for its own line.
OLDEST_DRIVER = {(8, 5): "25.0", (9, 0): "25.0", (9, 1): "25.2"}
TABLE = "release notes of CANN 9.1.0 and 8.5.0, version compatibility"

# From these on, verl hands weights to the rollout in device memory; before, through /dev/shm (verl 0.9.1,
# ServerAdapter of vLLM).
IPC_DRIVER, IPC_CANN = "25.3.rc1", "8.3.rc1"


def look(node: Node) -> Iterator[Line]:
    """Yield what is to be said of npu-smi, driver, firmware and CANN."""
    if node.without_npu:
        yield SECTION.unseen("driver, firmware, CANN", "the recipe is for a machine without an accelerator")
        return
    board, why = _board(node)
    yield from _driver(node, board, why)
    yield from _firmware(node, board)
    yield from _cann(node)
    yield from _what_verl_asks(node)


def ipc(node: Node) -> bool | None:
    """Say whether driver and CANN are new enough that verl needs no /dev/shm for weights. None: not known here."""
    board, _ = _board(node)
    installed, _ = npu.driver(node)
    driver = board.get("Software Version") or (installed.version if installed else "")
    found = [one.version for one in npu.cann(node).values() if one]
    if not driver or not found:
        return None
    return _at_least(driver, IPC_DRIVER) and _at_least(found[0], IPC_CANN)


def _board(node: Node) -> tuple[dict[str, str], str]:
    """Ask the first NPU that npu-smi lists: in a container that need not be NPU 0."""
    try:
        first = npu.parse_info(npu.ask(node, "info")).chips[0].npu
        return npu.parse_board(npu.ask(node, "info", "-t", "board", "-i", str(first))), ""
    except RecipeError as fault:
        return {}, str(fault)


def _driver(node: Node, board: dict[str, str], why: str) -> Iterator[Line]:
    installed, _ = npu.driver(node)
    running = board.get("Software Version", "")
    if not running and not installed:
        yield SECTION.unseen("driver", why or "neither npu-smi nor version.info of the driver tells a version")
        return
    version = running or installed.version
    if running and installed and running.lower() != installed.version.lower():
        yield SECTION.fault(
            "driver",
            {"npu-smi": running, installed.place: installed.version},
            "the driver that runs is another than the one whose files are here.",
            "Mount the host's driver folder into the container, or reboot the node after an installation.",
            severity="warning",
            noticed="first use of a device",
            source="npu-smi info -t board",
        )
    else:
        yield SECTION.ok(
            "driver", f"{version}{'' if running else f' by {installed.place}; npu-smi did not confirm it'}"
        )
    wanted = npu.numbers(node.stack.cann if node.stack else "")
    if not wanted:
        yield SECTION.unseen("driver for CANN", "no recipe says which CANN it is for")
        return
    oldest = OLDEST_DRIVER.get(wanted[:2])
    # The table knows lines such as 25.0.X, so only these two numbers count, and a release candidate is of its line.
    if not oldest or not npu.numbers(version):
        which = (
            f"no table tells which drivers CANN {node.stack.cann} runs on" if not oldest else f"{version} is no version"
        )
        yield SECTION.unseen("driver for CANN", which)
    elif npu.numbers(version)[:2] >= npu.numbers(oldest):
        yield SECTION.ok("driver for CANN", f"CANN {node.stack.cann} runs on drivers from {oldest} on")
    else:
        yield SECTION.fault(
            "driver for CANN",
            {"driver": version, "stack": node.stack.name},
            f"CANN {node.stack.cann} runs on drivers from {oldest} on.",
            "Update driver and firmware on the host (a container uses the host's).",
            noticed="import torch_npu, or the first operator",
            source=TABLE,
        )


def _firmware(node: Node, board: dict[str, str]) -> Iterator[Line]:
    on_host, _ = npu.firmware(node)
    _, told = npu.driver(node)
    version = board.get("Firmware Version") or (on_host.version if on_host else "")
    said = board.get("Compatibility", "")
    if said and said.upper() != "OK":
        yield SECTION.fault(
            "firmware",
            {"npu-smi": f"Compatibility {said}", "firmware": version or "unknown"},
            "driver and firmware do not fit each other, says the driver itself.",
            "Install the firmware of the driver's release, then reboot.",
            noticed="first use of a device, or never",
            source="npu-smi info -t board",
        )
        return
    allowed = npu.intervals(told.get("compatible_version_fw", ""))
    if not version:
        yield SECTION.unseen("firmware", "neither npu-smi nor version.info of the firmware tells a version")
    elif allowed and not any(low <= npu.numbers(version)[: len(low)] <= high for low, high in allowed):
        yield SECTION.fault(
            "firmware",
            {"firmware": version, "compatible_version_fw": told["compatible_version_fw"]},
            "the driver does not name this firmware among those it works with.",
            "Install the firmware of the driver's release, then reboot.",
            noticed="first use of a device, or never",
            source="version.info of the driver",
        )
    elif said or allowed:
        yield SECTION.ok("firmware", f"{version}, which fits the driver")
    else:
        yield SECTION.unseen("firmware", f"nothing here tells whether {version} fits the driver")


def _cann(node: Node) -> Iterator[Line]:
    found = npu.cann(node)
    set_here = {v for v in npu.CANN_VARIABLES if node.environment.get(v)}
    wanted = node.stack.cann if node.stack else ""
    noticed, source = "import torch_npu", "CANN's set_env.sh"
    if not found and node.subject is None and not node.shows_npu:
        yield SECTION.unseen("CANN", "there is none, and neither a recipe nor a device asks for one")
        return
    if not found:
        yield SECTION.fault(
            "CANN",
            {"ASCEND_HOME_PATH": "unset"},
            "there is no CANN in the usual place and no variable that names another.",
            "Install the toolkit and source its set_env.sh, or start the stack's image.",
            noticed=noticed,
            source=source,
        )
        return
    if not set_here:
        place, one = next(iter(found.items()))
        yield SECTION.fault(
            "CANN",
            {"ASCEND_HOME_PATH": "unset"},
            f"CANN {one.version} is in {place}, and the environment does not name it.",
            "Source its set_env.sh in the shell that launches, and before `ray start` on every node.",
            noticed=noticed,
            source=source,
        )
        return
    versions = set()
    for variable, one in found.items():
        keys = {variable: node.environment[variable]}
        if one is None:
            yield SECTION.fault(
                "CANN",
                keys,
                "that folder has no file that tells a version of CANN.",
                "Source set_env.sh of an installed toolkit.",
                noticed=noticed,
                source=source,
            )
            continue
        versions.add(one.version)
        same = not wanted or one.version == wanted or one.version.startswith(f"{wanted}.")
        if not same:
            yield SECTION.fault(
                "CANN",
                {**keys, "stack": node.stack.name},
                f"CANN {one.version} is there, and the stack wants {wanted}.",
                f"Source set_env.sh of CANN {wanted}, or choose the stack that fits.",
                noticed="import torch_npu, or an operator that is missing",
                source="the stack's facts",
            )
        elif wanted:
            yield SECTION.ok("CANN", f"{one.version} by {variable}, as stack {node.stack.name} wants")
        else:
            yield SECTION.ok("CANN", f"{one.version} by {variable}; no recipe says which is wanted")
    if len(versions) > 1:
        yield SECTION.fault(
            "CANN",
            {v: node.environment[v] for v in found},
            f"the variables point at different versions ({', '.join(sorted(versions))}).",
            "Source one set_env.sh in a fresh shell.",
            noticed=noticed,
            source=source,
        )


def _what_verl_asks(node: Node) -> Iterator[Line]:
    """verl itself asks for the versions when a vLLM rollout starts, in its own way, and ends the run when it cannot."""
    if node.subject is None or node.subject.recipe.rollout.engine != "vllm" or not node.shows_npu:
        return
    if Version(node.stack.verl) < Version("0.9.1"):
        yield SECTION.unseen("npu-smi", f"how verl {node.stack.verl} asks for versions was never read by us")
        return
    noticed, source = "rollout start, after the model is loaded", "verl 0.9.1, get_npu_versions"
    ours = "the weight transfer of verl asks it for the driver's version"
    try:
        npus = {chip.npu for chip in npu.parse_info(npu.ask(node, "info")).chips}
    except RecipeError as fault:
        yield SECTION.fault(
            "npu-smi",
            {"npu-smi": fault},
            f"{ours}.",
            "Mount it into the container and put it on PATH.",
            noticed=noticed,
            source=source,
        )
        return
    if 1 not in npus and not node.environment.get("ASCEND_VISIBLE_DEVICES"):
        yield SECTION.fault(
            "npu-smi",
            {"ASCEND_VISIBLE_DEVICES": "unset"},
            f"{ours}, of NPU 1 or else of the first this variable names, and NPU 1 is not here.",
            f"Set it to an NPU that is, such as {min(npus)}.",
            noticed=noticed,
            source=source,
        )
    home = node.environment.get("ASCEND_HOME_PATH") or str(node.file(f"{npu.ASCEND}/ascend-toolkit/latest"))
    record = Path(home) / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    if record.is_file():
        yield SECTION.ok("npu-smi", "verl finds what it asks when the rollout starts")
    else:
        yield SECTION.fault(
            "CANN",
            {"ASCEND_HOME_PATH": node.environment.get("ASCEND_HOME_PATH", "unset")},
            f"verl reads CANN's version from {record}, and there is no such file.",
            "Point ASCEND_HOME_PATH at the folder of the toolkit that has it.",
            noticed=noticed,
            source=source,
        )


def _at_least(version: str, oldest: str) -> bool:
    """Compare as verl does, by two numbers and a third or a release candidate: 25.5.t3.b001 is 25.5."""
    plain = re.match(r"\d+\.\d+(?:\.(?:rc\d+|\d+))?", version.lower())
    return bool(plain) and Version(plain[0]) >= Version(oldest)
