"""Cores and links as things that are taken in turn; a rank's main thread, which does one thing after the other."""

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from adam_mpi.simulate.cluster import Cluster, Costs

# What a thread computes before another one gets its core, and what a message sends before another one gets its link.
SLICE, PIECE = 0.5e-3, 1 << 20
SLICES = 8  # at the most, of one piece of work or one message
FREE = 2  # cores of a host on which work is still cut into slices
SLEEP = 1 / 8  # of the time in which a main thread has found nothing
LOOKS, ORDERS = 10, 3  # into MPI, in a round of a main thread; those for what others have ordered from its memory
EAGER = 1 << 16  # bytes of the longest message to another host that is sent before the other side has asked for it
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
    def spare(self) -> float:
        """Cores that nobody has."""
        return self.cores.capacity - self.cores.count

    def work(self, seconds: float, woken: bool = False) -> Steps:
        """So much of one core, in slices: more threads than cores take turns; one that has slept goes first."""
        left = seconds / self.speed
        # Long work has longer ones: a core is wanted by many then, and one of them is soon at the end of a slice. Where
        # several are free nobody has to wait for that.
        turn = max(SLICE, left / (SLICES if self.spare <= FREE else 1))
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

    After work it looks around for a while, then it sleeps, longer and longer, and notices late; one that is `patient`
    sleeps at once. Whenever it looks into MPI it leaves its core to others.
    """

    def __init__(self, host: Host, costs: Costs, chance: np.random.Generator, patient: bool) -> None:
        self.host, self.costs, self.chance, self.time = host, costs, chance, host.time
        self.spin, self.nap = (0.0, costs.nap) if patient else (costs.spin, 0.0)
        self.main, self.interpreter = simpy.Resource(self.time, 1), simpy.Resource(self.time, 1)
        self.attended = 0.0
        """The end of the last transfer that it has looked after."""
        self.rested = 0.0
        """When it last had something to do."""
        self.busy = 0.0
        """Seconds in which it had."""

    def interpret(self, seconds: float) -> Steps:
        """Python: one thread of a rank at a time, also while it waits for a core."""
        with self.interpreter.request() as turn:
            yield turn
            yield from self.host.work(seconds, woken=True)

    def do(self, python: float, kernels: float = 0.0, told: bool = False, looks: int = LOOKS) -> Steps:
        """Something for the main thread, which threads of its own wake; kernels leave the interpreter to others."""
        with self.main.request() as turn:
            yield turn
            # What has waited for it meanwhile is found in the same round.
            if self.time.now > self.rested:
                yield from self.notice(told, looks)
            begun = self.time.now
            yield from self.interpret(python)
            yield from self.host.work(kernels, woken=True)
            self.rested = self.time.now
            self.busy += self.rested - begun

    def notice(self, told: bool = False, looks: int = LOOKS) -> Steps:
        """What has come is found at the end of a sleep, in a round of the loop; what MPI waits for by one look."""
        asleep = self.time.now - self.rested - self.spin
        if asleep > 0 and not told:
            yield self.time.timeout(self.chance.uniform(0, self._sleep(asleep)))
        # With a core to spare nobody comes in between.
        pieces = 1 if self.host.spare else looks
        for _ in range(pieces):
            yield from self.host.work(self.costs.turn * looks / LOOKS / pieces)

    def send(self, to: "Rank", size: int, awaited: bool = False) -> Steps:
        """To the memory of another rank; on another host both sides have to look after it."""
        if to.host is self.host:
            return
        if size > EAGER:
            # Its announcement has to be found, and the answer to that.
            for side, looks in ((to, 1 if awaited else LOOKS), (self, 1)):
                yield self.time.timeout(self.host.links.latency)
                yield from side.notice(looks=looks)
        begun = self.time.now
        moving = self.host.send(to.host, size), self._move(size), to._move(size)
        yield self.time.all_of([self.time.process(part) for part in moving])
        for side in (self, to):
            self.time.process(side._attend(begun))

    def _move(self, size: int) -> Steps:
        """TCP's part, for the main thread."""
        with self.main.request() as turn:
            yield turn
            begun = self.time.now
            yield from self.host.work(size * self.costs.wire, woken=True)
            self.busy += self.time.now - begun

    def _attend(self, begun: float) -> Steps:
        """Sleep and look again until a transfer is over; others that are under way are looked after meanwhile."""
        now, turn = self.time.now, self.costs.turn
        alone, self.attended = now - max(begun, self.attended), now
        if alone and turn:
            yield from self.host.work(alone * turn / (turn + self._sleep((now - begun) / 2)))

    def _sleep(self, waited: float) -> float:
        return min(self.costs.poll, max(self.nap, waited * SLEEP))
