"""Small files replaced as a whole, so that a reader finds the old content or the new one."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file in one go."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one go: whoever reads it finds the old text or the new one."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
