"""The batches of one generation on their way through a strip, in the same order on every strip of the replica.

The first strip requests batches and all receive their columns. Batches are cut into parts, and part n is computed in
context n mod `worker.in_flight` on every strip. Gradients are added in the order of the parts; those of convolutions,
which every strip has a part of, are summed over the replica before each strip pushes its share.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from adam_mpi.model.exchange import FORWARD
from adam_mpi.model.metrics import MetricSet
from adam_mpi.model.partition import Partition
from adam_mpi.sharding import batches
from adam_mpi.sharding.batches import Batch, cut_batch, cut_rounds
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.flow import Flight, Flow
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool, add_scaled, batch_result, combine
from adam_mpi.worker.link import SUMS, Link
from adam_mpi.worker.replica import Computed
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
        metrics: MetricSet,
    ) -> None:
        self.metrics = metrics
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
        if (taken := current.take_batch()) is None:
            return False
        slot, batch = taken
        *others, last = self._cut(batch)
        self.waiting.extend([*((part, None) for part in others), (last, slot)])
        self.joint_slot = slot if shared else None
        return True

    def _cut(self, batch: Batch) -> list[Batch]:
        """Return the parts of `batch` that are under way one by one."""
        most = batches.most_parts(self.config.worker.in_flight, self.strip.ranks)
        count = batches.count_parts(batch.ids.size, *most)
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
            self._add_part(self.landed.pop(self.added), push_scale)
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

    def _add_part(self, flight: Flight, push_scale: float) -> None:
        """Add the result and the gradient of a part, and free its context."""
        context = self.flow.contexts[flight.context]
        labels = flight.batch.labels
        training = self.data.phase.training
        sums = self.metrics.measure(context.result, lambda: context.outputs_of(len(labels)), labels, training)
        self.results.append(batch_result(flight.batch, sums))
        if training:
            assert self.buffer is not None, "`collect` has taken a buffer"
            add_scaled(self.buffer.values, self.flow.gradients[flight.context], np.float32(push_scale))
        self.flow.release_flight(flight)
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


class Sums:
    """Sum gradient buffers over the replica: `begin` with each, then `step` returns them in the same order."""

    def __init__(self, link: Link, partition: Partition) -> None:
        """Exchange the common parts of `partition` through `link`."""
        self.link = link
        strip = partition.strips[link.strip]
        self.parts = [
            [
                slice(strip.local(a), strip.local(a) + b - a)
                for a, b in (spans[target] for spans in partition.common)
                if a < b
            ]
            for target in range(len(partition))
        ]
        """The share of each strip in the vector of this one."""
        contexts = link.channels.contexts
        self.channels = [link.channels.index((contexts + number, 0, FORWARD)) for number in range(SUMS)]
        self.under_way: deque[GradientBuffer] = deque()
        self.begun = 0
        self.done = 0

    @property
    def busy(self) -> bool:
        """Return whether a sum is under way."""
        return bool(self.under_way)

    def begin(self, buffer: GradientBuffer) -> bool:
        """Send the other strips their shares of `buffer`; return False while there is no room."""
        channel = self.channels[self.begun % SUMS]
        free = self.link.finished(self.link.channels.contexts, self.begun - SUMS + 1) and self.link.clear(channel)
        if len(self.under_way) == SUMS or not free:
            return False
        for target, values in self.link.out[channel].items():
            np.concatenate([buffer.values[part] for part in self.parts[target]], out=values)
        self.begun += 1
        self.link.post(channel, self.begun, {to: values.size for to, values in self.link.out[channel].items()})
        self.under_way.append(buffer)
        return True

    def step(self) -> GradientBuffer | None:
        """Return the next buffer if its sum is complete."""
        channel = self.channels[self.done % SUMS]
        if not self.under_way or not self.link.arrived(channel, self.done + 1):
            return None
        buffer = self.under_way.popleft()
        self._add_shares(buffer.values, channel)
        self.done += 1
        self.link.finish(self.link.channels.contexts, self.done)
        return buffer

    @property
    def missing(self) -> list[int]:
        """Return the strips whose part of the next sum has not arrived."""
        return self.link.missing(self.channels[self.done % SUMS], self.done + 1) if self.under_way else []

    @property
    def unread(self) -> list[int]:
        """Return the strips that have not read the sum whose memory the next one needs."""
        channel = self.channels[self.begun % SUMS]
        return self.link.unread(self.link.channels.contexts, self.begun - SUMS + 1, [channel])

    def _add_shares(self, values: np.ndarray, channel: int) -> None:
        """Sum this strip's share in the order of the strips, so that the same batches give the same bits."""
        own = self.parts[self.link.strip]
        arrived = self.link.into[channel]
        if not arrived:
            return
        mine = np.concatenate([values[part] for part in own])
        total = np.zeros_like(mine)
        for strip in range(len(self.parts)):
            total += mine if strip == self.link.strip else arrived[strip]
        place = 0
        for part in own:
            size = part.stop - part.start
            values[part] = total[place : place + size]
            place += size
