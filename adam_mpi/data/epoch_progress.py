"""The progress of one phase on one data rank: which of its batches are done, which images are still owed. Pure.

Every strip of a replica reports what it has done, so each image is counted `strips` times.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from adam_mpi.data.order import Order


class EpochProgress:
    """Counts the reported images of the batches `numbers` of an order."""

    def __init__(
        self,
        order: Order,
        numbers: Iterable[int],
        owner: Callable[[int], int],
        owners: int,
        done: np.ndarray | None,
        strips: int = 1,
        left: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Start with the batches marked in `done` complete, and with `left[number]` images of others to be reported.

        `owner` maps a batch to one of `owners` shares. A batch that is not in `left` owes all of its images.
        """
        self.owner = owner
        self.strips = strips
        self.done = np.zeros(len(order), bool) if done is None else done.copy()
        self.left = np.zeros(len(order), np.int64)
        """Images of each batch that are to be reported."""
        self.owed = np.zeros(owners, np.int64)
        """The same for each share."""
        self.reported = 0
        self.skipped = 0
        self.loss = 0.0
        self.correct = 0.0
        self.not_finite = 0
        """Of `reported`, images whose loss is not finite; it is not in the sum."""
        for number in numbers:
            if not self.done[number]:
                self.left[number] = left.get(number, order[number].size) * strips
                self.owed[owner(number)] += self.left[number]

    @property
    def finished(self) -> int:
        """Images that are done."""
        return self.reported // self.strips

    @property
    def complete(self) -> bool:
        """Whether no image is owed any more."""
        return not self.owed.any()

    @property
    def first_open(self) -> int:
        """The first batch of the order that is not done; the number of batches when all are."""
        return len(self.done) if self.done.all() else int(np.argmin(self.done))

    def resume(self, images: int, mean: Sequence[float], skipped: int = 0) -> None:
        """Count `images` that earlier generations did, with `mean` loss and correctness, and `skipped` others."""
        self.skipped = skipped
        self.reported = images * self.strips
        self.loss = images * mean[0]
        self.correct = images * mean[1]

    def report(self, number: int, images: int, loss: float, correct: float) -> bool:
        """Count `images` of batch `number` that a strip has done; return True when that completes a share."""
        self.reported += images
        if math.isfinite(loss):
            self.loss += loss / self.strips
        else:
            self.not_finite += images
        self.correct += correct / self.strips
        return self._subtract(number, images)

    def leave_out(self, number: int, images: int) -> bool:
        """Expect no report of `images` bad images of batch `number`; return True when that completes a share."""
        return self._subtract(number, images * self.strips)

    def skip(self, number: int) -> None:
        """Count batch `number` as skipped in this epoch, because its replica was too slow."""
        self.skipped += int(self.left[number]) // self.strips
        self.owed[self.owner(number)] -= self.left[number]
        self.left[number] = 0

    def _subtract(self, number: int, images: int) -> bool:
        assert images <= self.left[number], f"batch {number}: {images} images reported, {self.left[number]} are out"
        owner = self.owner(number)
        self.left[number] -= images
        self.owed[owner] -= images
        self.done[number] |= self.left[number] == 0
        return images > 0 and self.owed[owner] == 0
