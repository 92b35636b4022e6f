"""The order of the images in an epoch, the batches that they form, and the replica that each batch belongs to. Pure.

The order depends on seed and epoch only, never on the number of ranks; only skewed shares have owners.
"""

import numpy as np

from adam_mpi.sharding.phases import Phase


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
        """Return the replica that batch `number` belongs to when each replica has its share of an epoch."""
        if self.owners is not None:
            return int(self.owners[self[number][0]])
        return number * replicas // len(self)

    def share(self, number: int, replica: int, replicas: int) -> np.ndarray:
        """Return the images that `replica` of `replicas` computes of a joint batch `number`."""
        images = self[number]
        if self.owners is not None:
            return images[self.owners[images] % replicas == replica]
        return images[replica * images.size // replicas : (replica + 1) * images.size // replicas]

    def _gather(self, owners: np.ndarray) -> None:
        """Reorder the images so that each batch has images of one owner."""
        self.images = self.images[np.argsort(owners[self.images], kind="stable")]
        edges = np.cumsum([0, *np.bincount(owners)])
        starts = [np.arange(first, last, self.batch) for first, last in zip(edges[:-1], edges[1:], strict=True)]
        self.cuts = np.concatenate([*starts, [self.count]])

    def _spread(self, owners: np.ndarray) -> None:
        """Reorder the images so that every owner's images are spread evenly over the batches."""
        batches = len(self)
        place = np.empty(self.count, np.int64)
        for owner in np.unique(owners):
            own = np.flatnonzero(owners[self.images] == owner)
            place[own] = np.arange(len(own)) * batches // len(own)
        self.images = self.images[np.argsort(place, kind="stable")]
        self.cuts = np.cumsum([0, *np.bincount(place, minlength=batches)])


KEY = 0x5EED
"""Makes the random numbers of shares independent of all others that are drawn with the seed."""


def owners(skew: str, labels: np.ndarray, replicas: int, seed: int) -> np.ndarray:
    """Return each image's replica: "by_class" gives each a range of classes, "dirichlet:A" an uneven mix of all."""
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
    """Return the owner of each element when owner r gets the r-th consecutive share, `shares[r]`, of `order`."""
    edges = np.rint(np.cumsum(shares) * len(order)).astype(np.int64)
    owner = np.empty(len(order), np.int64)
    owner[order] = np.minimum(np.searchsorted(edges, np.arange(len(order)), side="right"), len(shares) - 1)
    return owner
