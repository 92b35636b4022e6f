"""Replace small files atomically, so that a reader finds the old content or the new one."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file `path` atomically by `content` as JSON."""
    write_text(path, _json_text(content))


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` atomically by `text`, after a power loss too: `text` is on disk before the rename."""
    part = _write_part(path, text)
    sync(part)
    part.replace(path)


def write_status(path: Path, content: dict[str, Any]) -> None:
    """Replace the file `path` by `content` as JSON, without waiting for the disk: only a running job's is of use."""
    _write_part(path, _json_text(content)).replace(path)


def sync(path: Path) -> None:
    """Return when `path`, a file or the list of names in a directory, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_part(path: Path, text: str) -> Path:
    """Write `text` beside `path`; return where."""
    part = path.with_suffix(".part")
    part.write_text(text)
    return part


def _json_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
