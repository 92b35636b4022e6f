"""Copies of shards on several servers: what the one that serves a shard sends to the others, and what they do with it.

A record is what a shard's next step was taken on: the folded gradient, the rate, and whose messages are in it. It goes
into a ring of each server with a copy, which takes the same step with the same kernel, and so has the same bits, and
publishes how far it has got. On the same node the gradient stays where it was folded, and every copy reads it there.
When all have taken it, the pushers are acknowledged: what is acknowledged is on every copy. A server without a whole
copy is sent one in the background, shard by shard, in the same ring, and counts from then on. What was acknowledged is
never taken back; in synchronous training a last step that not all have taken is, when a generation ends.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from adam_mpi.base.buffer_pool import NOTHING
from adam_mpi.base.thread_pool import ThreadPool
from adam_mpi.cluster.windows import Window
from adam_mpi.server.optimizer_rules import Counted
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding import message_format
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.mailbox import ReceivedMessage, RingReceiver
from adam_mpi.transport.published_weights import PublishedWeights
from adam_mpi.transport.ring_sender import RingSender

# Kinds of bodies between servers: a step to take, a part of a whole copy, and what a copy must come to.
RECORD, PART, CHECK = 4, 5, 6


@dataclass(eq=False)
class Record:
    shard: Shard
    version: int
    rate: float
    values: np.ndarray
    """The folded gradient; empty when nothing in it could be used."""
    notes: np.ndarray
    """How many pushers, (pusher, number) of each, then the batches."""
    done: Callable[[], None]
    images: int = 0
    counted: Counted = Counted(0, 0, 0)
    pending: int = 0
    """Servers that have not taken it yet."""


@dataclass(frozen=True)
class RecordMessage:
    record: Record
    header: np.ndarray
    place: int | None
    """Where in our arena its values are, for a server that can read them there."""

    def write(self, body: np.ndarray) -> np.ndarray:
        record, header = self.record, self.header.copy()
        header["kind"], header["sequence"], header["shard"] = RECORD, record.version, record.shard.index
        header["seen"] = np.float64(record.rate).view(np.int64)
        header["values"], header["images"] = record.values.size, record.images
        header["clock"], header["part"], header["codec"] = record.counted
        if self.place is None:
            header["words"] = record.values.size
            body[: record.values.size] = record.values.view(np.uint32)
        else:
            header["first"] = self.place
        return header

    def batches(self) -> np.ndarray:
        return self.record.notes

    def settled(self) -> None:
        self.record.pending -= 1
        if not self.record.pending:
            self.record.done()


@dataclass(frozen=True)
class PartMessage:
    """One of the arrays of a copy; the last one brings version and table, and makes it whole.

    Where a step may be taken back, the copy before it is sent first: `follows` says that the last one is still to come.
    """

    shard: int
    values: np.ndarray
    part: int
    parts: int
    version: int
    follows: bool
    notes: np.ndarray
    header: np.ndarray
    done: Callable[[], None]

    def write(self, body: np.ndarray) -> np.ndarray:
        header = self.header.copy()
        body[: self.values.size] = self.values.view(np.uint32)
        header["kind"], header["sequence"], header["shard"] = PART, self.version, self.shard
        header["words"] = header["values"] = self.values.size
        header["part"], header["parts"], header["first"] = self.part, self.parts, self.follows
        return header

    def batches(self) -> np.ndarray:
        return self.notes

    def settled(self) -> None:
        if self.part == self.parts - 1 and not self.follows:
            self.done()


@dataclass(frozen=True)
class CheckMessage:
    """The checksum of a shard, between the records before and after it: the copy must have the same."""

    shard: int
    checksum: int
    header: np.ndarray
    done: Callable[[], None]

    def write(self, body: np.ndarray) -> np.ndarray:
        header = self.header.copy()
        header["kind"], header["shard"], header["seen"] = CHECK, self.shard, self.checksum
        return header

    def batches(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def settled(self) -> None:
        self.done()


def notes(numbers: dict[int, int], batches: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Whose messages are in a step, or in a copy, and of which batches."""
    pairs = np.array([len(numbers), *(word for pair in numbers.items() for word in pair)], np.int64)
    some = [ids for ids in batches if ids.size]
    return np.concatenate([pairs, np.unique(np.concatenate(some))]) if some else pairs


