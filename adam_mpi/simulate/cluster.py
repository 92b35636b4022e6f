"""The machines of a simulation: hosts, links, stragglers, and what things cost; from a TOML file."""

from dataclasses import dataclass, field
from pathlib import Path

from adam_mpi.config.reading import fill, read
from adam_mpi.config.sections import limited


@dataclass
class Hosts:
    count: int = limited(1, low=1)
    """Hosts of the job, all alike."""
    ranks: int = limited(4, low=1)
    """Ranks on each."""
    cores: int = limited(2, low=1)
    """Cores of each."""
    speed: float = limited(1.0, low=0.001)
    """Speed of a core, beside one of the machine that the costs were measured on."""


@dataclass
class Links:
    bandwidth: float = limited(1.25e9, low=1.0)
    """Bytes per second of a host's link, in each direction."""
    latency: float = limited(50e-6, low=0.0)
    """Seconds that a message takes from host to host besides."""
    burst: float = limited(0.0, low=0.0)
    """Bytes that a link which has rested lets through at once, as one does whose rate is kept by a token bucket."""


@dataclass
class Chance:
    spread: float = limited(0.05, low=0.0, high=2.0)
    """Deviation of the time of a batch, as a fraction of it."""
    slow: float = limited(0.0, low=0.0, high=1.0)
    """Fraction of the replicas that are slow all the time ..."""
    factor: float = limited(1.0, low=1.0)
    """... and take so many times as long."""
    seed: int = limited(1, low=0)
    """Of all that is drawn."""


@dataclass
class Costs:
    """Seconds on one core; what is 0 is measured on this machine when the simulation starts."""

    image: float = limited(0.0, low=0.0)
    """A trainer thread computes one image and steps, beside the other trainer threads of its host."""
    prepare: float = limited(0.0, low=0.0)
    """A data rank makes one image ready."""
    copy: float = limited(0.0, low=0.0)
    """A worker writes one byte of a push."""
    sign: float = limited(0.0, low=0.0)
    """One byte's part in a checksum, made and compared where a push travels between hosts."""
    wire: float = limited(0.0, low=0.0)
    """A rank sends one byte to another host, and one there receives it: TCP's part."""
    apply: float = limited(0.0, low=0.0)
    """A server folds one byte of a push into the weights."""
    pull: float = limited(0.0, low=0.0)
    """A worker reads one byte of weights and puts it in place."""
    turn: float = limited(80e-6, low=0.0)
    """A main thread goes once round its loop, besides what it finds to do there."""
    message: float = limited(45e-6, low=0.0)
    """A worker sends one message of a push, and a server takes one in, besides its bytes."""
    batch: float = limited(180e-6, low=0.0)
    """A worker's main thread asks for a batch, takes it in, hands it to a thread and reports it."""
    hand: float = limited(100e-6, low=0.0)
    """A data rank hands out a batch and counts it."""
    task: float = limited(100e-6, low=0.0)
    """A trainer thread takes a batch and hands it back: in Python, which one thread of a rank runs at a time."""
    spin: float = limited(1.2e-3, low=0.0)
    """A main thread looks around so long after it had something to do, before it sleeps: with clocks, or strips."""
    nap: float = limited(1e-3, low=0.0)
    """Without either it sleeps at once, at least so long."""
    poll: float = limited(2e-3, low=0.0)
    """The longest that a loop with nothing to do sleeps."""


@dataclass
class Cluster:
    hosts: Hosts = field(default_factory=Hosts)
    links: Links = field(default_factory=Links)
    chance: Chance = field(default_factory=Chance)
    costs: Costs = field(default_factory=Costs)


def load(path: Path) -> Cluster:
    cluster = Cluster()
    fill(cluster, read(path), "", str(path))
    return cluster
