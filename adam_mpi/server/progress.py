"""The progress of a server: the position of training, clocks of pushers, counts of applied pushes, and statistics."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.config import Config
from adam_mpi.optimizer import schedules
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position, RankState
from adam_mpi.transport.mailbox import ReceivedMessage

if TYPE_CHECKING:
    from adam_mpi.server.session import ServerSession

NEVER = 1 << 62
log = logging.getLogger(__name__)


class PusherClocks:
    """The clock of each pusher, as one server sees it, during one generation."""

    def __init__(self, memory_layout: MemoryLayout, server: int, clocks: Sequence[int], names: Sequence[str]) -> None:
        """Begin with `clocks`, the clock of the next push in each ring; `names` has the pushers, for messages."""
        self.names = names
        self.strips = memory_layout.strips
        self.feeding = memory_layout.feeding(server)
        """The rings that push to this server; it never waits for strips that push nothing to it."""
        self.clocks = [clock if ring in self.feeding else NEVER for ring, clock in enumerate(clocks)]
        self.slowest = min(self.clocks, default=0)
        """The clock that all pushers have reached."""
        self.fastest = max((clocks[ring] for ring in self.feeding), default=0)
        self.first_applied: dict[int, float] = {}
        """Ring -> when a message of it was first applied in this generation, in seconds since 1970."""

    def note_applied(self, ring: int) -> None:
        """Note that a message of `ring` is in a shard."""
        if ring not in self.first_applied:
            self.first_applied[ring] = time.time()

    def advance(self, ring: int, clock: int) -> None:
        """Note that the push of `clock` in `ring` is complete on this server."""
        before = self.clocks[ring]
        after = clock + 1
        if after > before:
            self.clocks[ring] = after
            self.fastest = max(self.fastest, after)
            if before == self.slowest:
                self.slowest = min(self.clocks)

    def counts_images(self, ring: int) -> bool:
        """Return whether pushes in `ring` count images: the strips of a replica push the same ones, so one does."""
        return ring % self.strips == self.feeding[0]

    @property
    def resumed_at(self) -> tuple[float | None, float | None]:
        """Return when the first pusher, and when all of them, had a message applied in this generation."""
        whole = self.first_applied and len(self.first_applied) == len(self.feeding)
        first = min(self.first_applied.values(), default=None)
        return first, max(self.first_applied.values()) if whole else None


class ServerProgress:
    """The position of training on one server, and its counts, across generations."""

    def __init__(self, config: Config, position: Position, epoch_images: int) -> None:
        """Begin at `position`; the share of all epochs of `epoch_images` that is done sets the learning rate."""
        self.config = config
        self.position = position
        self.epoch_images = epoch_images
        self.total_images = config.train.epochs * epoch_images
        self.first_clock = position.clock
        self.rate_scale = 1.0
        """The scale of the schedule plateau."""
        self.synchronous = config.consistency.staleness == 0
        self.positions = {0: position}
        """In synchronous training by clock: before and after the current one."""
        self.copied = Position.unpack(position.pack())
        """Batches of steps that copies here have taken. Other servers continue after a snapshot before this one has
        written its part, so these batches must not be in `position`."""
        self.generation_start: Position | None = None
        """The position at the start of this generation: images of its batches are counted already."""
        self.counts: Counter[str] = Counter()
        self.leads: Counter[int] = Counter()
        """Clocks by which a push was ahead of the slowest pusher -> number of pushes."""
        self.delays: Counter[int] = Counter()
        """Steps since the weights that a message was computed on -> number of messages."""

    def rewind(self, position: Position, version: int | None, clock: int) -> None:
        """Set the position that all servers have when a generation begins, the fastest pusher being at `clock`."""
        self.first_clock = position.clock - clock
        self.position = position
        self.generation_start = Position.unpack(position.pack())
        self.copied = Position.unpack(position.pack())
        self.positions = {version or 0: position}

    @property
    def rate(self) -> float:
        """Return the learning rate at the current position."""
        return self._rate_at(self.position)

    def _rate_at(self, position: Position) -> float:
        batch = self.config.train.batch
        images = position.images_passed(batch, self.epoch_images)
        progress = schedules.Progress(images, self.total_images, batch=batch, epoch=self.epoch_images)
        return schedules.learning_rate(self.config.optimizer, progress) * self.rate_scale

    def rate_of(self, version: int, batches: np.ndarray, images: int) -> float:
        """Return the rate of the step to `version`: the current one; in synchronous training that of its clock."""
        if not self.synchronous:
            return self.rate
        self._begin_clock(version, batches, images)
        return self._rate_at(self.positions[version - 1])

    def note_copy_step(self, record: ReceivedMessage, batches: np.ndarray) -> None:
        """Note that a copy here has taken the step of `record`, which has these `batches`."""
        if self.synchronous and batches.size:
            self._begin_clock(record.sequence, batches, record.images)
        else:
            self.copied.add(batches)

    def _begin_clock(self, version: int, batches: np.ndarray, images: int) -> None:
        """Advance the position with the first step of a clock in synchronous training.

        A server that serves nothing and was sent its first copy after some clocks does not know where those ended.
        """
        if version not in self.positions and version - 1 in self.positions:
            self.position = self.positions[version - 1].after(batches, images)
            self.positions = {version - 1: self.positions[version - 1], version: self.position}

    def advance(self, message: ReceivedMessage, batches: np.ndarray, clocks: PusherClocks) -> None:
        """Advance clocks and position by a message, with these `batches`, that all copies have applied."""
        if message.last:
            self._count_push(message, clocks)
        if self.synchronous:
            return
        self.position.add(batches)
        if message.last:
            self.position.clock = self.first_clock + clocks.fastest
            if clocks.counts_images(message.ring) and not self._counted_before(batches):
                self.position.images += message.images

    def _counted_before(self, batches: np.ndarray) -> bool:
        """Return whether images of these batches were counted in an earlier generation."""
        start = self.generation_start
        return start is not None and self.config.asynchronous and start.has(batches)

    def _count_push(self, message: ReceivedMessage, clocks: PusherClocks) -> None:
        """Count a push with its last message for this server, and advance the clock of its pusher."""
        lead = message.clock - clocks.slowest
        self.leads[max(0, lead)] += 1
        if lead > self.config.consistency.staleness:
            self.counts["too_stale"] += 1
            ahead = f"{lead} clocks ahead of the slowest pusher, more than consistency.staleness"
            log.error("push %d of %s is %s; applied anyway", message.sequence, clocks.names[message.ring], ahead)
        self.counts["applied"] += 1
        clocks.advance(message.ring, message.clock)

    def export_state(self, state: RankState) -> None:
        """Write the positions into `state`."""
        self.copied.images = self.position.images
        self.copied.clock = self.position.clock
        state.positions = dict(self.positions) if self.synchronous else {0: self.position, 1: self.copied}


COUNTS = ("applied", "duplicates", "refused", "torn", "too_stale", "steps", "folded")


def server_statistics(session: "ServerSession", busy: float) -> dict[str, Any]:
    """Return the statistics of a server in `session`; `busy`: seconds in which it applied pushes."""
    progress = session.progress
    queue = session.push_queue
    counts = progress.counts + queue.counts
    owners = session.memory_layout.strip_of_shard
    return {
        "role": "server",
        "generation": session.world.generation,
        "tables": last_pushes(session.memory_layout, session.shards, session.shard_copies, session.began),
        "strips": sorted({owners[shard.index] for shard in session.shards}),
        "dropped": queue.counts["duplicates"],
        "resumed_at": session.clocks.resumed_at,
        "rebuilt": session.replicator.rebuilt if session.replicator else 0,
        "rank": session.world.place.member,
        "cpu": time.process_time(),
        **{key: counts[key] for key in COUNTS},
        "busy": busy,
        "queue": len(session.staged),
        "bytes": counts["bytes"],
        "rate": progress.rate,
        "rate_scale": progress.rate_scale,
        "clocks": dict(zip(queue.members, session.clocks.clocks, strict=True)),
        "leads": dict(progress.leads),
        "delays": dict(progress.delays),
        "shards": len(session.shards),
        "parameters": sum(shard.size for shard in session.shards),
        "store": _store_statistics(session.store),
    }


def last_pushes(
    memory_layout: MemoryLayout,
    shards: Sequence[Shard],
    shard_copies: Mapping[int, ShardCopy],
    acknowledged: Mapping[int, Mapping[int, int]],
) -> list[tuple[str, int, int]]:
    """Return (pusher, strip, the last of its pushes that every one of `shards` of that strip has).

    There is a row for every pusher in `acknowledged`, and for every earlier one with a push in one of the shards.
    """
    tables: dict[int, list[dict[int, int]]] = {}
    for shard in shards:
        tables.setdefault(memory_layout.strip_of_shard[shard.index], []).append(shard_copies[shard.index].table)
    return [
        (str(pusher), strip, min(table.get(pusher, 0) for table in held) // MOST_PARTS)
        for strip, held in tables.items()
        for pusher in sorted(acknowledged.get(strip, {}).keys() | {pusher for table in held for pusher in table})
    ]


def _store_statistics(store: WriteBehind | None) -> dict[str, Any] | None:
    """Return the statistics of `store`, if there is one."""
    if store is None:
        return None
    return {"behind": round(store.lag, 3), "bytes": store.written, "whole": store.complete}
