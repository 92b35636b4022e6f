"""The hosts of a simulation: their description in a TOML file, their cores and links, and the ranks on them."""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from adam_mpi.config.fields import limited
from adam_mpi.config.reading import fill_section, read_toml


@dataclass
class Hosts:
    """The hosts, all alike."""

    count: int = limited(1, low=1)
    """Number of hosts."""
    ranks: int = limited(4, low=1)
    """Ranks on each host."""
    cores: int = limited(2, low=1)
    """Cores of each host."""
    speed: float = limited(1.0, low=0.001)
    """Speed of a core, as a multiple of one of the machine that the costs were measured on."""


@dataclass
class Links:
    """The links between hosts, one of each host."""

    bandwidth: float = limited(1.25e9, low=1.0)
    """Bytes per second of a host's link, in each direction."""
    latency: float = limited(50e-6, low=0.0)
    """Seconds that a message takes from host to host, besides its bytes."""
    burst: float = limited(0.0, low=0.0)
    """Bytes that an idle link sends at once: the size of its token bucket."""


@dataclass
class Variation:
    """How the times of batches vary."""

    spread: float = limited(0.05, low=0.0, high=2.0)
    """Standard deviation of the time of a batch, as a fraction of it."""
    slow: float = limited(0.0, low=0.0, high=1.0)
    """Fraction of the replicas that are stragglers."""
    factor: float = limited(1.0, low=1.0)
    """How many times as long a straggler takes for a batch."""
    seed: int = limited(1, low=0)
    """Seed of all random numbers."""


@dataclass
class Costs:
    """Seconds on one core; a cost of 0 is measured on this machine when the simulation starts."""

    image: float = limited(0.0, low=0.0)
    """A trainer thread computes one image and steps, beside the other trainer threads of its host."""
    prepare: float = limited(0.0, low=0.0)
    """A data rank prepares one image."""
    copy: float = limited(0.0, low=0.0)
    """A worker writes one byte of a push."""
    sign: float = limited(0.0, low=0.0)
    """One byte is added to a checksum, which a push between hosts has."""
    wire: float = limited(0.0, low=0.0)
    """The operating system sends or receives one byte over TCP."""
    apply: float = limited(0.0, low=0.0)
    """A server applies one byte of a push to the weights."""
    pull: float = limited(0.0, low=0.0)
    """A worker reads one byte of weights into its own."""
    turn: float = limited(80e-6, low=0.0)
    """One round of the loop of a main thread, besides the work that it finds."""
    message: float = limited(45e-6, low=0.0)
    """A worker sends one message of a push, or a server receives it, besides its bytes."""
    batch: float = limited(180e-6, low=0.0)
    """A worker's main thread requests a batch, receives it, passes it to a thread and reports it."""
    hand: float = limited(100e-6, low=0.0)
    """A data rank sends a batch and counts it."""
    task: float = limited(100e-6, low=0.0)
    """A trainer thread takes a batch and returns its result, in Python, which one thread of a rank runs at a time."""
    spin: float = limited(1.2e-3, low=0.0)
    """A main thread polls this long after its last work before it sleeps, with clocks or strips."""
    nap: float = limited(1e-3, low=0.0)
    """Without clocks and strips a main thread sleeps at once, at least this long."""
    poll: float = limited(2e-3, low=0.0)
    """The longest sleep of a loop with nothing to do."""


@dataclass
class Cluster:
    """All that the TOML file describes."""

    hosts: Hosts = field(default_factory=Hosts)
    links: Links = field(default_factory=Links)
    variation: Variation = field(default_factory=Variation)
    costs: Costs = field(default_factory=Costs)


def load_cluster(path: Path) -> Cluster:
    """Return the simulated cluster that a TOML file describes; raise UserError for an unknown key or wrong value."""
    cluster = Cluster()
    fill_section(cluster, read_toml(path), "", str(path))
    return cluster


SLICE = 0.5e-3
"""Seconds that a thread computes before another one gets its core."""
PIECE = 1 << 20
"""Bytes that a message sends before another one gets its link."""
SLICES = 8
"""Slices of one piece of work, or pieces of one message, at most."""
FREE = 2
"""Free cores of a host up to which work is cut into slices."""
SLEEP = 1 / 8
"""Length of a sleep, as a fraction of the time in which a main thread has found nothing."""
LOOKS = 10
"""Calls of MPI in a round of a main thread."""
ORDERS = 3
"""Those of these calls that progress the reads of other ranks from its memory."""
EAGER = 1 << 16
"""Bytes of the longest message to another host that is sent before the receiver has answered its announcement."""
Steps = Generator[simpy.Event, Any, None]


