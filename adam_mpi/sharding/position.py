"""Where training stands: the epoch, its batches that are applied, images and clocks. The data position of a snapshot.

A push names its batches by number and epoch, so whoever has applied it knows them.
"""

import numpy as np

EPOCH = 1 << 40
"""A batch's id is its epoch times this, plus its number in that epoch."""
FIELDS = 4


def batch_id(epoch: int, number: int) -> int:
    return epoch * EPOCH + number


class Position:
    """`batches`: which of the `epoch` are applied. Epoch 0 is before the first push."""

    def __init__(self, room: int, epoch: int = 0, images: int = 0, clock: int = 0) -> None:
        self.epoch, self.images, self.clock = epoch, images, clock
        self.batches = np.zeros(room, bool)
        self.lasted = 0
        """How many batches the epoch before had in the end; 0 where that is not known."""

    def add(self, ids: np.ndarray) -> None:
        """Take in the batches of a push, all of one epoch; with the first of a new epoch the old one is complete."""
        if not ids.size:
            return
        epoch = int(ids[0]) // EPOCH
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self.lasted = self.count if epoch == self.epoch + 1 else 0
            self.epoch = epoch
            self.batches[:] = False
        self.batches[ids % EPOCH] = True

    def has(self, ids: np.ndarray) -> bool:
        """Whether the batches of a push are in it."""
        return all(bid // EPOCH == self.epoch and self.batches[bid % EPOCH] for bid in ids.tolist())

    def after(self, ids: np.ndarray, images: int) -> "Position":
        """Where training stands when one more clock is applied."""
        position = Position(self.batches.size, self.epoch, self.images + images, self.clock + 1)
        position.batches[:], position.lasted = self.batches, self.lasted
        position.add(ids)
        return position

    @property
    def count(self) -> int:
        return int(self.batches.sum())

    @staticmethod
    def packed_bytes(room: int) -> int:
        return 8 * (FIELDS + -(-room // 64))

    def pack(self) -> np.ndarray:
        fields = np.array([self.batches.size, self.epoch, self.images, self.clock], np.int64)
        packed = np.zeros(self.packed_bytes(self.batches.size), np.uint8)
        packed[: 8 * FIELDS] = fields.view(np.uint8)
        packed[8 * FIELDS :][: -(-self.batches.size // 8)] = np.packbits(self.batches)
        return packed

    @staticmethod
    def unpack(packed: np.ndarray) -> "Position":
        room, epoch, images, clock = packed[: 8 * FIELDS].view(np.int64).tolist()
        position = Position(room, epoch, images, clock)
        position.batches[:] = np.unpackbits(packed[8 * FIELDS :], count=room)
        return position

    def agrees(self, other: "Position") -> bool:
        mine, others = ((p.epoch, p.images, p.clock) for p in (self, other))
        return mine == others and np.array_equal(self.batches, other.batches)
