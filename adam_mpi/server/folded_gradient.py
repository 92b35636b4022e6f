"""The gradient of one step: the sum of its messages, which the server and all other copies of a shard step on."""

from itertools import accumulate

import numpy as np

from adam_mpi.base.pools import EMPTY
from adam_mpi.optimizer.settings import ImageCounts
from adam_mpi.server.message_values import is_partial
from adam_mpi.server.stepper import Stepper, Work


class FoldedGradient:
    """The sum of the messages of a step, in memory that stays until every copy of its shards has taken the step."""

    def __init__(self, work: Work, rate: float) -> None:
        self.band, self.messages, self.factors = work
        self.rate = rate
        stops = accumulate(shard.size for shard in self.band)
        self.parts = {shard.index: slice(stop - shard.size, stop) for shard, stop in zip(self.band, stops, strict=True)}
        self.pending = len(self.band)
        """Shards whose copies have not all taken the step."""
        self.buffer: np.ndarray | None = None
        self.skipped = False
        """Whether the step leaves weights and state as they are, because a part of it elsewhere is not finite."""
        self.image_counts = ImageCounts(0, 0, 0)
        self.partial = False
        """Whether it is for some of the parameters, and NaN for the others."""

    def fold_and_step(self, stepper: Stepper) -> None:
        """Sum the messages, and step the shards here; the thread that owns these shards calls this."""
        self.fold(stepper)
        self.step(stepper)

    def fold(self, stepper: Stepper) -> None:
        """Sum the messages."""
        scaled = list(zip(self.messages, stepper.scales(self.factors), strict=True))
        self.partial = not stepper.stays and is_partial(self.messages[0], self.band[0].size)
        if self.band[0].index not in stepper.steps.frozen:
            self.buffer = stepper.values.fold(self.band, scaled, self.partial)
        self.image_counts = stepper.count_images(self.messages)

    def step(self, stepper: Stepper) -> None:
        """Step the shards here on the sum."""
        for shard in self.band:
            stepper.step_folded(shard.index, self.values(shard.index), self.rate, self.image_counts, self.partial)

    def values(self, index: int) -> np.ndarray:
        """Return the sum for shard `index`; it is empty if no message had values to add."""
        return EMPTY if self.buffer is None or self.skipped else self.buffer[self.parts[index]]

    def release_shard(self, stepper: Stepper) -> None:
        """Count a shard whose copies have all taken the step; with the last one the memory is returned."""
        self.pending -= 1
        if not self.pending and self.buffer is not None:
            stepper.values.folds.give_back(self.buffer)
