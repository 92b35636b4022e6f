"""The machines of a simulation, read from a TOML file: hosts, links, stragglers and costs."""

from dataclasses import dataclass, field
from pathlib import Path

from adam_mpi.config.fields import limited
from adam_mpi.config.reading import fill, read


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


def load(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes; raise UserError for an unknown key or a wrong value."""
    cluster = Cluster()
    fill(cluster, read(path), "", str(path))
    return cluster
