"""The sections about data, model and training: what is trained on what, with which kernels, and by which steps."""

import math
from dataclasses import dataclass, field
from typing import Any

from adam_mpi.config.fields import limited


@dataclass
class Transform:
    shift: float = limited(0.0, low=0.0)
    """Shift each training image by a random distance of up to this many pixels in x and in y."""
    rotation: float = limited(0.0, low=0.0, high=180.0)
    """Rotate each training image by a random angle of up to this many degrees in either direction."""
    scale: float = limited(0.0, low=0.0, high=0.9)
    """Scale each training image by a random factor between 1 minus and 1 plus this fraction: 0.12 is 0.88 to 1.12."""
    shear: float = limited(0.0, low=0.0, high=2.0)
    """Shear each training image horizontally by up to this many columns per row."""
    elastic: float = limited(0.0, low=0.0)
    """Distort each training image by a smooth random field; its root mean square displacement is this many pixels."""
    spacing: int = limited(7, low=2)
    """Distance in pixels between the control points of the elastic field; a larger distance is smoother."""
    reflect: bool = False
    """Mirror each training image left to right with probability 1/2."""
    crop: int = limited(0, low=0)
    """Side in pixels of the square cropped from each image, at random in training and from the center in evaluation;
    0 uses the whole image."""
    pad: int = limited(0, low=0)
    """Black pixels added to every side of each training image before it is cropped at random, to its own size where
    `crop` is 0."""
    brightness: float = limited(0.0, low=0.0, high=1.0)
    """Brighten or darken each training image by a random amount of up to this fraction of white."""
    contrast: float = limited(0.0, low=0.0, high=1.0)
    """Multiply the contrast of each training image by a random factor between 1 minus and 1 plus this fraction."""
    saturation: float = limited(0.0, low=0.0, high=1.0)
    """Multiply the saturation of each color training image by a random factor between 1 minus and 1 plus this
    fraction."""
    hue: float = limited(0.0, low=0.0, high=0.5)
    """Turn the hue of each color training image by a random angle of up to this fraction of a full turn."""
    cutout: int = limited(0, low=0)
    """Side in pixels of the square that is erased around a random pixel of each training image; 0 erases nothing."""
    mixup: float = limited(0.0, low=0.0, high=100.0)
    """Blend each training image with a random other one; the weight is drawn from a beta distribution with this
    parameter (0.2 is usual), and both classes count by their weight. 0 blends nothing."""
    cutmix: float = limited(0.0, low=0.0, high=100.0)
    """Paste a random box of another image into each training image; its share of the area is drawn from a beta
    distribution with this parameter (1 is usual), and both classes count by their area. With `mixup` too, each image
    gets one of the two at random. 0 pastes nothing."""
    normalize: bool = False
    """Normalize each channel (or feature) to mean 0 and standard deviation 1 over a sample of the training part. Data
    ranks send bytes as they are: the first layer looks up their normalized values."""


@dataclass
class Data:
    set: str = "glyphs"
    """Data set: glyphs (built in), mnist, fashion, noise:3x32x32:10, or the path of files (formats: data/README.md)."""
    inputs: list[Any] = limited([])
    """Names of the arrays of a data set of named arrays that are inputs; empty for images or features. Train and test
    parts are found as `train_x`, `x_train` or `train/x` for the name x."""
    targets: list[Any] = limited([])
    """Names of the arrays that are targets, or tables as `{name = "y", kind = "vectors"}`: classes, vectors, sets (0 or
    1 for each label) or sequences (a whole number for each position); without a kind the type of the array decides."""
    validation: float = limited(1 / 12, low=0.0, high=0.5)
    """Fraction of the training set that is held out and evaluated at the end of each epoch."""
    images: int = limited(0, low=0)
    """Number of images of the training part to train on; 0 uses all of them."""
    prefetch: int = limited(16, low=1, high=64)
    """Batches that a replica requests ahead of use; it requests fewer toward the end of an epoch, so that no replica
    waits for batches that another has prefetched."""
    cache: int = limited(1 << 30, low=0)
    """Bytes of images that a data rank caches in memory; images beyond that are read from disk again in each epoch."""
    threads: int = limited(1, low=1, high=256)
    """Number of threads of a data rank that transform images."""
    size: int = limited(0, low=0)
    """Side in pixels to which images of a folder are scaled and center-cropped; 0 requires images of equal size."""
    on_bad: str = limited("stop", choices=("stop", "skip"))
    """Reaction to an unreadable image, an invalid label or a NaN feature: stop the job, or skip and count the image."""
    skew: str = "none"
    """Unequal distribution of classes over replicas, for studies: none, by_class, or dirichlet:ALPHA (a smaller ALPHA
    is more unequal); any but none implies `epoch.assignment = "static"`."""
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
    """List of layers: conv, max_pool, avg_pool, lrn, dense, relu, tanh, sigmoid, dropout, and the other operators of
    docs/explanation/models.md. A layer takes the one before it, or those that `inputs` names; `name` names a layer,
    `shared` the one whose parameters it uses, and a table with `repeat` and `layers` is a block that is repeated."""
    losses: list[Any] = limited([])
    """List of losses, each a kind or a table with `kind`, `weight` and `input`, the layer it is computed of; empty:
    softmax cross-entropy of the last layer, which has one unit per class."""
    graph: str = ""
    """A model that was built in Python, as JSON; it stands in for `layers` and `losses`."""
    operators: str = ""
    """Python file that registers operators of your own, which `layers` and `losses` may then name; all ranks read
    it."""
    weights: str = ""
    """File of initial weights, the `weights.h5` of a run or of `adam_mpi import`; empty draws random ones."""


