"""Give a snapshot its name when all members have written their parts, and remove snapshots that are not kept."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import LostRun
from adam_mpi.base.files import sync_to_disk, write_json
from adam_mpi.checkpoint import model_file, snapshot
from adam_mpi.checkpoint.disk_task import abandoned
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.model.parameters import Tensor

POSITION = ("epoch", "batches", "images", "clock")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotSettings:
    """What all snapshots of one generation have in common."""

    folder: Path
    servers: Sequence[int]
    """The ranks that have shards."""
    tensors: Sequence[Tensor]
    keep: int = 1
    joint: bool = False
    """Whether all replicas compute each batch together, and so are cut at one clock."""
    strips: int = 1
    pushers: Sequence[int] = ()
    """The ranks whose codec has a residual, which belongs to a snapshot too."""
    before_rename: Callable[[], None] = lambda: None
    owner: Owner | None = None
    """The claim of this job on the run directory."""
    seconds: float = 120.0
    """After how long a disk that takes nothing is given up."""

    @property
    def members(self) -> list[tuple[str, int]]:
        """Return (role, rank) of all that write a part of a snapshot, servers first."""
        return [("server", rank) for rank in self.servers] + [("worker", rank) for rank in self.pushers]

    def part(self, number: int) -> Path:
        """Return the folder in which snapshot `number` is made; a job that has lost the run has another one."""
        return self.folder / f"{snapshot.PART}{self.owner.number if self.owner else 0}-{number}"

    def remove_unfinished(self) -> None:
        """Complete or undo the snapshot renames of a coordinator that was lost; remove its other parts."""
        snapshot.finish_renames(self.folder)
        self.clear(snapshot.PART, snapshot.OLD)

    def clear(self, *prefixes: str) -> None:
        """Remove hidden folders with these `prefixes`: snapshots that are being made or replaced."""
        for path in self.folder.glob(".*") if self.folder.exists() else ():
            if path.name.startswith(prefixes):
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class SnapshotSeal:
    """One snapshot whose parts are written. It runs on a thread, which may hang for longer than the snapshot counts."""

    settings: SnapshotSettings
    number: int
    description: Mapping[str, Any]
    """What the manifest says besides the position."""
    answers: Sequence[Mapping[str, Any]]
    """What the members have reported, in the order of `settings.members`."""
    taken: Sequence[str]
    """The names of the snapshots of this job so far."""
    good: Sequence[str]
    """The names of those that are known to be from before any divergence; the last of them is kept."""
    began: float
    sealed: float
    """When all members had copied their state, in seconds since 1970."""

    @property
    def part(self) -> Path:
        """Return the folder in which the snapshot to seal is made."""
        return self.settings.part(self.number)

    def discard(self) -> list[str]:
        """Remove the parts of a snapshot that a member could not write; return the snapshots of this job."""
        shutil.rmtree(self.part, ignore_errors=True)
        return list(self.taken)

    def seal(self) -> list[str]:
        """Give the snapshot its name; return the snapshots of this job. A snapshot that cannot have it is removed."""
        try:
            return self._seal()
        except Exception as error:
            shutil.rmtree(self.part, ignore_errors=True)
            if not isinstance(error, LostRun) and not abandoned():
                # An earlier snapshot of the same name may have been moved away already.
                snapshot.finish_renames(self.settings.folder)
            raise

    def _seal(self) -> list[str]:
        """Write model file and manifest of the snapshot and rename it; return the names of this job's snapshots."""
        manifest = self._manifest()
        name = manifest["name"]
        attributes = {"snapshot": name} | {key: manifest[key] for key in ("epochs", "images", "config")}
        inputs = self.description["inputs"]
        model_file.write_virtual(self.part, list(manifest["files"]), self.settings.tensors, attributes, inputs)
        write_json(self.part / snapshot.MANIFEST, manifest)
        if abandoned():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        self._rename(self.settings.folder / name)
        taken = [*(other for other in self.taken if other != name), name]
        if not abandoned():
            self._remove_old(taken)
        log.info("snapshot %s in %.3f s", name, time.monotonic() - self.began)
        return taken

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest of the snapshot to seal, from the position at which all servers are."""
        epoch, batches, images, clock = (self.answers[0][key] for key in POSITION)
        epochs = self.description["epochs"]
        if epoch <= epochs:
            batches = 0
        else:
            epochs = epoch - 1
        sizes = [(answer["file"], answer["size"]) for answer in self.answers]
        servers = len(self.settings.servers)
        tensors = self.settings.tensors
        return dict(self.description) | {
            "format": FORMAT,
            "name": snapshot.folder_name(epochs, batches),
            "epochs": epochs,
            "batches": batches,
            "images": images,
            "clock": clock,
            "parameters": sum(tensor.size for tensor in tensors),
            "files": dict(sizes[:servers]),
            "residuals": dict(sizes[servers:]),
            "strips": self.settings.strips,
            "tensors": {tensor.name: [tensor.offset, list(tensor.shape)] for tensor in tensors},
            "time": self.sealed,
        }

    def _rename(self, path: Path) -> None:
        """Rename the snapshot's part to `path`; after a kill `finish_renames` completes or undoes it."""
        settings = self.settings
        if settings.owner:
            settings.owner.check()
        if path.exists():
            # An earlier job went another way after it, or this job came to the same position again.
            path.rename(settings.folder / f"{snapshot.OLD}{self.number}")
        settings.before_rename()
        self.part.rename(path)
        sync_to_disk(settings.folder)
        settings.clear(snapshot.OLD)

    def _remove_old(self, taken: Sequence[str]) -> None:
        """Remove all but `keep` snapshots: the newest that this job has `taken`, then those before its first.

        The last one that is known to be good stays too: the newest may turn out to have diverged weights.
        Snapshots of earlier jobs that are further than the first of this job are removed: this job went another way.
        """
        settings = self.settings
        found = [path.name for path in snapshot.list_snapshots(settings.folder)]
        newest = list(taken[-settings.keep :])
        first = min((found.index(name) for name in taken if name in found), default=0)
        before = [name for name in found[:first] if name not in taken]
        kept = [*newest, *before[::-1][: settings.keep - len(newest)], *self.good[-1:]]
        for name in found:
            if name not in kept and snapshot.recorded_name(settings.folder / name) == name:
                shutil.rmtree(settings.folder / name, ignore_errors=True)
