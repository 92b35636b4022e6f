"""Replace small files atomically, so that a reader finds the old content or the new one."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file `path` atomically by `content` as JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` atomically by `text`."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
