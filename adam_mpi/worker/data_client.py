"""The worker's side of data serving: several asks in flight, so that the next batch is there when needed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.world import World
from adam_mpi.sharding.joint_batches import Piece
from adam_mpi.sharding.phases import Phase
from adam_mpi.transport import batch_message as batch
from adam_mpi.transport.batch_message import Batch

# Batches a replica may hold at any time.
LEAST = 3
Columns = tuple[int, int]


@dataclass(eq=False)
class Slot:
    """One ask in flight and the memory its answer arrives in."""

    memory: np.ndarray = field(default_factory=lambda: np.empty(8 * batch.HEADER_WORDS, np.uint8))
    request: MPI.Request | None = None
    source: int = -1
    expected: int = 0
    """The tag of an answer that may come from any data rank, until one does."""
    batch: int = 0
    """The batch that was asked for, where a certain one was."""

    @property
    def head(self) -> tuple[int, int]:
        """Kind and phase of the answer."""
        kind, phase = self.memory[:16].view(np.int64).tolist()
        return kind, phase


class DataClient:
    """`columns`: only these columns (first, last + 1) of each image are sent; else all of them.

    The strips of a replica take batches as one: the first asks, for all of their `columns`, and each gets its part of
    every answer. The others only receive, in the order of the asks. Ranks of a hybrid replica get whole images, each
    its share of them, and ids and labels of all.
    """

    def __init__(
        self, world: World, shape: batch.Shape, columns: Columns | None = None, strips: Sequence[Columns] = ()
    ) -> None:
        self.world, self.config = world, world.config
        self.columns = columns or (0, shape[2])
        self.strips = strips
        self.shape = (*shape[:2], self.columns[1] - self.columns[0])
        self.follows = bool(world.place.strip)
        hybrid = self.config.layout.scheme == "hybrid" and strips
        self.share = (world.place.strip or 0, len(strips)) if hybrid else (0, 1)
        """Of a batch's images, those that we get pixels of: one in so many."""
        self.itemsize = self.asks = 0
        self.slots = [Slot() for _ in range(self.config.data.prefetch)]
        self.free = list(self.slots)
        self.asking: deque[Slot] = deque()
        self.arrived: deque[tuple[Slot, Batch]] = deque()
        self.phase_slot = Slot()
        self.phase, self.stopped = Phase(-1, "", 0), False
        self.exhausted: set[int] = set(world.layout.data)
        self.sources = deque(world.layout.data)
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.next_share = self.shares = 0
        self.unreported: list[tuple[int, int, int, float, int]] = []
        """Training batches that were done before this generation had a phase."""
        self.first_share: Callable[[int, int], int] = lambda epoch, first: first
        """(epoch, the first batch that anybody needs) -> the batch whose share we ask for first."""
        self.piece: Callable[[int], Piece] = lambda number: (world.place.replica or 0, world.layout.replicas)
        """Number of a batch -> our share of it."""
        self.left: dict[int, int] = {}
        """Batches that each data rank had left when it last answered."""

    @property
    def shared(self) -> bool:
        """Whether all replicas compute each batch together (finite staleness), each its share, in order."""
        return self.phase.training and not self.config.asynchronous

    @property
    def drained(self) -> bool:
        """Whether this phase has nothing more for us."""
        more = self.next_share < self.shares if self.shared else len(self.exhausted) < len(self.sources)
        # A strip that only receives cannot know of asks beyond the end; they bring nothing.
        return not (more or (self.asking and not self.follows) or self.arrived)

    def step(self) -> bool:
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        worked = self._phase_arrives()
        for slot in self._answered():
            self.asking.remove(slot)
            self._take(slot)
            worked = True
        while self.free and self._wanted() and self._ask(self.free[-1]):
            self.asking.append(self.free.pop())
            worked = True
        return worked

    @property
    def waits_for_phase(self) -> bool:
        return self.phase_slot.request is not None

    def next_phase(self) -> None:
        """Ask the head for the phase after this one; it arrives when everybody is done with this one."""
        if not self.waits_for_phase:
            self._send_ask(self.phase_slot, self.world.layout.head, [batch.NEXT_PHASE, 0, self.phase.number, 0, 0, 0])

    def take(self) -> tuple[Slot, Batch] | None:
        return self.arrived.popleft() if self.arrived else None

    def release(self, slot: Slot) -> None:
        """The batch in this slot's memory is no longer needed; slots of an earlier generation are not used again."""
        if slot in self.slots:
            self.free.append(slot)

    def report(self, epoch: int, number: int, images: int, loss: float, correct: int) -> None:
        """Tell the data rank whose batch it is that it is done; after a failure, once we know the phase again."""
        if self.phase.number < 0:
            self.unreported.append((epoch, number, images, loss, correct))
            return
        sources = self.world.layout.data
        message = np.array([self.phase.number, images, loss, correct, number], np.float64)
        self.sending.append((self.world.traffic.Isend(message, sources[number % len(sources)], batch.REPORT), message))

    @property
    def asked(self) -> list[int]:
        """Who could end a wait for a batch: the data ranks asked, or the strip that asks for all of the replica."""
        if self.follows:
            return [self.world.layout.strips(self.world.rank)[0]]
        return sorted({slot.source for slot in self.asking})

    def awaits(self) -> Iterator[Wait]:
        """Asks that are not answered, or for a strip that does not ask itself, not made."""
        if self.follows and self.asking and not self.arrived and not self.drained:
            yield Wait("an ask for a batch", self.asked[0], self.asks, patient=True)
        for slot in self.asking if not self.follows else ():
            yield Wait(f"batch {slot.batch}" if self.shared else "a batch", slot.source, id(slot.request))
        if self.waits_for_phase:
            yield Wait("the next phase", self.world.layout.head, self.phase.number, patient=True)

    def _phase_arrives(self) -> bool:
        slot = self.phase_slot
        if slot.request is None or not slot.request.Test():
            return False
        slot.request = None
        kind, number, part, epoch, count, itemsize, first = slot.memory.view(np.int64)[:7].tolist()
        self.stopped = kind == batch.STOP
        if self.stopped:
            self._withdraw()
        else:
            self.phase = Phase(number, batch.PARTS[part], epoch)
            self.exhausted = set()
            self.next_share = self.first_share(epoch, first) if self.shared else 0
            self.shares = -(-count // self.config.train.batch)
            self.left = dict.fromkeys(self.sources, -(-self.shares // len(self.sources)))
            self._allocate(itemsize)
            for report in self.unreported if self.phase.training else ():
                if report[0] == epoch:
                    self.report(*report)
            self.unreported.clear()
        return True

    def _withdraw(self) -> None:
        """No answers will come to what a strip has been ready to receive."""
        for slot in self.asking:
            slot.expected = 0
            if slot.request is not None:
                slot.request.Cancel()
                slot.request.Free()
        self.asking.clear()

    def _wanted(self) -> bool:
        """Whether to ask for one more: a slow replica that held many of the last batches would keep all waiting."""
        held = self.config.data.prefetch - len(self.free)
        if self.follows:
            return self.itemsize > 0 and not self.stopped
        return self.shared or held < max(LEAST, sum(self.left.values()) // (2 * self.world.layout.replicas))

    def _allocate(self, itemsize: int) -> None:
        """Memory for batches, once it is known how large a pixel is; between phases every slot is free."""
        if itemsize != self.itemsize:
            self.itemsize = itemsize
            for slot in self.free:
                size = batch.message_bytes(self.config.train.batch, self.shape, itemsize)
                slot.memory = np.empty(size, np.uint8)

    def _answered(self) -> list[Slot]:
        """StoreFile whose answer is there; those of shares and of strips are taken in the order they were asked for."""
        answered, status = [], MPI.Status()
        for slot in self.asking:
            # Not received from anybody: under MPICH such receives were seen never to end (5.0.2, over TCP).
            if slot.expected and self.world.traffic.Iprobe(MPI.ANY_SOURCE, slot.expected, status):
                self._receive(slot, status.source, slot.expected)
            if slot.request is not None and slot.request.Test(status):
                slot.request, slot.source = None, status.source
            # A quick data rank may be a phase ahead of the head's word to us.
            if slot.request is None and not slot.expected and slot.head[1] <= self.phase.number:
                answered.append(slot)
            elif self.shared or len(self.strips) > 1:
                break
        return answered

    def _ask(self, slot: Slot) -> bool:
        layout = self.world.layout
        piece = self.world.place.replica or 0, layout.replicas
        if self.follows:
            # Whatever the first strip asks for next.
            slot.source, slot.expected = MPI.ANY_SOURCE, batch.ANSWER + self._next_number()
            return True
        if self.shared:
            if self.next_share >= self.shares:
                return False
            source = layout.data[self.next_share % len(layout.data)]
            number, self.next_share = self.next_share, self.next_share + 1
            piece = self.piece(number)
        else:
            if len(self.exhausted) == len(self.sources):
                return False
            self.sources.rotate(-1)
            source = next(rank for rank in self.sources if rank not in self.exhausted)
            number = 0
        kind, slot.batch = batch.SHARE if self.shared else batch.ANY, number
        columns = [edge for strip in self.strips or (self.columns,) for edge in strip]
        words = [kind, self._next_number(), self.phase.number, number, *piece, *columns]
        self._send_ask(slot, source, words)
        return True

    def _next_number(self) -> int:
        self.asks = self.asks % batch.NUMBERS + 1
        return self.asks

    def _send_ask(self, slot: Slot, source: int, words: list[int]) -> None:
        self._receive(slot, source, batch.ANSWER + words[1])
        if not self.follows:
            ask = np.array(words, np.int64)
            self.sending.append((self.world.traffic.Isend(ask, source, batch.ASK), ask))

    def _receive(self, slot: Slot, source: int, tag: int) -> None:
        slot.source, slot.expected = source, 0
        slot.request = self.world.traffic.Irecv(slot.memory, source, tag)

    def _take(self, slot: Slot) -> None:
        kind, phase = slot.head
        if self.follows and self.shared and kind != batch.EXHAUSTED:
            slot.batch, self.next_share = self.next_share, self.next_share + 1
        if kind == batch.STOP:
            self._end(slot)
        elif kind == batch.BATCH and not (self.shared and slot.batch >= self.shares):
            self.left[slot.source] = int(slot.memory[48:56].view(np.int64)[0])
            self.arrived.append((slot, batch.unpack(slot.memory, self.shape, self.itemsize, *self.share)))
            return
        elif kind == batch.EXHAUSTED and phase == self.phase.number:
            self.exhausted.add(slot.source)
            self.left[slot.source] = 0
        self.free.append(slot)

    def _end(self, slot: Slot) -> None:
        """The job ends inside this phase: no batch follows; of joint ones, none after those that all replicas have."""
        self.exhausted.add(slot.source)
        self.left[slot.source] = 0
        if self.shared:
            self.shares = min(self.shares, slot.batch)
            return
        # These are not begun; whoever resumes the run gets them. Strips may have begun them elsewhere.
        while self.arrived and len(self.strips) < 2:
            self.free.append(self.arrived.popleft()[0])
