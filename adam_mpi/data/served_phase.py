"""One phase on one data rank: which of its batches this rank serves, what is prefetched, and what is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.data import epoch
from adam_mpi.data.batch_loader import AHEAD, GROUP, BatchLoader, LoadedBatch, PhaseBatches, PrefetchQueue
from adam_mpi.data.epoch import EpochProgress, Order
from adam_mpi.data.sets import DataSet
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.sharding import fields as described
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.batches import BatchRemainder, Share, shares
from adam_mpi.sharding.fields import CLASSES, INPUT, Field
from adam_mpi.sharding.training_state import Phase, Position


class ServedData:
    """What a data rank serves throughout a job, and how much it has served."""

    def __init__(self, data: DataSet, config: Config, replicas: int, metrics: MetricSet = ACCURACY) -> None:
        """Prepare to serve `data` in phases; skewed shares are drawn for the `replicas` of the job's start.

        Workers report the sums of `metrics`.
        """
        self.data = data
        self.metrics = metrics
        self.config = config
        self.loader = BatchLoader(data, config.run.seed)
        self.loader.warm()
        self.owners = self._owners(replicas)
        """The replica of each training image, with skewed shares."""
        self.answers = 0
        self.bytes = 0
        self.busy = 0.0
        """Seconds in which the rank's main thread served."""

    def count(self, part: str) -> int:
        """Return the number of images in `part` that are served."""
        return getattr(self.data.description, part)

    def _owners(self, replicas: int) -> np.ndarray | None:
        """Return the replica that each served training image belongs to; None where data is not skewed."""
        skew = self.config.data.skew
        if skew == "none":
            return None
        if self.data.target.kind != CLASSES:
            raise UserError(f"data.skew = {skew!r}: needs targets that are classes, not {self.data.target.kind}")
        return epoch.draw_owners(skew, self.data.labels("train"), replicas, self.config.run.seed)


@dataclass(frozen=True)
class Resumed:
    """What earlier generations, or an earlier job, have done of the epoch of `position`."""

    position: Position = field(default_factory=lambda: Position(0))
    """Its batches are not handed out again."""
    in_flight: frozenset[int] = frozenset()
    """Batches of it that workers hold and will report."""
    mean: tuple[float, ...] = ()
    """The sums of loss and metrics per image so far; empty without images."""
    partial: Mapping[int, BatchRemainder] = field(default_factory=dict)
    """Joint batches that some replicas have pushed their shares of -> what is left to be done."""

    def of(self, phase: Phase) -> "Resumed | None":
        """Return what was done of the served `phase`; None when it starts from its first batch."""
        return self if phase.training and phase.epoch == self.position.epoch else None


