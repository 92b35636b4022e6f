"""In which order an epoch goes through its images, and which of them make up a batch. Pure.

The order depends on seed and epoch only, never on how many ranks there are.
"""

import numpy as np

from adam_mpi.data.course import Phase


class Order:
    """The batches of one phase over a part of `count` images."""

    def __init__(self, phase: Phase, count: int, batch: int, seed: int) -> None:
        self.count, self.batch = count, batch
        self.images = np.arange(count)
        if phase.training:
            np.random.Generator(np.random.Philox(key=[seed, phase.epoch])).shuffle(self.images)

    def __len__(self) -> int:
        return -(-self.count // self.batch)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.images[number * self.batch : (number + 1) * self.batch]

    def share(self, number: int, replica: int, replicas: int) -> np.ndarray:
        """One replica's part of a batch that all replicas compute together."""
        images = self[number]
        return images[replica * images.size // replicas : (replica + 1) * images.size // replicas]
