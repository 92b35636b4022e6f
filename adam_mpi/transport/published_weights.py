"""The memory a server lets others read: its clock and rate, a line per pusher, versions and weights of its shards."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from adam_mpi.sharding.memory_layout import LINE, WIDTHS, MemoryLayout
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard

DTYPES = {"weights": np.float32, "ema": np.float32, "short": np.uint16}


class PublishedWeights:
    def __init__(self, memory_layout: MemoryLayout, server: int, memory: np.ndarray) -> None:
        self.memory = memory
        lines = self.memory[: memory_layout.version_offset].view(np.int64).reshape(-1, LINE // 8)
        self.clock, self.rate = lines[0, :1], lines[0, 1:2].view(np.float64)
        self.applied, self.torn, self.asked, self.different, self.arrived = (lines[1:, column] for column in range(5))
        """Per ring: the last position dealt with; the one that stayed torn; how often we have asked for such a one;
        of a peer, how many of our copies were not like its own; and the last position that has arrived."""
        start, shards = memory_layout.version_offset, memory_layout.held[server]
        self.versions = self.memory[start : start + 8 * len(shards)].view(np.int64)
        self.regions: dict[str, dict[int, np.ndarray]] = {}
        for region in memory_layout.regions:
            offset = memory_layout.region_offset(server, region)
            self.regions[region] = views = {}
            for shard in shards:
                size = WIDTHS[region] * shard.size
                views[shard.index] = self.memory[offset : offset + size].view(DTYPES[region])
                offset += size

    def run(self, shards: Sequence[Shard]) -> np.ndarray:
        """The weights of shards that are held one after the other, as one array."""
        first, size = self.weights[shards[0].index], 4 * sum(shard.size for shard in shards)
        offset = first.ctypes.data - self.memory.ctypes.data
        return self.memory[offset : offset + size].view(np.float32)

    def take_over(self, served: Iterable[Shard], kept: Mapping[int, ShardCopy]) -> dict[int, ShardCopy]:
        """Shards that are served from here: those we have had a copy of, or new ones, moved to where they are read."""
        emas, taken = self.regions.get("ema", {}), {}
        for shard in served:
            holding = kept.get(shard.index) or ShardCopy.empty(shard, bool(emas))
            holding.move(self.weights[shard.index], emas.get(shard.index, holding.ema))
            taken[shard.index] = holding
        return taken

    @property
    def weights(self) -> dict[int, np.ndarray]:
        return self.regions["weights"]
