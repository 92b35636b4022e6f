"""The offset between the clock of this rank and that of rank 0, measured by asking rank 0 for the time."""

from collections.abc import Callable

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.world import World

ROUNDS = 16
SECONDS = 30.0
"""Seconds after which a rank that does not answer counts as lost."""
TAG = 77


def offset(world: World, now: Callable[[], int] = trace.now) -> tuple[int, int]:
    """Return the nanoseconds to add to this rank's clock `now` to get rank 0's, and their maximum error (collective).

    Rank 0 serves one rank after the other. The quickest of its answers counts: it is taken to have been made half-way
    between question and answer.
    """
    if world.rank:
        return _ask(world, now)
    for rank in range(1, world.comm.size):
        for _ in range(ROUNDS):
            _receive(world, rank)
            _send(world, rank, now())
    return 0, 0


def _ask(world: World, now: Callable[[], int]) -> tuple[int, int]:
    """Return the offset to rank 0's clock and its maximum error from the quickest of several questions."""
    offset = 0
    shortest = 1 << 62
    for _ in range(ROUNDS):
        asked = now()
        _send(world, 0, 0)
        there = _receive(world, 0)
        answered = now()
        if answered - asked < shortest:
            offset = there - (asked + answered) // 2
            shortest = answered - asked
    return offset, shortest // 2


def _send(world: World, rank: int, value: int) -> None:
    request = world.comm.Isend(np.array([value], np.int64), rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)


def _receive(world: World, rank: int) -> int:
    value = np.zeros(1, np.int64)
    request = world.comm.Irecv(value, rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)
    return int(value[0])
