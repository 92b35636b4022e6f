"""The head's care for what outlives the job: when a snapshot is due, when the job is to stop, what may be removed."""

import copy
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import LostRun, UserError
from adam_mpi.base.files import write_json
from adam_mpi.base.log import say
from adam_mpi.checkpoint import model_file, snapshot
from adam_mpi.checkpoint.disk_task import DiskTask, abandoned, disk_seconds, reason
from adam_mpi.checkpoint.hdf5_file import FORMAT, sync
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.resume import order_settings
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.messages import HoldSnapshot, RemoveOldStores, SnapshotHeld, SnapshotWritten, TakeSnapshot
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.config import to_toml
from adam_mpi.model.parameters import Tensor
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.runtime.job import Job
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.transport.generation import Generation

log = logging.getLogger(__name__)


class CheckpointManager:
    def __init__(self, generation: Generation, job: Job, describe: Callable[[], dict[str, Any]]) -> None:
        """`describe` returns what snapshots say of the job."""
        world = generation.world
        memory_layout = generation.memory_layout
        channel = generation.channel
        directory = job.directory
        resume = job.resume
        owner = job.owner
        self.world = world
        self.config = world.config
        self.directory = directory
        self.memory_layout = memory_layout
        self.channel = channel
        self.resume = resume
        self.until = job.until
        self.describe = describe
        self.owner = owner
        self.heart = owner.beat()
        servers = [server for server in memory_layout.servers if memory_layout.held[server]]
        joint, keep = not self.config.asynchronous, self.config.snapshot.keep
        pushers = memory_layout.pushers if CODECS[self.config.push.codec].feedback else ()
        folder = directory / "snapshots"
        renaming = partial(world.injector.at, "rename")
        self.snapshots = SnapshotCoordinator(
            channel,
            servers,
            folder,
            keep,
            joint,
            memory_layout.tensors,
            self._describe,
            memory_layout.strips,
            pushers,
            renaming,
            owner,
            disk_seconds(self.config),
        )
        self.stale = resume is None or resume.kind == "store"
        """Whether the weights are newer than the newest snapshot."""
        self.last = False
        self.asked = world.asked
        self.old_stores = True
        """Whether there may be some of earlier lives."""

    def look(self, training: bool, stop: bool) -> str:
        """Take a snapshot if it is time for one, or somebody asks for it; returns why the job is to stop, if it is.

        `stop`: whether there is a file STOP.
        """
        self.heart.look()
        minutes, now = self.config.snapshot.minutes, time.monotonic()
        due = bool(minutes) and now - self.snapshots.ended > 60 * minutes and not self.snapshots.busy
        if due or self.world.asked > self.asked:
            self.asked = self.world.asked
            # Outside of training, that of the last epoch's end is still good.
            if training:
                self.snapshots.order()
        if stop:
            return "the file STOP"
        return "--max-minutes" if time.time() > self.until else ""

    def epoch_ended(self) -> None:
        self.stale = False
        self.snapshots.order()

    def finished(self) -> bool:
        """Whether what the job ends with is in a snapshot; without one it has no result."""
        self.heart.look()
        if self.snapshots.busy:
            return False
        if not self.stale and not self.snapshots.error:
            return True
        if self.last or self.snapshots.hung:
            cure = "see to the disk" if self.snapshots.hung else "make room"
            raise UserError(f"the last snapshot could not be written: {self.snapshots.error}; {cure} and --resume")
        self.last, self.stale = True, False
        self.snapshots.order()
        return False

    def write_weights(self) -> None:
        """The weights to use: those of the newest snapshot, in one file."""
        taken, folder = self.snapshots.taken, self.directory / "snapshots"
        newest = folder / taken[-1] if taken or self.resume is None else self.resume.path
        group = "ema/" if self.config.optimizer.ema else ""
        pieces = model_file.pieces(newest / snapshot.MODEL, self.memory_layout.tensors, group)
        told = self._describe()
        model_file.write_pieces(
            self.directory / "weights.h5", pieces, self.memory_layout.tensors, told["config"], told["inputs"]
        )

    def forget_old_stores(self, board: JobStatistics) -> None:
        """When every server's store of this job is whole, those of earlier ones are no longer needed."""
        now = [word for word in board.of("server") if word["generation"] == self.world.generation]
        words = [word["store"] for word in now if word["shards"]]
        if self.old_stores and len(words) == len(self.snapshots.servers) and all(w and w["whole"] for w in words):
            self.old_stores = False
            for server in self.snapshots.servers:
                self.channel.send(RemoveOldStores(), server)

    def _describe(self) -> dict[str, Any]:
        now = {"replicas": self.world.layout.replicas, "order": order_settings(self.config)}
        return now | {"config": to_toml(self.config)} | self.describe()


