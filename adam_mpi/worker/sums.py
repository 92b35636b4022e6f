"""Sums over a replica: every strip has a part of the gradients of convolutions; each sums and pushes its share."""

from collections import deque

import numpy as np

from adam_mpi.model.exchange_buffers import FORWARD
from adam_mpi.model.partition import Partition
from adam_mpi.worker.channels import SUMS
from adam_mpi.worker.gradient_buffer import GradientBuffer
from adam_mpi.worker.link import Link


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
        self._add(buffer.values, channel)
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

    def _add(self, values: np.ndarray, channel: int) -> None:
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
