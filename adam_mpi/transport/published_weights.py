"""The memory of a server that others read, and the place of its shard copies in it when a generation begins."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from adam_mpi.sharding.memory_layout import WIDTHS, MemoryLayout
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.rings import LINE, STEPPED
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard

DTYPES = {"weights": np.float32, "ema": np.float32, "short": np.uint16}


class PublishedWeights:
    """Views of what one server publishes in its part of the weights window; `MemoryLayout` says where it lies."""

    def __init__(self, memory_layout: MemoryLayout, server: int, memory: np.ndarray) -> None:
        """Publish in `memory`, the part of `server` in the weights window."""
        self.memory = memory
        self.states = len(memory_layout.states)
        lines = memory[: memory_layout.version_offset].view(np.int64).reshape(-1, LINE // 8)
        self.clock = lines[0, :1]
        self.rate = lines[0, 1:2].view(np.float64)
        rings = lines[1:]
        self.applied = rings[:, 0]
        """Of each ring: the position of the last message that is acknowledged."""
        self.torn = rings[:, 1]
        """Of each ring: the position of the last message that stayed torn."""
        self.asked = rings[:, 2]
        """Of each ring: how often a torn message was asked for again."""
        self.different = rings[:, 3]
        """Of each ring of another server: how many of our copies were different from its own."""
        self.arrived = rings[:, 4]
        """Of each ring: the position of the last message that has arrived."""
        self.stepped = rings[:, STEPPED]
        """Of each ring: the position of the last message that is in the published weights; copies may lack it."""
        shards = memory_layout.served[server]
        start = memory_layout.version_offset
        self.versions = memory[start : start + 8 * len(shards)].view(np.int64)
        self.regions: dict[str, dict[int, np.ndarray]] = {}
        for region in memory_layout.regions:
            self.regions[region] = self._views(region, shards, memory_layout.region_offset(server, region))

    def _views(self, region: str, shards: Sequence[Shard], offset: int) -> dict[int, np.ndarray]:
        """Return shard -> its values in `region`, which begins at byte `offset`."""
        views = {}
        for shard in shards:
            size = WIDTHS[region] * shard.size
            views[shard.index] = self.memory[offset : offset + size].view(DTYPES[region])
            offset += size
        return views

    def run(self, shards: Sequence[Shard]) -> np.ndarray:
        """Return the weights of `shards`, which lie one after the other, as one array."""
        size = 4 * sum(shard.size for shard in shards)
        offset = self.weights[shards[0].index].ctypes.data - self.memory.ctypes.data
        return self.memory[offset : offset + size].view(np.float32)

    def take_over(self, served: Iterable[Shard], earlier: Mapping[int, ShardCopy]) -> dict[int, ShardCopy]:
        """Move the copies of the shards in `served`, those in `earlier` or new ones, into this memory; return them."""
        emas = self.regions.get("ema", {})
        taken = {}
        for shard in served:
            own = earlier.get(shard.index) or ShardCopy.empty(shard, self.states, bool(emas))
            own.move(self.weights[shard.index], emas.get(shard.index, own.ema))
            taken[shard.index] = own
        return taken

    @property
    def weights(self) -> dict[int, np.ndarray]:
        """Return the weights of each shard."""
        return self.regions["weights"]


def place_copies(
    published: PublishedWeights, memory_layout: MemoryLayout, server: int, earlier: Mapping[int, ShardCopy]
) -> dict[int, ShardCopy]:
    """Return the copies of `server` in this generation, those of `earlier` or empty ones.

    Copies that are served move to the published memory, where others read them; the rest move away from there.
    """
    emas = "ema" in memory_layout.regions
    copied = memory_layout.copied[server]
    states = len(memory_layout.states)
    others = {shard.index: earlier.get(shard.index) or ShardCopy.empty(shard, states, emas) for shard in copied}
    for own in others.values():
        own.move(np.empty_like(own.weights), np.empty_like(own.ema))
    served = published.take_over(memory_layout.served[server], earlier)
    for place, own in enumerate(served.values()):
        published.versions[place] = own.version
    return served | others


def lacking_acknowledged(
    memory_layout: MemoryLayout,
    shards: Sequence[Shard],
    shard_copies: Mapping[int, ShardCopy],
    acknowledged: Mapping[int, Mapping[int, int]],
) -> list[int]:
    """Return which of `shards` lack a push that was acknowledged.

    `acknowledged`: strip -> pusher -> the last of its pushes that was acknowledged.
    """
    lacking = []
    for shard in shards:
        table = shard_copies[shard.index].table
        expected = acknowledged[memory_layout.strip_of_shard[shard.index]]
        if any(table.get(pusher, 0) // MOST_PARTS < number for pusher, number in expected.items()):
            lacking.append(shard.index)
    return lacking