@dataclass
class Kernels:
    engine: str = limited("generated", choices=("generated", "reference"))
    """Kernels that compute: generated for this CPU and these layers, or the slow reference they are tested against."""
    tune: bool = False
    """Choose the algorithm of each convolution by measuring the candidates, once per machine, instead of by a cost
    model."""


@dataclass
class Train:
    batch: int = limited(32, low=1)
    """Images in a batch. Data ranks hand out batches of this size, and gradients are divided by it. A replica of
    asynchronous training computes whole batches; with clocks (a finite `consistency.staleness`) all replicas together
    compute one batch per clock, each its share."""
    epochs: int = limited(4, low=0)
    """Maximum number of passes over the training part."""
    metrics: list[str] = limited([])
    """Metrics beside the loss: accuracy, topK (as top5), auc, mean_absolute_error, r2; empty takes those that suit the
    targets (accuracy for classes)."""
    monitor: str = "auto"
    """Metric of the validation part that decides which epoch is best and when training stops early; auto takes the
    first metric for classes, and the loss for other targets."""
    monitor_mode: str = limited("auto", choices=("auto", "max", "min"))
    """Whether a larger (max) or a smaller (min) value of `train.monitor` is better; auto knows it for each metric."""
    patience: int = limited(0, low=0)
    """Stop after this many epochs without a better `train.monitor`; 0 never stops early."""
    target: float = limited(0.0, low=0.0)
    """Stop when `train.monitor` reaches this value, for example an accuracy of 0.98; 0 never stops early."""
    on_divergence: str = limited("stop", choices=("stop", "back_off"))
    """Reaction to divergence (a loss that is not finite, or lost again after it was below that of guessing): stop the
    job, or let all ranks go back to the last good snapshot, or without one to the initial weights, with half the
    learning rate, at most 5 times in a run."""
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
class Group:
    match: str = ""
    """Pattern of the names of its parameters, such as "*/bias" or "conv1/*"."""
    learning_rate_factor: float = limited(1.0, low=0.0)
    """Factor of the learning rate."""
    decay_factor: float = limited(1.0, low=0.0)
    """Factor of `optimizer.decay`."""
    frozen: bool = False
    """Whether its parameters keep their first values: they are neither pushed nor stepped."""


SCHEDULES = ("constant", "step", "cosine", "linear", "polynomial", "one_cycle", "plateau")


