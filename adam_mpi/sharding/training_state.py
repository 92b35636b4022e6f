"""Where training stands: the phases of a job, the position in them, and the state that a rank takes along. Pure.

A push names its batches by epoch and number, so a server that has applied it knows them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adam_mpi.config import Train
from adam_mpi.model.metrics import ACCURACY, Monitor
from adam_mpi.sharding.batches import Progress


@dataclass(frozen=True)
class Phase:
    """A pass of all workers together through one part of the data set; `epoch` counts from 1."""

    number: int
    part: str
    epoch: int

    @property
    def training(self) -> bool:
        """Return whether weights change in this phase of training."""
        return self.part == "train"


class PhaseSchedule:
    """Decides which phase comes next, from a figure of the validation phases."""

    def __init__(
        self,
        train: Train,
        validates: bool,
        epochs_done: int = 0,
        best: tuple[float | None, int] = (None, 0),
        midway: bool = False,
        monitor: Monitor = ACCURACY.monitor,
    ) -> None:
        """Begin the phases after `epochs_done` epochs, the last not validated yet, or `midway` in the next one.

        `best` is the best value of `monitor` so far, and its epoch.
        """
        self.train = train
        self.monitor = monitor
        self.validates = validates
        self.best, self.best_epoch = best
        self.reason = "epochs"
        if epochs_done and validates and not midway:
            self.phase: Phase | None = Phase(0, "validation", epochs_done)
        else:
            self.phase = self._train_or_test(Phase(-1, "", epochs_done))

    def advance(self, value: float) -> Phase | None:
        """Return the phase after the current one, at whose end `monitor` had `value`; None when the job is done."""
        phase = self.phase
        assert phase is not None
        if phase.part == "test":
            self.phase = None
        elif phase.training and self.validates:
            self.phase = Phase(phase.number + 1, "validation", phase.epoch)
        elif phase.part == "validation" and self._should_stop(phase.epoch, value):
            self.phase = self._test(phase)
        else:
            self.phase = self._train_or_test(phase)
        return self.phase

    def _train_or_test(self, phase: Phase) -> Phase | None:
        """Return the phase of the next epoch, or the test after the last one."""
        if phase.epoch < self.train.epochs:
            return Phase(phase.number + 1, "train", phase.epoch + 1)
        return self._test(phase)

    def _test(self, phase: Phase) -> Phase | None:
        """Return the test phase of training, if one is configured."""
        return Phase(phase.number + 1, "test", phase.epoch) if self.train.test else None

    def _should_stop(self, epoch: int, value: float) -> bool:
        """Note the value of `epoch`; return whether the phases of training stop before the last epoch."""
        if self.monitor.better(value, self.best):
            self.best = value
            self.best_epoch = epoch
        if self.train.target and self.monitor.reaches(value, self.train.target):
            self.reason = "target"
        elif self.train.patience and epoch - self.best_epoch >= self.train.patience:
            self.reason = "patience"
        return self.reason != "epochs"


EPOCH = 1 << 40
"""The id of a batch is its epoch times this, plus its number in that epoch."""
FIELDS = 4
"""Numbers in front of the bits of a packed position."""


def batch_id(epoch: int, number: int) -> int:
    """Return the id of batch `number` of `epoch`."""
    return epoch * EPOCH + number


class Position:
    """How far training is; `batches` are the applied ones of `epoch`. Epoch 0 is before the first push."""

    def __init__(self, room: int, epoch: int = 0, images: int = 0, clock: int = 0) -> None:
        """Begin a training position at the first batch; no epoch has more than `room` batches."""
        self.epoch = epoch
        self.images = images
        self.clock = clock
        self.batches = np.zeros(room, bool)
        self.lasted = 0
        """How many batches the epoch before had when it ended; 0 if that is not known."""

    def add(self, ids: np.ndarray) -> None:
        """Add the batches of a push to the training position; the first one of a new epoch completes the one before."""
        if not ids.size:
            return
        epoch = int(ids[0]) // EPOCH
        if epoch < self.epoch:
            return
        self.begin_epoch(epoch)
        self.batches[ids % EPOCH] = True

    def begin_epoch(self, epoch: int) -> None:
        """Complete the training position's epoch before `epoch`, unless `epoch` has begun already."""
        if epoch > self.epoch:
            self.lasted = self.count if epoch == self.epoch + 1 else 0
            self.epoch = epoch
            self.batches[:] = False

    def has(self, ids: np.ndarray) -> bool:
        """Return whether all batches of a push are in the training position."""
        return all(bid // EPOCH == self.epoch and self.batches[bid % EPOCH] for bid in ids.tolist())

    def after(self, ids: np.ndarray, images: int) -> "Position":
        """Return the training position after one more clock, with batches `ids` and `images` images."""
        position = Position(self.batches.size, self.epoch, self.images + images, self.clock + 1)
        position.batches[:] = self.batches
        position.lasted = self.lasted
        position.add(ids)
        return position

    @property
    def count(self) -> int:
        """Return how many batches of the epoch are applied in the training position."""
        return int(self.batches.sum())

    def images_passed(self, batch: int, images: int) -> float:
        """Return how many images of all epochs, of `images` each, have passed at the position, left-out ones too.

        A batch counts as whole although images of it were bad. An epoch that ended early counts as whole when the next
        one begins; that one is assumed to have as many batches.
        """
        if not self.epoch:
            return self.images
        done = self.count * batch
        expected = min(images, self.lasted * batch or images)
        return max(self.images, images * (self.epoch - 1 + min(1, done / max(expected, 1))))

    @staticmethod
    def packed_bytes(room: int) -> int:
        """Return the bytes of a packed training position of up to `room` batches."""
        return 8 * (FIELDS + -(-room // 64) + 1)

    def pack(self) -> np.ndarray:
        """Return the training position as bytes: the fields, a bit for each batch, and `lasted`."""
        fields = np.array([self.batches.size, self.epoch, self.images, self.clock], np.int64)
        packed = np.zeros(self.packed_bytes(self.batches.size), np.uint8)
        packed[: 8 * FIELDS] = fields.view(np.uint8)
        packed[8 * FIELDS :][: -(-self.batches.size // 8)] = np.packbits(self.batches)
        packed[-8:] = np.array([self.lasted], np.int64).view(np.uint8)
        return packed

    @staticmethod
    def unpack(packed: np.ndarray) -> "Position":
        """Return the training position that `pack` has packed."""
        room, epoch, images, clock = packed[: 8 * FIELDS].view(np.int64).tolist()
        position = Position(room, epoch, images, clock)
        position.batches[:] = np.unpackbits(packed[8 * FIELDS :], count=room)
        position.lasted = int(packed[-8:].view(np.int64)[0])
        return position

    def agrees(self, other: "Position") -> bool:
        """Return whether `other` is the same training position."""
        mine, others = ((p.epoch, p.images, p.clock) for p in (self, other))
        return mine == others and np.array_equal(self.batches, other.batches)


@dataclass
class RankState:
    """The state of one rank when a generation ends; fields of roles that it does not have keep their defaults."""

    member: int
    detected: float = 0.0
    """When it detected the failure, in seconds since 1970."""
    copies: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> version of its whole copy."""
    behind: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> the strip that pushes it, of copies that were to be sent again and have not arrived. Other
    servers may have acknowledged pushes without them."""
    began: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server: strip -> pusher -> the last of its pushes that was acknowledged when the generation began."""
    firm: frozenset[int] = frozenset()
    """Of a server, in synchronous training: copies whose last step cannot be taken back."""
    served: frozenset[int] = frozenset()
    """Of a server: the shards that it served in the generation."""
    resumed_at: tuple[float | None, float | None] = (None, None)
    """Of a server: when it first applied a message of any pusher, and of all, in the generation."""
    positions: dict[int, Position] = field(default_factory=dict)
    """Of a server: the position of training; in synchronous training by clock, before and after the last one."""
    clock: int | None = None
    """Of a worker: the clock of its first push that is not acknowledged."""
    acknowledged: tuple[int, int] | None = None
    """Of a worker: the number of the last push that was acknowledged as a whole, and the clock after it."""
    strip: int = 0
    """Of a worker: which strip of its replica it is."""
    resent: tuple[tuple[int, int], ...] = ()
    """Of a worker: clock and images of every push that it will send again."""
    progress: Progress = field(default_factory=Progress)
    """How far it is with joint batches."""
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server, where pushes may have to be taken back: shard -> pusher -> the highest number of its messages."""
    batches: frozenset[int] = frozenset()
    """Of a worker: ids of batches that it has received and will report."""
    epoch_sums: tuple[int, float, tuple[float, ...]] = (0, 0.0, ())
    """Of a data rank: epoch, images so far, and the sums of the loss and the metrics over them."""
    unacknowledged: int = 0
    """Of a client of a `ParameterServer`: messages that it will send again."""
    coordinator: dict[str, Any] | None = None
    """The last state of the coordinator that it has received."""
    captured: tuple[str, ...] = ()
    """Layers that push factors; empty on a new rank."""
    order: dict[str, Any] | None = None
    """The last order to go back to a snapshot that it has received, the fields of a GoBack."""
    restart: Any = None
    """The RestartPoint of the last order that its roles have followed."""
    new: bool = False
    """Whether it has no roles yet: then it has nothing to take back."""
