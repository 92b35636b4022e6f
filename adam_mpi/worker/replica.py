"""What a worker computes batches with: trainer threads of a whole replica, or one partition of a replica.

`ThreadReplica` and `PartitionedReplica` implement the protocol `Replica`; the worker moves batches, gradients and
weights between the replica and the data ranks and servers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.model.network import Network
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.diagnostics import Trouble
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool, StepScales
from adam_mpi.worker.worker_generation import WorkerGeneration


@dataclass(frozen=True)
class Computed:
    """Report what a replica has finished; the worker handles each part that is not None."""

    slot: Slot | None = None
    """The memory of a batch that is no longer needed."""
    result: BatchResult | None = None
    """The result of a batch of an asynchronous or an evaluation phase."""
    gradient: GradientBuffer | None = None
    """A gradient to push."""


def drop_finished(finished: deque[Computed], pool: GradientPool) -> None:
    """Clear `finished`, and give its gradient buffers back to `pool`."""
    for computed in finished:
        if computed.gradient is not None:
            pool.give(computed.gradient)
    finished.clear()


class Replica(Protocol):
    """Compute batches on `local` weights; nothing here waits, apart from `rest`, `pause` and `end_threads`."""

    network: Network
    local: np.ndarray
    """The weights that batches are computed on."""
    scales: StepScales
    """The scales of the learning rate that was pulled last."""
    finished: deque[Computed]
    """What `collect` has finished, for the worker to take."""
    strip: int | None
    """The strip of the replica that this rank computes; None where it computes whole batches."""
    resumes: bool
    """Whether work under way continues in the next generation."""
    single: bool
    """Whether one thread computes whole batches, one after the other."""

    def begin_generation(self, world: World) -> DataClient:
        """Connect to the other ranks of the replica in `world`; return the client that receives its batches.

        Collective over the replica.
        """

    def abandon(self) -> None:
        """Drop the work under way, and give its gradient buffers back to the pool."""

    def feed(self, current: WorkerGeneration) -> bool:
        """Take arrived batches of `current` as far as there is room; return whether one was taken."""

    def compute_through_recovery(self, current: WorkerGeneration) -> None:
        """Take all batches of `current` that can be computed while this rank can neither push nor pull."""

    def collect(self) -> bool:
        """Advance the work under way, and append what is finished to `finished`; return whether anything moved."""

    def flush(self) -> None:
        """Hand over the gradients summed so far, however few images they have."""

    def renew(self, pulled: np.ndarray, missing: Iterable[tuple[slice, np.ndarray]]) -> None:
        """Set the local weights to `pulled`, together with what was computed and is not in it yet.

        `missing` are the spans and values of pushes that the servers had not applied when `pulled` was read.
        """

    def rest(self, seconds: float) -> bool:
        """Wait at most `seconds` for a thread; return False at once if no thread has anything to do."""

    def pause(self) -> bool:
        """Leave the core to the threads where polling would slow them down; return whether to poll again at once."""

    def end_threads(self) -> None:
        """End the threads."""

    def awaits(self, current: WorkerGeneration) -> Iterator[Wait]:
        """Yield what other ranks of the replica owe this one."""

    def transfers(self) -> Sequence[Any]:
        """Return what may still send or receive when a generation ends."""

    @property
    def windows(self) -> Sequence[Window]:
        """Return the windows of this generation."""

    @property
    def working(self) -> bool:
        """Return whether batches or gradients are under way."""

    @property
    def computes_share(self) -> bool:
        """Return whether a share of a batch that all replicas compute together is under way."""

    @property
    def waits_for_strips(self) -> bool:
        """Return whether a thread has nothing to do because batches wait for other strips."""

    @property
    def idle_share(self) -> float:
        """Return the fraction of the threads that have nothing to do."""

    @property
    def busy(self) -> float:
        """Return the seconds that a thread has computed, on average."""

    @property
    def trouble(self) -> Trouble | None:
        """Return the first number in a forward pass that was not finite."""
