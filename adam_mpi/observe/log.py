"""A log file per rank; nothing of it goes to the terminal."""

import logging
import sys
from pathlib import Path

log = logging.getLogger(__name__)


class Handler(logging.FileHandler):
    """Passes over what cannot be written: a full disk is no reason to fill the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start(directory: Path, rank: int, name: str) -> Path:
    """Log this rank to `log/rank-N.log` of the run directory."""
    path = directory / "log" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = Handler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}: %(levelname)s %(message)s"))
    root = logging.getLogger("adam_mpi")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    return path


def say(text: str) -> None:
    """Say something where people see it, and in the log."""
    sys.stderr.write(f"adam_mpi: {text}\n")
    sys.stderr.flush()
    log.warning(text)
