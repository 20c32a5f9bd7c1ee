"""What tells one model or data set from another at a glance: sizes, times, and a hash of samples. Cheap on terabytes.

Of each file the head, the middle and the tail are hashed, so a file that was replaced, cut or trained further shows;
a change elsewhere in a large file of the same size may not. A small file is hashed whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

# Bytes read at each of three places of a file, at least and at most, and of a whole directory.
LEAST, MOST, TOTAL = 4 << 10, 64 << 10, 64 << 20
# Files of a directory that are sampled, and that are named one by one; seconds it may take on a slow file system.
SAMPLED, NAMED, SECONDS = 4096, 256, 60.0


def fingerprint(path: str) -> dict[str, Any]:
    """Return what is at `path`: a file, a directory, a hub id, another system's address, or nothing.

    `bytes` is the size, `modified` the latest change (ISO 8601), `sample` the hash (SHA-256). A directory's hash is
    over the relative names, sizes and samples of its files, and `parts` has those where they are few; `unsampled`
    counts the files of which only the size is in it. Raises nothing: what cannot be read says so under `fault`.
    """
    if "://" in path:
        return {"path": path, "kind": "address"}
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return {"path": path, "kind": "directory", **_directory(place)}
        if place.is_file():
            size, modified = _stat(place)
            return {"path": path, "kind": "file", "bytes": size, "modified": _time(modified), **_file(place, size)}
    except OSError as fault:
        return {"path": path, "kind": "unreadable", "fault": f"{fault.strerror or fault}"}
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return {"path": path, "kind": "hub id", **_revision(path)}
    return {"path": path, "kind": "missing"}


def _file(place: Path, size: int) -> dict[str, Any]:
    return {"sample": _sample(place, size, MOST), "whole": size <= 3 * MOST}


def _directory(root: Path) -> dict[str, Any]:
    began = time.monotonic()
    names = sorted(
        os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118  a million of them
        for folder, _, files in os.walk(root)
        for name in files
    )
    piece = max(LEAST, min(MOST, TOTAL // (3 * max(1, len(names)))))
    digest, parts, total, latest, unsampled, faults = hashlib.sha256(), {}, 0, 0.0, 0, 0
    for place, name in enumerate(names):
        sample = ""
        try:
            size, modified = _stat(root / name)
            if place < SAMPLED and time.monotonic() - began < SECONDS:
                sample = _sample(root / name, size, piece)
        except OSError:  # a link to nowhere, or no right to read
            faults += 1
            continue
        unsampled += not sample
        total, latest = total + size, max(latest, modified)
        digest.update(f"{name}\0{size}\0{sample}\n".encode("utf-8", "surrogateescape"))
        parts[name] = {"bytes": size, "sample": sample[:16]}
    told: dict[str, Any] = {"files": len(names), "bytes": total, "modified": _time(latest) if latest else None}
    told |= {"sample": digest.hexdigest(), "whole": False, "unsampled": unsampled}
    if faults:
        told["fault"] = f"{faults} files cannot be read"
    return told | ({"parts": parts} if len(names) <= NAMED else {})


def _sample(place: Path, size: int, piece: int) -> str:
    """Hash the size with three pieces of a file, or with all of it where it is not longer than those."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with place.open("rb") as file:
        for start in (0,) if size <= 3 * piece else (0, (size - piece) // 2, size - piece):
            file.seek(start)
            digest.update(file.read(3 * piece if size <= 3 * piece else piece))
    return digest.hexdigest()


def _stat(place: Path) -> tuple[int, float]:
    told = place.stat()
    return told.st_size, told.st_mtime


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _revision(name: str) -> dict[str, str]:
    """The commit of a hub's model in the local cache (huggingface_hub keeps it under refs/), where it is there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    try:
        return {"revision": (cache / f"models--{name.replace('/', '--')}" / "refs" / "main").read_text().strip()}
    except OSError:
        return {}
