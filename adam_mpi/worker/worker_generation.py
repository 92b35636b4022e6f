"""What a worker has in one generation: the clients bound to its windows, and the batches not reported yet."""

from collections import Counter
from dataclasses import dataclass, replace

from adam_mpi.cluster.control_messages import ControlChannel
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.sharding.batches import Batch, BatchCuts, Share
from adam_mpi.sharding.training_state import RankState, batch_id
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool
from adam_mpi.worker.pull_client import PullClient
from adam_mpi.worker.push_client import PushClient


class HeldBatches:
    """Track which batches this worker will report; they outlive a generation together with their pushes."""

    def __init__(self, pushes: PushClient, pool: GradientPool) -> None:
        self.pushes = pushes
        self.pool = pool
        self.ids: set[int] = set()
        """The ids of training batches that were taken and are not reported."""
        self.images = 0
        """Images of batches that were reported."""

    def note_taken(self, batch: Batch) -> None:
        """Note that the replica of this worker has taken `batch`."""
        self.ids.add(batch_id(batch.epoch, batch.number))

    def report_done(self, data: DataClient) -> bool:
        """Report the batches of acknowledged pushes to `data`, and free their buffers; return whether any."""
        acknowledged = self.pushes.acknowledged
        worked = bool(acknowledged)
        while acknowledged:
            buffer = acknowledged.popleft()
            if self.pushes.conservation is not None:
                self.pushes.conservation.record_acknowledgement()
            for done in buffer.done if buffer.counted else ():
                self.images += done.images
                self.ids.discard(batch_id(done.epoch, done.number))
                data.report_done(done)
            self.pool.give(buffer)
        return worked

    def drop_unpushed(self) -> None:
        """Forget the batches that the replica has dropped; those that are pushed stay."""
        self.ids &= {batch_id(done.epoch, done.number) for pushed in self._unreported() for done in pushed.done}

    def uncount(self) -> None:
        """Report no batch of a push that is not reported yet: the servers know which of them are applied."""
        for buffer in self._unreported():
            buffer.counted = False
        self.ids.clear()

    def export_state(self, state: RankState, config: Config, base: tuple[int, int]) -> None:
        """Write the batches that will be reported into `state`; `base` is that of the JointSchedule."""
        state.batches = frozenset(self.ids)
        unacknowledged = self.pushes.unacknowledged
        state.unacknowledged = len(unacknowledged)
        if config.consistency.staleness > 0:
            state.resent = tuple((push.clock, push.images) for push in unacknowledged)
        if not config.asynchronous:
            self._export_shares(state, base)

    def _export_shares(self, state: RankState, base: tuple[int, int]) -> None:
        """With clocks: export the shares that are pushed, but not the one that the replica computes."""
        shares = [done for pushed in self._unreported() for done in pushed.done if pushed.counted]
        state.batches = frozenset(batch_id(share.epoch, share.number) for share in shares)
        images = _share_images(shares)
        state.progress = replace(state.progress, next=self.pushes.clock, base=base, pushed=images)

    def _unreported(self) -> list[GradientBuffer]:
        """Return the pushes whose batches are not reported yet."""
        return [*self.pushes.acknowledged, *self.pushes.unacknowledged]


def _share_images(shares: list[BatchResult]) -> dict[int, int]:
    """Return the images of the shares of each batch, by the number of the batch."""
    images = Counter[int]()
    for share in shares:
        images[share.number] += share.images
    return dict(images)


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

    def unapplied(self) -> int:
        """Return how many pushes of this worker are not known to be in the weights of all servers."""
        return self.held.pushes.count_unapplied()

    def take_batch(self) -> tuple[Slot, Batch] | None:
        """Return the next batch that has arrived, with the slot that holds it; None if there is none."""
        taken = self.data.take_batch()
        if taken is not None and self.data.phase.training:
            self.held.note_taken(taken[1])
        return taken
