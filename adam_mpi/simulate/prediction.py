"""A prediction: the layout of the real program on the machines of a TOML file, run for a while of simulated time."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import simpy

from adam_mpi import config as configuration
from adam_mpi.base.text import duration
from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import Config
from adam_mpi.data.batch_loader import AHEAD
from adam_mpi.data.sets import describe
from adam_mpi.planning.plan import model
from adam_mpi.sharding.push_protocol import captured_layers
from adam_mpi.simulate.cluster import Cluster, load
from adam_mpi.simulate.costs import Setting, measured
from adam_mpi.simulate.load import Load, chosen
from adam_mpi.simulate.load import load as weigh
from adam_mpi.simulate.machine import Host, Rank
from adam_mpi.simulate.roles import Copies, Data, Replica, Server, chance, cut

# Batches of a replica that are simulated, and the part of them at the start that does not count.
BATCHES, WARM_UP = 400, 0.25
EVENTS = 50


@dataclass(frozen=True)
class Prediction:
    images_per_second: float
    connections_per_second: float
    staleness_mean: float
    staleness_most: int
    waiting: float
    """Fraction of the time that a replica waits for other clocks."""
    server_busy: float
    """Of the main thread of the busiest server."""
    link_busy: float
    """Of the busiest host, sending."""
    replicas: int


def simulate(cluster_file: Path, model_file: str | None, overrides: list[str]) -> str:
    cluster, config = load(cluster_file), configuration.load(model_file, overrides)
    return json.dumps(asdict(predict(cluster, config, tell=Progress())), indent=2)


def predict(
    cluster: Cluster, config: Config, batches: int = BATCHES, tell: Callable[[float], None] = lambda share: None
) -> Prediction:
    """From so many batches of each replica. `tell` is called now and then with the share that is done."""
    description = describe(config.data)
    shapes = model(config, description)
    hosts = [f"host{number}" for number in range(cluster.hosts.count) for _ in range(cluster.hosts.ranks)]
    layout = arrange(hosts, config.layout)
    threads = _threads(cluster, config, layout, layout.workers[0])
    images = config.train.batch if config.asynchronous else -(-config.train.batch // (layout.replicas * threads))
    training = threads * layout.on_host(layout.places[layout.workers[0]].host, "worker")
    captured = captured_layers(chosen(config, layout, shapes)[1])
    setting = Setting(cluster.hosts.count, training, threads, images, captured)
    cluster.costs = measured(cluster.costs, config, description, shapes, setting)
    loads = weigh(config, layout, shapes, description, cluster.costs)
    connections = sum(shape.connections for shape in shapes)
    return Stage(cluster, config, layout, loads).play(connections, batches, tell)


def _threads(cluster: Cluster, config: Config, layout: Layout, rank: int) -> int:
    """Trainer threads of a worker."""
    workers = layout.on_host(layout.places[rank].host, "worker")
    return config.worker.threads or max(1, cluster.hosts.cores // workers)


class Stage:
    """Hosts, ranks and roles of one simulation."""

    def __init__(self, cluster: Cluster, config: Config, layout: Layout, load: Load) -> None:
        self.cluster, self.config, self.layout, self.load = cluster, config, layout, load
        self.time = simpy.Environment()
        self.hosts = {name: Host(self.time, cluster) for name in dict.fromkeys(p.host for p in layout.places)}
        patient = config.asynchronous and layout.partitions == 1
        self.ranks = [
            Rank(self.hosts[place.host], cluster.costs, chance(cluster.chance.seed, place.rank), patient)
            for place in layout.places
        ]
        self.servers = {rank: self._server(rank) for rank in layout.servers if rank in load.push}
        ahead = max(1, AHEAD * layout.replicas // len(layout.data))
        self.data = [Data(self.ranks[rank], config, cluster.costs, ahead, load.images) for rank in layout.data]
        self.replicas = [self._replica(number) for number in range(layout.replicas)]

    def _server(self, rank: int) -> Server:
        copies = [Copies(self.ranks[other], size) for other, size in self.load.copies[rank].items()]
        clocked = not self.config.asynchronous
        # Synchronous steps are taken back when a rank is lost: weights, and the optimizer's state.
        kept = 2 * self.load.held[rank] if self.config.consistency.staleness == 0 else 0
        return Server(self.ranks[rank], self.cluster.costs, copies, self.layout.replicas, clocked, kept)

    def _replica(self, number: int) -> Replica:
        places = [place for place in self.layout.places if place.replica == number]
        threads = _threads(self.cluster, self.config, self.layout, places[0].rank)
        slow = self.cluster.chance.factor if number < round(self.cluster.chance.slow * self.layout.replicas) else 1.0
        ranks = [self.ranks[place.rank] for place in places]
        share = cut(self.config.train.batch, self.layout.replicas)[number]
        return Replica(
            number, ranks, self.config, self.cluster, self.load, self.data, self.servers, threads, slow, share
        )

    def play(self, connections: int, batches: int, tell: Callable[[float], None]) -> Prediction:
        """Until the replicas have done their batches, or with clocks their shares of them; the first do not count."""
        takers = len(self.replicas) if self.config.asynchronous else 1
        whole = batches * self.config.train.batch * takers
        self._run_until(WARM_UP, whole, tell)
        begun, done, sent = self.time.now, self._images(), self._sent()
        for server in self.servers.values():
            server.delays, server.rank.busy = Counter(), 0.0
        self._run_until(1.0, whole, tell)
        seconds = self.time.now - begun
        rate = (self._images() - done) / seconds
        delays = sum((server.delays for server in self.servers.values()), Counter())
        link = max(now - before for now, before in zip(self._sent(), sent, strict=True))
        return Prediction(
            rate,
            3 * rate * connections,
            sum(delay * count for delay, count in delays.items()) / max(1, delays.total()),
            max(delays, default=0),
            sum(replica.waited for replica in self.replicas) / len(self.replicas) / self.time.now,
            max(server.rank.busy for server in self.servers.values()) / seconds,
            link / seconds / self.cluster.links.bandwidth,
            len(self.replicas),
        )

    def _images(self) -> int:
        return sum(replica.images for replica in self.replicas)

    def _sent(self) -> list[int]:
        return [host.sent for host in self.hosts.values()]

    def _run_until(self, share: float, whole: int, tell: Callable[[float], None]) -> None:
        while (done := self._images() / whole) < share:
            tell(done)
            # Not counted after every event: there may be hundreds of replicas.
            for _ in range(EVENTS):
                self.time.step()


# Seconds between two lines; the share before which the time so far says nothing about the rest.
INTERVAL, FIRST = 5.0, 0.01


class Progress:
    """Winograd1D on stderr while a long simulation runs; a short one says nothing."""

    def __init__(self) -> None:
        self.begun = self.told = monotonic()

    def __call__(self, share: float) -> None:
        now = monotonic()
        if now - self.told >= INTERVAL:
            left = duration((now - self.begun) * (1 - share) / share) if share >= FIRST else "unknown"
            print(f"simulated {share:.0%}, ETA {left}", file=sys.stderr, flush=True)
            self.told = now
