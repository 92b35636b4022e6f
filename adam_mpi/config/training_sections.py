"""The sections about training: batches, epochs, the optimizer, what is pushed and pulled, and how stale it may be."""

import math
from dataclasses import dataclass

from adam_mpi.config.fields import limited


@dataclass
class Train:
    batch: int = limited(32, low=1)
    """Images in a batch. Data ranks hand out batches of this size, and gradients are divided by it. A replica of
    asynchronous training computes whole batches; with clocks (a finite `consistency.staleness`) all replicas together
    compute one batch per clock, each its share."""
    epochs: int = limited(4, low=0)
    """Maximum number of passes over the training part."""
    patience: int = limited(0, low=0)
    """Stop after this many epochs without a better validation accuracy; 0 never stops early."""
    target: float = limited(0.0, low=0.0, high=1.0)
    """Stop when the validation accuracy reaches this fraction; 0 never stops early."""
    test: bool = True
    """Evaluate the test part once at the end; set it to false in a search for hyperparameters."""


@dataclass
class Epoch:
    assignment: str = limited("dynamic", choices=("dynamic", "static"))
    """Assignment of the batches of an epoch to replicas: dynamic gives the next batch to the replica that asks for it,
    so a slow replica computes fewer; static gives every replica an equal share."""
    quorum: float = limited(1.0, low=0.01, high=1.0)
    """Fraction of the replicas that must complete their static share to end an epoch; the others skip the rest of
    theirs."""


@dataclass
class Optimizer:
    kind: str = limited("momentum", choices=("momentum", "nesterov", "adagrad"))
    """Update rule of the servers; momentum with `optimizer.momentum = 0` is plain gradient descent."""
    where: str = limited("server", choices=("server", "worker"))
    """Where steps are computed: on the servers from pushed gradients, or by plain gradient descent on the workers,
    which then push the changes of their weights as in the paper."""
    learning_rate: float = limited(0.03, low=0.0)
    """Initial learning rate, for gradients averaged over `train.batch` images."""
    schedule: str = limited("cosine", choices=("constant", "step", "cosine"))
    """Learning rate over all epochs: constant, multiplied by 0.3 after each third, or decreasing to zero along a
    cosine."""
    warmup: float = limited(0.0, low=0.0, high=0.9)
    """Fraction of the training over which the learning rate first rises linearly from zero."""
    momentum: float = limited(0.0, low=0.0, high=0.999)
    """Fraction of the velocity that remains after each batch; with many asynchronous replicas choose a small one."""
    decay: float = limited(0.0, low=0.0)
    """Weight decay: `decay * weight` is added to the gradient of each batch."""
    staleness_scale: str = limited("none", choices=("none", "inverse"))
    """Factor of a push that was computed on weights n steps old: none is 1, inverse is 1 / (1 + n)."""
    ema: float = limited(0.0, low=0.0, high=1.0)
    """Weight of each batch in an exponential moving average of the weights, which is then evaluated and exported
    instead of them; 0 keeps no average."""


@dataclass
class Push:
    images: int = limited(32, low=1)
    """Images whose gradients a trainer thread sums before it pushes them, at most 64 batches. Asynchronous training
    only: with clocks a replica pushes once per clock, its share of the clock's batch."""
    protocol: str = limited("auto", choices=("auto", "delta", "factor"))
    """What dense layers push: gradients (delta), activations and errors whose product is the gradient (factor), or for
    each layer the one with fewer bytes (auto)."""
    codec: str = limited("none", choices=("none", "float16", "bfloat16", "onebit", "topk"))
    """Compression of pushed gradients; onebit and topk add what they leave out to the next push (error feedback)."""
    factor_codec: str = limited("none", choices=("none", "float16"))
    """Compression of pushed activations and errors."""


@dataclass
class Pull:
    images: int = limited(32, low=1)
    """Images that a worker trains on between two pulls. Asynchronous training only: with clocks a replica pulls at each
    clock."""
    codec: str = limited("none", choices=("none", "bfloat16"))
    """Compression of pulled weights: none, or bfloat16, which halves the bytes."""


@dataclass
class Consistency:
    staleness: float = limited(math.inf, low=0.0)
    """Number of clocks that the fastest replica may be ahead of the slowest: inf is asynchronous and never waits, 0 is
    synchronous. A clock is one batch of `train.batch` images that all replicas compute together, each pushing its
    share; an asynchronous push is `push.images` images of one thread alone."""
