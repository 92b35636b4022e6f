"""The data client of a worker: several requests in flight, so that the next batch is there when it is needed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.world import World
from adam_mpi.sharding import fields as described
from adam_mpi.sharding import message_formats as batch
from adam_mpi.sharding.batches import Batch, Share, shares
from adam_mpi.sharding.fields import INPUT, TARGET, Field
from adam_mpi.sharding.training_state import Phase
from adam_mpi.worker.gradient_buffer import BatchResult

LEAST = 3
"""The batches that a replica may hold at any time."""
Columns = tuple[int, int]
"""First column, and the one after the last."""


@dataclass(eq=False)
class Slot:
    """One request in flight, and the memory that its answer arrives in."""

    memory: np.ndarray = field(default_factory=lambda: np.empty(8 * described.HEADER_WORDS, np.uint8))
    request: MPI.Request | None = None
    source: int = -1
    expected: int = 0
    """The tag of an answer that may come from any data rank; 0 when its sender is known."""
    batch: int = 0
    """The number of the batch that was requested, where a certain one was."""

    @property
    def answer(self) -> tuple[int, int]:
        """Return the kind and the phase of the answer."""
        kind, phase = self.memory[:16].view(np.int64).tolist()
        return kind, phase


class DataClient:
    """Request the batches of a phase from the data ranks, and report those that are done.

    The strips of a replica receive the same batches: the first strip requests them for all, and each receives its
    columns of every answer. The others only receive, in the order of the requests. Ranks of a hybrid replica receive
    whole images, each its share of them, and ids and labels of all.
    """

    def __init__(
        self,
        world: World,
        fields: Sequence[Field],
        columns: Columns | None = None,
        strips: Sequence[Columns] = (),
    ) -> None:
        """Receive `fields`, but of inputs only their `columns` if given; `strips` are the columns of all strips."""
        self.world = world
        self.config = world.config
        self.columns = columns or (0, 0)
        self.strips = strips
        self.fields = described.cut_columns(fields, *columns) if columns else tuple(fields)
        self.signature = described.signature(fields)
        self.follows = bool(world.place.strip)
        """Whether another strip of the replica requests the batches."""
        hybrid = self.config.layout.scheme == "hybrid" and strips
        self.share = (world.place.strip or 0, len(strips)) if hybrid else (0, 1)
        """(n, m): of each batch, this rank receives the pixels of the n-th of m shares of the images."""
        self.begun = False
        """Whether a phase has begun."""
        self.asks = 0
        """The number of the last request."""
        self.slots = [Slot() for _ in range(self.config.data.prefetch)]
        self.free = list(self.slots)
        self.asking: deque[Slot] = deque()
        self.arrived: deque[tuple[Slot, Batch]] = deque()
        self.phase_slot = Slot()
        self.phase = Phase(-1, "", 0)
        """The current phase; its number is -1 until this generation has one."""
        self.stopped = False
        self.exhausted: set[int] = set(world.layout.data)
        self.sources = deque(world.layout.data)
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.next_share = 0
        """With clocks: the number of the batch whose share is requested next."""
        self.shares = 0
        """The number of batches in the phase."""
        self.unreported: list[BatchResult] = []
        """Reports of training batches that were done before this generation had a phase."""
        self.first_share: Callable[[int, int], int] = lambda epoch, first: first
        """(epoch, the first batch that any worker needs) -> the batch whose share is requested first."""
        self.piece: Callable[[int], Share] = lambda number: (world.place.replica or 0, world.layout.replicas)
        """Number of a batch -> the share of this worker."""
        self.left: dict[int, int] = {}
        """The batches that each data rank had left when it last answered."""

    @property
    def shared(self) -> bool:
        """Return whether all replicas compute each batch together (finite staleness), each its share, in order."""
        return self.phase.training and not self.config.asynchronous

    @property
    def drained(self) -> bool:
        """Return whether this phase has no more batches for this worker."""
        more = self.next_share < self.shares if self.shared else len(self.exhausted) < len(self.sources)
        # A strip that only receives cannot know of requests beyond the end; no batch answers them.
        return not (more or (self.asking and not self.follows) or self.arrived)

    def step(self) -> bool:
        """Receive the batches that have arrived and request more as needed; return whether that was anything."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        worked = self._phase_arrives()
        for slot in self._answered():
            self.asking.remove(slot)
            self._keep_batch(slot)
            worked = True
        while self.free and self._wanted() and self._ask(self.free[-1]):
            self.asking.append(self.free.pop())
            worked = True
        return worked

    @property
    def waits_for_phase(self) -> bool:
        """Return whether the next phase is requested and has not arrived."""
        return self.phase_slot.request is not None

    def next_phase(self) -> None:
        """Request the next phase from the coordinator; it arrives when all workers are done with this one."""
        if not self.waits_for_phase:
            self._send_ask(
                self.phase_slot, self.world.layout.coordinator, [batch.NEXT_PHASE, 0, self.phase.number, 0, 0, 0]
            )

    def take_batch(self) -> tuple[Slot, Batch] | None:
        """Return the next batch that has arrived, with the slot that holds it; None if there is none."""
        return self.arrived.popleft() if self.arrived else None

    def release_slot(self, slot: Slot) -> None:
        """Reuse the memory of `slot`, whose batch is no longer needed; slots of an earlier generation are ignored."""
        if slot in self.slots:
            self.free.append(slot)

    def report_done(self, result: BatchResult) -> None:
        """Report the batch of `result` as done to its data rank; after a failure, once the phase is known again."""
        if self.phase.number < 0:
            self.unreported.append(result)
            return
        sources = self.world.layout.data
        message = batch.pack_report(self.phase.number, result.number, result.images, result.sums)
        source = sources[result.number % len(sources)]
        self.sending.append((self.world.traffic.Isend(message, source, batch.REPORT), message))

    @property
    def asked(self) -> list[int]:
        """Return the ranks that could end a wait for a batch: data ranks, or the strip that requests batches."""
        if self.follows:
            return [self.world.layout.strips(self.world.rank)[0]]
        return sorted({slot.source for slot in self.asking})

    def awaits(self) -> Iterator[Wait]:
        """Yield the requests that are not answered, or not made by the strip that requests for the replica."""
        if self.follows and self.asking and not self.arrived and not self.drained:
            yield Wait("an ask for a batch", self.asked[0], self.asks, patient=True)
        for slot in self.asking if not self.follows else ():
            yield Wait(f"batch {slot.batch}" if self.shared else "a batch", slot.source, id(slot.request))
        if self.waits_for_phase:
            yield Wait("the next phase", self.world.layout.coordinator, self.phase.number, patient=True)

    def _phase_arrives(self) -> bool:
        slot = self.phase_slot
        if slot.request is None or not slot.request.Test():
            return False
        slot.request = None
        kind, number, part, epoch, count, first = slot.memory.view(np.int64)[:6].tolist()
        self.stopped = kind == batch.STOP
        if self.stopped:
            self._withdraw()
        else:
            self.phase = Phase(number, batch.PARTS[part], epoch)
            self.exhausted = set()
            self.next_share = self.first_share(epoch, first) if self.shared else 0
            self.shares = -(-count // self.config.train.batch)
            self.left = dict.fromkeys(self.sources, -(-self.shares // len(self.sources)))
            self._allocate()
            for result in self.unreported if self.phase.training else ():
                if result.epoch == epoch:
                    self.report_done(result)
            self.unreported.clear()
        return True

    def _withdraw(self) -> None:
        """Cancel the receives of a strip: no answers will come."""
        for slot in self.asking:
            slot.expected = 0
            if slot.request is not None:
                slot.request.Cancel()
                slot.request.Free()
        self.asking.clear()

    def _wanted(self) -> bool:
        """Return whether to request one more: a slow replica with many of the last batches delays all others."""
        held = self.config.data.prefetch - len(self.free)
        if self.follows:
            return self.begun and not self.stopped
        return self.shared or held < max(LEAST, sum(self.left.values()) // (2 * self.world.layout.replicas))

    def _allocate(self) -> None:
        """Allocate the memory of the slots when the first phase begins."""
        if self.begun:
            return
        self.begun = True
        for slot in self.free:
            slot.memory = np.empty(described.message_bytes(self.config.train.batch, self.fields), np.uint8)

    def _answered(self) -> list[Slot]:
        """Return the slots whose answer has arrived; those of shares and of strips in the order of the requests."""
        answered = []
        status = MPI.Status()
        for slot in self.asking:
            # No receive from any source: under MPICH such receives were seen never to end (5.0.2, over TCP).
            if slot.expected and self.world.traffic.Iprobe(MPI.ANY_SOURCE, slot.expected, status):
                self._receive_answer(slot, status.source, slot.expected)
            if slot.request is not None and slot.request.Test(status):
                slot.request = None
                slot.source = status.source
            # A fast data rank may be in a phase that the coordinator has not announced to this rank yet.
            if slot.request is None and not slot.expected and slot.answer[1] <= self.phase.number:
                answered.append(slot)
            elif self.shared or len(self.strips) > 1 or self.world.layout.replicas == 1:
                break
        return answered

    def _ask(self, slot: Slot) -> bool:
        """Request a batch into `slot`; return False if there is none to request."""
        if self.follows:
            # The first strip has requested it; it comes from the data rank that was asked.
            slot.source = MPI.ANY_SOURCE
            slot.expected = batch.ANSWER + self._next_number()
            return True
        target = self._next_share() if self.shared else self._next_source()
        if target is None:
            return False
        source, slot.batch, piece = target
        kind = batch.SHARE if self.shared else batch.ANY
        columns = [edge for strip in self.strips or (self.columns,) for edge in strip]
        words = [kind, self._next_number(), self.phase.number, slot.batch, *piece, *columns]
        self._send_ask(slot, source, words)
        return True

    def _next_share(self) -> tuple[int, int, Share] | None:
        """Return the data rank, the number and the share of the next joint batch; None after the last one."""
        if self.next_share >= self.shares:
            return None
        number = self.next_share
        self.next_share += 1
        sources = self.world.layout.data
        return sources[number % len(sources)], number, self.piece(number)

    def _next_source(self) -> tuple[int, int, Share] | None:
        """Return the data rank to request any batch from, in turns; None when all are exhausted."""
        if len(self.exhausted) == len(self.sources):
            return None
        self.sources.rotate(-1)
        source = next(rank for rank in self.sources if rank not in self.exhausted)
        return source, 0, (self.world.place.replica or 0, self.world.layout.replicas)

    def _next_number(self) -> int:
        self.asks = self.asks % batch.NUMBERS + 1
        return self.asks

    def _send_ask(self, slot: Slot, source: int, words: list[int]) -> None:
        self._receive_answer(slot, source, batch.ANSWER + words[1])
        if not self.follows:
            ask = np.array(words, np.int64)
            self.sending.append((self.world.traffic.Isend(ask, source, batch.ASK), ask))

    def _receive_answer(self, slot: Slot, source: int, tag: int) -> None:
        slot.source = source
        slot.expected = 0
        slot.request = self.world.traffic.Irecv(slot.memory, source, tag)

    def _keep_batch(self, slot: Slot) -> None:
        """Keep the batch that has arrived in `slot`, or free the slot."""
        kind, phase = slot.answer
        if self.follows and self.shared and kind != batch.EXHAUSTED:
            slot.batch = self.next_share
            self.next_share += 1
        if kind == batch.STOP:
            self._end_phase_early(slot)
        elif kind == batch.BATCH and not (self.shared and slot.batch >= self.shares):
            self.left[slot.source] = int(slot.memory[48:56].view(np.int64)[0])
            self.arrived.append((slot, self._unpack(slot.memory)))
            return
        elif kind == batch.EXHAUSTED and phase == self.phase.number:
            self.exhausted.add(slot.source)
            self.left[slot.source] = 0
        self.free.append(slot)

    def _unpack(self, message: np.ndarray) -> Batch:
        """Return the batch of an answer, as views into `message`; nothing is copied."""
        _, phase, _, epoch, number, count = message[: 8 * described.HEADER_WORDS].view(np.int64)[:6].tolist()
        rank, ranks = self.share
        edges = shares(count, ranks)
        values = described.unpack_batch(message, self.fields, self.signature, edges[rank + 1] - edges[rank])
        return Batch(
            phase=phase,
            epoch=epoch,
            number=number,
            ids=message[8 * described.HEADER_WORDS :][: 8 * count].view(np.int64),
            inputs=described.split(self.fields, values, INPUT),
            targets=described.split(self.fields, values, TARGET),
            edges=edges if ranks > 1 else (),
        )

    def _end_phase_early(self, slot: Slot) -> None:
        """End the phase early, because the job ends: no batch follows, or no joint one that not all replicas have."""
        self.exhausted.add(slot.source)
        self.left[slot.source] = 0
        if self.shared:
            self.shares = min(self.shares, slot.batch)
            return
        # These are not begun: a resumed run computes them. Strips may have begun them on other ranks.
        while self.arrived and len(self.strips) < 2:
            self.free.append(self.arrived.popleft()[0])
