"""The run directory: what is in it, and who may write into it."""

import json
import time
from pathlib import Path
from typing import Any

from adam_mpi.config import Config
from adam_mpi.errors import UserError


def where(config: Config, given: str | None) -> Path:
    """What it is called; a run without a name has the time of its start."""
    name = config.run.name or f"{Path(config.data.set).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(given) if given else Path("runs") / name


def choose(config: Config, given: str | None, resume: bool) -> Path:
    """The directory of this run, made if it is not there; one that holds a run is not touched without resume."""
    path = where(config, given)
    if (path / "config.toml").exists() and not resume:
        raise UserError(f"run directory {path} holds a run; add --resume to go on with it, or give another")
    if path.exists() and not path.is_dir():
        raise UserError(f"run directory {path} is a file; give another name")
    try:
        (path / "log").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run directory {path}: {error.strerror}; give another with --run DIR") from None
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file in one go."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
