"""All sections of the configuration together, and the checks that involve several keys.

The fields are in `training_sections.py` and `cluster_sections.py`, each with its default, its limits and its
documentation: the sentence under a field is what `adam_mpi train --help` prints, and what is in
docs/reference/configuration.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from adam_mpi.base.errors import UserError
from adam_mpi.config.cluster_sections import (
    Cluster,
    Inject,
    Layout,
    Observe,
    Recover,
    Server,
    Snapshot,
    Store,
    Watchdog,
    Worker,
)
from adam_mpi.config.fields import limited
from adam_mpi.config.training_sections import LAYERS as LAYERS
from adam_mpi.config.training_sections import (
    Consistency,
    Data,
    Epoch,
    Kernels,
    Model,
    Optimizer,
    Pull,
    Push,
    Train,
)
from adam_mpi.config.training_sections import Group as Group
from adam_mpi.config.training_sections import Transform as Transform


@dataclass
class Run:
    name: str = ""
    """Name of the run directory under `runs/`; empty makes one of the data set's name and the time."""
    seed: int = limited(1, low=0)
    """Seed of everything random: initial weights, order of images, dropout, injected faults."""


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
        """Return whether training has no clocks, so that no replica waits for another."""
        return math.isinf(self.consistency.staleness)

    @property
    def static(self) -> bool:
        """Return whether each replica has its own fixed share of an epoch."""
        return self.epoch.assignment == "static" or self.data.skew != "none"


MOST_BATCHES = 64
"""Maximum number of batches in one push: a message has room for this many batch numbers."""


def check_together(config: Config) -> None:
    """Raise UserError for values that are allowed one by one, but not together."""
    staleness = config.consistency.staleness
    if not config.asynchronous and staleness != int(staleness):
        raise UserError(f"consistency.staleness = {staleness}: must be a whole number or inf")
    _check_shares(config)
    _check_rule(config.optimizer)
    _check_clipping(config)
    _check_schedule(config)
    _check_asynchrony(config)
    _check_push_size(config)
    _check_injection(config)
    _check_places(config.layout.place)


def _check_schedule(config: Config) -> None:
    """Raise UserError for milestones that no schedule uses, and for a plateau of losses that nothing measures."""
    optimizer = config.optimizer
    given = f"optimizer.milestones = {optimizer.milestones}"
    if optimizer.milestones and optimizer.schedule != "step":
        raise UserError(f'{given}: only optimizer.schedule = "step" has milestones, not "{optimizer.schedule}"')
    if not all(isinstance(milestone, int | float) and milestone > 0 for milestone in optimizer.milestones):
        raise UserError(f"{given}: expected numbers above 0")
    if optimizer.schedule == "plateau" and not config.data.validation:
        raise UserError('optimizer.schedule = "plateau": needs a validation part; set data.validation above 0')


def _check_push_size(config: Config) -> None:
    room = MOST_BATCHES * config.train.batch
    if config.asynchronous and config.push.images > room:
        least = -(-config.push.images // MOST_BATCHES)
        what = f"push.images = {config.push.images}: at most {room}, {MOST_BATCHES} batches of train.batch"
        raise UserError(f"{what} = {config.train.batch}; set it to {room} or less, or train.batch to {least} or more")


def _check_injection(config: Config) -> None:
    partitions = config.layout.partitions
    if config.inject.conserve and partitions != 1 and config.push.codec not in ("onebit", "topk"):
        # When partitions give up a push, some shards may have applied their part of it; only codecs that leave their
        # residuals in files show which.
        raise UserError(f"inject.conserve: needs layout.partitions = 1, not {partitions}")
    if config.inject.noise and (partitions != 1 or config.push.protocol != "delta"):
        raise UserError('inject.noise: needs push.protocol = "delta" and layout.partitions = 1')


def _check_places(place: dict[str, list[str]]) -> None:
    for role, patterns in place.items():
        if role not in ("data", "worker", "server"):
            raise UserError(f"layout.place.{role}: unknown role; allowed: data, worker, server")
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"layout.place.{role} = {patterns!r}: expected a list of host patterns")


def _check_rule(optimizer: Optimizer) -> None:
    """Raise UserError for a rule that workers do not have, and for a decay that would flip the sign of weights."""
    defaults = Optimizer()
    for key in ("kind", "momentum", "decay", "l1", "groups"):
        value = getattr(optimizer, key)
        allowed = getattr(defaults, key)
        if optimizer.where == "worker" and value != allowed:
            given = f'optimizer.{key} = {value!r}: workers take plain steps; with optimizer.where = "worker" it must be'
            raise UserError(f'{given} {allowed!r}, or set optimizer.where = "server"')
    _check_keys_of_rule(optimizer)
    _check_groups(optimizer.groups)
    if optimizer.kind in ("momentum", "nesterov", "adamw") and optimizer.learning_rate * optimizer.decay >= 1:
        given = f"optimizer.decay = {optimizer.decay:g}: with optimizer.learning_rate = {optimizer.learning_rate:g}"
        raise UserError(f"{given} a step leaves nothing of a weight; learning_rate * decay must be below 1")


