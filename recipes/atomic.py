"""Files that change in one move: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> Path:
    """Put `content` at `path` in one move: a reader sees the old file or the new one. Makes the directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
