"""The position of training: the epoch, its applied batches, images and clocks; the data position of a snapshot. Pure.

A push names its batches by epoch and number, so a server that has applied it knows them.
"""

import numpy as np

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
        """`room`: the most batches of an epoch."""
        self.epoch = epoch
        self.images = images
        self.clock = clock
        self.batches = np.zeros(room, bool)
        self.lasted = 0
        """How many batches the epoch before had when it ended; 0 if that is not known."""

    def add(self, ids: np.ndarray) -> None:
        """Add the batches of a push, all of one epoch; the first one of a new epoch completes the epoch before."""
        if not ids.size:
            return
        epoch = int(ids[0]) // EPOCH
        if epoch < self.epoch:
            return
        self.begin_epoch(epoch)
        self.batches[ids % EPOCH] = True

    def begin_epoch(self, epoch: int) -> None:
        """Complete the epoch before `epoch`, unless `epoch` has begun already."""
        if epoch > self.epoch:
            self.lasted = self.count if epoch == self.epoch + 1 else 0
            self.epoch = epoch
            self.batches[:] = False

    def has(self, ids: np.ndarray) -> bool:
        """Return whether all batches of a push are in it."""
        return all(bid // EPOCH == self.epoch and self.batches[bid % EPOCH] for bid in ids.tolist())

    def after(self, ids: np.ndarray, images: int) -> "Position":
        """Return the position after one more clock, with batches `ids` and `images` images."""
        position = Position(self.batches.size, self.epoch, self.images + images, self.clock + 1)
        position.batches[:] = self.batches
        position.lasted = self.lasted
        position.add(ids)
        return position

    @property
    def count(self) -> int:
        """Return how many batches of the epoch are applied."""
        return int(self.batches.sum())

    @staticmethod
    def packed_bytes(room: int) -> int:
        """Return the bytes of a packed position of up to `room` batches."""
        return 8 * (FIELDS + -(-room // 64) + 1)

    def pack(self) -> np.ndarray:
        """Return the position as bytes: the fields, a bit for each batch, and `lasted`."""
        fields = np.array([self.batches.size, self.epoch, self.images, self.clock], np.int64)
        packed = np.zeros(self.packed_bytes(self.batches.size), np.uint8)
        packed[: 8 * FIELDS] = fields.view(np.uint8)
        packed[8 * FIELDS :][: -(-self.batches.size // 8)] = np.packbits(self.batches)
        packed[-8:] = np.array([self.lasted], np.int64).view(np.uint8)
        return packed

    @staticmethod
    def unpack(packed: np.ndarray) -> "Position":
        """Return the position that `pack` has packed."""
        room, epoch, images, clock = packed[: 8 * FIELDS].view(np.int64).tolist()
        position = Position(room, epoch, images, clock)
        position.batches[:] = np.unpackbits(packed[8 * FIELDS :], count=room)
        # The first files of format 4 end with the bits.
        if packed.size == Position.packed_bytes(room):
            position.lasted = int(packed[-8:].view(np.int64)[0])
        return position

    def agrees(self, other: "Position") -> bool:
        """Return whether `other` is the same position."""
        mine, others = ((p.epoch, p.images, p.clock) for p in (self, other))
        return mine == others and np.array_equal(self.batches, other.batches)