POSITION = "epoch", "batches", "images", "clock"
WARN_SECONDS = 30.0
log = logging.getLogger(__name__)


class SnapshotCoordinator:
    def __init__(
        self,
        channel: ControlChannel,
        servers: Sequence[int],
        folder: Path,
        keep: int,
        joint: bool,
        tensors: Sequence[Tensor],
        describe: Callable[[], dict[str, Any]],
        strips: int = 1,
        pushers: Sequence[int] = (),
        renaming: Callable[[], None] = lambda: None,
        owner: Owner | None = None,
        seconds: float = 120.0,
    ) -> None:
        """`pushers`: ranks whose codec has a residual, which belongs to a snapshot too; `owner`: our claim on the run.

        `seconds`: after which a disk that takes nothing is given up.
        """
        self.members = [("server", rank) for rank in servers] + [("worker", rank) for rank in pushers]
        self.channel, self.servers, self.folder, self.keep, self.joint = channel, servers, folder, keep, joint
        self.tensors, self.strips, self.renaming, self.owner = tensors, strips, renaming, owner
        self.describe = describe
        """What the manifest says besides the position, as it is when the snapshot is ordered."""
        self.number, self.seconds = 0, seconds
        self.sealing: DiskTask[list[str]] | None = None
        """Naming a snapshot that all have written; a slow disk keeps nobody waiting."""
        self.answers: dict[tuple[str, int], dict[str, Any]] = {}
        self.stage, self.again = "", False
        self.told: dict[str, Any] = {}
        self.taken: list[str] = []
        """Snapshots of this job."""
        self.error, self.hung = "", False
        """Why there is no snapshot; whether a disk hangs."""
        self.quiet = 0.0
        self.began = self.ended = time.monotonic()
        try:
            # A head that was lost may have been between two renames.
            snapshot.restore(folder)
            self._clear(snapshot.PART, snapshot.OLD)
        except OSError as error:
            log.warning("%s: %s; what a lost head was making or replacing stays there", folder, reason(error))

    @property
    def busy(self) -> bool:
        return bool(self.stage)

    @property
    def part(self) -> Path:
        """Where the snapshot under way is made; a job that has lost the run may still write into another one."""
        return self.folder / f"{snapshot.PART}{self.owner.number if self.owner else 0}-{self.number}"

    def order(self) -> None:
        """Take a snapshot now, or another one after the one under way."""
        if self.busy:
            self.again = True
            return
        self.again, self.stage, self.error, self.answers = False, "held", "", {}
        self.number += 1
        self.told, self.began = self.describe(), time.monotonic()
        for role, rank in self.members:
            self.channel.send(HoldSnapshot(role), rank)

    def handle(self, source: int, message: SnapshotHeld | SnapshotWritten) -> None:
        """Take the answer of a server or pusher; the last one begins the next step."""
        wanted = SnapshotHeld if self.stage == "held" else SnapshotWritten if self.stage == "stored" else None
        assert type(message) is wanted, f"{message} of rank {source} in stage {self.stage!r} of a snapshot"
        self.answers[message.role, source] = (
            {"clocks": message.clocks} if isinstance(message, SnapshotHeld) else message.values
        )
        if len(self.answers) < len(self.members):
            return
        answers = [self.answers[member] for member in self.members]
        self.answers = {}
        if self.stage == "held":
            self.stage = "stored"
            clocks = self._clocks(answers)
            for role, rank in self.members:
                self.channel.send(TakeSnapshot(role, clocks, str(self.part)), rank)
        else:
            self._check(answers)
            self.stage = "sealed"
            # With a copy of all this: a thread that hangs, and wakes up much later, must not meet the next snapshot.
            self.sealing = DiskTask("seal", partial(copy.copy(self)._seal, answers), self.seconds)

    def step(self) -> None:
        """Go on when the snapshot has its name, or cannot have it."""
        if self.sealing is None or not self.sealing.over:
            return
        sealing, self.sealing = self.sealing, None
        try:
            self.taken = sealing.result()
        except LostRun:
            raise
        except Exception as error:
            log.warning("no snapshot", exc_info=error)
            self.error, self.hung = f"{self.part}: {reason(error)}", isinstance(error, TimeoutError)
        if self.error:
            self._warn()
        self.stage, self.ended = "", time.monotonic()
        if self.again:
            self.order()

    def _warn(self) -> None:
        """Loudly, but not for each of many short epochs."""
        tell = say if time.monotonic() > self.quiet else log.warning
        tell(f"warning: no snapshot: {self.error}")
        if tell is say:
            self.quiet = time.monotonic() + WARN_SECONDS

    def awaits(self) -> list[Wait]:
        """Who has not answered: to the order to hold, at once, or that its part is written, once it has all of it."""
        owed = [rank for role, rank in self.members if (role, rank) not in self.answers]
        if self.stage == "held":
            return [Wait("where it holds for a snapshot", rank, self.number) for rank in owed]
        if self.stage == "stored":
            return [Wait("its part of a snapshot", rank, self.number, patient=True) for rank in owed]
        return []

    def abandon(self) -> None:
        """Another generation has begun: what this one was about to name is not touched any more."""
        if self.sealing is not None:
            self.sealing.given_up = True

    def _clocks(self, answers: Sequence[dict[str, Any]]) -> list[int]:
        """As far as anybody has begun with a replica; with clocks, which all go through, as far as with any."""
        clocks = [max(begun) for begun in zip(*(answer["clocks"] for answer in answers), strict=True)]
        # The strips of a replica make one step together.
        group = len(clocks) if self.joint else self.strips
        return [max(clocks[ring - ring % group :][:group]) for ring in range(len(clocks))]

    def _check(self, answers: Sequence[dict[str, Any]]) -> None:
        """Find out whether all have written the same moment."""
        self.error = next((answer["error"] for answer in answers if "error" in answer), "")
        self.hung = any(answer.get("hung") for answer in answers)
        positions = {tuple(answer.get(key) for key in POSITION) for answer in answers[: len(self.servers)]}
        if not self.error and len(positions) > 1:
            self.error = f"the servers are not at one position: {positions}"

    def _seal(self, answers: Sequence[dict[str, Any]]) -> list[str]:
        """Name what all have written, or remove it; returns the snapshots of this job."""
        if self.error:
            shutil.rmtree(self.part, ignore_errors=True)
            return self.taken
        try:
            self._name(answers)
        except Exception as error:
            shutil.rmtree(self.part, ignore_errors=True)
            if not isinstance(error, LostRun) and not abandoned():
                # The one before of the same name may be without it.
                snapshot.restore(self.folder)
            raise
        return self.taken

    def _name(self, answers: Sequence[dict[str, Any]]) -> None:
        """All servers agree: write the model file and the manifest, and give the folder its name."""
        epoch, batches, images, clock = (answers[0][key] for key in POSITION)
        done = epoch <= self.told["epochs"]
        epochs, batches = (self.told["epochs"], 0) if done else (epoch - 1, batches)
        name = snapshot.name(epochs, batches)
        sizes = [(answer["file"], answer["size"]) for answer in answers]
        files, residuals = dict(sizes[: len(self.servers)]), dict(sizes[len(self.servers) :])
        manifest = self.told | {
            "format": FORMAT,
            "name": name,
            "epochs": epochs,
            "batches": batches,
            "images": images,
            "clock": clock,
            "parameters": sum(tensor.size for tensor in self.tensors),
            "files": files,
            "residuals": residuals,
            "strips": self.strips,
            "tensors": {tensor.name: [tensor.offset, list(tensor.shape)] for tensor in self.tensors},
            "time": time.time(),
        }
        attributes = {"snapshot": name, "epochs": epochs, "images": images, "config": self.told["config"]}
        model_file.write_virtual(self.part, list(files), self.tensors, attributes, self.told["inputs"])
        write_json(self.part / snapshot.MANIFEST, manifest)
        sync(self.part / snapshot.MANIFEST)
        if abandoned():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        self._rename(self.folder / name)
        self.taken = [*(other for other in self.taken if other != name), name]
        if not abandoned():
            self._remove_old()
        log.info("snapshot %s in %.3f s", name, time.monotonic() - self.began)

    def _rename(self, path: Path) -> None:
        """Give the snapshot its name; a kill at any moment leaves it, or the one before of that name, to `restore`."""
        if self.owner:
            self.owner.check()
        if path.exists():
            # Of a run that went another way after it, or the same again.
            path.rename(self.folder / f"{snapshot.OLD}{self.number}")
        self.renaming()
        self.part.rename(path)
        sync(self.folder)
        self._clear(snapshot.OLD)

    def _remove_old(self) -> None:
        """Older ones of this run; those of an earlier life that are said to be further are not to be trusted."""
        newest, found = self.taken[-self.keep :], [path.name for path in snapshot.own(self.folder)]
        first = min((found.index(name) for name in self.taken if name in found), default=0)
        before = [name for name in found[:first] if name not in self.taken]
        kept = newest + before[::-1][: self.keep - len(newest)]
        for name in found:
            if name not in kept and snapshot.called(self.folder / name) == name:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _clear(self, *beginnings: str) -> None:
        """Remove what is being made or replaced, of which nobody has use any more."""
        for path in self.folder.glob(".*") if self.folder.exists() else ():
            if path.name.startswith(beginnings):
                shutil.rmtree(path, ignore_errors=True)
