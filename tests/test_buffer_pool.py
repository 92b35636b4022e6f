"""The pool of scratch buffers: sizes, reuse, and the arena."""

import numpy as np
import pytest

from adam_mpi.base.pools import BufferPool


@pytest.mark.parametrize(("size", "room"), [(1, 1024), (1024, 1024), (1025, 2048), (5000, 8192)])
def test_a_buffer_has_the_next_power_of_two_and_at_least_1024_values(size, room):
    assert BufferPool().take(size).size == room


def test_a_buffer_that_was_given_back_is_taken_again():
    pool = BufferPool()
    first = pool.take(2000)
    assert pool.take(2000) is not first
    pool.give_back(first)
    assert pool.take(1500) is first and pool.allocated == 2


def test_buffers_are_cut_from_the_arena_while_it_has_room():
    arena = np.zeros(3 * 1024, np.float32)
    pool = BufferPool(arena)
    buffers = [pool.take(1000), pool.take(2000), pool.take(1000)]
    assert [pool.arena_offset(buffer) for buffer in buffers] == [0, 1024, None]
    assert pool.arena_offset(buffers[1][100:]) == 1124 and pool.allocated == 1
