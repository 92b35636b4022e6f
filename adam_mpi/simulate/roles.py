"""Simulated data ranks, replicas and servers, which wait for each other and for cores and links."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import simpy

from adam_mpi.config import Config
from adam_mpi.simulate.hosts import LOOKS, ORDERS, Cluster, Costs, Rank, Steps
from adam_mpi.simulate.load import Load, Part

FOLDED = 0.55
"""Cost of a message that is applied together with others, as a fraction of one that is applied alone."""


@dataclass
class Message:
    """The part of a push that one server gets."""

    part: Part
    clock: int
    seen: int
    """The server's version that the push was computed on."""
    applied: simpy.Event
    far: bool
    """Whether it came from another host: then its checksum is compared."""

    def receiving(self, costs: Costs) -> float:
        """Return the seconds in which a simulated server compares the checksum of the message."""
        return self.far * self.part.bytes * costs.sign

    def writing(self, costs: Costs) -> float:
        """Return the seconds in which a simulated worker writes the bytes of the message."""
        return self.part.bytes * (costs.copy + self.far * costs.sign)


@dataclass(frozen=True)
class Copies:
    """The copies of a server's shards that another server has."""

    rank: Rank
    bytes: int


class Server:
    """A server rank, which applies pushes and forwards them to the copies of its shards."""

    def __init__(self, rank: Rank, costs: Costs, copies: list[Copies], replicas: int, clocked: bool, kept: int) -> None:
        """Simulate a server of `replicas`, with clocks if `clocked`; copy `kept` bytes before a step, to undo it."""
        self.rank = rank
        self.costs = costs
        self.copies = copies
        self.replicas = replicas
        self.clocked = clocked
        self.kept = kept
        self.time = rank.host.time
        self.arrived: list[Message] = []
        self.arrival = self.time.event()
        self.advance = self.time.event()
        self.version = 0
        self.clock = 0
        self.delays: Counter[int] = Counter()
        self.time.process(self.serve())

    def deliver(self, message: Message) -> None:
        """Take `message`, which has arrived at the simulated server."""
        self.arrived.append(message)
        if not self.arrival.triggered:
            self.arrival.succeed()

    def serve(self) -> Steps:
        """Simulate a server that applies all that has arrived in one step; with clocks, all messages of one clock."""
        while True:
            ready = self._ready()
            if not ready:
                self.arrival = self.time.event()
                yield self.arrival
                continue
            each = [message.part.seconds for message in ready]
            seconds = max(each) + FOLDED * (sum(each) - max(each))
            seconds += sum(message.receiving(self.costs) for message in ready) + self.kept * self.costs.copy
            # With clocks a message is handled twice: when it arrives, and when all of its clock have.
            messages = (1 + self.clocked) * sum(message.part.messages for message in ready)
            yield from self.rank.do(messages * self.costs.message, seconds)
            if self.copies:
                yield self.time.all_of([self.time.process(self._replicate(copies)) for copies in self.copies])
            self._acknowledge(ready)

    def send(self, size: int) -> Steps:
        """Simulate a server that sends `size` bytes of weights to another host, from the main thread."""
        yield from self.rank.do(self.costs.message, size * self.costs.copy, looks=LOOKS // ORDERS)

    def _ready(self) -> list[Message]:
        """Remove and return the messages of a simulated server's next step; none while a clock is not complete."""
        ready = [message for message in self.arrived if not self.clocked or message.clock == self.clock]
        if self.clocked and len(ready) < self.replicas:
            return []
        self.arrived = [message for message in self.arrived if message not in ready]
        return ready

    def _replicate(self, copies: Copies) -> Steps:
        """Simulate sending the sum of a step to another copy, which applies it too."""
        far = (copies.rank.host is not self.rank.host) * self.costs.sign
        yield from self.rank.do(self.costs.message, copies.bytes * (self.costs.copy + far))
        yield from self.rank.send(copies.rank, copies.bytes)
        yield from copies.rank.do(self.costs.message, copies.bytes * (self.costs.apply + far))

    def _acknowledge(self, messages: list[Message]) -> None:
        """Count the simulated delay of each message, report it applied, and advance version and clock."""
        for message in messages:
            self.delays[self.version - message.seen] += 1
            message.applied.succeed()
        self.version += 1
        self.clock += 1
        self.advance.succeed()
        self.advance = self.time.event()


@dataclass
class Data:
    """A data rank, whose threads keep up to `ahead` batches ready."""

    rank: Rank
    config: Config
    costs: Costs
    ahead: int
    images: int
    """Images of a batch, or of a share of it."""
    ready: simpy.Store = field(init=False)

    def __post_init__(self) -> None:
        time = self.rank.host.time
        self.ready = simpy.Store(time, self.ahead)
        for _ in range(self.config.data.threads):
            time.process(self.prepare())

    def prepare(self) -> Steps:
        """Simulate one thread of a data rank that prepares batch after batch."""
        while True:
            yield from self.rank.host.work(self.images * self.costs.prepare)
            yield self.ready.put(None)


class Replica:
    """One logical worker: the ranks of its strips, its threads, its pushes and pulls."""

    def __init__(
        self,
        ranks: list[Rank],
        config: Config,
        cluster: Cluster,
        load: Load,
        data: list[Data],
        servers: dict[int, Server],
        threads: int,
        slowdown: float,
        share: int,
    ) -> None:
        """Simulate a replica on `ranks`; batches take `slowdown` times as long, `share` images of a clock are ours."""
        self.ranks = ranks
        self.config = config
        self.costs = cluster.costs
        self.load = load
        self.data = data
        self.servers = servers
        self.threads = threads
        self.slowdown = slowdown
        self.share = share
        self.time = ranks[0].host.time
        self.random = ranks[0].random
        self.spread = cluster.variation.spread
        self.latency = cluster.links.latency
        self.batches = simpy.Store(self.time)
        self.pool = simpy.Container(self.time, 2 * threads + 2, 2 * threads + 2)
        self.seen = dict.fromkeys(servers, 0)
        self.pulling = False
        self.images = 0
        self.since_pull = 0
        self.clock = 0
        self.waited = 0.0
        """Seconds that it has waited for the clocks of other replicas."""
        for _ in range(config.data.prefetch):
            self.time.process(self.fetch())
        if config.asynchronous:
            for _ in range(threads):
                self.time.process(self.train())
        else:
            self.time.process(self.clocks())

    def train(self) -> Steps:
        """Simulate a trainer thread: compute batch after batch; push after `push.images` images."""
        held = 0
        batch = self.config.train.batch
        while True:
            yield self.batches.get()
            yield from self._compute(batch)
            self.time.process(self.fetch())
            held += batch
            self.since_pull += batch
            if held >= self.config.push.images and (self.pool.level or held >= self.load.most):
                yield self.pool.get(1)
                self.time.process(self.push(0, dict(self.seen)))
                held = 0
            if self.since_pull >= self.config.pull.images and not self.pulling:
                self.time.process(self.pull())

    def clocks(self) -> Steps:
        """Simulate clock after clock: wait for the other replicas, pull, compute a share, push."""
        for self.clock in range(1 << 60):
            begun = self.time.now
            for server in self.servers.values():
                while server.clock < self.clock - self.config.consistency.staleness:
                    yield server.advance
            self.waited += self.time.now - begun
            yield self.time.process(self.pull())
            yield self.batches.get()
            self.time.process(self.fetch())
            parts = split_evenly(self.share, self.threads)
            yield self.time.all_of([self.time.process(self._compute(part)) for part in parts])
            # The gradients of all threads are summed.
            yield from self._share(0.0, self.threads * self.load.gradient * self.costs.apply)
            yield self.pool.get(1)
            self.time.process(self.push(self.clock, dict(self.seen)))

    def fetch(self) -> Steps:
        """Simulate fetching a batch from one of the data ranks, for each strip its columns."""
        data = self.data[int(self.random.integers(len(self.data)))]
        yield data.ready.get()
        yield from data.rank.do(self.costs.hand)
        for rank in self.ranks:
            yield from data.rank.send(rank, self.load.batch // len(self.ranks), awaited=True)
        yield from self.ranks[0].do(self.costs.batch)
        yield self.batches.put(None)

    def _compute(self, images: int) -> Steps:
        """Simulate computing `images` images on all strips; their exchanges are assumed to be hidden."""
        noise = self.random.lognormal(-(self.spread**2) / 2, self.spread)
        seconds = images * self.costs.image * noise
        yield from self.ranks[0].interpret(self.costs.task)
        strips = [self.time.process(rank.host.work(self.slowdown * seconds / len(self.ranks))) for rank in self.ranks]
        yield self.time.all_of(strips)
        self.images += images

    def push(self, clock: int, seen: dict[int, int]) -> Steps:
        """Simulate a push of a gradient computed on the versions in `seen`, by server, until it is applied."""
        sent = [
            Message(part, clock, seen[number], self.time.event(), self._far(number))
            for number, part in self.load.push.items()
        ]
        # Not server by server: with hundreds of them that would be most of what there is to simulate.
        messages = sum(message.part.messages for message in sent)
        kernels = sum(message.writing(self.costs) for message in sent)
        yield from self._share(messages * self.costs.message, kernels, awake=True)
        for number, message in zip(self.load.push, sent, strict=True):
            self.time.process(self._travel(number, message))
        yield self.time.all_of([message.applied for message in sent])
        yield self.pool.put(1)

    def _far(self, server: int) -> bool:
        """Return whether the simulated `server` is on another host than the replica."""
        return self.servers[server].rank.host is not self.ranks[0].host

    def _travel(self, number: int, message: Message) -> Steps:
        """Simulate sending `message` to server `number`, and deliver it there."""
        server = self.servers[number]
        for rank, size in self._strips(number, message.part.bytes):
            yield from rank.send(server.rank, size)
        server.deliver(message)

    def _strips(self, server: int, size: int) -> list[tuple[Rank, int]]:
        """Return the bytes that each simulated strip sends a server, or reads; with many servers each has its own."""
        if len(self.servers) < len(self.ranks):
            return [(rank, size // len(self.ranks)) for rank in self.ranks]
        return [(self.ranks[server % len(self.ranks)], size)]

    def pull(self) -> Steps:
        """Simulate a pull: ask the servers what has changed, and read it."""
        self.pulling = True
        self.since_pull = 0
        yield from self._share(len(self.servers) * self.costs.message, awake=True)
        yield from self._ask_for_changes()
        parts = self.load.pull.items()
        yield self.time.all_of([self.time.process(self._weights(number, size)) for number, size in parts])
        seconds = sum(self.load.pull.values()) * self.costs.pull
        yield from self._share(len(self.servers) * self.costs.message, seconds)
        self.pulling = False

    def _ask_for_changes(self) -> Steps:
        """Simulate asking servers on other hosts what has changed; with clocks they have been asked all along."""
        if not (far := [server.rank for number, server in self.servers.items() if self._far(number)]):
            return
        if self.config.asynchronous:
            yield self.time.timeout(self.latency)
            yield self.time.all_of([self.time.process(rank.notice()) for rank in far])
        yield self.time.timeout(self.latency)
        yield from self.ranks[0].notice()

    def _weights(self, number: int, size: int) -> Steps:
        """Simulate reading `size` bytes of weights from server `number`, which sends them to another host."""
        server = self.servers[number]
        if self._far(number):
            yield from server.send(size)
        self.seen[number] = server.version
        for rank, share in self._strips(number, size):
            yield from server.rank.send(rank, share, awaited=True)

    def _share(self, python: float, kernels: float = 0.0, awake: bool = False) -> Steps:
        """Share simulated work of the main threads among the strips."""
        parts = len(self.ranks)
        work = [rank.do(python / parts, kernels / parts, awake) for rank in self.ranks]
        yield self.time.all_of([self.time.process(part) for part in work])


def split_evenly(images: int, parts: int) -> list[int]:
    """Return the sizes of `parts` parts of `images` simulated images, which differ by one at most."""
    return [(number + 1) * images // parts - number * images // parts for number in range(parts)]


def rank_generator(seed: int, number: int) -> np.random.Generator:
    """Return the random generator of simulated rank `number`, whatever the number of ranks."""
    return np.random.Generator(np.random.Philox(key=[seed, number]))
