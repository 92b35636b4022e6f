"""A server's copy of a shard: everything that another server needs to stand in for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adam_mpi.base.checksum import checksum
from adam_mpi.sharding.shards import Shard

MODULUS = 1 << 62


@dataclass(eq=False)
class ShardCopy:
    """`weights` and `ema` lie where others read them on the server that serves the shard, else in plain memory."""

    shard: Shard
    weights: np.ndarray
    state: np.ndarray
    ema: np.ndarray
    """Empty where no ema is kept."""
    version: int = 0
    table: dict[int, int] = field(default_factory=dict)
    """Pusher -> the highest number of its messages that is in the weights."""
    whole: bool = True
    """Whether it may serve: one that is still being sent may not."""
    behind: bool = False
    """Whether it is to be sent anew: pushes may be acknowledged without it."""
    before: "ShardCopy | None" = None
    """The same before its last step, where that may have to be taken back."""

    @staticmethod
    def empty(shard: Shard, ema: bool) -> "ShardCopy":
        # Each an array of its own: one that is moved is given back.
        weights, state = np.zeros(shard.size, np.float32), np.zeros(shard.size, np.float32)
        return ShardCopy(shard, weights, state, np.zeros(shard.size if ema else 0, np.float32), whole=False)

    @property
    def parts(self) -> list[np.ndarray]:
        """What has to be sent for a copy of it, besides version and table."""
        return [part for part in (self.weights, self.state, self.ema) if part.size]

    def move(self, weights: np.ndarray, ema: np.ndarray) -> None:
        """To another place, with what is in it."""
        weights[:], ema[:] = self.weights, self.ema
        self.weights, self.ema = weights, ema

    def become(self, parts: Sequence[np.ndarray], version: int, table: dict[int, int], behind: bool = False) -> None:
        """A whole copy has come; `behind`: of the step before the last one, which follows."""
        for mine, new in zip(self.parts, parts, strict=True):
            mine[:] = new
        self.version, self.table, self.whole, self.behind = version, table, True, behind

    @property
    def firm(self) -> bool:
        """Whether its last step cannot be taken back."""
        return self.before is None or self.before.version != self.version - 1

    def remember(self) -> None:
        """Before a step that may have to be taken back."""
        if self.before is None:
            weights, state, ema = self.weights.copy(), self.state.copy(), self.ema.copy()
            self.before = replace(self, weights=weights, state=state, ema=ema)
        for kept, part in zip(self.before.parts, self.parts, strict=True):
            kept[:] = part
        self.before.version, self.before.table = self.version, dict(self.table)

    def take_back(self) -> None:
        """The last step."""
        assert self.before is not None and not self.firm, "a step back was not provided for"
        for kept, part in zip(self.before.parts, self.parts, strict=True):
            part[:] = kept
        self.version, self.table = self.before.version, dict(self.before.table)

    def checksum(self) -> int:
        """Of everything that another copy has to be equal in."""
        total = self.version
        for pusher, number in sorted(self.table.items()):
            total = (31 * total + 17 * pusher + number) % MODULUS
        for part in self.parts:
            total = (31 * total + checksum(part)) % MODULUS
        return total

    def note(self, pusher: int, number: int) -> None:
        self.table[pusher] = max(number, self.table.get(pusher, 0))
