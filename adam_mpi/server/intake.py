"""The rings of a mailbox, read: what is whole is taken, each ring's in order; what stays torn is asked for again."""

import time
from collections.abc import Sequence

import numpy as np

from adam_mpi.cluster.world import World
from adam_mpi.server import mailbox
from adam_mpi.server.mail import Mail
from adam_mpi.server.published import Published
from adam_mpi.server.shelves import Rings


class Intake:
    def __init__(
        self, world: World, rings: Rings, senders: Sequence[int], memory: np.ndarray, published: Published
    ) -> None:
        """`senders`: the rank that writes each ring."""
        self.slots, self.slot_words = rings.slots, rings.slot_bytes // 4
        self.words = memory.view(np.uint32)
        self.headers = np.ndarray(len(senders) * self.slots, mailbox.HEADER, memory, strides=(rings.slot_bytes,))
        host, shared = world.place.host, world.config.cluster.transport == "shared"
        self.near = np.array([shared and world.layout.places[rank].host == host for rank in senders], bool)
        """Whose messages are written where we read them, and carry no checksum."""
        lines = slice(rings.first_line, rings.first_line + len(senders))
        self.applied, self.torn, self.asked = published.applied[lines], published.torn[lines], published.asked[lines]
        self.arrived = published.arrived[lines]
        self.collected = np.zeros(len(senders), np.int64)
        self.seconds = world.config.server.torn_seconds
        self.since: dict[tuple[int, int], float] = {}
        """(ring, position) of messages that are there in part -> since when."""

    def collect(self) -> list[Mail]:
        """Everything that has arrived whole since the last time."""
        place = self.words, self.slots, self.slot_words, self.collected, self.applied, self.near
        whole, torn = mailbox.arrived(*place)
        if torn.size or self.since:
            broken = [(ring, int(self.collected[ring]) + 1) for ring in torn.tolist()]
            self.since = {message: self.since.get(message, time.monotonic()) for message in broken}
        if not whole.size:
            return []
        self.arrived[:] = self.collected
        headers = zip(whole.tolist(), self.headers[whole].tolist(), strict=True)
        return [
            Mail(slot // self.slots, slot * self.slot_words + mailbox.HEADER_WORDS, *fields) for slot, fields in headers
        ]

    def ask_again(self) -> list[tuple[int, int]]:
        """For messages that have been there in part for too long; returns which."""
        if not self.since:
            return []
        now = time.monotonic()
        late = [message for message, since in self.since.items() if now - since > self.seconds]
        for ring, position in late:
            self.since[ring, position] = now
            self.torn[ring] = position
            self.asked[ring] += 1
        return late
