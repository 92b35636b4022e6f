"""Sums over a replica: every strip has a part of the gradients of convolutions; each sums up and pushes its share."""

from collections import deque

import numpy as np

from adam_mpi.model.exchange_buffers import FORWARD
from adam_mpi.model.partition import Partition
from adam_mpi.worker.channels import SUMS
from adam_mpi.worker.gradient_buffer import GradientBuffer
from adam_mpi.worker.link import Link


class Sums:
    """`begin` with a contribution, then `step` until it gives it back, in the order they were begun."""

    def __init__(self, link: Link, cut: Partition) -> None:
        self.link = link
        strip = cut.strips[link.strip]
        self.parts = [
            [slice(strip.local(a), strip.local(a) + b - a) for a, b in (spans[target] for spans in cut.common) if a < b]
            for target in range(len(cut))
        ]
        """Where the share of each strip lies in our vector."""
        contexts = link.channels.contexts
        self.channels = [link.channels.index((contexts + number, 0, FORWARD)) for number in range(SUMS)]
        self.under_way: deque[GradientBuffer] = deque()
        self.begun = self.done = 0

    @property
    def busy(self) -> bool:
        return bool(self.under_way)

    def begin(self, contribution: GradientBuffer) -> bool:
        """Send the others what is theirs; False while there is no room."""
        channel = self.channels[self.begun % SUMS]
        free = self.link.finished(self.link.channels.contexts, self.begun - SUMS + 1) and self.link.clear(channel)
        if len(self.under_way) == SUMS or not free:
            return False
        for target, values in self.link.out[channel].items():
            np.concatenate([contribution.values[part] for part in self.parts[target]], out=values)
        self.begun += 1
        self.link.post(channel, self.begun, {to: values.size for to, values in self.link.out[channel].items()})
        self.under_way.append(contribution)
        return True

    def step(self) -> GradientBuffer | None:
        """The next contribution whose sum is complete."""
        channel = self.channels[self.done % SUMS]
        if not self.under_way or not self.link.arrived(channel, self.done + 1):
            return None
        contribution = self.under_way.popleft()
        self._add(contribution.values, channel)
        self.done += 1
        self.link.finish(self.link.channels.contexts, self.done)
        return contribution

    @property
    def missing(self) -> list[int]:
        """The strips whose part of the next sum is not here."""
        return self.link.missing(self.channels[self.done % SUMS], self.done + 1) if self.under_way else []

    @property
    def unread(self) -> list[int]:
        """The strips that have not read the sum whose memory the next one to begin takes."""
        channel = self.channels[self.begun % SUMS]
        return self.link.unread(self.link.channels.contexts, self.begun - SUMS + 1, [channel])

    def _add(self, values: np.ndarray, channel: int) -> None:
        """In the order of the strips, so that the same batches give the same bits."""
        own, arrived = self.parts[self.link.strip], self.link.into[channel]
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
