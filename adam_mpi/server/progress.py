"""The books of a server: where training stands, how far each pusher is, and what has been counted on the way."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from adam_mpi.config import Config
from adam_mpi.server import schedule
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.transport.mailbox import ReceivedMessage

NEVER = 1 << 62
log = logging.getLogger(__name__)


class ServerProgress:
    def __init__(self, config: Config, position: Position, epoch_images: int) -> None:
        self.config, self.position = config, position
        """Where training stands here; what has passed so far of the whole training sets the learning rate."""
        self.epoch_images, self.total = epoch_images, config.train.epochs * epoch_images
        self.first_clock = position.clock
        self.synchronous = config.consistency.staleness == 0
        self.positions = {0: position}
        """In synchronous training by clock: before and after the one under way."""
        self.copied = Position.unpack(position.pack())
        """Batches of steps that copies here have taken. Apart: others go on after a snapshot before we have ours."""
        self.settled: Position | None = None
        """Where training stood when this generation began: pushes of its batches have been counted."""
        self.counts: Counter[str] = Counter()
        self.leads: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()

    def enter(self, memory_layout: MemoryLayout, server: int, clocks: Sequence[int], pushers: Sequence[str]) -> None:
        """Begin a generation; `clocks`: of the next push in each ring; `pushers`: what to call them."""
        self.pushers = pushers
        self.strips, self.feeding = memory_layout.strips, memory_layout.feeding(server)
        # Strips that push nothing to us are never waited for.
        self.clocks = [clock if ring in self.feeding else NEVER for ring, clock in enumerate(clocks)]
        self.clock, self.furthest = min(self.clocks, default=0), max((clocks[ring] for ring in self.feeding), default=0)
        """What all pushers, and what the first of them, have come to."""
        self.went_on: dict[int, float] = {}
        """Ring -> when something of it was first applied in this generation, in seconds since 1970."""

    def go_back(self, position: Position, version: int | None, clock: int) -> None:
        """To where all servers stand when a generation begins, the fastest pusher at this clock."""
        self.first_clock = position.clock - clock
        self.position, self.settled = position, Position.unpack(position.pack())
        self.copied = Position.unpack(position.pack())
        self.positions = {version or 0: position}

    @property
    def rate(self) -> float:
        return self._rate_at(self.position)

    def _rate_at(self, position: Position) -> float:
        images = schedule.passed(position, self.config.train.batch, self.epoch_images)
        return schedule.rate(self.config.optimizer, images, self.total)

    def rate_of(self, version: int, batches: np.ndarray, images: int) -> float:
        """For the step to this version: as it is now; in synchronous training as it was when the clock began."""
        if not self.synchronous:
            return self.rate
        self._reach(version, batches, images)
        return self._rate_at(self.positions[version - 1])

    def taken(self, record: ReceivedMessage, batches: np.ndarray) -> None:
        """A copy here has taken a step."""
        if self.synchronous and batches.size:
            self._reach(record.sequence, batches, record.images)
        else:
            self.copied.add(batches)

    def _reach(self, version: int, batches: np.ndarray, images: int) -> None:
        """The first step of a clock in synchronous training.

        A server that serves nothing and was sent its first copy after some clocks does not know where those ended.
        """
        if version not in self.positions and version - 1 in self.positions:
            self.position = self.positions[version - 1].after(batches, images)
            self.positions = {version - 1: self.positions[version - 1], version: self.position}

    def applied(self, mail: ReceivedMessage) -> None:
        """Something of a message is in a shard."""
        if mail.ring not in self.went_on:
            self.went_on[mail.ring] = time.time()

    def settle(self, mail: ReceivedMessage, batches: np.ndarray) -> None:
        """A message has been dealt with, on all copies."""
        if mail.last:
            self._advance(mail)
        if self.synchronous:
            return
        self.position.add(batches)
        if mail.last:
            self.position.clock = self.first_clock + self.furthest
            counted = self.settled is not None and self.config.asynchronous and self.settled.has(batches)
            # The strips of a replica push the same images: they count once.
            if mail.ring % self.strips == self.feeding[0] and not counted:
                self.position.images += mail.images

    def _advance(self, mail: ReceivedMessage) -> None:
        """The last message of a push for this server."""
        lead = mail.clock - self.clock
        self.leads[max(0, lead)] += 1
        if lead > self.config.consistency.staleness:
            self.counts["too_stale"] += 1
            log.error("push %d of %s is %d clocks ahead", mail.sequence, self.pushers[mail.ring], lead)
        self.counts["applied"] += 1
        before, after = self.clocks[mail.ring], mail.clock + 1
        if after > before:
            self.clocks[mail.ring], self.furthest = after, max(self.furthest, after)
            if before == self.clock:
                self.clock = min(self.clocks)

    @property
    def went_on_at(self) -> tuple[float | None, float | None]:
        """When the first pusher, and when all of them, had something applied in this generation."""
        whole = self.went_on and len(self.went_on) == len(self.feeding)
        return min(self.went_on.values(), default=None), max(self.went_on.values()) if whole else None

    def export_state(self, state: RankState) -> None:
        self.copied.images, self.copied.clock = self.position.images, self.position.clock
        state.positions = dict(self.positions) if self.synchronous else {0: self.position, 1: self.copied}
        state.went_on = self.went_on_at
