"""A server's copy of a shard: everything that another server needs to take over the shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adam_mpi.base.files import file_checksum
from adam_mpi.sharding.shards import Shard

MODULUS = 1 << 62
BATCHES = "batches"
"""The name, in files, of the number of batches that each shard has been stepped on."""


@dataclass(eq=False)
class ShardCopy:
    """One server's copy; `weights` and `ema` lie in published memory on the server that serves the shard."""

    shard: Shard
    weights: np.ndarray
    states: np.ndarray
    """The state vectors of the optimizer, a row for each."""
    ema: np.ndarray
    """Running average of the weights; empty where none is kept."""
    version: int = 0
    batches: float = 0.0
    """Batches that it has been stepped on: bias corrections depend on it."""
    table: dict[int, int] = field(default_factory=dict)
    """Pusher -> the highest number of its messages that are in the weights."""
    whole: bool = True
    """Whether it may serve the shard: a copy that is still being sent may not."""
    behind: bool = False
    """Whether it is to be sent again: pushes may be acknowledged without it."""
    before: "ShardCopy | None" = None
    """The copy before its last step, where that may have to be taken back."""

    @staticmethod
    def empty(shard: Shard, states: int, ema: bool) -> "ShardCopy":
        """Return a copy of `shard` that is not whole, with `states` state vectors; `ema`: with a running average."""
        # Separate arrays: the memory of one that is moved is freed.
        weights = np.zeros(shard.size, np.float32)
        vectors = np.zeros((states, shard.size), np.float32)
        return ShardCopy(shard, weights, vectors, np.zeros(shard.size if ema else 0, np.float32), whole=False)

    @property
    def parts(self) -> list[np.ndarray]:
        """Return the vectors that make a shard copy, besides version, batches and table."""
        return [part for part in (self.weights, *self.states, self.ema) if part.size]

    def move(self, weights: np.ndarray, ema: np.ndarray) -> None:
        """Move weights and running average of the shard copy into the arrays `weights` and `ema`."""
        weights[:] = self.weights
        ema[:] = self.ema
        self.weights = weights
        self.ema = ema

    def become(
        self, parts: Sequence[np.ndarray], version: int, batches: float, table: dict[int, int], behind: bool = False
    ) -> None:
        """Take over a whole shard copy that has arrived; `behind`: it is of the step before the last one."""
        for mine, new in zip(self.parts, parts, strict=True):
            mine[:] = new
        self.version = version
        self.batches = batches
        self.table = table
        self.whole = True
        self.behind = behind

    @property
    def firm(self) -> bool:
        """Return whether the last step of the shard copy cannot be taken back."""
        return self.before is None or self.before.version != self.version - 1

    def remember(self) -> None:
        """Keep everything of the shard copy, before a step that may have to be taken back."""
        if self.before is None:
            self.before = replace(self, weights=self.weights.copy(), states=self.states.copy(), ema=self.ema.copy())
        for kept, part in zip(self.before.parts, self.parts, strict=True):
            kept[:] = part
        self.before.version = self.version
        self.before.batches = self.batches
        self.before.table = dict(self.table)

    def take_back(self) -> None:
        """Take back the last step of the shard copy."""
        assert self.before is not None and not self.firm, "the last step of this copy was not remembered"
        for kept, part in zip(self.before.parts, self.parts, strict=True):
            part[:] = kept
        self.version = self.before.version
        self.batches = self.before.batches
        self.table = dict(self.before.table)

    def checksum(self) -> int:
        """Return a checksum of everything that must be equal in another copy of the shard."""
        total = self.version + int(np.float64(self.batches).view(np.int64))
        for pusher, number in sorted(self.table.items()):
            total = (31 * total + 17 * pusher + number) % MODULUS
        for part in self.parts:
            total = (31 * total + file_checksum(part)) % MODULUS
        return total

    def note(self, pusher: int, number: int) -> None:
        """Note in the shard copy's table that message `number` of `pusher` is in the weights."""
        self.table[pusher] = max(number, self.table.get(pusher, 0))
