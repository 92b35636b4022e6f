"""The messages of a step put together, in memory that stays until every copy of the shards has taken it."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from adam_mpi.server.optimizer_rules import Counted
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.mailbox import ReceivedMessage


class Fold:
    """Of shards that are stepped on together, by the same messages."""

    def __init__(
        self, band: Sequence[Shard], mails: Sequence[ReceivedMessage], delays: Sequence[int], rate: float
    ) -> None:
        self.band, self.mails, self.delays, self.rate = band, mails, delays, rate
        self.ends = dict(zip((shard.index for shard in band), accumulate(shard.size for shard in band), strict=True))
        self.left = len(band)
        self.buffer: np.ndarray | None = None
        self.counted = Counted(0, 0, 0)

    def step(self, stepper: Stepper) -> None:
        """Called by the thread that owns these shards."""
        self.buffer, self.counted = stepper.fold(self.band, self.mails, self.delays), stepper.counted(self.mails)
        for shard in self.band:
            stepper.take(shard.index, self.values(shard.index), self.rate, self.counted)

    def values(self, index: int) -> np.ndarray:
        """What came together for a shard; nothing if no message had numbers to add."""
        if self.buffer is None:
            return np.empty(0, np.float32)
        end = self.ends[index]
        size = next(shard.size for shard in self.band if shard.index == index)
        return self.buffer[end - size : end]

    def release(self, stepper: Stepper) -> None:
        """A shard's copies have all taken it; with the last shard its memory is given back."""
        self.left -= 1
        if not self.left and self.buffer is not None:
            stepper.folds.give(self.buffer)
