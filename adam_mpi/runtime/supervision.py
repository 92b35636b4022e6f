"""How a rank is supervised: the sentinel of its host sees it die, a watch ends it when a recovery takes too long."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from adam_mpi.cluster import failure_report, fence, sentinel
from adam_mpi.cluster.sentinel import SentinelConnection
from adam_mpi.cluster.world import World
from adam_mpi.runtime.job import Job

GRACE_SECONDS = 10.0
"""How much longer than the ranks themselves the sentinel waits for the end of a recovery."""
log = logging.getLogger(__name__)


def connect_sentinel(world: World, failure_file: Path) -> SentinelConnection:
    """Return the connection of this rank to a new sentinel of its node; collective over the node."""
    path = _start_sentinel(world, failure_file, world.node.size) if world.node.rank == 0 else None
    world.sentinel = world.node.bcast(path)
    return SentinelConnection(world.sentinel, str(world.place))


def join_sentinel(world: World, failure_file: Path) -> SentinelConnection:
    """Return the connection of a rank that joins to the sentinel of its host, or to a new one if there is none."""
    if world.sentinel is not None:
        with suppress(OSError):
            return SentinelConnection(world.sentinel, str(world.place))
    world.sentinel = _start_sentinel(world, failure_file, 1)
    return SentinelConnection(world.sentinel, str(world.place))


def _start_sentinel(world: World, failure_file: Path, ranks: int) -> str:
    """Start a sentinel for `ranks` ranks of this node; return the path at which it listens."""
    # The ranks themselves give up after `recover.seconds`, if they can.
    limits = (world.config.cluster.stopped, world.config.recover.seconds + GRACE_SECONDS)
    elsewhere = world.comm.size > ranks
    return sentinel.start(failure_file, ranks, world.survivable, *limits, elsewhere, world.place.host)


def watch_recoveries(world: World, job: Job, connection: SentinelConnection) -> fence.MembershipWatch:
    """Return the watch that ends this rank if a recovery takes longer than `recover.seconds` or excludes it."""
    seconds = job.config.recover.seconds

    def end_late() -> None:
        text = f"surviving ranks did not agree on a new membership within {seconds:g} s"
        failure_report.report(job.failure_file, f"{world.place}: {text}; the job ends; restart it with --resume")
        connection.close()
        os._exit(1)

    def end_evicted(eviction: fence.Evicted) -> None:
        log.error("%s", eviction)
        print(f"adam_mpi: {world.place} {eviction}", file=sys.stderr, flush=True)
        connection.close()
        logging.shutdown()
        os._exit(0)

    return fence.MembershipWatch(job.directory / "log", seconds, end_late, end_evicted)
