"""Is an exported checkpoint whole? Compares the names, shapes and dtypes of two safetensors checkpoints.

Only indexes and file headers are read, never a tensor, so 59,585 tensors of a 1.5 TB model take seconds and no torch.
An export exits 0 and prints a warning even when it dropped a whole shard: the files are the only witness.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from recipes.errors import RecipeError
from recipes.finding import Finding

INDEX = "model.safetensors.index.json"
# verl writes it when all ranks have written their parts, with the number of the step.
TRACKER = "latest_checkpointed_iteration.txt"

# The format's own limit (safetensors, MAX_HEADER_SIZE): a larger length is a damaged file, not a long header.
MAX_HEADER_BYTES = 100_000_000

# Bits a value takes; what is not listed (a dtype of the future) is compared by name alone.
BITS = dict.fromkeys(("F64", "I64", "U64"), 64) | dict.fromkeys(("F32", "I32", "U32"), 32)
BITS |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 16) | {"F4": 4}
BITS |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8)

# Floating types by (exponent bits, fraction bits): one with at least as many of both holds every value of the other.
FLOATS = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}

# Names shown of one kind; the JSON form has all of them.
SHOWN = 5


class Tensor(NamedTuple):
    """What a safetensors header says of one tensor, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class Fault(NamedTuple):
    """Something wrong with a checkpoint's files in themselves: the kind, the file or tensor, the reason in words."""

    kind: str
    subject: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its files describe it. `tensors` holds what a loader finds: listed, and in the file named."""

    path: Path
    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    faults: tuple[Fault, ...]
    config: Mapping[str, Any] = field(default_factory=dict)


class Change(NamedTuple):
    """A tensor whose shape or dtype is another in the export."""

    name: str
    source: str
    export: str


@dataclass(frozen=True)
class ExportCheck:
    """What differs between a checkpoint and its export. `passed`: nothing but MTP tensors is missing or wrong."""

    source: str
    export: str
    expected: int  # tensors of the source that are not MTP
    found: int  # of those, how many the export has
    mtp: int  # MTP tensors of the source
    missing: tuple[str, ...]
    missing_mtp: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: tuple[Change, ...]
    dtypes: tuple[Change, ...]
    lost_shards: tuple[str, ...]  # source files of which nothing (but MTP) has arrived
    source_faults: tuple[Fault, ...]
    export_faults: tuple[Fault, ...]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not any(f.severity == "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, ready for JSON."""
        tree = asdict(self)
        for key in ("shapes", "dtypes", "source_faults", "export_faults"):
            tree[key] = [item._asdict() for item in getattr(self, key)]
        return {"passed": self.passed, **tree}


def compare(source: str | Path, export: str | Path) -> ExportCheck:
    """Compare an exported checkpoint with the one the training started from.

    Both are directories of safetensors; `export` may also be a global_step_N directory that holds one. Only the tensors
    of multi-token-prediction layers, as the source's config.json declares them, may be missing.

    A dtype that changed between floating types is a warning: the export holds what was trained, in the precision it was
    trained in, and loads; wider is exact, narrower is rounded. Any other dtype change is an error. Tensors the source
    does not have are a warning: loaders skip them.

    Raises RecipeError when a directory is not there or the source holds no checkpoint; an export with nothing in it is
    a result, not an error of the call.
    """
    original, written = read(_directory(source, "source")), read(_export_directory(export))
    if not original.tensors:
        reasons = " ".join(f.reason for f in original.faults[:1])
        raise RecipeError(
            f"The source {original.path} has no tensor to compare with{': ' + reasons if reasons else '.'}"
        )
    mtp = {name for name in original.tensors if is_mtp(name, original.config)}
    tied = {"lm_head.weight"} if original.config.get("tie_word_embeddings") else set()
    missing = sorted(set(original.tensors) - set(written.tensors) - mtp - tied)
    extra = sorted(set(written.tensors) - set(original.tensors) - tied)
    common = sorted(set(original.tensors) & set(written.tensors))
    expected = len(set(original.tensors) - mtp - tied)
    pairs = [(name, original.tensors[name], written.tensors[name]) for name in common]
    shapes = [Change(name, _shape(a), _shape(b)) for name, a, b in pairs if a.shape != b.shape]
    dtypes = [Change(name, a.dtype, b.dtype) for name, a, b in pairs if a.dtype != b.dtype]
    found = {
        "source": str(original.path),
        "export": str(written.path),
        "expected": expected,
        "found": expected - len(missing),
        "mtp": len(mtp),
        "missing": tuple(missing),
        "missing_mtp": tuple(sorted(mtp - set(written.tensors))),
        "extra": tuple(extra),
        "shapes": tuple(shapes),
        "dtypes": tuple(dtypes),
        "lost_shards": _lost_shards(original, set(missing), mtp),
        "source_faults": original.faults,
        "export_faults": written.faults,
    }
    return ExportCheck(**found, findings=tuple(_findings(ExportCheck(**found, findings=()), written)))


