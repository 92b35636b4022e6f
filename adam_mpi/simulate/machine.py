"""Cores and links as things that are taken in turn; a rank's main thread, which does one thing after the other."""

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from adam_mpi.simulate.cluster import Cluster, Costs

# What a thread computes before another one gets its core, and what a message sends before another one gets its link.
SLICE, PIECE = 0.5e-3, 1 << 20
SLICES = 8  # at the most, of one piece of work or one message
SLEEP = 1 / 8  # of the time in which a main thread has found nothing
LOOK = 200e-6  # some rounds of a main thread that finds nothing
Steps = Generator[simpy.Event, Any, None]


class Host:
    def __init__(self, time: simpy.Environment, cluster: Cluster) -> None:
        self.time, self.links, self.speed = time, cluster.links, cluster.hosts.speed
        self.cores = simpy.PriorityResource(time, cluster.hosts.cores)
        self.leaving = self.entering = 0.0
        """When its link has sent, and received, all that it has been given so far."""
        self.saved, self.counted = self.links.burst, 0.0
        """Bytes that may leave at once, at that time."""
        self.sent = 0
        """Bytes that have left it."""

    @property
    def spare(self) -> bool:
        """Whether one more thread would leave a core free."""
        return self.cores.count < self.cores.capacity - 1

    def work(self, seconds: float, woken: bool = False) -> Steps:
        """So much of one core, in slices: more threads than cores take turns; one that has slept goes first."""
        left = seconds / self.speed
        # Long work has longer ones: a core is wanted by many then, and one of them is soon at the end of a slice.
        turn = max(SLICE, left / SLICES)
        while left > 0:
            with self.cores.request(0 if woken else 1) as core:
                yield core
                yield self.time.timeout(min(left, turn))
            left -= turn

    def send(self, to: "Host", size: int) -> Steps:
        """Over the links of both, first come first served; inside a host nothing is waited for, copies are work."""
        if to is self:
            return
        turn = max(PIECE, -(-size // SLICES))
        for first in range(0, size, turn):
            piece = min(turn, size - first)
            begin = max(self.time.now, self.leaving)
            seconds = self._seconds(piece, begin)
            self.leaving, self.sent = begin + seconds, self.sent + piece
            to.entering = max(self.leaving, to.entering + seconds)
            yield self.time.timeout(to.entering - self.time.now)
        yield self.time.timeout(self.links.latency)

    def _seconds(self, piece: int, begin: float) -> float:
        """That so many bytes take to leave."""
        rested = (begin - self.counted) * self.links.bandwidth
        self.saved = min(self.links.burst, self.saved + rested)
        at_once = min(self.saved, piece)
        seconds = (piece - at_once) / self.links.bandwidth
        self.saved, self.counted = self.saved - at_once, begin + seconds
        return seconds


class Rank:
    """A rank on its host. Its main thread does one thing after the other and polls in between.

    After work it looks around for a while, which takes a core; then it sleeps, longer and longer, and notices late.
    """

    def __init__(self, host: Host, costs: Costs, chance: np.random.Generator) -> None:
        self.host, self.costs, self.chance, self.time = host, costs, chance, host.time
        self.main, self.interpreter = simpy.Resource(self.time, 1), simpy.Resource(self.time, 1)
        self.rested = 0.0
        """When it last had something to do."""
        self.busy = 0.0
        """Seconds in which it had."""
        self.looking = False

    def interpret(self, seconds: float) -> Steps:
        """Python: one thread of a rank at a time, also while it waits for a core."""
        with self.interpreter.request() as turn:
            yield turn
            yield from self.host.work(seconds, woken=True)

    def do(self, python: float, kernels: float = 0.0) -> Steps:
        """Something for the main thread; kernels leave the interpreter to others."""
        with self.main.request() as turn:
            yield turn
            # A sleep is a part of the time since they began.
            asleep = max(0.0, self.time.now - self.rested - self.costs.spin)
            yield self.time.timeout(self.chance.uniform(0, min(asleep * SLEEP, self.costs.poll)))
            # What has waited for it meanwhile is found in the same round.
            begun, again = self.time.now, self.costs.turn if self.time.now > self.rested else 0.0
            yield from self.interpret(again + python)
            yield from self.host.work(kernels, woken=True)
            self.rested = self.time.now
            self.busy += self.rested - begun
        if not self.looking:
            self.looking = True
            self.time.process(self._look_around())

    def _look_around(self) -> Steps:
        while (left := self.rested + self.costs.spin - self.time.now) > 0:
            if self.main.count:
                yield self.time.timeout(LOOK)
            elif self.host.spare:
                # Nobody is kept from anything.
                yield self.time.timeout(left)
            else:
                yield from self.host.work(LOOK * self.host.speed)
        self.looking = False
