"""The worker's side of data serving: several asks in flight, so that the next batch is there when needed."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.world import World
from adam_mpi.data import batch
from adam_mpi.data.batch import Batch
from adam_mpi.data.course import Phase

# Batches a replica may hold at any time.
LEAST = 3


@dataclass
class Slot:
    """One ask in flight and the memory its answer arrives in."""

    number: int
    memory: np.ndarray = field(default_factory=lambda: np.empty(8 * batch.HEADER_WORDS, np.uint8))
    request: MPI.Request | None = None
    source: int = -1
    batch: int = 0
    """The batch that was asked for, where a certain one was."""


class DataClient:
    """`columns`: only these columns (first, last + 1) of each image are sent; else all of them."""

    def __init__(self, world: World, shape: batch.Shape, columns: tuple[int, int] | None = None) -> None:
        self.world, self.config = world, world.config
        self.columns = columns or (0, shape[2])
        self.shape = (*shape[:2], self.columns[1] - self.columns[0])
        self.itemsize = 0
        self.free = [Slot(number) for number in range(self.config.data.prefetch)]
        self.asking: deque[Slot] = deque()
        self.arrived: deque[tuple[Slot, Batch]] = deque()
        self.phase_slot = Slot(self.config.data.prefetch)
        self.phase, self.stopped = Phase(-1, "", 0), False
        self.exhausted: set[int] = set(world.layout.data)
        self.sources = deque(world.layout.data)
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.next_share = self.shares = 0
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
        return not (more or self.asking or self.arrived)

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

    def next_phase(self) -> None:
        """Ask the head for the phase after this one; it arrives when everybody is done with this one."""
        if self.phase_slot.request is None:
            self._send_ask(self.phase_slot, self.world.layout.head, [batch.NEXT_PHASE, 0, self.phase.number])

    def take(self) -> tuple[Slot, Batch] | None:
        return self.arrived.popleft() if self.arrived else None

    def release(self, slot: Slot) -> None:
        """The batch in this slot's memory is no longer needed."""
        self.free.append(slot)

    def report(self, source: int, phase: int, number: int, images: int, loss: float, correct: int) -> None:
        """Tell the data rank that handed a batch out that it is done."""
        message = np.array([phase, images, loss, correct, number], np.float64)
        self.sending.append((self.world.traffic.Isend(message, source, batch.REPORT), message))

    def _phase_arrives(self) -> bool:
        slot = self.phase_slot
        if slot.request is None or not slot.request.Test():
            return False
        slot.request = None
        kind, number, part, epoch, count, itemsize, first = slot.memory.view(np.int64)[:7].tolist()
        self.stopped = kind == batch.STOP
        if not self.stopped:
            self.phase = Phase(number, batch.PARTS[part], epoch)
            self.exhausted = set()
            self.next_share, self.shares = first, -(-count // self.config.train.batch)
            self.left = dict.fromkeys(self.sources, -(-self.shares // len(self.sources)))
            self._allocate(itemsize)
        return True

    def _wanted(self) -> bool:
        """Whether to ask for one more: a slow replica that held many of the last batches would keep all waiting."""
        held = self.config.data.prefetch - len(self.free)
        return self.shared or held < max(LEAST, sum(self.left.values()) // (2 * self.world.layout.replicas))

    def _allocate(self, itemsize: int) -> None:
        """Memory for batches, once it is known how large a pixel is; between phases every slot is free."""
        if itemsize != self.itemsize:
            self.itemsize = itemsize
            for slot in self.free:
                size = batch.message_bytes(self.config.train.batch, self.shape, itemsize)
                slot.memory = np.empty(size, np.uint8)

    def _answered(self) -> list[Slot]:
        """Slots whose answer is there; shares of batches are taken in the order they were asked for."""
        answered = []
        for slot in self.asking:
            if slot.request is not None and slot.request.Test():
                answered.append(slot)
            elif self.shared:
                break
        return answered

    def _ask(self, slot: Slot) -> bool:
        place, layout = self.world.place, self.world.layout
        if self.shared:
            if self.next_share >= self.shares:
                return False
            source = layout.data[self.next_share % len(layout.data)]
            number, self.next_share = self.next_share, self.next_share + 1
        else:
            if len(self.exhausted) == len(self.sources):
                return False
            self.sources.rotate(-1)
            source = next(rank for rank in self.sources if rank not in self.exhausted)
            number = 0
        kind, slot.batch = batch.SHARE if self.shared else batch.ANY, number
        words = [kind, slot.number, self.phase.number, number, place.replica or 0, layout.replicas, *self.columns]
        self._send_ask(slot, source, words)
        return True

    def _send_ask(self, slot: Slot, source: int, words: list[int]) -> None:
        words[1] = slot.number
        ask = np.zeros(batch.ASK_WORDS, np.int64)
        ask[: len(words)] = words
        slot.source = source
        slot.request = self.world.traffic.Irecv(slot.memory, source, batch.ANSWER + slot.number)
        self.sending.append((self.world.traffic.Isend(ask, source, batch.ASK), ask))

    def _take(self, slot: Slot) -> None:
        kind, phase = slot.memory[:16].view(np.int64).tolist()
        slot.request = None
        if kind == batch.STOP:
            self._end(slot)
        elif kind == batch.BATCH and not (self.shared and slot.batch >= self.shares):
            self.left[slot.source] = int(slot.memory[48:56].view(np.int64)[0])
            self.arrived.append((slot, batch.unpack(slot.memory, slot.source, self.shape, self.itemsize)))
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
        # These are not begun; whoever resumes the run gets them.
        while self.arrived:
            self.free.append(self.arrived.popleft()[0])
