"""Predict a job: the layout of the real program on the machines of a TOML file, for some simulated time."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import simpy

from adam_mpi import config as configuration
from adam_mpi.base.log import format_duration
from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import Config
from adam_mpi.data.batch_loader import AHEAD
from adam_mpi.data.sets import describe
from adam_mpi.optimizer.rules import rule_of
from adam_mpi.planning.plan import model
from adam_mpi.sharding.push_protocol import captured_layers
from adam_mpi.simulate.hosts import Cluster, Host, Rank, load_cluster
from adam_mpi.simulate.load import Load, chosen
from adam_mpi.simulate.load import replica_load as weigh
from adam_mpi.simulate.measure_costs import Setting, measure
from adam_mpi.simulate.roles import Copies, Data, Replica, Server, rank_generator, split_evenly

BATCHES = 400
"""Batches of a replica that are simulated."""
WARMUP = 0.25
"""Share of the batches, at the start, that does not count."""
EVENTS = 50
"""Events between two looks at the number of images, which there may be hundreds of replicas for."""
INTERVAL = 5.0
"""Seconds between two lines about the progress."""
FIRST = 0.01
"""Share before which the time so far does not predict the rest."""


@dataclass(frozen=True)
class Prediction:
    """What the simulation says about a job."""

    images_per_second: float
    connections_per_second: float
    staleness_mean: float
    staleness_most: int
    waiting: float
    """Fraction of the time that a replica waits for other clocks."""
    server_busy: float
    """Fraction of the time that the main thread of the busiest server works."""
    link_busy: float
    """Fraction of the bandwidth that the busiest host sends with."""
    replicas: int


def simulate(cluster_file: Path, model_file: str | None, overrides: list[str]) -> str:
    """Return the prediction for a simulated cluster and a configuration as JSON; print the progress on stderr."""
    cluster = load_cluster(cluster_file)
    config = configuration.load(model_file, overrides)
    return json.dumps(asdict(predict_job(cluster, config, report=Progress())), indent=2)


def predict_job(
    cluster: Cluster, config: Config, batches: int = BATCHES, report: Callable[[float], None] = lambda share: None
) -> Prediction:
    """Predict a job by simulation of `batches` batches of each replica; `report` is called with the share done."""
    description = describe(config.data)
    shapes = model(config, description)
    hosts = [f"host{number}" for number in range(cluster.hosts.count) for _ in range(cluster.hosts.ranks)]
    layout = arrange(hosts, config.layout)
    threads = _trainer_threads(cluster, config, layout, layout.workers[0])
    images = config.train.batch if config.asynchronous else -(-config.train.batch // (layout.replicas * threads))
    training = threads * layout.count_on_host(layout.places[layout.workers[0]].host, "worker")
    captured = captured_layers(chosen(config, layout, shapes)[1])
    setting = Setting(hosts=cluster.hosts.count, threads=training, own=threads, images=images, captured=captured)
    cluster.costs = measure(cluster.costs, config, description, shapes, setting)
    loads = weigh(config, layout, shapes, description, cluster.costs)
    connections = sum(shape.connections for shape in shapes)
    return Simulation(cluster, config, layout, loads).run(connections, batches, report)


def _trainer_threads(cluster: Cluster, config: Config, layout: Layout, rank: int) -> int:
    """Return the number of trainer threads of a simulated worker."""
    workers = layout.count_on_host(layout.places[rank].host, "worker")
    return config.worker.threads or max(1, cluster.hosts.cores // workers)


class Simulation:
    """The hosts, ranks and roles of one simulation."""

    def __init__(self, cluster: Cluster, config: Config, layout: Layout, load: Load) -> None:
        self.cluster = cluster
        self.config = config
        self.layout = layout
        self.load = load
        self.time = simpy.Environment()
        self.hosts = {name: Host(self.time, cluster) for name in dict.fromkeys(p.host for p in layout.places)}
        patient = config.asynchronous and layout.partitions == 1
        self.ranks = [
            Rank(self.hosts[place.host], cluster.costs, rank_generator(cluster.variation.seed, place.rank), patient)
            for place in layout.places
        ]
        self.servers = {rank: self._server(rank) for rank in layout.servers if rank in load.push}
        ahead = max(1, AHEAD * layout.replicas // len(layout.data))
        self.data = [Data(self.ranks[rank], config, cluster.costs, ahead, load.images) for rank in layout.data]
        self.replicas = [self._replica(number) for number in range(layout.replicas)]

    def _server(self, rank: int) -> Server:
        """Make the simulated server on `rank`."""
        copies = [Copies(self.ranks[other], size) for other, size in self.load.copies[rank].items()]
        clocked = not self.config.asynchronous
        # Synchronous steps are undone when a rank is lost: weights, and the state of the optimizer.
        vectors = 1 + len(rule_of(self.config.optimizer).states)
        kept = vectors * self.load.held[rank] if self.config.consistency.staleness == 0 else 0
        return Server(
            rank=self.ranks[rank],
            costs=self.cluster.costs,
            copies=copies,
            replicas=self.layout.replicas,
            clocked=clocked,
            kept=kept,
        )

    def _replica(self, number: int) -> Replica:
        """Make simulated replica `number`; the first ones are the stragglers."""
        places = [place for place in self.layout.places if place.replica == number]
        variation = self.cluster.variation
        straggles = number < round(variation.slow * self.layout.replicas)
        return Replica(
            ranks=[self.ranks[place.rank] for place in places],
            config=self.config,
            cluster=self.cluster,
            load=self.load,
            data=self.data,
            servers=self.servers,
            threads=_trainer_threads(self.cluster, self.config, self.layout, places[0].rank),
            slowdown=variation.factor if straggles else 1.0,
            share=split_evenly(self.config.train.batch, self.layout.replicas)[number],
        )

    def run(self, connections: int, batches: int, report: Callable[[float], None]) -> Prediction:
        """Simulate until each replica, or with clocks all together, computed `batches` batches; skip the first."""
        takers = len(self.replicas) if self.config.asynchronous else 1
        whole = batches * self.config.train.batch * takers
        self._run_until(WARMUP, whole, report)
        begun = self.time.now
        done = self._images()
        sent = self._sent()
        for server in self.servers.values():
            server.delays = Counter()
            server.rank.busy = 0.0
        self._run_until(1.0, whole, report)
        seconds = self.time.now - begun
        rate = (self._images() - done) / seconds
        delays = sum((server.delays for server in self.servers.values()), Counter())
        link = max(now - before for now, before in zip(self._sent(), sent, strict=True))
        return Prediction(
            images_per_second=rate,
            connections_per_second=3 * rate * connections,
            staleness_mean=sum(delay * count for delay, count in delays.items()) / max(1, delays.total()),
            staleness_most=max(delays, default=0),
            waiting=sum(replica.waited for replica in self.replicas) / len(self.replicas) / self.time.now,
            server_busy=max(server.rank.busy for server in self.servers.values()) / seconds,
            link_busy=link / seconds / self.cluster.links.bandwidth,
            replicas=len(self.replicas),
        )

    def _images(self) -> int:
        """Return the number of images that all simulated replicas have computed."""
        return sum(replica.images for replica in self.replicas)

    def _sent(self) -> list[int]:
        """Return the bytes that each simulated host has sent."""
        return [host.sent for host in self.hosts.values()]

    def _run_until(self, share: float, whole: int, report: Callable[[float], None]) -> None:
        """Simulate until `share` of `whole` images are computed."""
        while (done := self._images() / whole) < share:
            report(done)
            for _ in range(EVENTS):
                self.time.step()


class Progress:
    """Lines on stderr while a long simulation runs; a short one prints none."""

    def __init__(self) -> None:
        self.begun = monotonic()
        self.printed = self.begun

    def __call__(self, share: float) -> None:
        """Print the simulated share that is done and the time left, if the last line is INTERVAL old."""
        now = monotonic()
        if now - self.printed >= INTERVAL:
            left = format_duration((now - self.begun) * (1 - share) / share) if share >= FIRST else "unknown"
            print(f"simulated {share:.0%}, ETA {left}", file=sys.stderr, flush=True)
            self.printed = now
