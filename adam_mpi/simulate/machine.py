"""Cores and links as things that are taken in turn; a rank's main thread, which does one thing after the other."""

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from adam_mpi.simulate.cluster import Cluster

# What a thread computes before another one gets its core, and the most that one message keeps a link for itself.
SLICE, PIECE = 3e-3, 1 << 20
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
        while left > 0:
            with self.cores.request() as core:
                yield core
                yield self.time.timeout(min(left, SLICE))
            left -= SLICE

    def send(self, to: "Host", size: int) -> Steps:
        """Over both hosts' links; inside a host there is nothing to wait for, copies are work."""
        if to is self:
            return
        for first in range(0, size, PIECE):
            piece = min(PIECE, size - first)
            with self.sending.request() as out, to.receiving.request() as into:
                yield out & into
                yield self.time.timeout(piece / self.links.bandwidth)
            self.sent += piece
        yield self.time.timeout(self.links.latency)


class Rank:
    """A rank on its host. Its main thread polls: the longer it had nothing to do, the later it notices."""

    def __init__(self, host: Host, poll: float, chance: np.random.Generator) -> None:
        self.host, self.poll, self.chance = host, poll, chance
        self.main = simpy.Resource(host.time, 1)
        self.rested = 0.0
        """When it last had something to do."""

    def do(self, seconds: float) -> Steps:
        """Something for the main thread."""
        with self.main.request() as turn:
            yield turn
            idle = self.host.time.now - self.rested
            yield self.host.time.timeout(self.chance.uniform(0, min(idle, self.poll)))
            yield from self.host.work(seconds)
            self.rested = self.host.time.now
