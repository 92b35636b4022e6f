"""The sender of one ring in the mailbox of a server: messages wait for a slot, are sent, and are acknowledged."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.windows import Window
from adam_mpi.sharding.rings import LINE, STEPPED, Rings
from adam_mpi.transport import mailbox
from adam_mpi.transport.shared_memcpy import SharedMemcpy


class OutgoingMessage(Protocol):
    """A message that is to be sent."""

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the body into `body`; return the header, without the position in the ring."""

    def batches(self) -> np.ndarray:
        """Return the ids of the batches whose gradients are in the message."""

    def acknowledge(self) -> None:
        """Handle that the server has acknowledged the message."""


M = TypeVar("M", bound=OutgoingMessage)


class RingSender(Generic[M]):
    """Writes messages into one ring of a server, in order, and reads its acknowledgements."""

    def __init__(self, rings: Rings, server: int, ring: int, mailbox_window: Window, weights_window: Window) -> None:
        """Send into ring number `ring` of `server`, which acknowledges messages in its `weights_window`."""
        self.server = server
        self.mailbox_window = mailbox_window
        self.weights_window = weights_window
        self.line_offset = rings.line_offset(ring)
        self.ring_offset = ring * rings.ring_bytes
        self.slots = rings.slots
        self.slot_bytes = rings.slot_bytes
        self.waiting: deque[M] = deque()
        """Messages that wait for a slot."""
        self.held: deque[M] = deque()
        """Messages that wait until a snapshot has been taken."""
        self.sent: deque[M] = deque()
        """Messages that are not acknowledged."""
        self.position = 0
        """Position in the ring of the last message that was sent."""
        self.applied = 0
        """Position of the last message that is acknowledged."""
        self.asked = 0
        """How often the server has asked for a torn message."""
        near = mailbox_window.memory_of(server, self.ring_offset, rings.ring_bytes)
        self.near = near is not None
        """Whether messages are written where the server reads them, and no put is needed."""
        self.memcpy = SharedMemcpy()
        memory = np.zeros(rings.ring_bytes, np.uint8) if near is None else near
        self.buffers = memory.view(np.uint32).reshape(self.slots, -1)
        self.lengths = [0] * self.slots
        self.requests: list[MPI.Request | None] = [None] * self.slots
        self.line = np.zeros(LINE // 8, np.int64)
        """What the server has published about this ring, when it was last read; see `PublishedWeights`."""
        self.reading: MPI.Request | None = None
        self.bytes = 0
        self.resent = 0

    def drop(self) -> None:
        """Drop all messages: they refer to their sender, and would keep its memory until the garbage collector runs."""
        for messages in (self.waiting, self.held, self.sent):
            messages.clear()

    def copy(self, body: np.ndarray, values: np.ndarray) -> bool:
        """Copy the words `values` into `body`; return whether none of them is a NaN or an infinity."""
        return self.memcpy.copy(body, values) if self.near else mailbox.copy_words(body, values)

    def step(self) -> bool:
        """Handle acknowledgements and send waiting messages, without waiting; return whether anything was done."""
        if self.near:
            # What the server has published can be read at once.
            self._read_line()
        worked = self._handle_acknowledgements()
        while self.waiting and self.position - self.applied < self.slots and self._slot_is_free():
            with trace.span("push"):
                self._put(self.waiting.popleft())
            worked = True
        if not self.near:
            self._read_line()
        return worked

    def _read_line(self) -> None:
        """Begin to read what the server has published about this ring, if messages are not acknowledged."""
        if self.reading is None and self.position > self.applied:
            self.reading = self.weights_window.get(self.line, self.server, self.line_offset)

    @property
    def arrived(self) -> int:
        """Return how many of the messages in `sent`, the oldest ones, the server has seen."""
        return min(max(0, int(self.line[4]) - self.applied), len(self.sent))

    @property
    def stepped(self) -> int:
        """Return the position of the last message that was in the weights of the server when its line was read."""
        return int(self.line[STEPPED])

    def missing(self, stepped: int) -> Iterator[M]:
        """Yield the messages that are not in weights read when the server had stepped on the ring up to `stepped`."""
        yield from islice(self.sent, max(0, stepped - self.applied), None)
        yield from self.waiting
        yield from self.held

    def _slot_is_free(self) -> bool:
        """Return whether the put of the last message in the next slot is complete."""
        request = self.requests[self.position % self.slots]
        return request is None or request.Test()

    def _put(self, message: M) -> None:
        """Write `message` into the next slot, and send it."""
        slot = self.position % self.slots
        header = message.write(mailbox.body(self.buffers[slot]))
        # Not before: a position without a message would never be applied.
        self.position += 1
        batches = message.batches()
        header["batches"] = batches.size
        self.lengths[slot] = mailbox.seal(self.buffers[slot], header, batches)
        if header["last"]:
            # Before it is sent: a near server may have it in the next microsecond.
            trace.sends((int(header["pusher"]), int(header["sequence"]), self.server))
        self._send(slot, self.position)
        self.sent.append(message)

    def _send(self, slot: int, position: int) -> None:
        """Send the message in `slot`: write its position, and put it if the server is not near."""
        message = self.buffers[slot, : self.lengths[slot]]
        if self.near:
            self.mailbox_window.sync()
            mailbox.write_position(message, position)
        else:
            mailbox.write_position(message, position)
            mailbox.write_checksum(message)
            offset = self.ring_offset + slot * self.slot_bytes
            self.requests[slot] = self.mailbox_window.put(message, self.server, offset)
        self.bytes += message.nbytes

    def _handle_acknowledgements(self) -> bool:
        """Handle what the server has published as applied, which also frees slots; return whether there was any."""
        if self.reading is None or not self.reading.Test():
            return False
        self.reading = None
        count = int(self.line[0]) - self.applied
        self.applied += count
        for _ in range(count):
            self.sent.popleft().acknowledge()
        if self.line[2] != self.asked:
            self.asked = int(self.line[2])
            self._send_again(int(self.line[1]))
        return count > 0

    def _send_again(self, position: int) -> None:
        """Send the message at `position` again: the server has had only a part of it for too long."""
        if position > self.applied:
            self.resent += 1
            self._send((position - 1) % self.slots, position)