def _check_asynchrony(config: Config) -> None:
    """Raise UserError for a velocity of replicas where they cannot keep one, and for an unknown `optimizer.stale`."""
    optimizer = config.optimizer
    word, _, limit = optimizer.stale.partition(":")
    if optimizer.stale not in ("keep", "scale") and not (word == "drop" and limit.isdigit()):
        raise UserError(f'optimizer.stale = "{optimizer.stale}": must be keep, scale, or drop:R with a whole number R')
    if config.asynchronous and 0 < optimizer.clip_tensor < math.inf:
        given = f"optimizer.clip_tensor = {optimizer.clip_tensor:g}"
        raise UserError(f"{given}: needs consistency.staleness = 0; asynchronous training has optimizer.clip_norm")
    if config.asynchronous and config.layout.partitions != 1 and 0 < optimizer.clip_norm < math.inf:
        given = f"optimizer.clip_norm = {optimizer.clip_norm:g}: no strip has the whole gradient of a batch"
        raise UserError(f"{given}; set consistency.staleness = 0, or layout.partitions = 1")
    if optimizer.momentum_where != "replica":
        return
    given = 'optimizer.momentum_where = "replica"'
    if not config.asynchronous:
        raise UserError(f"{given}: with clocks the servers keep the velocity; set auto, or consistency.staleness = inf")
    if config.layout.partitions != 1 or config.push.protocol == "factor":
        needed = 'layout.partitions = 1 and push.protocol = "auto" or "delta"'
        raise UserError(f"{given}: a velocity is of all parameters, and has no factors; it needs {needed}")


def _check_keys_of_rule(optimizer: Optimizer) -> None:
    """Raise UserError for keys that the rule does not have, because they would be ignored."""
    kind = optimizer.kind
    if optimizer.momentum and kind not in ("momentum", "nesterov"):
        given = f"optimizer.momentum = {optimizer.momentum:g}: {kind} has no momentum"
        raise UserError(f'{given}; set it to 0, or optimizer.kind to "momentum" or "nesterov"')
    if optimizer.l1 and kind != "ftrl":
        raise UserError(f'optimizer.l1 = {optimizer.l1:g}: {kind} has no such penalty; set optimizer.kind = "ftrl"')
    if kind == "ftrl" and optimizer.schedule != "constant":
        given = f'optimizer.schedule = "{optimizer.schedule}": ftrl has a step size for each parameter'
        raise UserError(f'{given}, which decreases by itself; set optimizer.schedule = "constant"')


def _check_clipping(config: Config) -> None:
    """Raise UserError for clipping where no gradient is that of a batch."""
    for key in ("clip_norm", "clip_tensor"):
        limit = getattr(config.optimizer, key)
        if not 0 < limit < math.inf:
            continue
        if config.optimizer.where == "worker":
            raise UserError(f'optimizer.{key} = {limit:g}: needs optimizer.where = "server"')
        if not config.asynchronous and config.consistency.staleness > 0:
            given = f"optimizer.{key} = {limit:g}: with consistency.staleness = {config.consistency.staleness:g}"
            raise UserError(f"{given} no push is the gradient of a batch; set consistency.staleness = 0 or inf")


def _check_groups(groups: Sequence[Group]) -> None:
    """Raise UserError for a group without a pattern, and for one that changes nothing."""
    for number, group in enumerate(groups):
        name = f"optimizer.groups[{number}]"
        if not group.match:
            raise UserError(f'{name}: has no match; give a pattern of names, such as match = "*/bias"')
        if group == Group(group.match):
            raise UserError(f"{name}: changes nothing; set learning_rate_factor, decay_factor or frozen")


def _check_shares(config: Config) -> None:
    kind, _, alpha = config.data.skew.partition(":")
    if config.data.skew not in ("none", "by_class") and not (kind == "dirichlet" and _positive(alpha)):
        raise UserError(f"data.skew = {config.data.skew!r}: must be none, by_class or dirichlet:ALPHA with ALPHA > 0")
    if config.epoch.quorum < 1 and not (config.static and config.asynchronous):
        needed = 'epoch.assignment = "static" and consistency.staleness = inf'
        raise UserError(f"epoch.quorum = {config.epoch.quorum:g}: needs {needed}")


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
