"""The tally of a phase: which of a data rank's batches are handed out, done, left out. Pure.

Every strip of a replica reports what it has done, so each image is counted `strips` times.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from adam_mpi.data.order import Order


class EpochProgress:
    """Counts the images of the batches `numbers` of an order; `done` marks batches that an earlier run has done."""

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
        """`left`: number of a batch -> how many of its images are to be reported, where that is not all of them."""
        self.owner, self.strips = owner, strips
        self.done = np.zeros(len(order), bool) if done is None else done.copy()
        self.left = np.zeros(len(order), np.int64)
        """Images of each batch that are to be reported."""
        self.owed = np.zeros(owners, np.int64)
        """The same for each replica's share."""
        self.reported = self.skipped = 0
        self.loss = self.correct = 0.0
        self.not_finite = 0
        """Of `reported`, those whose loss is no number; it is not in the sum."""
        for number in numbers:
            if not self.done[number]:
                self.left[number] = left.get(number, order[number].size) * strips
                self.owed[owner(number)] += self.left[number]

    @property
    def finished(self) -> int:
        """Images that are done."""
        return self.reported // self.strips

    def go_on(self, images: int, mean: Sequence[float], skipped: int = 0) -> None:
        """So many images were done before, with these means of loss and correctness, and so many left out."""
        self.skipped = skipped
        self.reported, self.loss, self.correct = images * self.strips, images * mean[0], images * mean[1]

    @property
    def complete(self) -> bool:
        return not self.owed.any()

    def report(self, number: int, images: int, loss: float, correct: float) -> bool:
        """A strip is done with images of a batch; True when that completes somebody's share."""
        self.reported += images
        if math.isfinite(loss):
            self.loss += loss / self.strips
        else:
            self.not_finite += images
        self.correct += correct / self.strips
        return self._take(number, images)

    def leave_out(self, number: int, images: int) -> bool:
        """Some of a batch's images are bad: nobody will report them."""
        return self._take(number, images * self.strips)

    def skip(self, number: int) -> None:
        """A batch that nobody will compute in this epoch: its replica was too slow."""
        self.skipped += int(self.left[number]) // self.strips
        self.owed[self.owner(number)] -= self.left[number]
        self.left[number] = 0

    def _take(self, number: int, images: int) -> bool:
        assert images <= self.left[number], f"batch {number}: {images} images reported, {self.left[number]} are out"
        owner = self.owner(number)
        self.left[number] -= images
        self.owed[owner] -= images
        self.done[number] |= self.left[number] == 0
        return images > 0 and self.owed[owner] == 0
