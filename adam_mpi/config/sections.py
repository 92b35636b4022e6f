"""All sections of the configuration together.

The fields are in `model_sections.py`, `training_sections.py` and `cluster_sections.py`, each with its default, its
limits and its documentation: the sentence under a field is what `adam_mpi train --help` prints, and what is in
docs/reference/configuration.md.
"""

import math
from dataclasses import dataclass, field

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
from adam_mpi.config.model_sections import LAYERS as LAYERS
from adam_mpi.config.model_sections import Data, Kernels, Model
from adam_mpi.config.model_sections import Transform as Transform
from adam_mpi.config.training_sections import Consistency, Epoch, Optimizer, Pull, Push, Train


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
