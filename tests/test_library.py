"""The parameter server as a library, under any number of ranks: the last one or two serve."""

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.errors import UserError
from adam_mpi.library import significant

pytestmark = pytest.mark.mpi
COMM = MPI.COMM_WORLD
CLIENTS = max(1, COMM.size - 1)
CLIENTS_COMM = COMM.Split(int(COMM.rank < CLIENTS), COMM.rank)


def served(work, **settings):
    """Run `work(server)` on every client while the others serve; then what all parameters are, on every client."""
    server = ParameterServer(COMM, size=1000, shard=128, **settings)
    result = None
    if not server.serve():
        work(server)
        server.world.wait(lambda: server.step() and server.idle, "own pushes", 60)
        meet = CLIENTS_COMM.Ibarrier()
        server.world.wait(lambda: server.step() and meet.Test(), "the other clients", 60)
        result = server.wait(server.pull())
    server.close()
    return result


@pytest.mark.parametrize("transport", ["shared", "rma", "send"])
def test_every_push_is_added_once(transport):
    def work(server):
        for _ in range(20):
            server.push(np.ones(1000, np.float32))
            server.push(np.full(7, 2, np.float32), first=125)

    values = served(work, transport=transport)
    if values is not None:
        wanted = np.full(1000, 20.0 * CLIENTS)
        wanted[125:132] += 40 * CLIENTS
        assert np.array_equal(values, wanted)


def test_pairs_and_ranges_meet_in_the_same_parameters():
    chosen = np.array([999, 3, 500, 127, 128])

    def work(server):
        server.push(np.arange(5, dtype=np.float32), indices=chosen)
        handle = server.pull(indices=np.array([3, 127, 128, 500, 999]), after=[server.push(np.ones(1000, np.float32))])
        assert server.wait(handle).min() >= 1

    values = served(work)
    if values is not None:
        wanted = np.full(1000, float(CLIENTS))
        wanted[chosen] += np.arange(5) * CLIENTS
        assert np.array_equal(values, wanted)


def test_many_pairs_are_cut_to_fit_a_slot():
    values = served(lambda server: server.push(np.ones(1000, np.float32), indices=np.arange(1000)[::-1]))
    if values is not None:
        assert np.array_equal(values, np.full(1000, float(CLIENTS)))


def test_sequential_consistency_reads_its_own_writes():
    def work(server):
        last = []
        for step in range(1, 30):
            last = [server.push(np.ones(10, np.float32), first=10 * server.ring, after=last)]
            read = server.wait(server.pull(first=10 * server.ring, count=10, after=last))
            assert np.array_equal(read, np.full(10, step))

    served(work)


def test_bounded_delay_sees_all_but_the_last_few():
    delay = 3

    def work(server):
        pushes = []
        for step in range(20):
            pushes.append(server.push(np.ones(10, np.float32), first=10 * server.ring, after=pushes[-delay:][:1]))
            read = server.wait(server.pull(first=10 * server.ring, count=10, after=pushes[-delay - 1 : -delay]))
            assert step + 1 - delay <= read.min() <= read.max() <= step + 1

    served(work)


def test_eventual_consistency_never_waits_and_loses_nothing():
    def work(server):
        for _ in range(200):
            server.push(np.ones(1000, np.float32))

    values = served(work)
    if values is not None:
        assert np.array_equal(values, np.full(1000, 200.0 * CLIENTS))


def test_a_filter_carries_forward_what_it_keeps_back():
    def work(server):
        for _ in range(10):
            server.push(np.full(1000, 0.25, np.float32))
        assert np.allclose(server.carried, 0.5)

    values = served(work, keep=significant(0.9))
    if values is not None:
        assert np.allclose(values, 2.0 * CLIENTS)


def test_gradients_are_stepped_on_by_the_rate():
    values = served(lambda server: server.push(np.full(1000, 2, np.float32)), optimiser="descent", rate=0.5)
    if values is not None:
        assert np.allclose(values, -1.0 * CLIENTS)


def test_first_values_are_given():
    values = served(lambda server: None, initial=np.arange(1000, dtype=np.float32))
    if values is not None:
        assert np.array_equal(values, np.arange(1000))


def test_a_pull_into_memory_of_the_caller():
    def work(server):
        mine = np.zeros(300, np.float32)
        assert server.wait(server.pull(first=100, count=300, into=mine)) is mine
        assert np.array_equal(mine, np.arange(100, 400))

    served(work, initial=np.arange(1000, dtype=np.float32))


def test_mistakes_are_named():
    with pytest.raises(UserError, match="servers = 9"):
        ParameterServer(COMM, size=10, servers=9)
    with pytest.raises(UserError, match="additive, adagrad, descent"):
        ParameterServer(COMM, size=10, optimiser="sgd")

    def work(server):
        with pytest.raises(UserError, match="parameters 995 to 1004: there are 1000"):
            server.push(np.ones(10, np.float32), first=995)
        with pytest.raises(UserError, match="there are 1000"):
            server.pull(first=-1, count=3)
        with pytest.raises(UserError, match="into: float64 of shape .*must be 3 float32"):
            server.pull(count=3, into=np.zeros(3))

    served(work)
