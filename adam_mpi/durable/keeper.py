"""The head's care for what outlives the job: when a snapshot is due, when the job is to stop, what may be removed."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from adam_mpi.cluster.post import Post
from adam_mpi.cluster.world import World
from adam_mpi.config import to_toml
from adam_mpi.durable import model, snapshot
from adam_mpi.durable.conductor import Conductor
from adam_mpi.durable.errand import disk_seconds
from adam_mpi.durable.newest import Resume, order_settings
from adam_mpi.durable.owner import Owner
from adam_mpi.errors import UserError
from adam_mpi.observe.board import Board
from adam_mpi.server.codecs import CODECS
from adam_mpi.server.shelves import Shelves

log = logging.getLogger(__name__)


class Keeper:
    def __init__(
        self, world: World, post: Post, directory: Path, shelves: Shelves, resume: Resume | None, until: float,
        describe: Callable[[], dict[str, Any]], owner: Owner,
    ) -> None:  # fmt: skip
        """`until`: when the job is to stop; `describe`: what snapshots say of it; `owner`: its claim on the run."""
        self.world, self.config, self.directory, self.shelves = world, world.config, directory, shelves
        self.post, self.resume, self.until, self.describe = post, resume, until, describe
        self.owner, self.heart = owner, owner.beat()
        servers = [server for server in shelves.servers if shelves.held[server]]
        joint, keep = not self.config.asynchronous, self.config.snapshot.keep
        pushers = shelves.pushers if CODECS[self.config.push.codec].feedback else ()
        folder = directory / "snapshots"
        renaming = partial(world.injector.at, "rename")
        self.snapshots = Conductor(
            post, servers, folder, keep, joint, shelves.tensors, self._describe, shelves.strips, pushers, renaming,
            owner, disk_seconds(self.config),
        )  # fmt: skip
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
        group = "average/" if self.config.optimiser.average else ""
        pieces = model.pieces(newest / snapshot.MODEL, self.shelves.tensors, group)
        told = self._describe()
        model.write_pieces(self.directory / "weights.h5", pieces, self.shelves.tensors, told["config"], told["inputs"])

    def forget_old_stores(self, board: Board) -> None:
        """When every server's store of this job is whole, those of earlier ones are no longer needed."""
        now = [word for word in board.of("server") if word["generation"] == self.world.generation]
        words = [word["store"] for word in now if word["shards"]]
        if self.old_stores and len(words) == len(self.snapshots.servers) and all(w and w["whole"] for w in words):
            self.old_stores = False
            for server in self.snapshots.servers:
                self.post.send({"kind": "store", "order": "forget"}, server)

    def _describe(self) -> dict[str, Any]:
        now = {"replicas": self.world.layout.replicas, "order": order_settings(self.config)}
        return now | {"config": to_toml(self.config)} | self.describe()
