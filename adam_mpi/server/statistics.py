"""The statistics of a server, which the coordinator collects."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.server.session import ServerSession
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_format import MOST_PARTS
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard

COUNTS = ("applied", "duplicates", "refused", "torn", "too_stale", "steps", "folded")


def collect(session: ServerSession, busy: float) -> dict[str, Any]:
    """Return the statistics of a server in `session`; `busy`: seconds in which it applied pushes."""
    progress = session.progress
    queue = session.push_queue
    counts = progress.counts + queue.counts
    owners = session.memory_layout.owners
    return {
        "role": "server",
        "generation": session.world.generation,
        "tables": last_pushes(session.memory_layout, session.shards, session.shard_copies, session.began),
        "strips": sorted({owners[shard.index] for shard in session.shards}),
        "dropped": queue.counts["duplicates"],
        "resumed_at": session.clocks.resumed_at,
        "rebuilt": session.replicator.rebuilt if session.replicator else 0,
        "rank": session.world.place.member,
        "cpu": time.process_time(),
        **{key: counts[key] for key in COUNTS},
        "busy": busy,
        "queue": len(session.staged),
        "bytes": counts["bytes"],
        "rate": progress.rate,
        "clocks": dict(zip(queue.members, session.clocks.clocks, strict=True)),
        "leads": dict(progress.leads),
        "delays": dict(progress.delays),
        "shards": len(session.shards),
        "parameters": sum(shard.size for shard in session.shards),
        "store": _store_statistics(session.store),
    }


def last_pushes(
    memory_layout: MemoryLayout,
    shards: Sequence[Shard],
    shard_copies: Mapping[int, ShardCopy],
    acknowledged: Mapping[int, Mapping[int, int]],
) -> list[tuple[str, int, int]]:
    """Return (pusher, strip, the last of its pushes that every one of `shards` of that strip has).

    There is a row for every pusher in `acknowledged`, and for every earlier one with a push in one of the shards.
    """
    tables: dict[int, list[dict[int, int]]] = {}
    for shard in shards:
        tables.setdefault(memory_layout.owners[shard.index], []).append(shard_copies[shard.index].table)
    return [
        (str(pusher), strip, min(table.get(pusher, 0) for table in held) // MOST_PARTS)
        for strip, held in tables.items()
        for pusher in sorted(acknowledged.get(strip, {}).keys() | {pusher for table in held for pusher in table})
    ]


def _store_statistics(store: WriteBehind | None) -> dict[str, Any] | None:
    """Return the statistics of `store`, if there is one."""
    if store is None:
        return None
    return {"behind": round(store.lag, 3), "bytes": store.written, "whole": store.complete}