def describe(check: ExportCheck) -> str:
    """Return the comparison as a few lines of text."""
    lines = [f"source: {check.source}", f"export: {check.export}"]
    lines.append(f"{check.found} of {check.expected} tensors arrived; besides, {_mtp_words(check)}.")
    for finding in check.findings:
        lines.append(f"{finding.severity}: {finding.sentence}{' ' + finding.remedy if finding.remedy else ''}")
    lines.append("the export is whole." if check.passed else "the export must not be used.")
    return "\n".join(lines)


def read(path: Path) -> Checkpoint:
    """Read index, headers and config.json of the checkpoint in the directory `path`.

    Nothing wrong with a file raises: it becomes a Fault, and the tensors that cannot be had are not in `tensors`.
    """
    faults: list[Fault] = []
    config = _json_object(path / "config.json", faults) if (path / "config.json").is_file() else {}
    present = sorted(p.name for p in path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        listed = _weight_map(path, faults)
    else:
        listed = None
        if len(present) > 1:
            faults.append(Fault("no index", INDEX, f"{len(present)} shards, but no {INDEX} that says what is where."))
    wanted = sorted(set(listed.values())) if listed is not None else present
    for name in sorted(set(wanted) - set(present)):
        faults.append(Fault("missing file", name, f"the index names {name}, which is not there."))
    for name in sorted(set(present) - set(wanted)):
        faults.append(Fault("stray file", name, f"{name} is in no index; loaders do not read it."))
    held = {name: _header(path / name, faults) for name in wanted if name in present}
    if listed is None:
        tensors = {name: tensor for header in held.values() for name, tensor in header.items()}
        return Checkpoint(path, tensors, tuple(wanted), tuple(faults), config)
    tensors = {}
    for name, file in listed.items():
        if name in held.get(file, {}):
            tensors[name] = held[file][name]
        elif held.get(file):
            faults.append(
                Fault("not in shard", name, f"the index says {name} is in {file}, whose header has no such name.")
            )
    for file, header in held.items():
        for name in header:
            if listed.get(name) != file:
                faults.append(Fault("not in index", name, f"{file} holds {name}, which the index does not list there."))
    return Checkpoint(path, tensors, tuple(wanted), tuple(faults), config)


def is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    """Say whether a tensor belongs to a multi-token-prediction layer that config.json declares.

    GLM, DeepSeek: `model.layers.N` with N from num_hidden_layers on, for num_nextn_predict_layers layers.
    Qwen3-Next and others: everything under `mtp.`. Without such a declaration nothing is MTP.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    layers = _count(config, text, "num_hidden_layers")
    count = _count(config, text, "num_nextn_predict_layers") or _count(config, text, "mtp_num_hidden_layers")
    if not count:
        return False
    if re.match(r"(model\.)?mtp[._]", name):
        return True
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return bool(layers and layer and layers <= int(layer[1]) < layers + count)


def grouped(names: Iterable[str]) -> list[str]:
    """Return tensor names by kind with their layers and count, such as `model.layers.40-77.mlp.*.weight (76)`."""
    kinds: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    for name in names:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        head, tail = (name[: layer.start(1)], name[layer.end(1) :]) if layer else ("", name)
        kind = (
            f"{head}{{}}{re.sub(r'[.][0-9]+(?=[.]|$)', '.*', tail)}"
            if layer
            else re.sub(r"[.][0-9]+(?=[.]|$)", ".*", tail)
        )
        kinds.setdefault(kind, []).extend([int(layer[1])] if layer else [])
        counts[kind] += 1
    shown = []
    for kind, layers in kinds.items():
        text = kind.replace("{}", _ranges(layers)) if layers else kind
        shown.append(f"{text} ({counts[kind]})" if counts[kind] > 1 else text)
    return shown


# ---------------------------------------------------------------------------------------------------------- findings


def _findings(check: ExportCheck, written: Checkpoint) -> Iterable[Finding]:
    source, remedy = "safetensors index and headers", ""
    if check.mtp and check.missing_mtp:
        remedy = (
            "An export with checkpoint.strict=true drops every shard that also holds an MTP tensor it did not train: "
            "set checkpoint.strict=false and export again."
        )
    for fault in check.source_faults:
        severity = "warning" if fault.kind == "stray file" else "error"
        yield Finding("export.source", severity, {"source": check.source}, f"source: {fault.reason}", source=source)
    for fault in check.export_faults[: 4 * SHOWN]:
        severity = "warning" if fault.kind == "stray file" else "error"
        yield Finding("export.files", severity, {"export": check.export}, fault.reason, source=source)
    if len(check.export_faults) > 4 * SHOWN:
        more = len(check.export_faults) - 4 * SHOWN
        yield Finding(
            "export.files", "error", {"export": check.export}, f"{more} more faults of this kind.", source=source
        )
    if not written.tensors:
        yield Finding("export.missing", "error", {"export": check.export}, "no weight was written at all.", remedy)
        return
    if check.missing:
        lost = f" Nothing of {_some(check.lost_shards)} has arrived." if check.lost_shards else ""
        sentence = (
            f"{len(check.missing)} of {check.expected} tensors are missing: {_some(grouped(check.missing))}.{lost}"
        )
        yield Finding("export.missing", "error", {"missing": len(check.missing)}, sentence, remedy, source=source)
    if check.extra:
        sentence = f"{len(check.extra)} tensors are not in the source: {_some(grouped(check.extra))}."
        yield Finding("export.extra", "warning", {"extra": len(check.extra)}, sentence, source=source)
    if check.shapes:
        shown = _some([f"{c.name} is {c.export}, was {c.source}" for c in check.shapes])
        vocabulary = all(re.search(r"embed_tokens|lm_head", c.name) for c in check.shapes)
        why = "The vocabulary was padded and not cut back." if vocabulary else ""
        sentence = f"{len(check.shapes)} tensors have another shape: {shown}."
        yield Finding("export.shape", "error", {"shapes": len(check.shapes)}, sentence, why, source=source)
    yield from _dtype_findings(check.dtypes)


def _dtype_findings(changes: Iterable[Change]) -> Iterable[Finding]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        kinds.setdefault((change.source, change.export), []).append(change.name)
    for (before, after), names in kinds.items():
        if before in FLOATS and after in FLOATS:
            wider = all(b <= a for b, a in zip(FLOATS[before], FLOATS[after], strict=True))
            effect = "the values are the same, the files larger" if wider else "values were rounded"
            severity = "warning"
        else:
            severity, effect = "error", "these types do not hold the same values"
        sentence = f"{len(names)} tensors went from {before} to {after} ({effect}): {_some(grouped(names))}."
        yield Finding("export.dtype", severity, {"dtype": f"{before} to {after}"}, sentence)


def _lost_shards(original: Checkpoint, missing: set[str], mtp: set[str]) -> tuple[str, ...]:
    """Source files whose every tensor besides MTP is missing; none when all files are (then the export is empty)."""
    held: dict[str, list[str]] = {}
    for name, tensor in original.tensors.items():
        if name not in mtp:
            held.setdefault(tensor.file, []).append(name)
    lost = tuple(file for file, names in sorted(held.items()) if missing.issuperset(names))
    return lost if len(lost) < len(held) else ()


def _mtp_words(check: ExportCheck) -> str:
    if not check.mtp:
        return "the model has no MTP layer"
    if not check.missing_mtp:
        return f"all {check.mtp} MTP tensors were exported"
    return f"{len(check.missing_mtp)} of {check.mtp} MTP tensors are not there, which is allowed"


def _some(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def _ranges(numbers: Iterable[int]) -> str:
    """Write layer numbers as `0-3,7`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


# ------------------------------------------------------------------------------------------------------------- files


def _directory(path: str | Path, what: str) -> Path:
    path = Path(path).expanduser()
    if not path.is_dir():
        reason = "is a file; give the directory it is in" if path.exists() else "is no directory on this machine"
        raise RecipeError(f"{what} {str(path)!r} {reason}.")
    return path


def _export_directory(path: str | Path) -> Path:
    """Return the directory with the weights: `path`, or the one `huggingface` folder below it (verl's layout)."""
    path = _directory(path, "export")
    if any(path.glob("*.safetensors")) or (path / INDEX).is_file() or path.name == "huggingface":
        return path
    below = sorted(p for p in path.glob("**/huggingface") if p.is_dir())
    if len(below) > 1:
        raise RecipeError(f"{path} holds {len(below)} exports, such as {below[0]} and {below[1]}: name one of them.")
    return below[0] if below else path


def _weight_map(path: Path, faults: list[Fault]) -> dict[str, str]:
    found = _json_object(path / INDEX, faults).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        faults.append(Fault("index", INDEX, f"{INDEX} has no weight_map from tensor names to file names."))
        return {}
    # An index comes from strangers: a name that leaves the directory is not followed.
    outside = {v for v in found.values() if PurePosixPath(v).name != v}
    for name in sorted(outside):
        faults.append(Fault("index", name, f"the index names {name!r}, which is no file of this directory."))
    return {k: v for k, v in found.items() if v not in outside}


def _json_object(path: Path, faults: list[Fault]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        faults.append(Fault("unreadable", path.name, f"{path.name} cannot be read: {fault}."))
        return {}
    if not isinstance(found, dict):
        faults.append(Fault("unreadable", path.name, f"{path.name} is no JSON object."))
        return {}
    return found


def _header(path: Path, faults: list[Fault]) -> dict[str, Tensor]:
    """Return what a safetensors file says it holds: 8 bytes of length, JSON, then the data. {} when it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                faults.append(Fault("truncated", path.name, f"{path.name} ends within its header ({size} bytes)."))
                return {}
            entries = json.loads(file.read(length))
        tensors = {
            str(name): Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), path.name)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        ends = {name: tuple(map(int, entries[name]["data_offsets"])) for name in tensors}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        faults.append(
            Fault("unreadable", path.name, f"{path.name} is no safetensors file ({type(fault).__name__}: {fault}).")
        )
        return {}
    for name, tensor in tensors.items():
        bits = BITS.get(tensor.dtype)
        begin, end = ends[name] if len(ends[name]) == 2 else (0, -1)
        if end < begin or (bits and (end - begin) * 8 != math.prod(tensor.shape) * bits):
            faults.append(
                Fault("damaged", path.name, f"{path.name}: the bytes of {name} do not fit its shape and dtype.")
            )
            return {}
    needed = 8 + length + max((end for _, end in ends.values()), default=0)
    if size < needed:
        faults.append(Fault("truncated", path.name, f"{path.name} is truncated: {size} of {needed} bytes are there."))
        return {}
    return tensors


def _count(config: Mapping[str, Any], text: Mapping[str, Any], key: str) -> int:
    found = config.get(key, text.get(key))
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
