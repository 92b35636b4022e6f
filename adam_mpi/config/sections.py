"""Every key of the configuration, its default, its limits, and one sentence about it.

The sentence under each field is its documentation; `python -m adam_mpi train --help` prints it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def limited(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] = (),
    words: Mapping[str, Any] | None = None,
) -> Any:
    """A field with a default and the values that are allowed for it; `words` may be written for certain values."""
    limits = {"low": low, "high": high, "choices": tuple(choices), "words": words or {}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class Run:
    name: str = ""
    """Name of the run directory under `runs/`; empty takes the data set's name and the time."""
    seed: int = limited(1, low=0)
    """Seed of everything random: first weights, order of images, dropout, injected faults."""


@dataclass
class Layout:
    data: int = limited(0, low=0)
    """Number of data ranks; 0 takes one in eight."""
    servers: int = limited(0, low=0)
    """Number of parameter server ranks; 0 takes one in four."""
    partitions: int = limited(1, low=0, words={"auto": 0})
    """Worker ranks (vertical strips) that hold one replica together; auto: as few as make each fit the cache."""
    scheme: str = limited("strips", choices=("strips", "hybrid"))
    """What these ranks share out: strips, columns and units; hybrid, images up to the first dense layer, then units."""
    memory: int = limited(0, low=0)
    """Bytes that a rank may take as a worker or as a server, by the plan; what needs more is refused; 0: no limit."""
    place: dict[str, list[str]] = field(default_factory=dict)
    """Host patterns per role, as in `layout.place.server = ["big-*"]`; roles are data, worker, server."""


@dataclass
class Transform:
    shift: float = limited(0.0, low=0.0)
    """Move each training image by up to so many pixels in x and in y."""
    rotation: float = limited(0.0, low=0.0, high=180.0)
    """Turn it by up to so many degrees."""
    scale: float = limited(0.0, low=0.0, high=0.9)
    """Make it larger or smaller by up to this fraction: 0.12 is 0.88 to 1.12 times."""
    shear: float = limited(0.0, low=0.0, high=2.0)
    """Slant it by up to so many columns per row."""
    elastic: float = limited(0.0, low=0.0)
    """Bend it by a smooth random field that moves pixels by so many pixels in the quadratic mean."""
    spacing: int = limited(7, low=2)
    """Pixels between the control points of the elastic field: more is smoother."""
    reflect: bool = False
    """Mirror every second image, left to right."""
    crop: int = limited(0, low=0)
    """Cut a square of this side out of each image, at random in training, from the middle elsewhere; 0 takes all."""
    brightness: float = limited(0.0, low=0.0, high=1.0)
    """Make it lighter or darker by up to this fraction of white."""
    contrast: float = limited(0.0, low=0.0, high=1.0)
    """Stretch its gray levels by up to this fraction."""
    normalize: bool = False
    """Bring each channel (or feature) to mean 0 and deviation 1; data ranks then send 4 bytes per pixel."""


@dataclass
class Data:
    set: str = "glyphs"
    """Data set: glyphs (built in), mnist, fashion, noise:3x32x32:10, or the path of files (formats: data/README.md)."""
    validation: float = limited(1 / 12, low=0.0, high=0.5)
    """Fraction of the training set kept apart for validation at epoch ends."""
    images: int = limited(0, low=0)
    """Train on this many images of the training part only; 0 takes all."""
    prefetch: int = limited(16, low=1, high=64)
    """Batches each replica asks for ahead of need; fewer toward the end of an epoch, which must not wait for one."""
    cache: int = limited(1 << 30, low=0)
    """Bytes of images a data rank keeps in memory; what is beyond is read again in each epoch, ahead of need."""
    threads: int = limited(1, low=1, high=256)
    """Threads of a data rank that transform images."""
    size: int = limited(0, low=0)
    """Side that images of a folder are scaled to, the middle cut out; 0 wants all of one size."""
    on_bad: str = limited("stop", choices=("stop", "skip"))
    """What an unreadable image, a wrong label or a NaN feature does: stop the job, or be left out and counted."""
    skew: str = "none"
    """Uneven shares for studies: none, by_class, or dirichlet:ALPHA (less is more uneven); implies static shares."""
    transform: Transform = field(default_factory=Transform)


# The paper's MNIST network.
LAYERS: list[Any] = [
    {"kind": "conv", "channels": 10, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "conv", "channels": 20, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "dense", "units": 400},
    "relu",
    {"kind": "dense", "units": 400},
    "relu",
    {"kind": "dense", "units": 10},
]


