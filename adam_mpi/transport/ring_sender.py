"""A lane: our ring in one server's mailbox. What waits for a slot, what is under way, what is acknowledged."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.windows import Window
from adam_mpi.sharding.memory_layout import LINE, Rings
from adam_mpi.transport import mailbox
from adam_mpi.transport.shared_memcpy import SharedMemcpy


class OutgoingMessage(Protocol):
    """What is to be sent as one message."""

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the body; return the header, without the position in the ring."""

    def batches(self) -> np.ndarray: ...

    def settled(self) -> None:
        """The server has dealt with it."""


L = TypeVar("L", bound=OutgoingMessage)


class RingSender(Generic[L]):
    def __init__(self, rings: Rings, server: int, ring: int, mail: Window, published: Window) -> None:
        self.server, self.mailbox, self.published = server, mail, published
        self.line_offset, self.ring_offset = rings.line_offset(ring), ring * rings.ring_bytes
        self.slots, self.slot_bytes = rings.slots, rings.slot_bytes
        self.waiting: deque[L] = deque()
        self.held: deque[L] = deque()
        """What must wait until a snapshot has been taken."""
        self.sent: deque[L] = deque()
        self.position = self.applied = self.asked = 0
        near = mail.direct(server, self.ring_offset, rings.ring_bytes)
        self.near = near is not None
        """Whether messages are written where the server reads them, and nothing needs to be put."""
        self.copier = SharedMemcpy()
        memory = np.zeros(rings.ring_bytes, np.uint8) if near is None else near
        self.buffers = memory.view(np.uint32).reshape(self.slots, -1)
        self.lengths = [0] * self.slots
        self.requests: list[MPI.Request | None] = [None] * self.slots
        self.line = np.zeros(LINE // 8, np.int64)
        self.reading: MPI.Request | None = None
        self.bytes = self.resent = 0

    def drop(self) -> None:
        """Let go of all letters: they know their lane, and would keep its memory until Python looks for such rings."""
        for letters in (self.waiting, self.held, self.sent):
            letters.clear()

    def copy(self, body: np.ndarray, values: np.ndarray) -> bool:
        """Copy words into a body; whether none of them is a NaN or an infinity."""
        return self.copier.copy(body, values) if self.near else mailbox.copy(body, values)

    def step(self) -> bool:
        if self.near:
            # What the server has published is at hand.
            self._look()
        worked = self._acknowledge()
        while self.waiting and self.position - self.applied < self.slots and self._free():
            with trace.span("push"):
                self._put(self.waiting.popleft())
            worked = True
        if not self.near:
            self._look()
        return worked

    def _look(self) -> None:
        """Begin to read what the server has published, if anything of ours is under way."""
        if self.reading is None and self.position > self.applied:
            self.reading = self.published.get(self.line, self.server, self.line_offset)

    @property
    def arrived(self) -> int:
        """How many of the messages under way, the oldest ones, the server has seen."""
        return min(max(0, int(self.line[4]) - self.applied), len(self.sent))

    def missing(self, applied: int) -> Iterator[L]:
        """What is pushed and not in weights read when the server had applied so much of our ring."""
        yield from islice(self.sent, max(0, applied - self.applied), None)
        yield from self.waiting
        yield from self.held

    def _free(self) -> bool:
        request = self.requests[self.position % self.slots]
        return request is None or request.Test()

    def _put(self, letter: L) -> None:
        slot = self.position % self.slots
        header = letter.write(mailbox.body(self.buffers[slot]))
        # Not before: a position without a message would never be applied.
        self.position += 1
        batches = letter.batches()
        header["batches"] = batches.size
        self.lengths[slot] = mailbox.seal(self.buffers[slot], header, batches)
        if header["last"]:
            # Before it is sent: a near server may have it in the next microsecond.
            trace.sends((int(header["pusher"]), int(header["sequence"]), self.server))
        self._send(slot, self.position)
        self.sent.append(letter)

    def _send(self, slot: int, position: int) -> None:
        message = self.buffers[slot, : self.lengths[slot]]
        if self.near:
            self.mailbox.sync()
            mailbox.post(message, position)
        else:
            mailbox.post(message, position)
            mailbox.sign(message)
            self.requests[slot] = self.mailbox.put(message, self.server, self.ring_offset + slot * self.slot_bytes)
        self.bytes += message.nbytes

    def _acknowledge(self) -> bool:
        """Take note of what the server has published as applied; that also frees its slots."""
        if self.reading is None or not self.reading.Test():
            return False
        self.reading = None
        news = int(self.line[0]) - self.applied
        self.applied += news
        for _ in range(news):
            self.sent.popleft().settled()
        if self.line[2] != self.asked:
            self.asked = int(self.line[2])
            self._send_again(int(self.line[1]))
        return news > 0

    def _send_again(self, position: int) -> None:
        """The server has had this message in part for too long."""
        if position > self.applied:
            self.resent += 1
            self._send((position - 1) % self.slots, position)
