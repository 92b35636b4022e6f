"""An epoch: the order of its images, the batches they form, their replicas, and which of them are done. Pure.

The order depends on seed and epoch only, never on the number of ranks; only skewed shares have owners.

Every strip of a replica reports what it has done, so each image is counted `strips` times.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from adam_mpi.sharding.training_state import Phase


class Order:
    """The batches of one phase over a part of `count` images.

    With `owners` (the replica of each image) a batch has images of one owner; or, when all replicas compute each batch
    together (`joint`), every owner's images are spread evenly over the batches.
    """

    def __init__(
        self, phase: Phase, count: int, batch: int, seed: int, owners: np.ndarray | None = None, joint: bool = False
    ) -> None:
        """Shuffle the images for the epoch of a training phase, and cut them into batches of `batch` images."""
        self.count = count
        self.batch = batch
        self.owners = owners
        self.images = np.arange(count)
        if phase.training:
            np.random.Generator(np.random.Philox(key=[seed, phase.epoch])).shuffle(self.images)
        self.cuts = np.minimum(np.arange(-(-count // batch) + 1) * batch, count)
        if owners is not None and joint:
            self._spread(owners)
        elif owners is not None:
            self._gather(owners)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.images[self.cuts[number] : self.cuts[number + 1]]

    def owner(self, number: int, replicas: int) -> int:
        """Return the replica that batch `number` of the epoch belongs to when each has its share of the images."""
        if self.owners is not None:
            return int(self.owners[self[number][0]])
        return number * replicas // len(self)

    def share(self, number: int, replica: int, replicas: int) -> np.ndarray:
        """Return the images of a joint batch `number` of the epoch that `replica` of `replicas` computes."""
        images = self[number]
        if self.owners is not None:
            return images[self.owners[images] % replicas == replica]
        return images[replica * images.size // replicas : (replica + 1) * images.size // replicas]

    def _gather(self, owners: np.ndarray) -> None:
        """Reorder the images of the epoch so that each batch has images of one owner."""
        self.images = self.images[np.argsort(owners[self.images], kind="stable")]
        edges = np.cumsum([0, *np.bincount(owners)])
        starts = [np.arange(first, last, self.batch) for first, last in zip(edges[:-1], edges[1:], strict=True)]
        self.cuts = np.concatenate([*starts, [self.count]])

    def _spread(self, owners: np.ndarray) -> None:
        """Reorder the images of the epoch so that every owner's images are spread evenly over the batches."""
        batches = len(self)
        place = np.empty(self.count, np.int64)
        for owner in np.unique(owners):
            own = np.flatnonzero(owners[self.images] == owner)
            place[own] = np.arange(len(own)) * batches // len(own)
        self.images = self.images[np.argsort(place, kind="stable")]
        self.cuts = np.cumsum([0, *np.bincount(place, minlength=batches)])


KEY = 0x5EED
"""Makes the random numbers of shares independent of all others that are drawn with the seed."""


def draw_owners(skew: str, labels: np.ndarray, replicas: int, seed: int) -> np.ndarray:
    """Return each image's replica in every epoch: "by_class" gives each some classes, "dirichlet:A" an uneven mix."""
    kind, _, alpha = skew.partition(":")
    random = np.random.Generator(np.random.Philox(key=[seed, KEY]))
    if kind == "by_class":
        return _deal(np.argsort(labels, kind="stable"), np.full(replicas, 1 / replicas))
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        images = random.permutation(np.flatnonzero(labels == label))
        owner[images] = _deal(np.arange(len(images)), random.dirichlet(np.full(replicas, float(alpha))))
    return owner


def _deal(order: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the owner of each image when owner r gets the r-th consecutive share, `shares[r]`, of `order`."""
    edges = np.rint(np.cumsum(shares) * len(order)).astype(np.int64)
    owner = np.empty(len(order), np.int64)
    owner[order] = np.minimum(np.searchsorted(edges, np.arange(len(order)), side="right"), len(shares) - 1)
    return owner


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
        sums: int = 2,
    ) -> None:
        """Start an epoch's progress with batches marked in `done`, and `left[number]` images to be reported.

        A report has `sums` sums.

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
        self.sums = np.zeros(sums)
        """The sums of the loss and of metrics over the reported images, without those that are not finite."""
        self.not_finite = 0
        """Of `reported`, images whose loss is not finite; it is not in the sum."""
        for number in numbers:
            if not self.done[number]:
                self.left[number] = left.get(number, order[number].size) * strips
                self.owed[owner(number)] += self.left[number]

    @property
    def finished(self) -> int:
        """Return the number of images of the epoch that are done."""
        return self.reported // self.strips

    @property
    def complete(self) -> bool:
        """Return whether every image of the epoch is done."""
        return not self.owed.any()

    @property
    def first_open(self) -> int:
        """Return the first batch of the epoch's order that is not done; the number of batches if all are."""
        return len(self.done) if self.done.all() else int(np.argmin(self.done))

    def resume(self, images: int, mean: Sequence[float], skipped: int = 0) -> None:
        """Count `images` of the epoch that earlier generations did, with `mean` sums each, and `skipped` others."""
        self.skipped = skipped
        self.reported = images * self.strips
        if len(mean):
            self.sums[:] = images * np.asarray(mean)

    def report(self, number: int, images: int, sums: np.ndarray) -> bool:
        """Count `images` of the epoch's batch `number` as done; return True when that completes a share.

        `sums` are those of their loss, which comes first, and of their metrics.
        """
        self.reported += images
        finite = np.isfinite(sums)
        self.sums[finite] += sums[finite] / self.strips
        if not finite[0]:
            self.not_finite += images
        return self._subtract(number, images)

    def leave_out(self, number: int, images: int) -> bool:
        """Expect no report of `images` bad ones of the epoch's batch `number`; return True if it completes a share."""
        return self._subtract(number, images * self.strips)

    def skip(self, number: int) -> None:
        """Count batch `number` as skipped in this epoch, because its replica was too slow."""
        self.skipped += int(self.left[number]) // self.strips
        self.owed[self.owner(number)] -= self.left[number]
        self.left[number] = 0

    def _subtract(self, number: int, images: int) -> bool:
        """Subtract `images` from what is left of the epoch's batch `number`; return True if its share is complete."""
        assert images <= self.left[number], f"batch {number}: {images} images reported, {self.left[number]} are out"
        owner = self.owner(number)
        self.left[number] -= images
        self.owed[owner] -= images
        self.done[number] |= self.left[number] == 0
        return images > 0 and self.owed[owner] == 0
