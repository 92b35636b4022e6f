"""One-sided transfers, only ever polled, on every rank of a real MPI job of any size."""

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World

pytestmark = pytest.mark.mpi
SECONDS = 30


@pytest.fixture
def world():
    world = World(MPI.COMM_WORLD, config.load())
    yield world
    world.finish()


def pattern(rank, size=100_003):
    return np.arange(size, dtype=np.float32) * (rank + 1)


def neighbours(world):
    return (world.rank - 1) % world.comm.size, (world.rank + 1) % world.comm.size


def test_get_reads_the_memory_of_another_rank(world):
    window = Window.over(world.comm, pattern(world.rank).view(np.uint8))
    left, _ = neighbours(world)
    into = np.zeros(1000, np.float32)
    world.wait(window.get(into, left, 4 * 5000).Test, f"the memory of rank {left}", SECONDS)
    assert np.array_equal(into, pattern(left)[5000:6000])
    world.finish()
    window.free()


def test_what_is_written_locally_is_seen_by_later_gets(world):
    memory = np.zeros(8, np.int64)
    window = Window.over(world.comm, memory.view(np.uint8))
    left, _ = neighbours(world)
    into = np.zeros(1, np.int64)

    def seen():
        world.wait(window.get(into, left, 8 * 3).Test, f"a read from rank {left}", SECONDS)
        return into[0] == 41 + left

    memory[3] = 41 + world.rank
    window.sync()
    world.wait(seen, f"the word of rank {left}", SECONDS)
    world.finish()
    window.free()


def test_a_put_that_is_only_tested_arrives_whole(world):
    size = pattern(0).nbytes
    window = Window.allocate(world.comm, 2 * size)
    assert window.memory.nbytes == 2 * size and not window.memory.any()
    left, right = neighbours(world)
    world.finish()  # memory is cleared before it is written
    data = pattern(world.rank)
    request = window.put(data, right, size)
    arrived = window.memory[size:].view(np.float32)

    def whole():
        window.sync()
        return np.array_equal(arrived, pattern(left))

    world.wait(whole, f"the put of rank {left}", SECONDS)
    world.wait(request.Test, f"the own put to rank {right}", SECONDS)
    assert not window.memory[:size].any()
    world.finish()
    window.free()


def test_memory_outlives_a_window_over_it(world):
    memory = pattern(world.rank)
    for _ in range(2):
        window = Window.over(world.comm, memory.view(np.uint8))
        left, _ = neighbours(world)
        into = np.zeros_like(memory)
        world.wait(window.get(into, left, 0).Test, f"the memory of rank {left}", SECONDS)
        assert np.array_equal(into, pattern(left))
        world.finish()
        window.free()
    assert np.array_equal(memory, pattern(world.rank))


def test_a_rank_may_offer_nothing(world):
    window = Window.allocate(world.comm, 1024 if world.rank == 0 else 0)
    assert window.memory.size == (1024 if world.rank == 0 else 0)
    world.finish()
    data = np.full(1, world.rank + 1, np.uint8)
    request = window.put(data, 0, 64 * world.rank)

    def all_there():
        window.sync()
        return world.rank != 0 or all(window.memory[64 * rank] == rank + 1 for rank in range(world.comm.size))

    world.wait(all_there, "the puts of all ranks", SECONDS)
    world.wait(request.Test, "the own put", SECONDS)
    world.finish()
    window.free()
