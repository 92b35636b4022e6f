"""The push client: cuts contributions into messages, one per shard, and puts them into the servers' mailboxes."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.windows import SendWindow, Window
from adam_mpi.cluster.world import World
from adam_mpi.server import mailbox
from adam_mpi.server.codecs import CODECS, NUMBERS
from adam_mpi.server.shards import Shard
from adam_mpi.server.shelves import LINE, Shelves
from adam_mpi.worker.contribution import Contribution


class Lane:
    """Our ring in one server's mailbox: what waits for a slot, what is under way, what is acknowledged."""

    def __init__(self, client: "PushClient", server: int) -> None:
        shelves = client.shelves
        self.client, self.server = client, server
        self.waiting: deque[tuple[Contribution, Shard]] = deque()
        self.sent: deque[tuple[Contribution, Shard]] = deque()
        self.position = self.applied = 0
        self.buffers = np.zeros((shelves.slots, shelves.slot_bytes // 4), np.uint32)
        self.requests: list[MPI.Request | None] = [None] * shelves.slots
        self.lengths = [0] * shelves.slots
        self.again = 0
        self.line = np.zeros(LINE // 8, np.int64)
        self.reading: MPI.Request | None = None

    def step(self) -> bool:
        worked = self._acknowledge()
        while self.waiting and self.position - self.applied < self.client.shelves.slots and self._free():
            self._put(*self.waiting.popleft())
            worked = True
        if self.reading is None and self.position > self.applied:
            self.reading = self.client.published.get(
                self.line, self.server, self.client.shelves.line_offset(self.client.ring)
            )
        return worked

    def missing(self, applied: int) -> Iterator[tuple[Contribution, Shard]]:
        """What is pushed and not in weights read when the server had applied so much of our ring."""
        yield from islice(self.sent, max(0, applied - self.applied), None)
        yield from self.waiting

    def _free(self) -> bool:
        request = self.requests[self.position % len(self.requests)]
        return request is None or request.Test()

    def _put(self, contribution: Contribution, shard: Shard) -> None:
        client, slot = self.client, self.position % len(self.requests)
        self.position += 1
        header = client.header(contribution, shard, self.position, shard is client.shelves.held[self.server][-1])
        part, body = slice(shard.start, shard.stop), mailbox.body(self.buffers[slot])
        header["words"] = client.codec.encode(contribution.values[part], client.residual[part], body)
        batches = np.array([done.number for done in contribution.done], np.int64)
        message = self.buffers[slot, : mailbox.seal(self.buffers[slot], header, batches)]
        self.lengths[slot] = message.size
        self._send(slot)
        self.sent.append((contribution, shard))

    def _send(self, slot: int) -> None:
        client, message = self.client, self.buffers[slot, : self.lengths[slot]]
        offset = client.ring * client.shelves.ring_bytes + slot * client.shelves.slot_bytes
        self.requests[slot] = client.mailbox.put(message, self.server, offset)
        client.bytes += message.nbytes

    def _send_again(self, position: int) -> None:
        """The server has had this message in part for too long."""
        if position > self.again and position > self.applied:
            self.again = position
            self.client.resent += 1
            self._send((position - 1) % len(self.requests))

    def _acknowledge(self) -> bool:
        """Take note of what the server has published as applied; that also frees its slots."""
        if self.reading is None or not self.reading.Test():
            return False
        self.reading = None
        news = int(self.line[0]) - self.applied
        for _ in range(news):
            self.client.settled(self.sent.popleft()[0])
        self.applied += news
        self._send_again(int(self.line[1]))
        return news > 0


class PushClient:
    def __init__(
        self, world: World, shelves: Shelves, mail: Window | SendWindow, published: Window | SendWindow
    ) -> None:
        self.world, self.shelves, self.mailbox, self.published = world, shelves, mail, published
        self.ring = shelves.pushers.index(world.rank)
        self.pusher = self.ring
        """Unique for the life of the job; in the first generation the same as the ring."""
        self.lanes = [Lane(self, server) for server in shelves.servers if shelves.held[server]]
        self.seen = np.zeros(len(shelves.shards), np.int64)
        """Versions of the shards that the last pull brought."""
        self.unacknowledged: deque[Contribution] = deque()
        self.acknowledged: deque[Contribution] = deque()
        self.codec = CODECS[world.config.push.codec]
        self.residual = np.zeros(shelves.parameters if self.codec.feedback else 0, np.float32)
        """What error feedback carries into later pushes."""
        self.sent = self.settled_count = self.bytes = self.resent = 0

    def push(self, contribution: Contribution) -> None:
        self.world.injector.at("push")
        contribution.clock = self.sent
        self.sent += 1
        contribution.sequence, contribution.pending = self.sent, len(self.shelves.shards)
        self.unacknowledged.append(contribution)
        for lane in self.lanes:
            lane.waiting.extend((contribution, shard) for shard in self.shelves.held[lane.server])

    def step(self) -> bool:
        self.mailbox.sync()
        self.published.sync()
        worked = [lane.step() for lane in self.lanes]
        return any(worked)

    def header(self, contribution: Contribution, shard: Shard, position: int, last: bool) -> np.ndarray:
        header = np.zeros((), mailbox.HEADER)
        header["position"], header["generation"] = position, self.world.generation
        header["pusher"], header["sequence"], header["clock"] = self.pusher, contribution.sequence, contribution.clock
        header["shard"], header["kind"], header["last"] = shard.index, mailbox.DELTA, last
        header["codec"] = NUMBERS[self.world.config.push.codec]
        header["values"], header["images"] = shard.size, contribution.images
        header["batches"] = len(contribution.done)
        header["seen"] = self.seen[shard.index]
        return header

    def settled(self, contribution: Contribution) -> None:
        """One message of a push is acknowledged; with the last one the push is."""
        contribution.pending -= 1
        if contribution.pending == 0:
            self.unacknowledged.remove(contribution)
            self.acknowledged.append(contribution)
            self.settled_count += 1

    @property
    def idle(self) -> bool:
        return not self.unacknowledged
