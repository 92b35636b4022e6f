"""Data ranks, replicas and servers as processes that wait for each other and for cores and links."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import simpy

from adam_mpi.config import Config
from adam_mpi.simulate.cluster import Cluster, Costs
from adam_mpi.simulate.load import Load, Part
from adam_mpi.simulate.machine import LOOKS, ORDERS, Rank, Steps

# A message that is folded together with others costs this much of one that comes alone.
FOLDED = 0.55


@dataclass
class Letter:
    """A part of a push at its server."""

    part: Part
    clock: int
    seen: int
    """The server's version that the push was computed on."""
    applied: simpy.Event
    far: bool
    """Whether it came from another host: then its checksum is compared."""

    def receiving(self, costs: Costs) -> float:
        """Seconds for a server to compare its bytes, besides applying it."""
        return self.far * self.part.bytes * costs.sign

    def writing(self, costs: Costs) -> float:
        """Seconds for a worker to write its bytes."""
        return self.part.bytes * (costs.copy + self.far * costs.sign)


@dataclass(frozen=True)
class Copies:
    """Of shards of a server, with another one."""

    rank: Rank
    bytes: int


class Server:
    def __init__(self, rank: Rank, costs: Costs, copies: list[Copies], replicas: int, clocked: bool, kept: int) -> None:
        """`kept`: bytes that it copies before every step, which it may have to take back."""
        self.rank, self.costs, self.copies, self.kept, self.time = rank, costs, copies, kept, rank.host.time
        self.letters: list[Letter] = []
        self.arrival, self.advance = self.time.event(), self.time.event()
        self.replicas, self.clocked = replicas, clocked
        self.version = self.clock = 0
        self.delays: Counter[int] = Counter()
        self.time.process(self.serve())

    def deliver(self, letter: Letter) -> None:
        self.letters.append(letter)
        if not self.arrival.triggered:
            self.arrival.succeed()

    def serve(self) -> Steps:
        """All that has arrived is one step; with clocks, all of one clock."""
        while True:
            ready = self._ready()
            if not ready:
                self.arrival = self.time.event()
                yield self.arrival
                continue
            each = [letter.part.seconds for letter in ready]
            seconds = max(each) + FOLDED * (sum(each) - max(each))
            seconds += sum(letter.receiving(self.costs) for letter in ready) + self.kept * self.costs.copy
            # With clocks a message is looked at twice: when it comes, and when all of its clock have.
            messages = (1 + self.clocked) * sum(letter.part.messages for letter in ready)
            yield from self.rank.do(messages * self.costs.message, seconds)
            if self.copies:
                yield self.time.all_of([self.time.process(self._replicate(copies)) for copies in self.copies])
            self._acknowledge(ready)

    def send(self, size: int) -> Steps:
        """Weights to another host, from the main thread."""
        yield from self.rank.do(self.costs.message, size * self.costs.copy, looks=LOOKS // ORDERS)

    def _ready(self) -> list[Letter]:
        ready = [letter for letter in self.letters if not self.clocked or letter.clock == self.clock]
        if self.clocked and len(ready) < self.replicas:
            return []
        self.letters = [letter for letter in self.letters if letter not in ready]
        return ready

    def _replicate(self, copies: Copies) -> Steps:
        """The folded record goes to a copy, which applies it too."""
        far = (copies.rank.host is not self.rank.host) * self.costs.sign
        yield from self.rank.do(self.costs.message, copies.bytes * (self.costs.copy + far))
        yield from self.rank.send(copies.rank, copies.bytes)
        yield from copies.rank.do(self.costs.message, copies.bytes * (self.costs.apply + far))

    def _acknowledge(self, letters: list[Letter]) -> None:
        for letter in letters:
            self.delays[self.version - letter.seen] += 1
            letter.applied.succeed()
        self.version += 1
        self.clock += 1
        self.advance.succeed()
        self.advance = self.time.event()


@dataclass
class Data:
    """A data rank; its threads keep some batches ready."""

    rank: Rank
    config: Config
    costs: Costs
    ahead: int
    images: int
    """In a batch, or a share of it."""
    ready: simpy.Store = field(init=False)

    def __post_init__(self) -> None:
        time = self.rank.host.time
        self.ready = simpy.Store(time, self.ahead)
        for _ in range(self.config.data.threads):
            time.process(self.prepare())

    def prepare(self) -> Steps:
        while True:
            yield from self.rank.host.work(self.images * self.costs.prepare)
            yield self.ready.put(None)


class Replica:
    """One logical worker: the ranks of its strips, its threads, its pushes and pulls."""

    def __init__(
        self,
        number: int,
        ranks: list[Rank],
        config: Config,
        cluster: Cluster,
        load: Load,
        data: list[Data],
        servers: dict[int, Server],
        threads: int,
        slow: float,
        share: int,
    ) -> None:
        """`slow`: how many times as long it computes; `share`: images that it has of every clock."""
        self.number, self.ranks, self.config, self.costs, self.load = number, ranks, config, cluster.costs, load
        self.data, self.servers, self.threads, self.slow, self.share = data, servers, threads, slow, share
        self.time, self.chance = ranks[0].host.time, ranks[0].chance
        self.spread = cluster.chance.spread
        self.latency = cluster.links.latency
        self.batches = simpy.Store(self.time)
        self.pool = simpy.Container(self.time, 2 * threads + 2, 2 * threads + 2)
        self.seen = dict.fromkeys(servers, 0)
        self.pulling = False
        self.images = self.since_pull = self.clock = 0
        self.waited = 0.0
        """For other replicas' clocks."""
        for _ in range(config.data.prefetch):
            self.time.process(self.fetch())
        if config.asynchronous:
            for _ in range(threads):
                self.time.process(self.train())
        else:
            self.time.process(self.clocks())

    def train(self) -> Steps:
        """A trainer thread: batch after batch, a push after so many images."""
        held, batch = 0, self.config.train.batch
        while True:
            yield self.batches.get()
            yield from self._compute(batch)
            self.time.process(self.fetch())
            held, self.since_pull = held + batch, self.since_pull + batch
            if held >= self.config.push.images and (self.pool.level or held >= self.load.most):
                yield self.pool.get(1)
                self.time.process(self.push(0, dict(self.seen)))
                held = 0
            if self.since_pull >= self.config.pull.images and not self.pulling:
                self.time.process(self.pull())

    def clocks(self) -> Steps:
        """With a bound on staleness: wait for the others, pull, compute a share, push."""
        for self.clock in range(1 << 60):
            begun = self.time.now
            for server in self.servers.values():
                while server.clock < self.clock - self.config.consistency.staleness:
                    yield server.advance
            self.waited += self.time.now - begun
            yield self.time.process(self.pull())
            yield self.batches.get()
            self.time.process(self.fetch())
            parts = cut(self.share, self.threads)
            yield self.time.all_of([self.time.process(self._compute(part)) for part in parts])
            # The gradients of all threads are summed.
            yield from self._share(0.0, self.threads * self.load.gradient * self.costs.apply)
            yield self.pool.get(1)
            self.time.process(self.push(self.clock, dict(self.seen)))

    def fetch(self) -> Steps:
        """A batch from one of the data ranks, to each strip its columns."""
        data = self.data[int(self.chance.integers(len(self.data)))]
        yield data.ready.get()
        yield from data.rank.do(self.costs.hand)
        for rank in self.ranks:
            yield from data.rank.send(rank, self.load.batch // len(self.ranks), awaited=True)
        yield from self.ranks[0].do(self.costs.batch)
        yield self.batches.put(None)

    def _compute(self, images: int) -> Steps:
        """All strips at once; what they exchange is taken to be hidden behind other batches in flight."""
        noise = self.chance.lognormal(-(self.spread**2) / 2, self.spread)
        seconds = images * self.costs.image * noise
        yield from self.ranks[0].interpret(self.costs.task)
        strips = [self.time.process(rank.host.work(self.slow * seconds / len(self.ranks))) for rank in self.ranks]
        yield self.time.all_of(strips)
        self.images += images

    def push(self, clock: int, seen: dict[int, int]) -> Steps:
        """`seen`: the version of each server that it was computed on."""
        letters = [
            Letter(part, clock, seen[number], self.time.event(), self._far(number))
            for number, part in self.load.push.items()
        ]
        # Not server by server: with hundreds of them that would be most of what there is to simulate.
        messages = sum(letter.part.messages for letter in letters)
        kernels = sum(letter.writing(self.costs) for letter in letters)
        yield from self._share(messages * self.costs.message, kernels, told=True)
        for number, letter in zip(self.load.push, letters, strict=True):
            self.time.process(self._travel(number, letter))
        yield self.time.all_of([letter.applied for letter in letters])
        yield self.pool.put(1)

    def _far(self, server: int) -> bool:
        return self.servers[server].rank.host is not self.ranks[0].host

    def _travel(self, number: int, letter: Letter) -> Steps:
        server = self.servers[number]
        for rank, size in self._strips(number, letter.part.bytes):
            yield from rank.send(server.rank, size)
        server.deliver(letter)

    def _strips(self, server: int, size: int) -> list[tuple[Rank, int]]:
        """Who sends a server so many bytes, or gets them: all strips; with many servers each strip has its own."""
        if len(self.servers) < len(self.ranks):
            return [(rank, size // len(self.ranks)) for rank in self.ranks]
        return [(self.ranks[server % len(self.ranks)], size)]

    def pull(self) -> Steps:
        """What has changed is asked for first."""
        self.pulling, self.since_pull = True, 0
        yield from self._share(len(self.servers) * self.costs.message, told=True)
        yield from self._look_for_news()
        parts = self.load.pull.items()
        yield self.time.all_of([self.time.process(self._weights(number, size)) for number, size in parts])
        seconds = sum(self.load.pull.values()) * self.costs.pull
        yield from self._share(len(self.servers) * self.costs.message, seconds)
        self.pulling = False

    def _look_for_news(self) -> Steps:
        """Ask the servers on other hosts what has changed; with clocks they have been asked all the time."""
        if not (far := [server.rank for number, server in self.servers.items() if self._far(number)]):
            return
        if self.config.asynchronous:
            yield self.time.timeout(self.latency)
            yield self.time.all_of([self.time.process(rank.notice()) for rank in far])
        yield self.time.timeout(self.latency)
        yield from self.ranks[0].notice()

    def _weights(self, number: int, size: int) -> Steps:
        """Of one server; another host's are asked for, and sent when it gets to that."""
        server = self.servers[number]
        if self._far(number):
            yield from server.send(size)
        self.seen[number] = server.version
        for rank, share in self._strips(number, size):
            yield from server.rank.send(rank, share, awaited=True)

    def _share(self, python: float, kernels: float = 0.0, told: bool = False) -> Steps:
        """Work that the strips share."""
        each = python / len(self.ranks), kernels / len(self.ranks), told
        yield self.time.all_of([self.time.process(rank.do(*each)) for rank in self.ranks])


def cut(images: int, among: int) -> list[int]:
    """Divide images as evenly as whole ones can be; with fewer of them than takers, some get none."""
    return [(number + 1) * images // among - number * images // among for number in range(among)]


def chance(seed: int, number: int) -> np.random.Generator:
    """For one rank: its draws do not depend on how many others there are."""
    return np.random.Generator(np.random.Philox(key=[seed, number]))