@dataclass
class Model:
    layers: list[Any] = limited(LAYERS)
    """The stack: conv, pool, average, lrn, dense, relu, tanh, sigmoid, dropout; softmax follows the last dense."""
    weights: str = ""
    """Weights to begin with: `weights.h5` of a run or of `adam_mpi import`; empty draws new ones."""


@dataclass
class Kernels:
    engine: str = limited("generated", choices=("generated", "reference"))
    """What computes: kernels generated for this CPU and these layers, or the plain ones they are tested against."""
    tune: bool = False
    """Choose between ways to compute each convolution by measuring them, once per machine, not by arithmetic."""


@dataclass
class Train:
    batch: int = limited(32, low=1)
    """Images in a batch: what a data rank hands out, and what gradients are divided by."""
    epochs: int = limited(4, low=0)
    """Passes over the training part at the most."""
    patience: int = limited(0, low=0)
    """Stop after this many epochs without a better validation accuracy; 0 never does."""
    target: float = limited(0.0, low=0.0, high=1.0)
    """Stop when the validation accuracy reaches this; 0 never does."""
    test: bool = True
    """Evaluate the test part at the end; a search for a recipe must not look at it."""


@dataclass
class Epoch:
    assignment: str = limited("dynamic", choices=("dynamic", "static"))
    """Batches go to whoever asks, so a slow replica takes fewer; or each replica has its share of an epoch."""
    quorum: float = limited(1.0, low=0.01, high=1.0)
    """With static shares: an epoch ends when this fraction of the replicas is done with theirs."""


@dataclass
class Optimizer:
    kind: str = limited("momentum", choices=("momentum", "nesterov", "adagrad"))
    """The rule the servers step by; momentum 0 is plain gradient descent."""
    where: str = limited("server", choices=("server", "worker"))
    """Who steps: servers, on pushed gradients; or workers, plainly, who push how theirs change (Adam's own way)."""
    learning_rate: float = limited(0.03, low=0.0)
    """Learning rate at the start, for gradients averaged over `train.batch` images."""
    schedule: str = limited("cosine", choices=("constant", "step", "cosine"))
    """How the rate goes on over all epochs: constant, times 0.3 after each third, or down to zero along a cosine."""
    warmup: float = limited(0.0, low=0.0, high=0.9)
    """Part of the training over which the rate rises from zero first."""
    momentum: float = limited(0.0, low=0.0, high=0.999)
    """Share of the velocity that is left after a batch; many asynchronous replicas want little of it."""
    decay: float = limited(0.0, low=0.0)
    """Weight decay, added to the gradient of each batch as `decay * weight`."""
    staleness_scale: str = limited("none", choices=("none", "inverse"))
    """Weight of a push that was computed on weights n steps old: 1, or 1 / (1 + n)."""
    ema: float = limited(0.0, low=0.0, high=1.0)
    """Share of each batch in a running average of the weights, which is then evaluated and exported; 0 keeps none."""


@dataclass
class Push:
    images: int = limited(32, low=1)
    """Images whose gradients a thread sums up before it pushes them (asynchronous training); at most 64 batches."""
    protocol: str = limited("auto", choices=("auto", "delta", "factor"))
    """What dense layers push: gradients (delta), activations and errors (factor), or whichever is cheaper."""
    codec: str = limited("none", choices=("none", "float16", "bfloat16", "onebit", "topk"))
    """How gradients are packed; onebit and topk carry what they leave out into the next push."""
    factor_codec: str = limited("none", choices=("none", "float16"))
    """How activations and errors are packed."""


@dataclass
class Pull:
    images: int = limited(32, low=1)
    """Images a worker trains on between two pulls (asynchronous training)."""
    codec: str = limited("none", choices=("none", "bfloat16"))
    """How weights are read: as they are, or in half the bytes."""


@dataclass
class Server:
    shard: int = limited(262_144, low=64)
    """Parameters in a shard; smaller when `server.mailbox_bytes` leaves no room for two per pusher."""
    mailbox_bytes: int = limited(256 << 20, low=1 << 16)
    """Memory of one server's mailboxes, for all pushers together."""
    threads: int = limited(1, low=1)
    """Threads of a server that apply pushes, each to shards of its own."""
    copies: int = limited(3, low=1)
    """Servers that hold each shard, as far as there are so many, and where the job can go on without a lost one."""
    torn_seconds: float = limited(5.0, low=0.1)
    """How long a message may be there in part before it is reported and sent again."""
    on_nan: str = limited("refuse", choices=("refuse", "stop"))
    """What a NaN or infinity in a push does: refuse that push, or end the job."""


