"""What earlier jobs have left in a run directory: whether it is done, what to resume from, where new stores go."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adam_mpi import config as configuration
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint import snapshot, stores
from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.checkpoint.stores import FoundStores
from adam_mpi.config import Config, Given


def saved_config(directory: str | None, resume: bool) -> Path | None:
    """Return the configuration of the run that is resumed; None if there is none."""
    saved = Path(directory or "") / "config.toml"
    return saved if resume and directory and saved.exists() else None


def epochs_done(given: Given, overrides: Sequence[str], directory: str | None) -> int:
    """Return the number of epochs of a run that has all wanted epochs with this very configuration; otherwise 0."""
    run = Path(directory or "")
    if not directory or not (run / "DONE").exists():
        return 0
    try:
        epochs = json.loads((run / "summary.json").read_text())["epochs"]
    except (OSError, ValueError, KeyError):
        return 0
    wanted = configuration.load(given, overrides)
    if epochs < wanted.train.epochs or wanted != configuration.load(run / "config.toml"):
        return 0
    return epochs


def keeps_store(config: Config) -> bool:
    """Return whether servers write stores: with clocks only snapshots are of use, as a store has no single clock."""
    return config.asynchronous and config.store.interval > 0


@dataclass(frozen=True)
class PreviousRun:
    """A run directory as rank 0 finds it."""

    config: Config
    directory: Path
    identity: Identity
    replicas: int
    parameters: int
    seen: FoundStores
    """The stores of the run that the ranks have found."""

    def find_resume_point(self) -> Resume | None:
        """Return what the job resumes from, or None; print what is not complete and is not used."""
        snapshot.finish_renames(self.directory / "snapshots")
        found, passed_over = resume_points.find_resume_point(self.config, self.directory, self.seen)
        for trouble in passed_over:
            print(f"adam_mpi: passed over: {trouble}", file=sys.stderr, flush=True)
        if found is None:
            return None
        note = resume_points.check_resume(found, self.config, self.replicas, self.parameters)
        if note:
            print(f"adam_mpi: {note}", file=sys.stderr, flush=True)
        if found.kind == "store":
            # A store knows which acknowledged pushes it lacks.
            return found
        cost = resume_points.describe_lost_work(found, self.directory, self.config)
        return replace(found, note=found.note + cost)

    def new_attempt(self) -> Path:
        """Return the folder of the stores of the new job, with a description of them in it."""
        place = stores.folder(self.config, self.directory, self.identity)
        folder = resume_points.next_attempt(place, self.seen)
        if keeps_store(self.config):
            with suppress(OSError):
                resume_points.describe_store(folder, self.config, self.replicas, self.parameters, self.identity)
        return folder