@dataclass
class Optimizer:
    kind: str = limited("momentum", choices=("momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "ftrl"))
    """Update rule of the servers; momentum with `optimizer.momentum = 0` is plain gradient descent. The others have a
    step size of their own for each parameter, and want learning rates of their own: 0.001 is usual for adam."""
    where: str = limited("server", choices=("server", "worker"))
    """Where steps are computed: on the servers from pushed gradients, or by plain gradient descent on the workers,
    which then push the changes of their weights as in the paper."""
    learning_rate: float = limited(0.03, low=0.0)
    """Initial learning rate, for gradients averaged over `train.batch` images."""
    schedule: str = limited("cosine", choices=SCHEDULES)
    """Learning rate over the training: constant; multiplied at `milestones` (step); decreasing to `final_rate` along a
    cosine, a line (linear) or a power (polynomial); rising from a 25th in 30 % of the steps before that (one_cycle);
    or multiplied when the validation loss no longer improves (plateau)."""
    schedule_unit: str = limited("epochs", choices=("epochs", "steps"))
    """Unit of `milestones` and `schedule_length`; a step is a batch of `train.batch` images."""
    schedule_length: float = limited(0.0, low=0.0)
    """Epochs or steps after which `final_rate` is reached and kept; 0 is all epochs."""
    milestones: list[float] = field(default_factory=list)
    """Epochs or steps after which the rate is multiplied in the schedule step; empty is after each third."""
    schedule_factor: float = limited(0.3, low=0.0, high=1.0)
    """Factor of the rate at each milestone, and at each plateau."""
    schedule_patience: int = limited(2, low=0)
    """Epochs in a row without a better validation loss that the schedule plateau tolerates."""
    final_rate: float = limited(0.0, low=0.0)
    """Learning rate at the end of the schedules cosine, linear, polynomial and one_cycle."""
    power: float = limited(1.0, low=0.0)
    """Exponent of the schedule polynomial."""
    warmup: float = limited(0.0, low=0.0, high=0.9)
    """Fraction of the training over which the learning rate first rises linearly from zero."""
    momentum: float = limited(0.0, low=0.0, high=0.999)
    """Fraction of the velocity that remains after each batch."""
    momentum_where: str = limited("auto", choices=("auto", "server", "replica"))
    """Where the velocity is kept: one on the servers, which late gradients make unstable, or one in each trainer thread
    (replica), which pushes `momentum * velocity + gradient` for the servers to add. auto is replica in asynchronous
    training, and server with clocks, with strips, with `push.protocol = "factor"` and for one thread alone."""
    clip_norm: float = limited(0.0, low=0.0, words={"auto": 0.0, "none": math.inf})
    """Largest norm of the mean gradient of a batch over all parameters that are trained; a longer one is scaled down.
    In synchronous training it is that of the whole step, whatever the layout. auto (0) is 4 * (1 - momentum), at least
    1, where several threads train asynchronously, and no limit elsewhere; none is no limit."""
    clip_tensor: float = limited(0.0, low=0.0, words={"none": 0.0})
    """Largest norm of the mean gradient of each tensor, such as `dense1/weight`, before `optimizer.clip_norm` applies
    to what is left of all of them; none (0) is no limit."""
    beta1: float = limited(0.9, low=0.0, high=0.9999)
    """Of adam and adamw: fraction of the mean gradient that remains after each batch."""
    beta2: float = limited(0.999, low=0.0, high=0.999999)
    """Of rmsprop, adam and adamw: fraction of the mean squared gradient that remains after each batch."""
    epsilon: float = limited(1e-8, low=1e-20)
    """Of adagrad, rmsprop, adam and adamw: added to the root of squared gradients that a step is divided by."""
    l1: float = limited(0.0, low=0.0)
    """Of ftrl: weights are zero where the gradients do not exceed this; `decay` is its second, quadratic penalty."""
    decay: float = limited(0.0, low=0.0)
    """Weight decay: `decay * weight` is added to the gradient of each batch; adamw subtracts it, times the learning
    rate, from the weights instead."""
    groups: list[Group] = field(default_factory=list)
    """Groups of parameters, each a table with a pattern of names (`match = "*/bias"`) and `learning_rate_factor`,
    `decay_factor` or `frozen = true`; a parameter belongs to the first group that it matches."""
    stale: str = "scale"
    """What servers do with a push that is n gradients of other threads late: keep it as it is; scale it down where n
    times the learning rate (over 1 - momentum) is more than 4; or drop:R leaves it out where n is more than R."""
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
    in_flight: int = limited(0, low=0, words={"auto": 0})
    """Pushes of a trainer thread, counting the one that it computes, that servers may not have applied yet, in
    asynchronous training; a thread with so many waits. auto (0) shares ten among all threads, but gives each at least
    four, or one where a node has more threads than cores: there another thread computes meanwhile."""
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
