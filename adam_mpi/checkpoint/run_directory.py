"""The run directory: its name, the requests that people leave in it for a running job, and its metrics."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import owner
from adam_mpi.config import Config

COMPARE = "COMPARE"
"""File that asks a running job to compare all copies of its shards."""
GROW = "GROW"
"""File that asks a running job to add ranks; it holds their number."""


def where(config: Config, given: str | None) -> Path:
    """Return `given`, or the run directory that `config` names; a run without a name has the time of its start."""
    name = config.run.name or f"{Path(config.data.set).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(given) if given else Path("runs") / name


def choose(config: Config, given: str | None, resume: bool) -> Path:
    """Return the directory of this run, and make it; raise a UserError where it holds a run and `resume` is False."""
    path = where(config, given)
    if (path / "config.toml").exists() and not resume:
        raise UserError(f"run directory {path} holds a run; add --resume to continue it, or give another")
    if path.exists() and not path.is_dir():
        raise UserError(f"run directory {path} is a file; give another name")
    try:
        (path / "log").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run directory {path}: {error.strerror}; give another with --run DIR") from None
    return path


def compare_copies(path: Path, seconds: float) -> tuple[str, bool]:
    """Ask the job that runs in `path` to compare the copies of its shards; return its answer, and if all are equal.

    Raises a UserError when no answer comes within `seconds`.
    """
    _check_running(path)
    answer = path / "copies.json"
    limit = time.monotonic() + seconds
    answer.unlink(missing_ok=True)
    (path / COMPARE).touch()
    while not answer.exists():
        if time.monotonic() > limit:
            (path / COMPARE).unlink(missing_ok=True)
            raise UserError(f"{path}: no answer in {seconds:g} s; only a job that runs can compare its copies")
        time.sleep(0.05)
    counts = json.loads(answer.read_text())
    text = f"{counts['copies']} copies compared with what is served, {counts['different']} different"
    return f"{text} (generation {counts['generation']})", not counts["different"]


def _check_running(path: Path) -> None:
    """Raise a UserError where no job runs in `path` that could answer a request."""
    if not (path / "config.toml").exists():
        raise UserError(f"{path}: not a run directory")
    if owner.running(path) is None:
        ended = next((f"; the last one has left {mark}" for mark in ("DONE", "STOPPED") if (path / mark).exists()), "")
        raise UserError(f"{path}: no job runs there{ended}; start one with --run {path} --resume")


def grow(path: Path, ranks: int) -> str:
    """Ask the job that runs in `path` to add `ranks` ranks; return what to print."""
    if ranks < 1:
        raise UserError(f"grow {ranks}: at least one rank")
    _check_running(path)
    part = path / f".{GROW}"
    part.write_text(f"{ranks}\n")
    part.replace(path / GROW)
    return f"asked for {ranks} more; they join where mpirun has free slots, in a job started with --with-ft ulfm"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, without those that a kill or a full disk has left torn."""
    found = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            if isinstance(read := json.loads(line), dict):
                found.append(read)
    return found
