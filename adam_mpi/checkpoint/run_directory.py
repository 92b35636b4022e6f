"""The run directory: its name and identity, its metrics, and the requests that people leave in it for a running job.

A run directory that does not answer keeps no rank waiting.
"""

import json
import logging
import re
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json
from adam_mpi.checkpoint import owner
from adam_mpi.checkpoint.owner import Heartbeat
from adam_mpi.config import Config

IDENTITY_FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """Which run a directory holds."""

    id: str
    directory: str = ""
    """Where the run was when a job used it last."""
    before: tuple[str, ...] = ()
    """For a copy: the identities of the runs that it is a copy of."""

    @property
    def known(self) -> tuple[str, ...]:
        """Return the identities of the run directory that stores inside of it may be marked with."""
        return (self.id, *self.before)


def load_or_create_identity(run: Path) -> Identity:
    """Return the identity of the run in the directory `run`; draw one if it has none or is a copy of another run."""
    here = str(run.resolve())
    found = _read_identity(run)
    if found is None:
        now = Identity(_draw_identity(), here)
    elif found.directory != here and _still_there(found, run):
        now = Identity(_draw_identity(), here, found.known)
    else:
        now = Identity(found.id, here, found.before)
    if now != found:
        write_json(run / IDENTITY_FILE, asdict(now))
    return now


def _draw_identity() -> str:
    """Return a new identity for a run directory."""
    return uuid.uuid4().hex[:16]


def _read_identity(run: Path) -> Identity | None:
    """Return the identity that the run directory has stored, or None."""
    try:
        content = json.loads((run / IDENTITY_FILE).read_text())
        found = Identity(content["id"], str(content["directory"]), tuple(content["before"]))
        # It becomes a part of a path.
        return found if all(re.fullmatch("[0-9a-f]{16}", id) for id in found.known) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _still_there(found: Identity, run: Path) -> bool:
    """Return whether the run `found` is still at its old directory: then `run` is a copy of it and was not moved."""
    other = Path(found.directory)
    there = _read_identity(other)
    return there is not None and there.id == found.id and not other.samefile(run)


COMPARE = "COMPARE"
"""File that asks a running job to compare all copies of its shards."""
GROW = "GROW"
"""File that asks a running job to add ranks; it holds their number."""


def where(config: Config, given: str | None) -> Path:
    """Return the run directory: `given`, or the one that `config` names; without a name it has its time of start."""
    name = config.run.name or f"{Path(config.data.set).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(given) if given else Path("runs") / name


def choose_run_directory(config: Config, given: str | None, resume: bool) -> Path:
    """Return the directory of this run, and make it; raise UserError where it holds a run and `resume` is False."""
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


STOP = "STOP"
LOOK_SECONDS = 0.25
log = logging.getLogger(__name__)


class RequestWatcher:
    """Collects the requests STOP, COMPARE and GROW."""

    def __init__(self, directory: Path, heart: Heartbeat) -> None:
        """Watch the run `directory` for requests while the job has it, as its `heart` shows."""
        self.directory = directory
        self.heart = heart
        self.stop = False
        """Whether the job is to stop."""
        self.compare = 0
        """Requests to compare copies that were not taken yet."""
        self.ranks = 0
        """Ranks to add that were not taken yet."""
        threading.Thread(target=self._run, name="requests", daemon=True).start()

    def take_compare(self) -> bool:
        """Return whether people requested in the run directory to compare the copies; forget it."""
        requested = self.compare > 0
        self.compare = 0
        return requested

    def take_ranks(self) -> int:
        """Return how many ranks people requested in the run directory (`grow`); forget them."""
        ranks = self.ranks
        self.ranks = 0
        return ranks

    def _run(self) -> None:
        """Look for requests in the run directory at intervals, in a thread of its own."""
        while self.heart.alive:
            with suppress(OSError):
                self._look()
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        """Look once for the request files in the run directory, and remove those that were found."""
        self.stop = (self.directory / STOP).exists()
        if (self.directory / COMPARE).exists():
            (self.directory / COMPARE).unlink()
            self.compare += 1
        if (self.directory / GROW).exists():
            text = (self.directory / GROW).read_text()
            (self.directory / GROW).unlink()
            with suppress(ValueError):
                self.ranks += int(text)
