"""npu-smi and Ascend's version files: what they print, read into numbers. Nothing here judges.

`npu-smi info` prints two tables. In the first a chip takes two rows: NPU, name, health and power, then chip, (on
Atlas A3 the physical device id,) bus and memory. The second lists processes by NPU and chip. Widths differ by release,
so cells are split at `|` and never by column.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.doctor import child
from recipes.doctor.node import Node
from recipes.errors import RecipeError
from recipes.stack.probe import CANN_VERSION

# Seconds for npu-smi to answer. It takes one or two on a busy node; a driver that hangs never answers.
ASK_SECONDS = 30

# Where the run packages of driver, firmware and CANN install themselves unless told otherwise.
ASCEND = "usr/local/Ascend"

# The variables CANN's set_env.sh sets, in the order its own libraries and verl ask for them.
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


@dataclass(frozen=True)
class Chip:
    """One device as `npu-smi info` shows it. `device` counts from 0 in its order, as ASCEND_RT_VISIBLE_DEVICES does.

    HBM is in MiB, which npu-smi calls MB; None where the device shows none.
    """

    npu: int
    chip: int
    device: int
    name: str
    health: str
    hbm_used: int | None
    hbm_total: int | None


@dataclass(frozen=True)
class Process:
    """A process on a device; its memory in MiB. Seen from a container the name may be empty."""

    npu: int
    chip: int
    pid: int
    name: str
    memory: int


@dataclass(frozen=True)
class Info:
    """All of `npu-smi info`. `version` is npu-smi's own, which is released with the driver."""

    version: str
    chips: tuple[Chip, ...]
    processes: tuple[Process, ...]

    def of(self, process: Process) -> Chip | None:
        """Return the device a process is on, or None when the table does not list it."""
        return next((c for c in self.chips if (c.npu, c.chip) == (process.npu, process.chip)), None)


@dataclass(frozen=True)
class Installed:
    """A version and the file or command that tells it."""

    version: str
    place: str


def parse_info(text: str) -> Info:
    """Read the output of `npu-smi info`.

    Raises RecipeError when it has no device row: an error message of the tool, or a layout nobody has seen yet.
    """
    version = re.search(r"npu-smi\s+(\S+)", text)
    chips: list[Chip] = []
    processes: list[Process] = []
    upper: tuple[int, str, str] | None = None
    has_hbm = "HBM-Usage" in text
    for cells in _rows(text):
        device = re.fullmatch(r"(\d+)\s+(\S.*)", cells[0])
        lower = re.fullmatch(r"(\d+)(?:\s+(\d+|NA|-))?", cells[0])
        if len(cells) == 4 and cells[1].isdigit() and lower and lower[2] and lower[2].isdigit():
            memory = int(cells[3]) if cells[3].isdigit() else 0
            processes.append(Process(int(lower[1]), int(lower[2]), int(cells[1]), cells[2], memory))
        elif upper is None and device and len(cells) >= 3 and re.fullmatch(r"[A-Za-z]+", cells[1]):
            upper = (int(device[1]), device[2], cells[1])
        elif upper is not None and lower and len(cells) >= 3:
            used, total = _last_pair(cells[-1]) if has_hbm else (None, None)
            chips.append(Chip(upper[0], int(lower[1]), len(chips), upper[1], upper[2], used, total))
            upper = None
        else:
            upper = None
    if not chips:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise RecipeError(f"npu-smi info lists no device; it says: {first[:200]}")
    return Info(version[1] if version else "", tuple(chips), tuple(processes))


def parse_board(text: str) -> dict[str, str]:
    """Read `Key : value` lines, as `npu-smi info -t board` prints them. `NA` and empty values are left out."""
    found = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip() and value.strip() != "NA":
            found.setdefault(key.strip(), value.strip())
    return found


def parse_version_info(text: str) -> dict[str, str]:
    """Read `key=value` lines, as version.info and *_install.info hold them. Keys in lower case; the first one holds."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key.strip().lower(), value.strip())
    return found


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 25.3.rc1.2 is (25, 3), 7.7.0.1.231 is (7, 7, 0, 1, 231)."""
    head = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, head[0].split("."))) if head else ()


