"""Driver, firmware and CANN: are they there, do they fit each other, and are they what the stack wants?"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

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


def ipc(node: Node) -> bool | None:
    """Say whether driver and CANN are new enough that verl needs no /dev/shm for weights. None: not known here."""
    board, _ = _board(node)
    installed, _ = npu.driver(node)
    driver = board.get("Software Version") or (installed.version if installed else "")
    found = [one.version for one in npu.cann(node).values() if one]
    if not driver or not found:
        return None
    new_driver, new_cann = _at_least(driver, IPC_DRIVER), _at_least(found[0], IPC_CANN)
    return None if new_driver is None or new_cann is None else new_driver and new_cann


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
    fits = _at_least(version, oldest) if oldest else None
    if fits is None:
        which = (
            f"no table tells which drivers CANN {node.stack.cann} runs on" if not oldest else f"{version} is no version"
        )
        yield SECTION.unseen("driver for CANN", which)
    elif fits:
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


def _at_least(version: str, oldest: str) -> bool | None:
    """Compare two versions; None when one of them is none that can be compared."""
    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        return npu.numbers(version) >= npu.numbers(oldest) if npu.numbers(version) else None