class Replicator:
    def __init__(
        self,
        generation: Generation,
        published: PublishedWeights,
        mirror: Window,
        stepper: Stepper,
        appliers: ThreadPool,
        lacking: Sequence[tuple[int, int]],
        taken: Callable[[ReceivedMessage, np.ndarray], None],
    ) -> None:
        """`mirror` has the rings of records; `lacking`: servers without a whole copy of shards that are served here.

        `taken` is called with every record that was taken, and its batches.
        """
        self.taken = taken
        self.world = world = generation.world
        self.memory_layout = memory_layout = generation.memory_layout
        self.published = published
        self.mirror = mirror
        window = generation.weights_window
        self.stepper, self.thread_pool = stepper, appliers
        rings, me = memory_layout.peers, memory_layout.servers.index(world.rank)
        self.lanes: dict[int, RingSender[RecordMessage | PartMessage | CheckMessage]] = {
            server: RingSender(rings, server, me, mirror, window)
            for server in memory_layout.servers
            if server != world.rank
        }
        self.words, self.floats = mirror.memory.view(np.uint32), mirror.memory.view(np.float32)
        self.arenas = [self._arena(server) for server in memory_layout.servers]
        self.intake = RingReceiver(world, rings, memory_layout.servers, mirror.memory, published)
        self.lacking: dict[int, deque[int]] = defaultdict(deque)
        for server, shard in lacking:
            self.lacking[server].append(shard)
        self.began = {shard: stepper.holdings[shard].version for _, shard in lacking}
        """Versions of shards with copies to be sent, when this generation began: complete everywhere."""
        self.sending: dict[int, int] = {}
        """Servers that a whole copy is on its way to -> of which shard."""
        self.arriving: dict[int, list[np.ndarray]] = {shard.index: [] for shard in memory_layout.copied[world.rank]}
        self.alone: dict[int, list[Callable[[], None]]] = defaultdict(list)
        """Shards that nobody else has a whole copy of, though somebody should -> what is to be done when one has."""
        self.header = np.zeros((), message_format.HEADER)
        self.header["generation"], self.header["pusher"], self.header["parts"] = world.generation, me, 1
        self.rebuilt = self.compared = 0
        """Copies that were sent and have become whole; that were compared."""
        self.different = published.different[len(memory_layout.pushers) :]

    def send(self, record: Record) -> None:
        """To every server that has a copy, whole or on its way before it in the same ring."""
        ready = self._ready(record.shard.index)
        record.pending = len(ready)
        place = self.stepper.folds.place(record.values) if record.values.size else None
        for server in ready:
            lane = self.lanes[server]
            lane.waiting.append(RecordMessage(record, self.header, place if lane.near else None))
        if not ready:
            self.when_safe(record.shard.index, record.done)

    def when_safe(self, shard: int, done: Callable[[], None]) -> None:
        """At once, or where the only copy is ours when a second one is whole: what is told then is not lost with us.

        One that is on its way is no second copy yet.
        """
        arrived = [server for server in self._ready(shard) if self.sending.get(server) != shard]
        if shard in self.alone or (not arrived and len(self.memory_layout.holders[shard]) > 1):
            self.alone[shard].append(done)
        else:
            done()

    def _ready(self, shard: int) -> list[int]:
        return [server for server in self.memory_layout.holders[shard][1:] if shard not in self.lacking.get(server, ())]

    def step(self) -> bool:
        for server, shards in self.lacking.items():
            # One at a time, among the records that go to the same server.
            if shards and server not in self.sending:
                urgent = next((shard for shard in shards if shard in self.alone), shards[0])
                shards.remove(urgent)
                self.sending[server] = urgent
                self._send_copy(server, urgent)
        worked = [lane.step() for lane in self.lanes.values()]
        if any(lane.sent for lane in self.lanes.values()):
            self.world.injector.at("prepare")
        return self._collect() or any(worked)

    def _send_copy(self, server: int, shard: int) -> None:
        """All arrays of a shard as they are now: what changes later is in the records that follow.

        If the last step may have to be taken back, also as they were before it: the copy may be the only one then.
        """
        self.world.injector.at("rebuild")
        holding = self.stepper.holdings[shard]
        if self.stepper.remembers and holding.before is not None and holding.version > self.began[shard]:
            self._send_parts(server, holding.before, follows=True)
        self._send_parts(server, holding, follows=False)

    def _send_parts(self, server: int, holding: ShardCopy, follows: bool) -> None:
        """A copy of a holding, into the ring of a server; `follows`: that of the next step comes right after it."""
        shard, copied = holding.shard.index, [part.copy() for part in holding.parts]
        done = partial(self._count_rebuilt, server, shard)
        for part, values in enumerate(copied):
            table = notes(holding.table if part == len(copied) - 1 else {})
            where = part, len(copied), holding.version, follows
            self.lanes[server].waiting.append(PartMessage(shard, values, *where, table, self.header, done))

    def compare(self) -> int:
        """Have every copy of what is served here compared; returns how many there are."""
        copies = [(server, shard.index) for shard in self.stepper.shards for server in self._ready(shard.index)]
        for server, shard in copies:
            sum_ = self.stepper.holdings[shard].checksum()
            self.lanes[server].waiting.append(CheckMessage(shard, sum_, self.header, self._count_compared))
        return len(copies)

    @property
    def found_different(self) -> int:
        """Copies, of those that were compared, that were not the same."""
        return sum(int(lane.line[3]) for lane in self.lanes.values())

    def _count_rebuilt(self, server: int, shard: int) -> None:
        self.rebuilt += 1
        del self.sending[server]
        for done in self.alone.pop(shard, ()):
            done()

    def _count_compared(self) -> None:
        self.compared += 1

    def _collect(self) -> bool:
        """Take what has arrived, each shard's in order and by one thread; then show that it is taken."""
        self.mirror.sync()
        arrived = self.intake.collect()
        self.intake.ask_again()
        if not arrived:
            return False
        # Between seeing that they are there and reading them.
        self.mirror.sync()
        current = [mail for mail in arrived if mail.generation == self.world.generation]
        self.thread_pool.run((mail.shard, partial(self._take, mail)) for mail in current)
        for mail in current:
            if mail.kind == RECORD:
                self.taken(mail, self._notes(mail)[1])
        self.mirror.sync()
        self.intake.applied[:] = self.intake.collected
        return True

    def _arena(self, server: int) -> np.ndarray:
        """What a server has folded, where we can read it."""
        memory = self.mirror.direct(server, self.memory_layout.peers.bytes, self.memory_layout.arena)
        return NOTHING if memory is None else memory.view(np.float32)

    def _values(self, mail: ReceivedMessage) -> np.ndarray:
        if mail.words or not mail.values:
            return self.floats[mail.start : mail.start + mail.words]
        return self.arenas[mail.ring][mail.first : mail.first + mail.values]

    def _take(self, mail: ReceivedMessage) -> None:
        holding, values = self.stepper.holdings[mail.shard], self._values(mail)
        numbers = self._notes(mail)[0]
        if mail.kind == PART:
            self.arriving[mail.shard].append(values.copy())
            if mail.part == mail.parts - 1:
                # Until now the old copy, if there was one, was as good as ever.
                if self.stepper.remembers and holding.whole and holding.version == mail.sequence - 1:
                    holding.remember()
                holding.become(self.arriving[mail.shard], mail.sequence, numbers, behind=bool(mail.first))
                self.arriving[mail.shard] = []
        elif mail.kind == CHECK:
            self.different[mail.ring] += holding.checksum() != mail.seen
        elif holding.whole:
            assert mail.sequence == holding.version + 1, f"shard {mail.shard}: {mail.sequence} after {holding.version}"
            rate, counted = float(np.int64(mail.seen).view(np.float64)), Counted(mail.clock, mail.part, mail.codec)
            self.stepper.take(mail.shard, values, rate, counted)
            holding.version = mail.sequence
            # Not before the step: what is remembered, in case it has to be taken back, has nothing of these.
            for pusher, number in numbers.items():
                holding.note(pusher, number)

    def _notes(self, mail: ReceivedMessage) -> tuple[dict[int, int], np.ndarray]:
        """Whose messages are in it, as pusher -> number, and of which batches."""
        start = mail.start + mail.words + mail.words % 2
        words = self.words[start : start + 2 * mail.batches].view(np.int64)
        pairs = int(words[0]) if words.size else 0
        numbers = words[1 : 1 + 2 * pairs].tolist()
        return dict(zip(numbers[::2], numbers[1::2], strict=True)), words[1 + 2 * pairs :].copy()
