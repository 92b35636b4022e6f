"""The sections about ranks: roles, servers, workers, storage, time limits, recovery, monitoring, injected faults."""

from dataclasses import dataclass, field

from adam_mpi.config.fields import limited


@dataclass
class Layout:
    data: int = limited(0, low=0)
    """Number of data ranks; 0 makes one rank in eight a data rank."""
    servers: int = limited(0, low=0)
    """Number of parameter server ranks; 0 makes one rank in four a server."""
    partitions: int = limited(1, low=0, words={"auto": 0})
    """Number of worker ranks that hold one replica of the model together, each a partition of it (a strip); auto takes
    the smallest number whose working set fits the cache."""
    scheme: str = limited("strips", choices=("strips", "hybrid"))
    """How a replica is partitioned: strips divides columns of images and units of dense layers; hybrid divides the
    images of a batch up to the first dense layer and units from there on."""
    memory: int = limited(0, low=0)
    """Bytes that a worker or server rank may take according to the plan; a job that needs more is refused at the start;
    0 is no limit."""
    place: dict[str, list[str]] = field(default_factory=dict)
    """Host patterns per role (data, worker, server), as in `layout.place.server = ["big-*"]`; a role without patterns
    may be on any host."""


@dataclass
class Server:
    shard: int = limited(262_144, low=64)
    """Maximum number of parameters in a shard; fewer where `server.mailbox_bytes` has no room for two messages of this
    size per pusher."""
    mailbox_bytes: int = limited(256 << 20, low=1 << 16)
    """Bytes of one server's mailbox, shared by the rings of all pushers."""
    threads: int = limited(1, low=1)
    """Number of threads of a server that apply pushes, each to its own shards."""
    copies: int = limited(3, low=1)
    """Replication factor of each shard, at most the number of servers; 1 where the MPI cannot survive a lost rank."""
    torn_seconds: float = limited(5.0, low=0.1)
    """Seconds after which a message that has arrived only in part is reported and requested again."""
    on_nan: str = limited("refuse", choices=("refuse", "stop"))
    """Reaction to a NaN or infinity in a push: refuse that push, or stop the job."""


@dataclass
class Store:
    """The file that each server writes behind its updates, in asynchronous training only."""

    dir: str = ""
    """Folder of the servers' stores, on a shared disk or on a disk of each node, with $VARIABLES expanded on each node;
    empty is `store` in the run directory."""
    interval: float = limited(10.0, low=0.0)
    """Maximum age in seconds of what a server's store lacks; 0 writes no store."""
    required: bool = False
    """Whether a full, read-only or slow disk ends the job; otherwise it is a warning and training continues."""


@dataclass
class Snapshot:
    minutes: float = limited(10.0, low=0.0)
    """Minutes between two snapshots within an epoch; 0 takes snapshots only at the ends of epochs."""
    keep: int = limited(2, low=1)
    """Number of latest snapshots to keep; older ones are removed, but not the last one that is known to be from before
    any divergence."""


@dataclass
class Worker:
    threads: int = limited(0, low=0)
    """Number of trainer threads of a worker rank; 0 divides the cores of a node among its workers."""
    in_flight: int = limited(2, low=1, high=64)
    """Number of parts of batches that a partition computes concurrently: while one waits for another partition, the
    next is computed."""


@dataclass
class Cluster:
    poll: str = limited("sleep", choices=("sleep", "spin"))
    """How an idle rank polls: sleep for about a millisecond between two polls, or spin, for ranks with a core each."""
    transport: str = limited("shared", choices=("shared", "rma", "send"))
    """Transport of pushes and pulls: shared memory within a node and one-sided MPI between nodes (two-sided messages
    under ULFM), one-sided MPI everywhere (rma), or two-sided messages everywhere (send)."""
    seconds: float = limited(60.0, low=1.0)
    """Seconds without an answer from a rank after which it is reported by name and the job ends, or continues without
    it where the MPI can survive a lost rank."""
    stopped: float = limited(5.0, low=0.0)
    """Seconds that a rank may be stopped (SIGSTOP) or frozen (cgroup) before the sentinel of its host kills it; 0 is no
    limit."""


@dataclass
class Watchdog:
    seconds: float = limited(10.0, low=0.0)
    """Seconds after which a waiting rank logs what it waits for, from which rank and since when, with the stacks of
    both; 0 never does."""


@dataclass
class Recover:
    """Recovery from a lost rank where the MPI survives it (`mpirun --with-ft ulfm`)."""

    seconds: float = limited(30.0, low=1.0)
    """Seconds in which the surviving ranks must agree on a new membership and resume training; after that the job ends
    and can be restarted with --resume."""
    respawn: bool = False
    """Whether a new rank is started for each lost rank, where the launcher has a free slot."""
    spares: int = limited(0, low=0, high=64)
    """Number of spare processes, started in advance with kernels loaded, that replace a lost rank at once; more than 0
    implies `recover.respawn`."""

    @property
    def replaces(self) -> bool:
        """Return whether lost ranks are replaced."""
        return self.respawn or self.spares > 0


@dataclass
class Observe:
    interval: float = limited(2.0, low=0.1)
    """Seconds between two progress lines and between two lines of `metrics.jsonl`."""
    trace: bool = False
    """Write a timeline of every thread, `trace.json.gz`, for https://ui.perfetto.dev; it costs less than 3 % of the
    speed."""
    tensorboard: bool = False
    """Write the metrics as TensorBoard event files too, into the folder `tensorboard` of the run."""


@dataclass
class Inject:
    faults: list[str] = field(default_factory=list)
    """Faults to inject, for example "kill rank=2 at=push step=20"; docs/explanation/failures.md lists them."""
    conserve: bool = False
    """Replace every gradient so that each push adds exactly 1 to every parameter, which shows lost and repeated pushes;
    needs a constant `optimizer.learning_rate = 1`."""
    noise: float = limited(0.0, low=0.0)
    """Standard deviation of Gaussian noise added to every push, as a fraction of the root mean square of each tensor's
    gradient; needs `push.protocol = "delta"`."""
