"""Replication of shards: what the server that serves a shard sends to the other copies, and what they do with it.

A record is the input of a shard's next step: the folded gradient, the rate, and whose messages are in it. It goes into
a ring of each server with a copy, which takes the same step with the same kernel, and so has the same bits, and
publishes how far it is. On the same node the gradient stays where it was folded, and every copy reads it there.
When all copies have taken the step, the pushers are acknowledged: what is acknowledged is on every copy. A server
without a whole copy is sent one in the background, shard by shard, in the same ring, and counts from then on. What was
acknowledged is never taken back; in synchronous training a last step that not all copies have taken is, when a
generation ends.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from adam_mpi.base.pools import EMPTY, ThreadPool
from adam_mpi.cluster.windows import Window
from adam_mpi.optimizer.settings import ImageCounts
from adam_mpi.server.replication_messages import (
    CHECK,
    PART,
    RECORD,
    CheckMessage,
    PartMessage,
    Record,
    RecordMessage,
    ReplicationMessage,
    notes,
    read_notes,
)
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.mailbox import ReceivedMessage, RingReceiver
from adam_mpi.transport.published_weights import PublishedWeights
from adam_mpi.transport.ring_sender import RingSender


class Replicator:
    """Keeps the other copies of the shards of one server up to date during one generation, and its own copies."""

    def __init__(
        self,
        generation: Generation,
        replication_window: Window,
        published: PublishedWeights,
        stepper: Stepper,
        thread_pool: ThreadPool,
        *,
        lacking: Sequence[tuple[int, int]],
        on_step: Callable[[ReceivedMessage, np.ndarray], None],
    ) -> None:
        """Replicate the shards served here; `lacking` has (server, shard) of servers that need a whole copy.

        `on_step` is called with every record whose step a copy here has taken, and with its batches.
        """
        memory_layout = generation.memory_layout
        self.world = generation.world
        self.memory_layout = memory_layout
        self.replication_window = replication_window
        self.stepper = stepper
        self.thread_pool = thread_pool
        self.on_step = on_step
        self.words = replication_window.memory.view(np.uint32)
        self.floats = replication_window.memory.view(np.float32)
        own_ring = memory_layout.servers.index(self.world.rank)
        self.ring_senders = self._connect(generation, own_ring)
        self.arenas = [self._arena(server) for server in memory_layout.servers]
        self.receiver = RingReceiver(
            self.world, memory_layout.peers, memory_layout.servers, replication_window.memory, published
        )
        self.lacking: dict[int, deque[int]] = defaultdict(deque)
        for server, shard in lacking:
            self.lacking[server].append(shard)
        self.began = {shard: stepper.shard_copies[shard].version for _, shard in lacking}
        """Versions of shards with copies to be sent, when this generation began: complete everywhere."""
        self.sending: dict[int, int] = {}
        """Servers that a whole copy is on its way to -> of which shard."""
        copied = memory_layout.copied[self.world.rank]
        self.arriving: dict[int, list[np.ndarray]] = {shard.index: [] for shard in copied}
        self.alone: dict[int, list[Callable[[], None]]] = defaultdict(list)
        """Shards without a second whole copy, though there should be one -> what to call when there is one."""
        self.header = np.zeros((), message_formats.HEADER)
        self.header["generation"] = self.world.generation
        self.header["pusher"] = own_ring
        self.header["parts"] = 1
        self.rebuilt = 0
        """Copies that were sent and have become whole."""
        self.compared = 0
        self.different = published.different[len(memory_layout.pushers) :]

    def _connect(self, generation: Generation, own_ring: int) -> dict[int, RingSender[ReplicationMessage]]:
        """Return a sender to each other server."""
        rings = self.memory_layout.peers
        others = [server for server in self.memory_layout.servers if server != self.world.rank]
        weights = generation.weights_window
        return {server: RingSender(rings, server, own_ring, self.replication_window, weights) for server in others}

    def _arena(self, server: int) -> np.ndarray:
        """Return the folded gradients of `server`, where we can read them."""
        memory = self.replication_window.memory_of(server, self.memory_layout.peers.bytes, self.memory_layout.arena)
        return EMPTY if memory is None else memory.view(np.float32)

    def send(self, record: Record) -> None:
        """Send `record` to every server whose copy is whole, or on its way before it in the same ring."""
        receivers = self._receivers(record.shard.index)
        record.pending = len(receivers)
        place = self.stepper.values.folds.arena_offset(record.values) if record.values.size else None
        for server in receivers:
            sender = self.ring_senders[server]
            sender.waiting.append(RecordMessage(record, self.header, place if sender.near else None))
        if not receivers:
            self.when_safe(record.shard.index, record.done)

    def when_safe(self, shard: int, done: Callable[[], None]) -> None:
        """Call `done` now, or when a second copy is whole if ours is the only one: then nothing is lost with us.

        A copy that is on its way is no second copy yet.
        """
        arrived = [server for server in self._receivers(shard) if self.sending.get(server) != shard]
        if shard in self.alone or (not arrived and len(self.memory_layout.holders[shard]) > 1):
            self.alone[shard].append(done)
        else:
            done()

    def _receivers(self, shard: int) -> list[int]:
        """Return the servers that take records of `shard`: all with a copy, but those that are still to be sent one."""
        return [server for server in self.memory_layout.holders[shard][1:] if shard not in self.lacking.get(server, ())]

    def step(self) -> bool:
        """Send copies and records, and take those that have arrived; return whether anything was done."""
        for server, shards in self.lacking.items():
            # One at a time, among the records that go to the same server.
            if shards and server not in self.sending:
                urgent = next((shard for shard in shards if shard in self.alone), shards[0])
                shards.remove(urgent)
                self.sending[server] = urgent
                self._send_copy(server, urgent)
        worked = [sender.step() for sender in self.ring_senders.values()]
        if any(sender.sent for sender in self.ring_senders.values()):
            self.world.injector.at("prepare")
        return self._collect() or any(worked)

    def _send_copy(self, server: int, shard: int) -> None:
        """Send all arrays of `shard` as they are now: later changes are in the records that follow.

        If the last step may have to be taken back, also send them as they were before it, because the copy may become
        the only one.
        """
        self.world.injector.at("rebuild")
        own = self.stepper.shard_copies[shard]
        if self.stepper.remembers and own.before is not None and own.version > self.began[shard]:
            self._send_parts(server, own.before, follows=True)
        self._send_parts(server, own, follows=False)

    def _send_parts(self, server: int, own: ShardCopy, follows: bool) -> None:
        """Put the arrays of `own` into the ring of `server`; `follows`: the copy after the next step comes next."""
        copied = [part.copy() for part in own.parts]
        for part, values in enumerate(copied):
            message = PartMessage(
                shard=own.shard.index,
                values=values,
                part=part,
                parts=len(copied),
                version=own.version,
                stepped=own.batches,
                follows=follows,
                notes=notes(own.table if part == len(copied) - 1 else {}),
                header=self.header,
                done=partial(self._count_rebuilt, server, own.shard.index),
            )
            self.ring_senders[server].waiting.append(message)

    def compare(self) -> int:
        """Order a comparison of every copy of the shards that are served here; return how many there are."""
        copies = [(server, shard.index) for shard in self.stepper.shards for server in self._receivers(shard.index)]
        for server, shard in copies:
            expected = self.stepper.shard_copies[shard].checksum()
            self.ring_senders[server].waiting.append(CheckMessage(shard, expected, self.header, self._count_compared))
        return len(copies)

    @property
    def found_different(self) -> int:
        """Return how many of the compared copies were different."""
        return sum(int(sender.line[3]) for sender in self.ring_senders.values())

    def _count_rebuilt(self, server: int, shard: int) -> None:
        """Count a copy that has become whole, and call what has waited for it."""
        self.rebuilt += 1
        del self.sending[server]
        for done in self.alone.pop(shard, ()):
            done()

    def _count_compared(self) -> None:
        self.compared += 1

    def drop(self) -> None:
        """Drop all messages and calls that wait, at the end of the generation: they would keep its memory."""
        self.alone.clear()
        for sender in self.ring_senders.values():
            sender.drop()

    def _collect(self) -> bool:
        """Take what has arrived, each shard's messages in order and by one thread; then publish that it is taken."""
        self.replication_window.sync()
        arrived = self.receiver.collect_messages()
        self.receiver.ask_again()
        if not arrived:
            return False
        # Between seeing that they are there and reading them.
        self.replication_window.sync()
        current = [message for message in arrived if message.generation == self.world.generation]
        self.thread_pool.run((message.shard, partial(self._take_replicated, message)) for message in current)
        for message in current:
            if message.kind == RECORD:
                self.on_step(message, self._notes(message)[1])
        self.replication_window.sync()
        self.receiver.applied[:] = self.receiver.collected
        return True

    def _take_replicated(self, message: ReceivedMessage) -> None:
        """Handle `message`: store an array of a copy, compare a checksum, or take a step."""
        own = self.stepper.shard_copies[message.shard]
        if message.kind == PART:
            self._take_part(own, message)
        elif message.kind == CHECK:
            self.different[message.ring] += own.checksum() != message.seen
        elif own.whole:
            self._take_step(own, message)

    def _take_part(self, own: ShardCopy, message: ReceivedMessage) -> None:
        """Store an array of a copy; the last one makes it whole."""
        shard = message.shard
        self.arriving[shard].append(self._values(message).copy())
        if message.part == message.parts - 1:
            # Until now the old copy, if there was one, could still be used.
            if self.stepper.remembers and own.whole and own.version == message.sequence - 1:
                own.remember()
            own.become(
                self.arriving[shard],
                version=message.sequence,
                batches=float(np.int64(message.seen).view(np.float64)),
                table=self._notes(message)[0],
                behind=bool(message.first),
            )
            self.arriving[shard] = []

    def _take_step(self, own: ShardCopy, message: ReceivedMessage) -> None:
        """Take the step of a record."""
        version = message.sequence
        assert version == own.version + 1, f"shard {message.shard}: {version} after {own.version}"
        rate = float(np.int64(message.seen).view(np.float64))
        images = ImageCounts(message.clock, message.part, message.codec)
        self.stepper.step_folded(message.shard, self._values(message), rate, images, bool(message.last))
        own.version = version
        # Not before the step: the copy that it may be taken back to must not have these numbers.
        for pusher, number in self._notes(message)[0].items():
            own.note(pusher, number)

    def _values(self, message: ReceivedMessage) -> np.ndarray:
        """Return the values of `message`, in its body or in the arena of its sender."""
        if message.words or not message.values:
            return self.floats[message.start : message.start + message.words]
        return self.arenas[message.ring][message.first : message.first + message.values]

    def _notes(self, message: ReceivedMessage) -> tuple[dict[int, int], np.ndarray]:
        """Return whose messages are in it, as pusher -> number, and the ids of its batches."""
        start = message.start + message.words + message.words % 2
        return read_notes(self.words[start : start + 2 * message.batches].view(np.int64))
