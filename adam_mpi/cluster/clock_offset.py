"""The clocks of the ranks, compared: how far rank 0's is ahead of ours, by asking it for the time and back."""

from collections.abc import Callable

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.world import World

ROUNDS = 16
SECONDS = 30.0
TAG = 77


def offset(world: World, now: Callable[[], int] = trace.now) -> tuple[int, int]:
    """Collective: (nanoseconds to add to our clock to get rank 0's, how wrong that may be).

    Rank 0 serves one rank after the other; of its answers the quickest counts, half-way between question and answer.
    """
    if world.rank:
        return _ask(world, now)
    for rank in range(1, world.comm.size):
        for _ in range(ROUNDS):
            _receive(world, rank)
            _send(world, rank, now())
    return 0, 0


def _ask(world: World, now: Callable[[], int]) -> tuple[int, int]:
    best = 0, 1 << 62
    for _ in range(ROUNDS):
        asked = now()
        _send(world, 0, 0)
        there, heard = _receive(world, 0), now()
        if heard - asked < best[1]:
            best = there - (asked + heard) // 2, heard - asked
    return best[0], best[1] // 2


def _send(world: World, rank: int, value: int) -> None:
    request = world.comm.Isend(np.array([value], np.int64), rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)


def _receive(world: World, rank: int) -> int:
    value = np.zeros(1, np.int64)
    request = world.comm.Irecv(value, rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)
    return int(value[0])
