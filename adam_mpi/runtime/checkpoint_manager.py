"""What outlives a job: when a snapshot is due, when the job is to stop, the final weights, which stores are removed."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file, snapshot
from adam_mpi.checkpoint.disk_task import disk_seconds
from adam_mpi.checkpoint.resume import order_settings
from adam_mpi.cluster.control_messages import RemoveOldStores
from adam_mpi.config import to_toml
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.snapshot_coordinator import SnapshotCoordinator
from adam_mpi.runtime.snapshot_seal import SnapshotSettings
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.transport.generation import Generation


class CheckpointManager:
    """Orders the snapshots of one generation."""

    def __init__(self, generation: Generation, job: Job, describe: Callable[[], dict[str, Any]]) -> None:
        """Make a checkpoint manager; `describe` returns what snapshots say about the progress of the job."""
        self.world = generation.world
        self.config = generation.world.config
        self.directory = job.directory
        self.memory_layout = generation.memory_layout
        self.channel = generation.channel
        self.resume = job.resume
        self.until = job.until
        self.describe_progress = describe
        self.owner = job.owner
        self.heartbeat = job.owner.heartbeat()
        self.snapshots = SnapshotCoordinator(generation.channel, _settings(generation, job), self._describe)
        if job.resume is not None and job.resume.kind == "snapshot":
            self.snapshots.good = [job.resume.path.name]
        self.stale = job.resume is None or job.resume.kind == "store"
        """Whether the weights are newer than the newest snapshot."""
        self.last_ordered = False
        """Whether the snapshot with which the job ends has been ordered."""
        self.requests_handled = self.world.snapshot_requests
        """How many of the requests for a snapshot by a signal have been handled."""
        self.old_stores = True
        """Whether there may be stores of earlier attempts."""

    def look(self, training: bool, stop: bool) -> str:
        """Order a snapshot if one is due or requested; return why the job is to stop, or an empty string.

        `training` says whether the current phase is one of training, `stop` whether there is a file STOP.
        """
        self.heartbeat.raise_if_lost()
        if self._is_due() or self.world.snapshot_requests > self.requests_handled:
            self.requests_handled = self.world.snapshot_requests
            # Outside of training, the snapshot of the last epoch's end is up to date.
            if training:
                self.snapshots.order()
        if stop:
            return "the file STOP"
        return "--max-minutes" if time.time() > self.until else ""

    def _is_due(self) -> bool:
        """Return whether a snapshot is due: `snapshot.minutes` have passed since the last one."""
        seconds = 60 * self.config.snapshot.minutes
        return bool(seconds) and not self.snapshots.busy and time.monotonic() - self.snapshots.ended > seconds

    def epoch_ended(self) -> None:
        """Order the snapshot of the end of an epoch."""
        self.stale = False
        self.snapshots.order()

    def finished(self) -> bool:
        """Return whether the last snapshot has the final weights; raise UserError if it could not be written."""
        self.heartbeat.raise_if_lost()
        if self.snapshots.busy:
            return False
        if not self.stale and not self.snapshots.error:
            return True
        if self.last_ordered or self.snapshots.hung:
            advice = "see to the disk" if self.snapshots.hung else "make room"
            raise UserError(f"the last snapshot could not be written: {self.snapshots.error}; {advice} and --resume")
        self.last_ordered = True
        self.stale = False
        self.snapshots.order()
        return False

    def write_weights(self) -> None:
        """Write the weights of the newest snapshot as one file, `weights.h5`."""
        taken = self.snapshots.taken
        newest = self.directory / "snapshots" / taken[-1] if taken or self.resume is None else self.resume.path
        group = "ema/" if self.config.optimizer.ema else ""
        tensors = self.memory_layout.tensors
        pieces = model_file.model_pieces(newest / snapshot.MODEL, tensors, group)
        description = self._describe()
        path = self.directory / "weights.h5"
        model_file.write_pieces(path, pieces, tensors, description["config"], description["inputs"])

    def remove_old_stores(self, statistics: JobStatistics) -> None:
        """Let servers remove the stores of earlier attempts once all stores of this generation are complete."""
        if not self.old_stores:
            return
        current = [report for report in statistics.of_role("server") if report["generation"] == self.world.generation]
        stores = [report["store"] for report in current if report["shards"]]
        servers = self.snapshots.settings.servers
        if len(stores) == len(servers) and all(store and store["whole"] for store in stores):
            self.old_stores = False
            for server in servers:
                self.channel.send(RemoveOldStores(), server)

    def _describe(self) -> dict[str, Any]:
        """Return what snapshots say about the job besides its position."""
        settings = {
            "replicas": self.world.layout.replicas,
            "order": order_settings(self.config),
            "config": to_toml(self.config),
        }
        return settings | self.describe_progress()


def _settings(generation: Generation, job: Job) -> SnapshotSettings:
    """Return the settings that all snapshots of `generation` have in common."""
    world = generation.world
    config = world.config
    layout = generation.memory_layout
    return SnapshotSettings(
        folder=job.directory / "snapshots",
        servers=[server for server in layout.servers if layout.served[server]],
        tensors=layout.tensors,
        keep=config.snapshot.keep,
        joint=not config.asynchronous,
        strips=layout.strips,
        pushers=layout.pushers if CODECS[config.push.codec].feedback else (),
        before_rename=partial(world.injector.at, "rename"),
        owner=job.owner,
        seconds=disk_seconds(config),
    )
