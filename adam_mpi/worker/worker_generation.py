"""What a worker has in one generation: the clients that are bound to its communicators and windows."""

from dataclasses import dataclass

from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.world import World
from adam_mpi.sharding.batch_parts import Batch
from adam_mpi.sharding.joint_batches import BatchCuts, Share
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.held_batches import HeldBatches
from adam_mpi.worker.pull_client import PullClient
from adam_mpi.worker.push_client import PushClient


class JointSchedule:
    """Map batches that all replicas compute together to clocks, and to the share of this worker.

    The batches of an epoch are computed in order, one per clock, so the clock of the first one determines the others.
    """

    def __init__(self, pushes: PushClient) -> None:
        self.pushes = pushes
        self.cuts: BatchCuts | None = None
        """How joint batches are cut over the replicas; None in asynchronous training."""
        self.base: tuple[int, int] = (0, 0)
        """An epoch, and the clock of its first batch."""

    def cut_by(self, cuts: BatchCuts | None) -> None:
        """Cut the joint batches of a generation by `cuts`; call it before any of them is requested."""
        if cuts is not None:
            self.cuts = cuts
            self.base = (cuts.epoch, cuts.base)

    def first_share(self, epoch: int, first: int) -> int:
        """Return the number of this worker's next batch of `epoch`; `first` is the first that any worker needs."""
        if epoch != self.base[0]:
            self.base = (epoch, self.pushes.clock - first)
        return self.pushes.clock - self.base[1]

    def piece(self, number: int) -> Share:
        """Return the share of this worker of batch `number` of the epoch."""
        assert self.cuts is not None, "joint batches are cut before the generation begins"
        return self.cuts.piece(self.base[1] + number, self.pushes.rings.world.place.member)


@dataclass
class WorkerGeneration:
    """Hold the clients of a worker in one generation, and what it has received in it."""

    generation: Generation
    data: DataClient
    pulls: PullClient
    held: HeldBatches
    fresh: bool = False
    """Whether the weights that the phase, or the next clock, needs have arrived."""
    flushed: bool = False
    """Whether the replica was asked for the last gradients of the phase."""

    @property
    def world(self) -> World:
        """Return the ranks of this generation."""
        return self.generation.world

    @property
    def channel(self) -> ControlChannel:
        """Return the control channel of this generation."""
        return self.generation.channel

    def take(self) -> tuple[Slot, Batch] | None:
        """Return the next batch that has arrived, with the slot that holds it; None if there is none."""
        taken = self.data.take()
        if taken is not None and self.data.phase.training:
            self.held.take(taken[1])
        return taken
