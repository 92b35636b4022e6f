"""The training batches of a worker, from the moment the replica takes them until they are reported as done."""

from collections import Counter
from dataclasses import replace

from adam_mpi.config import Config
from adam_mpi.sharding.batch_parts import Batch
from adam_mpi.sharding.position import batch_id
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.worker.data_client import DataClient
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool
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

    def take(self, batch: Batch) -> None:
        """Note that the replica has taken `batch`."""
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
                data.report_result(done)
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
        images = _images(shares)
        state.progress = replace(state.progress, next=self.pushes.clock, base=base, pushed=images)

    def _unreported(self) -> list[GradientBuffer]:
        """Return the pushes whose batches are not reported yet."""
        return [*self.pushes.acknowledged, *self.pushes.unacknowledged]


def _images(shares: list[BatchResult]) -> dict[int, int]:
    """Return the images of the shares of each batch, by the number of the batch."""
    images = Counter[int]()
    for share in shares:
        images[share.number] += share.images
    return dict(images)
