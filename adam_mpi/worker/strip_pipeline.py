"""The batches of one generation on their way through a strip, in the same order on every strip of the replica.

The first strip requests batches and all receive their columns. Batches are cut into parts, and part n is computed in
context n mod `worker.in_flight` on every strip. Gradients are added in the order of the parts; those of convolutions,
which every strip has a part of, are summed over the replica before each strip pushes its share.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from adam_mpi.model.exchange_buffers import FORWARD
from adam_mpi.model.partition import Partition
from adam_mpi.sharding import batch_parts
from adam_mpi.sharding.batch_parts import Batch, cut_batch, cut_rounds
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.flow import Flight, Flow
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool, add_scaled, batch_result, combine
from adam_mpi.worker.link import Link
from adam_mpi.worker.replica import Computed
from adam_mpi.worker.sums import Sums
from adam_mpi.worker.worker_generation import WorkerGeneration


class StripPipeline:
    """Take batches from `data` through `flow`, and append gradients that are summed over the replica to `finished`."""

    def __init__(
        self,
        flow: Flow,
        link: Link,
        partition: Partition,
        *,
        pool: GradientPool,
        data: DataClient,
        finished: deque[Computed],
    ) -> None:
        self.flow = flow
        self.link = link
        self.partition = partition
        self.strip = partition.strips[link.strip]
        self.sums = Sums(link, partition)
        self.pool = pool
        self.data = data
        self.config = data.config
        self.finished = finished
        self.begun = 0
        """The number of parts that have begun."""
        self.added = 0
        """The number of parts whose results are added."""
        self.landed: dict[int, Flight] = {}
        """Parts that are computed while an earlier one is not."""
        self.waiting: deque[tuple[Batch, Slot | None]] = deque()
        """Parts of a batch that have not begun; the last one is paired with the slot of the batch."""
        self.results: list[BatchResult] = []
        """The results of a batch's parts that are added while others of it are not."""
        self.buffer: GradientBuffer | None = None
        """Where gradients are added now."""
        self.unsummed: deque[GradientBuffer] = deque()
        """Full buffers that are not being summed over the replica yet."""
        self.joint_slot: Slot | None = None
        """The slot of the joint batch under way."""

    def feed(self, current: WorkerGeneration, weights: np.ndarray) -> bool:
        """Begin parts of arrived batches on `weights`, as far as contexts are free; return whether one was begun."""
        worked = False
        while self.flow.takes(self.begun) and (self.waiting or self._take_batch(current)):
            part, slot = self.waiting.popleft()
            self.flow.begin(self.begun, part, slot, weights, self.data.phase.training)
            self.begun += 1
            worked = True
        return worked

    def _take_batch(self, current: WorkerGeneration) -> bool:
        """Cut the next batch into parts, a joint one when the one before is pushed; return whether there was one."""
        shared = self.data.shared
        if shared and (self.joint_slot is not None or not self.data.arrived or not self._has_room()):
            return False
        if (taken := current.take()) is None:
            return False
        slot, batch = taken
        *others, last = self._cut(batch)
        self.waiting.extend([*((part, None) for part in others), (last, slot)])
        self.joint_slot = slot if shared else None
        return True

    def _cut(self, batch: Batch) -> list[Batch]:
        """Return the parts of `batch` that are under way one by one."""
        most = batch_parts.most(self.config.worker.in_flight, self.strip.ranks)
        count = batch_parts.count(batch.labels.size, *most)
        if self.partition.hybrid:
            return cut_rounds(batch, count, self.strip.number)
        return cut_batch(batch, count)

    def _has_room(self) -> bool:
        """Return whether there is a buffer to add to; all are under way while servers or other replicas are slow."""
        self.buffer = self.buffer or self.pool.take()
        return self.buffer is not None

    def collect(self, push_scale: float) -> bool:
        """Add computed parts in order, times `push_scale`, and advance the sums; return whether anything moved."""
        worked = self.flow.step()
        while self.flow.landed:
            flight = self.flow.landed.popleft()
            self.landed[flight.number] = flight
        while self.added in self.landed and (not self.data.phase.training or self._has_room()):
            self._add(self.landed.pop(self.added), push_scale)
            self.added += 1
            worked = True
        while self.unsummed and self.sums.begin(self.unsummed[0]):
            self.unsummed.popleft()
            worked = True
        while (summed := self.sums.step()) is not None:
            self.finished.append(Computed(slot=self.joint_slot, gradient=summed))
            self.joint_slot = None
            worked = True
        return worked

    def _add(self, flight: Flight, push_scale: float) -> None:
        """Add the result and the gradient of a part, and free its context."""
        self.results.append(batch_result(flight.batch, *self.flow.contexts[flight.context].result))
        if self.data.phase.training:
            assert self.buffer is not None, "`collect` has taken a buffer"
            add_scaled(self.buffer.values, self.flow.gradients[flight.context], np.float32(push_scale))
        self.flow.release(flight)
        if flight.slot is not None:
            self._finish_batch(flight.slot)

    def _finish_batch(self, slot: Slot) -> None:
        """Combine the results of a batch whose parts are all added, and complete the buffer if it is full."""
        result = combine(self.results)
        self.results = []
        shared = self.data.shared
        if not shared:
            self.finished.append(Computed(slot=slot, result=result))
        if self.data.phase.training:
            assert self.buffer is not None, "`collect` has taken a buffer"
            self.buffer.done.append(result)
            if shared or self.buffer.full(self.config.push.images):
                self.complete()

    def complete(self) -> None:
        """Pass the buffer on to be summed over the replica, if it has any images."""
        if self.buffer is not None and self.buffer.done:
            self.unsummed.append(self.buffer)
            self.buffer = None

    def abandon(self) -> None:
        """Give all gradient buffers back to the pool."""
        for buffer in (*self.unsummed, *self.sums.under_way):
            self.pool.give(buffer)
        self.unsummed.clear()
        self.sums.under_way.clear()
        if self.buffer is not None:
            self.pool.give(self.buffer)
            self.buffer = None
        self.joint_slot = None

    @property
    def working(self) -> bool:
        """Return whether parts of batches or sums are under way."""
        parts = self.added < self.begun or bool(self.waiting)
        return parts or self.joint_slot is not None or bool(self.unsummed) or self.sums.busy

    def owed(self) -> Iterator[tuple[str, int, int]]:
        """Yield what is missing, the strip that owes it, and its turn.

        A strip owes what it has not sent, and the reading of what was sent to it while that memory is needed.
        """
        exchanges = list(self.partition.exchanges.values())
        for strip, (port, number) in self.flow.awaited().items():
            does = "needs" if port.direction == FORWARD else "gives back"
            side = "left" if strip < self.strip.number else "right"
            what = f"what {exchanges[port.exchange].layer} {does} on the {side}, part {number} of the batches,"
            yield what, strip, number
        for strip in self.sums.missing:
            yield f"its share of sum {self.sums.done} of gradients", strip, self.sums.done
        for strip in self.flow.unread(self.begun) if self.waiting or self.data.arrived else ():
            yield f"its end of what was sent before part {self.begun} of the batches", strip, self.begun
        for strip in self.sums.unread if self.unsummed else ():
            yield f"its end of what was sent before sum {self.sums.begun} of gradients", strip, self.sums.begun