class ServedPhase:
    """Serves the batches whose number, modulo the number of data ranks, is this rank's index among them."""

    def __init__(self, phase: Phase, served: ServedData, world: World, resumed: Resumed | None) -> None:
        """Queue the batches of the served `phase` that are neither done nor in flight according to `resumed`."""
        config = served.config
        self.phase = phase
        self.sums = served.metrics.size(phase.training)
        """The numbers that a batch reports."""
        self.replicas = world.layout.replicas
        self.joint = phase.training and not config.asynchronous
        """Whether all replicas compute each batch together, each its share."""
        self.static = phase.training and config.asynchronous and config.static
        """Whether each replica has batches of its own."""
        self.order = Order(
            phase,
            served.count(phase.part),
            batch=config.train.batch,
            seed=config.run.seed,
            owners=served.owners if phase.training else None,
            joint=self.joint,
        )
        data_ranks = world.layout.data
        self.numbers = range(data_ranks.index(world.rank), len(self.order), len(data_ranks))
        self.epoch_progress = self._progress(world, resumed)
        self.queues = self._queues(served, resumed)
        self.share_completed = self.epoch_progress.complete
        """Whether a share is complete that the coordinator does not know of."""

    @property
    def remaining(self) -> int:
        """Return the number of batches of the served phase that no worker has received."""
        return sum(len(queue) for queue in self.queues)

    def take_next(self, replica: int) -> tuple[int, LoadedBatch] | None:
        """Return (number, batch) of the served phase's next batch for `replica`; None while loading or at the end.

        Batches whose images are all bad are passed over.
        """
        queue = self._queue(replica)
        while len(queue):
            taken = queue.take()
            if taken is None:
                return None
            number, batch = taken
            self._leave_out(number, self.order[number].size - batch.ids.size)
            if batch.ids.size:
                return taken
        return None

    def take_share(self, number: int, replica: int, replicas: int) -> LoadedBatch | None:
        """Return the share of a served joint batch `number` that `replica` of `replicas` computes, None if loading."""
        taken = self.queues[0].take(number)
        if taken is None:
            return None
        batch = taken[1]
        images = self.order.share(number, replica, replicas)
        chosen = np.isin(batch.ids, images)
        self._leave_out(number, images.size - int(chosen.sum()))
        return batch.select(chosen)

    def is_exhausted(self, replica: int) -> bool:
        """Return whether the served phase has no batch left for `replica`."""
        return not len(self._queue(replica))

    def is_begun(self, number: int) -> bool:
        """Return whether, after `stop`, the served joint batch `number` still has to be handed to some replicas."""
        return any(queue.is_begun(number) for queue in self.queues)

    def fill(self) -> bool:
        """Start loading the next batches of the served phase; return whether any was started."""
        return any([queue.fill() for queue in self.queues])

    def report(self, number: int, images: int, sums: np.ndarray) -> None:
        """Count `images` of the served batch `number` that a strip has done, with `sums` of loss and metrics."""
        self.share_completed |= self.epoch_progress.report(number, images, sums)

    def close(self) -> None:
        """Skip all batches of the served phase that are not handed out: enough replicas completed their shares."""
        for queue in self.queues:
            for number in queue.close():
                self.epoch_progress.skip(number)
        self.share_completed = True

    def stop(self) -> None:
        """Hand out only those joint batches of the served phase of which some replica has a share already."""
        for queue in self.queues:
            queue.stop()

    def _progress(self, world: World, resumed: Resumed | None) -> EpochProgress:
        """Return the progress of the served phase when this generation starts."""
        partial = resumed.partial if resumed else {}
        done = None
        if resumed is not None:
            done = resumed.position.batches[: len(self.order)].copy()
            unfinished = [number for number, left in partial.items() if left.pushed or left.due]
            done[[*resumed.in_flight, *unfinished]] = False
        owed = {number: left.pushed + self._images(number, left.due) for number, left in partial.items()}
        progress = EpochProgress(
            self.order,
            self.numbers,
            owner=self._owner,
            owners=self.replicas if self.static else 1,
            done=done,
            strips=world.layout.partitions,
            left=owed,
            sums=self.sums,
        )
        if world.generation and resumed is not None and done is not None:
            self._count_earlier(progress, resumed, done, owed)
        return progress

    def _count_earlier(
        self, progress: EpochProgress, resumed: Resumed, done: np.ndarray, owed: Mapping[int, int]
    ) -> None:
        """Count the served phase's images that earlier generations have done, and those lost with their ranks."""
        images = 0
        skipped = 0
        for number in self.numbers:
            if done[number] or number in owed:
                lost = self._images(number, resumed.partial[number].lost) if number in owed else 0
                images += self.order[number].size - owed.get(number, 0) - lost
                skipped += lost
        progress.resume(images, resumed.mean, skipped)

    def _queues(self, served: ServedData, resumed: Resumed | None) -> list[PrefetchQueue]:
        """Return one queue of the served phase for all replicas, or with static shares one for each."""
        in_flight = resumed.in_flight if resumed else frozenset()
        begun = {number: len(left.due) for number, left in resumed.partial.items()} if resumed else {}
        shares: list[list[int]] = [[] for _ in range(self.replicas if self.static else 1)]
        for number in self.numbers:
            if not self.epoch_progress.done[number] and number not in in_flight and begun.get(number, 1):
                shares[self._owner(number)].append(number)
        group = max(1, GROUP // served.config.train.batch)
        ahead = max(AHEAD * self.replicas // len(shares), 2 * group)
        takers = self.replicas if self.joint else 1
        source = PhaseBatches(served.loader, self.phase, self.order)
        return [PrefetchQueue(share, source, ahead, group, takers=takers, begun=begun) for share in shares]

    def _queue(self, replica: int) -> PrefetchQueue:
        """Return the queue of the served phase that `replica` takes batches from."""
        return self.queues[replica if self.static else 0]

    def _owner(self, number: int) -> int:
        """Return the share that batch `number` of the served phase belongs to."""
        return self.order.owner(number, self.replicas) % self.replicas if self.static else 0

    def _images(self, number: int, pieces: Sequence[Share]) -> int:
        """Return the number of images in these `pieces` of batch `number` of the served phase."""
        return sum(self.order.share(number, *piece).size for piece in pieces)

    def _leave_out(self, number: int, bad: int) -> None:
        """Expect no report of the `bad` images of batch `number` of the served phase."""
        self.share_completed |= self.epoch_progress.leave_out(number, bad)


@dataclass(frozen=True)
class Ask:
    """A worker's ask for the next phase, for any batch of a phase, or for a share of one batch."""

    source: int
    """The rank that asks."""
    kind: int
    """NEXT_PHASE, ANY or SHARE of `sharding/message_formats.py`."""
    slot: int
    """The number of the ask, which its answer carries in its tag."""
    phase: int
    """The number of the last phase that the worker knows."""
    number: int
    """The batch, of an ask for a share."""
    replica: int
    replicas: int
    columns: tuple[slice, ...]
    """The columns of an image that each strip of the replica needs."""

    @classmethod
    def parse(cls, source: int, words: np.ndarray) -> "Ask":
        """Read a worker's ask for a batch from `words` of rank `source`; an end of columns of 0 stands for all."""
        kind, slot, phase, number, replica, replicas, *edges = words.tolist()
        columns = tuple(slice(first, end or None) for first, end in zip(edges[::2], edges[1::2], strict=True))
        return cls(source, kind, slot, phase, number=number, replica=replica, replicas=replicas, columns=columns)


def stop_answer() -> np.ndarray:
    """Return the data rank's answer to every ask once the job stops."""
    return _header_only([message_formats.STOP])


def exhausted_answer(phase: int) -> np.ndarray:
    """Return the data rank's answer to an ask that no batch of `phase` is left."""
    return _header_only([message_formats.EXHAUSTED, phase])


def phase_answer(phase: Phase, count: int, first: int) -> np.ndarray:
    """Return the data rank's answer that names `phase`: its `count` images, its `first` batch not done."""
    part = message_formats.PARTS.index(phase.part)
    return _header_only([message_formats.PHASE, phase.number, part, phase.epoch, count, first])


def batch_answer(
    phase: Phase,
    number: int,
    batch: LoadedBatch,
    columns: tuple[slice, ...],
    *,
    fields: Sequence[Field],
    remaining: int,
    hybrid: bool,
) -> list[np.ndarray]:
    """Return the answer to an ask, a message for each strip: targets of batch `number`, part of its inputs.

    A strip gets its `columns` of all images, a rank of a hybrid replica all columns of its images. `fields` describes
    the batch, `remaining` is the number of batches that are not handed out.
    """
    part = message_formats.PARTS.index(phase.part)
    header = [message_formats.BATCH, phase.number, part, phase.epoch, number, batch.ids.size, remaining]
    if hybrid:
        edges = shares(batch.ids.size, len(columns))
        pieces: list[tuple] = [(slice(first, last),) for first, last in pairwise(edges)]
    else:
        pieces = [() if own == slice(0, None) else (..., own) for own in columns]
    mark = described.signature(fields)
    return [described.pack_batch(header, mark, batch.ids, _values(batch, fields, piece)) for piece in pieces]


def _values(batch: LoadedBatch, fields: Sequence[Field], piece: tuple) -> list[np.ndarray]:
    """Return the arrays of the asked `batch` in the order of `fields`: of inputs this `piece`, targets whole."""
    return [
        (batch.inputs[field.name][piece] if field.role == INPUT else batch.targets[field.name]).astype(
            field.dtype, copy=False
        )
        for field in fields
    ]


def _header_only(header: list[int]) -> np.ndarray:
    """Return an answer to an ask without images."""
    return described.pack_batch(header, 0, np.empty(0, np.int64), ())
