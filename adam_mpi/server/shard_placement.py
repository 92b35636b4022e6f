"""The shard copies of a server when a generation begins: where their memory lies, and whether they are complete."""

from collections.abc import Mapping, Sequence

import numpy as np

from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_format import MOST_PARTS
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.published_weights import PublishedWeights


def place_copies(
    published: PublishedWeights, memory_layout: MemoryLayout, server: int, earlier: Mapping[int, ShardCopy]
) -> dict[int, ShardCopy]:
    """Return the copies of `server` in this generation, those of `earlier` or empty ones.

    Copies that are served move to the published memory, where others read them; the rest move away from there.
    """
    emas = "ema" in memory_layout.regions
    copied = memory_layout.copied[server]
    others = {shard.index: earlier.get(shard.index) or ShardCopy.empty(shard, emas) for shard in copied}
    for own in others.values():
        own.move(np.empty_like(own.weights), np.empty_like(own.ema))
    served = published.take_over(memory_layout.held[server], earlier)
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
        expected = acknowledged[memory_layout.owners[shard.index]]
        if any(table.get(pusher, 0) // MOST_PARTS < number for pusher, number in expected.items()):
            lacking.append(shard.index)
    return lacking