class Host:
    """A host: cores that threads take turns on, and a link to the other hosts."""

    def __init__(self, time: simpy.Environment, cluster: Cluster) -> None:
        self.time = time
        self.links = cluster.links
        self.speed = cluster.hosts.speed
        self.cores = simpy.PriorityResource(time, cluster.hosts.cores)
        self.leaving = 0.0
        """When its link has sent all that it has been given so far."""
        self.entering = 0.0
        """When its link has received all that others have sent so far."""
        self.tokens = self.links.burst
        """Bytes that could be sent at once at the time `counted`."""
        self.counted = 0.0
        self.sent = 0
        """Bytes that it has sent to other hosts."""

    @property
    def spare(self) -> float:
        """Return the number of cores of a simulated host that no thread has."""
        return self.cores.capacity - self.cores.count

    def work(self, seconds: float, woken: bool = False) -> Steps:
        """Simulate `seconds` of work on one core, in slices; a thread that was `woken` gets a core before others."""
        left = seconds / self.speed
        # Long work has longer slices: when many want a core, one of them is soon at the end of a slice. Where several
        # cores are free no thread has to wait.
        turn = max(SLICE, left / (SLICES if self.spare <= FREE else 1))
        while left > 0:
            with self.cores.request(0 if woken else 1) as core:
                yield core
                yield self.time.timeout(min(left, turn))
            left -= turn

    def send(self, to: "Host", size: int) -> Steps:
        """Simulate sending `size` bytes to another host, over the links of both in turn; nothing inside a host."""
        if to is self:
            return
        turn = max(PIECE, -(-size // SLICES))
        for first in range(0, size, turn):
            piece = min(turn, size - first)
            begin = max(self.time.now, self.leaving)
            seconds = self._seconds(piece, begin)
            self.leaving = begin + seconds
            self.sent += piece
            to.entering = max(self.leaving, to.entering + seconds)
            yield self.time.timeout(to.entering - self.time.now)
        yield self.time.timeout(self.links.latency)

    def _seconds(self, piece: int, begin: float) -> float:
        """Return the simulated time in which the link sends `piece` bytes that it gets at the time `begin`."""
        refilled = (begin - self.counted) * self.links.bandwidth
        self.tokens = min(self.links.burst, self.tokens + refilled)
        at_once = min(self.tokens, piece)
        seconds = (piece - at_once) / self.links.bandwidth
        self.tokens -= at_once
        self.counted = begin + seconds
        return seconds


class Rank:
    """A rank on its host. Its main thread does one thing after the other and polls in between.

    After work it polls for a while, then it sleeps, longer and longer, and notices events late; one that is `patient`
    sleeps at once. Whenever it calls MPI it yields its core to others.
    """

    def __init__(self, host: Host, costs: Costs, random: np.random.Generator, patient: bool) -> None:
        self.host = host
        self.costs = costs
        self.random = random
        self.time = host.time
        self.spin = 0.0 if patient else costs.spin
        self.nap = costs.nap if patient else 0.0
        self.main = simpy.Resource(self.time, 1)
        self.interpreter = simpy.Resource(self.time, 1)
        self.progressed = 0.0
        """The end of the last transfer that it has progressed."""
        self.rested = 0.0
        """When its main thread last had something to do."""
        self.busy = 0.0
        """Seconds in which its main thread has worked."""

    def interpret(self, seconds: float) -> Steps:
        """Simulate `seconds` of Python: one thread of a rank at a time, also while it waits for a core."""
        with self.interpreter.request() as turn:
            yield turn
            yield from self.host.work(seconds, woken=True)

    def do(self, python: float, kernels: float = 0.0, awake: bool = False, looks: int = LOOKS) -> Steps:
        """Simulate work of the main thread: seconds of Python, and of `kernels`, which release the interpreter.

        A main thread that a thread of its own has woken is `awake`; else it may sleep, and notices late.
        """
        with self.main.request() as turn:
            yield turn
            # Whatever has come meanwhile is found in the same round.
            if self.time.now > self.rested:
                yield from self.notice(awake, looks)
            begun = self.time.now
            yield from self.interpret(python)
            yield from self.host.work(kernels, woken=True)
            self.rested = self.time.now
            self.busy += self.rested - begun

    def notice(self, awake: bool = False, looks: int = LOOKS) -> Steps:
        """Simulate how a rank finds what has come: at the end of a sleep, after `looks` calls of MPI."""
        asleep = self.time.now - self.rested - self.spin
        if asleep > 0 and not awake:
            yield self.time.timeout(self.random.uniform(0, self._sleep(asleep)))
        # With a free core no other thread runs in between.
        pieces = 1 if self.host.spare else looks
        for _ in range(pieces):
            yield from self.host.work(self.costs.turn * looks / LOOKS / pieces)

    def send(self, to: "Rank", size: int, awaited: bool = False) -> Steps:
        """Simulate sending `size` bytes to another rank's memory; between hosts both ranks have to progress it."""
        if to.host is self.host:
            return
        if size > EAGER:
            # The receiver has to find its announcement, and the sender the answer.
            for side, looks in ((to, 1 if awaited else LOOKS), (self, 1)):
                yield self.time.timeout(self.host.links.latency)
                yield from side.notice(looks=looks)
        begun = self.time.now
        moving = (self.host.send(to.host, size), self._move(size), to._move(size))
        yield self.time.all_of([self.time.process(part) for part in moving])
        for side in (self, to):
            self.time.process(side._progress(begun))

    def _move(self, size: int) -> Steps:
        """Simulate the time that TCP costs for `size` bytes, in the main thread of a rank."""
        with self.main.request() as turn:
            yield turn
            begun = self.time.now
            yield from self.host.work(size * self.costs.wire, woken=True)
            self.busy += self.time.now - begun

    def _progress(self, begun: float) -> Steps:
        """Simulate a rank's polls of a transfer since `begun`; those of others at the same time count once."""
        now = self.time.now
        turn = self.costs.turn
        alone = now - max(begun, self.progressed)
        self.progressed = now
        if alone and turn:
            yield from self.host.work(alone * turn / (turn + self._sleep((now - begun) / 2)))

    def _sleep(self, waited: float) -> float:
        """Return the length of a simulated rank's sleep after `waited` seconds without work."""
        return min(self.costs.poll, max(self.nap, waited * SLEEP))
