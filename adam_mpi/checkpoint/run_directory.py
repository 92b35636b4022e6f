"""The run directory: what is in it, and who may write into it."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import owner
from adam_mpi.config import Config

COMPARE, GROW = "COMPARE", "GROW"
"""Files that ask something of a running job: to compare the copies of all shards, to take in so many more ranks."""


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


def compare_copies(path: Path, seconds: float) -> tuple[str, bool]:
    """Ask the job that runs there whether all copies of its shards are the same; what it says, and whether they are."""
    _check_running(path)
    answer, limit = path / "copies.json", time.monotonic() + seconds
    answer.unlink(missing_ok=True)
    (path / COMPARE).touch()
    while not answer.exists():
        if time.monotonic() > limit:
            (path / COMPARE).unlink(missing_ok=True)
            raise UserError(f"{path}: no answer in {seconds:g} s; only a job that runs can compare its copies")
        time.sleep(0.05)
    told = json.loads(answer.read_text())
    text = f"{told['copies']} copies compared with what is served, {told['different']} different"
    return f"{text} (generation {told['generation']})", not told["different"]


def _check_running(path: Path) -> None:
    """Refuse to ask something of a job where none runs."""
    if not (path / "config.toml").exists():
        raise UserError(f"{path}: not a run directory")
    if owner.running(path) is None:
        ended = next((f"; the last one has left {mark}" for mark in ("DONE", "STOPPED") if (path / mark).exists()), "")
        raise UserError(f"{path}: no job runs there{ended}; start one with --run {path} --resume")


def grow(path: Path, ranks: int) -> str:
    """Ask the job that runs there to take in so many ranks more."""
    if ranks < 1:
        raise UserError(f"grow {ranks}: at least one rank")
    _check_running(path)
    part = path / f".{GROW}"
    part.write_text(f"{ranks}\n")
    part.replace(path / GROW)
    return f"asked for {ranks} more; they join where mpirun has free slots, in a job started with --with-ft ulfm"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; those that a kill or a full disk has left torn are passed over."""
    found = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            if isinstance(read := json.loads(line), dict):
                found.append(read)
    return found
