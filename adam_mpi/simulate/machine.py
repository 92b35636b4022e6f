"""Cores and links as things that are taken in turn; a rank's main thread, which does one thing after the other."""

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from adam_mpi.simulate.cluster import Cluster, Costs

# What a thread computes before another one gets its core, and the most that one message keeps a link for itself.
SLICE, PIECE = 3e-3, 1 << 20
SLICES = 8  # at the most, of one piece of work
LOOK = 200e-6  # some rounds of a main thread that finds nothing
Steps = Generator[simpy.Event, Any, None]


class Host:
    def __init__(self, time: simpy.Environment, cluster: Cluster) -> None:
        self.time, self.links, self.speed = time, cluster.links, cluster.hosts.speed
        self.cores = simpy.Resource(time, cluster.hosts.cores)
        self.sending, self.receiving = simpy.Resource(time, 1), simpy.Resource(time, 1)
        self.sent = 0
        """Bytes that have left it."""

    def work(self, seconds: float) -> Steps:
        """So much of one core, in slices: more threads than cores take turns."""
        left = seconds / self.speed
        # Long work has longer ones: a core is wanted by many then, and one of them is soon at the end of a slice.
        turn = max(SLICE, left / SLICES)
        while left > 0:
            with self.cores.request() as core:
                yield core
                yield self.time.timeout(min(left, turn))
            left -= turn

    def send(self, to: "Host", size: int) -> Steps:
        """Over both hosts' links; inside a host there is nothing to wait for, copies are work."""
        if to is self:
            return
        for first in range(0, size, PIECE):
            piece = min(PIECE, size - first)
            # A receiver is not kept waiting by one whose own link is busy.
            with self.sending.request() as out:
                yield out
                with to.receiving.request() as into:
                    yield into
                    yield self.time.timeout(piece / self.links.bandwidth)
            self.sent += piece
        yield self.time.timeout(self.links.latency)


class Rank:
    """A rank on its host. Its main thread does one thing after the other and polls in between.

    After work it looks around for a while, which takes a core; then it sleeps, longer and longer, and notices late.
    """

    def __init__(self, host: Host, costs: Costs, chance: np.random.Generator) -> None:
        self.host, self.costs, self.chance, self.time = host, costs, chance, host.time
        self.main = simpy.Resource(self.time, 1)
        self.rested = 0.0
        """When it last had something to do."""
        self.looking = False

    def do(self, seconds: float) -> Steps:
        """Something for the main thread."""
        with self.main.request() as turn:
            yield turn
            # Sleeps double: the one under way is about half of the time since they began.
            asleep = max(0.0, self.time.now - self.rested - self.costs.spin)
            yield self.time.timeout(self.chance.uniform(0, min(asleep / 2, self.costs.poll)))
            yield from self.host.work(seconds)
            self.rested = self.time.now
        if not self.looking:
            self.looking = True
            self.time.process(self._look_around())

    def _look_around(self) -> Steps:
        while self.time.now - self.rested < self.costs.spin:
            if self.main.count:
                yield self.time.timeout(LOOK)
            else:
                yield from self.host.work(LOOK * self.host.speed)
        self.looking = False
