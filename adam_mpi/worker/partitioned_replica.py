"""One partition of a replica of several ranks: this rank computes a strip of every batch.

Weights change by pulls only. In a hybrid replica a part of a batch is a round: it has some images of each rank's share
of the batch, and the outputs of the last layer before the dense ones are sent to all ranks while others are computed.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition
from adam_mpi.sharding.fields import Field
from adam_mpi.worker.data_client import DataClient
from adam_mpi.worker.diagnostics import Trouble
from adam_mpi.worker.flow import Flow
from adam_mpi.worker.gradient_buffer import GradientPool, StepScales
from adam_mpi.worker.link import Link, plan_channels
from adam_mpi.worker.replica import Computed, drop_finished
from adam_mpi.worker.strip_pipeline import StripPipeline
from adam_mpi.worker.worker_generation import WorkerGeneration

REST_SECONDS = 2e-3
"""How long the main thread rests while all threads compute."""
SPIN_SECONDS = 5e-3
"""How long the main thread polls without a rest while a thread waits for other strips."""


class PartitionedReplica:
    """Compute one strip of every batch; `begin_generation` connects it to the other strips before anything else."""

    resumes = False
    single = False
    pipeline: StripPipeline

    def __init__(
        self,
        world: World,
        network: Network,
        threads: int,
        *,
        pool: GradientPool,
        partition: Partition,
        metrics: MetricSet = ACCURACY,
        fields: Sequence[Field] = (),
    ) -> None:
        """Make the contexts and start the threads; batches have `fields`."""
        self.fields = fields
        self.metrics = metrics
        self.config = world.config
        self.network = network
        self.pool = pool
        self.partition = partition
        self.strip: int | None = world.place.strip or 0
        self.local = np.zeros(pool.size, np.float32)
        self.scales = StepScales.at(0.0, self.config)
        self.finished: deque[Computed] = deque()
        self.vector_lanes = network.program.lanes if network.program else 0
        count = self.config.worker.in_flight
        contexts = [network.strip_context() for _ in range(count)]
        gradients = [np.zeros_like(self.local) for _ in range(count)]
        self.flow = Flow(contexts, gradients, world.injector)
        self.flow.start(threads)
        self.all_computing = time.perf_counter()
        """When all threads were last seen computing."""

    def begin_generation(self, world: World) -> DataClient:
        """Connect to the other strips of the replica, and return the client that receives this strip's columns.

        Collective over the replica. Raises UserError where the CPUs of its ranks have vectors of different lengths.
        """
        assert world.replica is not None, "a worker has a replica"
        if len(set(world.replica.allgather(self.vector_lanes))) > 1:
            raise UserError("the CPUs of a replica have vectors of several lengths; set kernels.engine = reference")
        contexts = self.flow.contexts
        link = Link(world, plan_channels(self.partition, len(contexts), contexts[0].room, contexts[0].own_room))
        self.flow.attach(link)
        columns = [strip.columns for strip in self.partition.strips]
        data = DataClient(world, self.fields, columns[self.strip or 0], columns)
        self.pipeline = StripPipeline(
            self.flow,
            link,
            self.partition,
            pool=self.pool,
            data=data,
            finished=self.finished,
            metrics=self.metrics,
        )
        return data

    def abandon(self) -> None:
        """Drop all parts of batches: strips that are left may have reached different parts of a batch."""
        self.flow.drop_flights(self.config.cluster.seconds)
        self.pipeline.abandon()
        drop_finished(self.finished, self.pool)

    def feed(self, current: WorkerGeneration) -> bool:
        """Begin parts of arrived batches; return whether one was begun."""
        return self.pipeline.feed(current, self.local)

    def compute_through_recovery(self, current: WorkerGeneration) -> None:
        """Do nothing: what strips have begun when a generation ends is given up."""

    def collect(self) -> bool:
        """Advance the parts and sums under way; return whether anything moved."""
        return self.pipeline.collect(self.scales.push)

    def flush(self) -> None:
        """Begin to sum the last gradients of a phase over the replica."""
        self.pipeline.complete()

    def renew(self, pulled: np.ndarray, missing: Iterable[tuple[slice, np.ndarray]]) -> None:
        """Set the local weights to `pulled`: strips predict no steps."""
        self.local[:] = pulled

    def rest(self, seconds: float) -> bool:
        """Wait at most `seconds` for a thread; return False at once if none computes."""
        return self.flow.rest(seconds)

    def pause(self) -> bool:
        """Rest while all threads compute, because polling takes time from them; poll while one waits for strips."""
        now = time.perf_counter()
        if not self.flow.idle:
            self.all_computing = now
            return self.flow.rest(REST_SECONDS)
        os.sched_yield()
        return now - self.all_computing < SPIN_SECONDS

    def end_threads(self) -> None:
        """End the threads."""
        self.flow.end_threads()

    def awaits(self, current: WorkerGeneration) -> Iterator[Wait]:
        """Yield what other strips have not sent or not read."""
        ranks = current.world.layout.strips(current.world.rank)
        for what, strip, turn in self.pipeline.owed():
            yield Wait(what, ranks[strip], turn)

    def transfers(self) -> Sequence[Any]:
        """Return the link to the other strips."""
        return [self.pipeline.link]

    @property
    def windows(self) -> Sequence[Window]:
        """Return the window that the strips of a node share."""
        return [self.pipeline.link.window]

    @property
    def working(self) -> bool:
        """Return whether parts of batches or sums are under way."""
        return self.pipeline.working

    @property
    def computes_share(self) -> bool:
        """Return whether a joint batch is under way."""
        return self.pipeline.joint_slot is not None

    @property
    def waits_for_strips(self) -> bool:
        """Return whether a thread has nothing to do because parts of batches wait for other strips."""
        return self.flow.idle

    @property
    def idle_share(self) -> float:
        """Return the fraction of the threads that do not compute."""
        return max(0.0, 1 - self.flow.computing / len(self.flow.threads))

    @property
    def busy(self) -> float:
        """Return the seconds that a thread has computed, on average."""
        return self.flow.busy / len(self.flow.threads)

    @property
    def trouble(self) -> Trouble | None:
        """Return None: a strip alone cannot look for the layer that made a NaN."""
        return None