def intervals(text: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Read `[7.0.0,7.5.99],[8.0.0,8.9.9]`, the firmware a driver names in compatible_version_fw, ends included."""
    return [(numbers(low), numbers(high)) for low, high in re.findall(r"\[([\d.]+),([\d.]+)\]", text)]


def ask(node: Node, *words: str) -> str:
    """Return what `npu-smi` prints for `words`.

    Raises RecipeError when it is not on the run's PATH, does not answer within ASK_SECONDS, or fails.
    """
    if words in node.answers:
        return node.answers[words]
    path = node.environment.get("PATH", "")
    # The driver's package puts it there, and a container's PATH may lack it.
    program = shutil.which("npu-smi", path=path) or _executable(node.file("usr/local/sbin/npu-smi"))
    if program is None:
        raise RecipeError("npu-smi is neither on PATH nor in usr/local/sbin")
    ended = child.run([program, *words], environment=node.environment, deadline=ASK_SECONDS)
    if ended.code is None:
        raise RecipeError(f"npu-smi {' '.join(words)} did not answer within {ASK_SECONDS} s")
    if ended.code != 0:
        raise RecipeError(f"npu-smi {' '.join(words)} ended with exit code {ended.code}: {ended.last}")
    node.answers[words] = ended.output
    return ended.output


def driver(node: Node) -> tuple[Installed | None, dict[str, str]]:
    """Return the installed driver's version and all its version.info says, or None and {}."""
    return _component(node, "driver")


def firmware(node: Node) -> tuple[Installed | None, dict[str, str]]:
    """Return the version of the firmware package on the host, or None and {}: a container rarely has it mounted."""
    return _component(node, "firmware")


def cann(node: Node) -> dict[str, Installed | None]:
    """Return the CANN each variable of CANN_VARIABLES points at, None where its folder tells no version.

    Where no variable is set, what stands in the usual places is found under the name of its folder.
    """
    named = {v: node.environment[v] for v in CANN_VARIABLES if node.environment.get(v)}
    if named:
        return {variable: _cann_in(Path(home)) for variable, home in named.items()}
    root = node.file(ASCEND)
    homes = [root / "ascend-toolkit" / "latest", root / "cann", *sorted(root.glob("cann-*"), reverse=True)]
    told = {str(home): _cann_in(home) for home in homes}
    return {place: installed for place, installed in told.items() if installed}


def _component(node: Node, name: str) -> tuple[Installed | None, dict[str, str]]:
    path = f"{ASCEND}/{name}/version.info"
    text = node.read(path)
    told = parse_version_info(text) if text else {}
    version = told.get("version", "")
    return (Installed(version, str(node.file(path))), told) if version else (None, told)


def _cann_in(home: Path) -> Installed | None:
    """The installer's own record first: version.info of a part may carry a build number where the release has RC."""
    for pattern in ("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg"):
        for path in sorted(home.glob(pattern)):
            if found := _version_in(path):
                return found
    for name in ("toolkit/version.info", "version.info", "compiler/version.info", "opp/version.info"):
        if found := _version_in(home / name):
            return found
    return None


def _version_in(path: Path) -> Installed | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    told = parse_version_info(text)
    plain = (re.match(r"\d[\w.-]*", told.get(key, "")) for key in ("version_dir", "version"))
    version = next((found[0] for found in plain if found), "")
    if not version and (listed := CANN_VERSION.search(text)):
        version = listed[1]
    return Installed(version, str(path)) if version else None


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("|") and stripped.endswith("|"):
            yield [cell.strip() for cell in stripped[1:-1].split("|")]


def _last_pair(cell: str) -> tuple[int | None, int | None]:
    pairs = re.findall(r"(\d+)\s*/\s*(\d+)", cell)
    return (int(pairs[-1][0]), int(pairs[-1][1])) if pairs else (None, None)


def _executable(path: Path) -> str | None:
    return shutil.which(str(path))
