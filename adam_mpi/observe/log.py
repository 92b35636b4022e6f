"""A log file per rank; nothing of it goes to the terminal."""

import logging
from pathlib import Path


def start(directory: Path, rank: int, name: str) -> Path:
    """Log this rank to `log/rank-N.log` of the run directory."""
    path = directory / "log" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}: %(levelname)s %(message)s"))
    root = logging.getLogger("adam_mpi")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    return path