@dataclass
class Store:
    """Each server's own file, written behind, for runs without clocks (staleness inf)."""

    dir: str = ""
    """Folder of the servers' stores, shared or of each node, $NAMES too; empty takes `store` in the run directory."""
    interval: float = limited(10.0, low=0.0)
    """Seconds that a server's store is behind at the most; 0 writes none."""
    required: bool = False
    """What a full, read-only or slow disk does: a warning, and training goes on; or it ends the job."""


@dataclass
class Snapshot:
    minutes: float = limited(10.0, low=0.0)
    """Minutes between two snapshots inside an epoch; 0 takes them at epoch ends only."""
    keep: int = limited(2, low=1)
    """Snapshots that are kept, the newest ones."""


@dataclass
class Consistency:
    staleness: float = limited(math.inf, low=0.0)
    """Clocks the fastest replica may be ahead of the slowest: 0 is synchronous, inf never waits."""


@dataclass
class Worker:
    threads: int = limited(0, low=0)
    """Trainer threads per worker rank; 0 shares the node's cores between its workers."""
    in_flight: int = limited(2, low=1, high=64)
    """Parts of batches that a strip has in flight: while one waits for another strip, its threads compute the next."""


@dataclass
class Cluster:
    poll: str = limited("sleep", choices=("sleep", "spin"))
    """What a rank with nothing to do does: sleep about a millisecond, or spin (nodes of its own)."""
    transport: str = limited("shared", choices=("shared", "rma", "send"))
    """How pushes and pulls travel: shared memory and, between nodes, one-sided (messages under ULFM); `rma`; `send`."""
    seconds: float = limited(60.0, low=1.0)
    """How long a rank waits for an answer before it names who owes it and ends the job, or may be silent itself."""
    stopped: float = limited(5.0, low=0.0)
    """Seconds a rank may be stopped (SIGSTOP) or frozen before the sentinel of its host ends it; 0: no limit."""


@dataclass
class Watchdog:
    seconds: float = limited(10.0, low=0.0)
    """A rank that waits longer than this logs for what, from whom and since when, with stacks of both; 0 never does."""


@dataclass
class Recover:
    """What happens when a rank is lost and the MPI can go on without it (`mpirun --with-ft ulfm`)."""

    seconds: float = limited(30.0, low=1.0)
    """How long the others may take to go on; after that the job ends, to be restarted from what it has stored."""
    respawn: bool = False
    """Whether a new rank is started for each that is lost, where the launcher has a free slot."""
    spares: int = limited(0, low=0, high=64)
    """Processes that stand by, with kernels loaded, to take the place of a lost rank at once; implies `respawn`."""

    @property
    def replaces(self) -> bool:
        """Whether the job keeps its number of ranks."""
        return self.respawn or self.spares > 0


@dataclass
class Observe:
    interval: float = limited(2.0, low=0.1)
    """Seconds between two lines of progress and of `metrics.jsonl`."""
    trace: bool = False
    """Write a timeline of every thread, `trace.json.gz`, for https://ui.perfetto.dev; costs less than 3 %."""
    tensorboard: bool = False
    """Write what is in `metrics.jsonl` as event files for TensorBoard too, into the folder `tensorboard` of the run."""


@dataclass
class Inject:
    faults: list[str] = field(default_factory=list)
    """Faults on purpose, e.g. "kill rank=2 at=push step=20"; docs/explanation/failures.md lists them."""
    conserve: bool = False
    """Every push adds exactly 1 to every parameter (with optimizer.learning_rate = 1, constant), to see what a failure costs."""
    noise: float = limited(0.0, low=0.0)
    """Gaussian noise in every push, as a fraction of the root mean square of each tensor's gradient; needs deltas."""


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    kernels: Kernels = field(default_factory=Kernels)
    train: Train = field(default_factory=Train)
    epoch: Epoch = field(default_factory=Epoch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    push: Push = field(default_factory=Push)
    pull: Pull = field(default_factory=Pull)
    server: Server = field(default_factory=Server)
    store: Store = field(default_factory=Store)
    snapshot: Snapshot = field(default_factory=Snapshot)
    consistency: Consistency = field(default_factory=Consistency)
    worker: Worker = field(default_factory=Worker)
    cluster: Cluster = field(default_factory=Cluster)
    watchdog: Watchdog = field(default_factory=Watchdog)
    recover: Recover = field(default_factory=Recover)
    observe: Observe = field(default_factory=Observe)
    inject: Inject = field(default_factory=Inject)

    @property
    def asynchronous(self) -> bool:
        return math.isinf(self.consistency.staleness)

    @property
    def static(self) -> bool:
        """Whether each replica has its own share of an epoch."""
        return self.epoch.assignment == "static" or self.data.skew != "none"
