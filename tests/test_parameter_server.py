"""`adam_mpi.ParameterServer` under any number of ranks: the last one or two serve."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import Handle, ParameterServer, significant
from adam_mpi.base.errors import Stall, UserError
from adam_mpi.parameter_server import shutdown

pytestmark = pytest.mark.mpi
COMM = MPI.COMM_WORLD
CLIENTS = max(1, COMM.size - 1)
CLIENTS_COMM = COMM.Split(int(COMM.rank < CLIENTS), COMM.rank)


def served(work, **settings):
    """Run `work(server)` on every client while the others serve; return all parameters, on clients."""
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
            server.push(np.full(7, 2, np.float32), offset=125)

    values = served(work, transport=transport)
    if values is not None:
        wanted = np.full(1000, 20.0 * CLIENTS)
        wanted[125:132] += 40 * CLIENTS
        assert np.array_equal(values, wanted)


def test_pairs_and_ranges_of_the_same_parameters_are_added():
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


def test_many_pairs_are_split_to_fit_a_slot():
    values = served(lambda server: server.push(np.ones(1000, np.float32), indices=np.arange(1000)[::-1]))
    if values is not None:
        assert np.array_equal(values, np.full(1000, float(CLIENTS)))


def test_sequential_consistency_reads_its_own_writes():
    def work(server):
        last = []
        offset = 10 * server._client.transfers.ring
        for step in range(1, 30):
            last = [server.push(np.ones(10, np.float32), offset=offset, after=last)]
            read = server.wait(server.pull(offset=offset, count=10, after=last))
            assert np.array_equal(read, np.full(10, step))

    served(work)


def test_bounded_delay_sees_all_but_the_last_few():
    delay = 3

    def work(server):
        pushes = []
        offset = 10 * server._client.transfers.ring
        for step in range(20):
            pushes.append(server.push(np.ones(10, np.float32), offset=offset, after=pushes[-delay:][:1]))
            read = server.wait(server.pull(offset=offset, count=10, after=pushes[-delay - 1 : -delay]))
            assert step + 1 - delay <= read.min() <= read.max() <= step + 1

    served(work)


def test_eventual_consistency_never_waits_and_loses_nothing():
    def work(server):
        for _ in range(200):
            server.push(np.ones(1000, np.float32))

    values = served(work)
    if values is not None:
        assert np.array_equal(values, np.full(1000, 200.0 * CLIENTS))


def test_a_filter_carries_forward_what_it_does_not_send():
    def work(server):
        for _ in range(10):
            server.push(np.full(1000, 0.25, np.float32))
        assert np.allclose(server._client.carried, 0.5)

    values = served(work, filter=significant(0.9))
    if values is not None:
        assert np.allclose(values, 2.0 * CLIENTS)


def test_gradients_are_scaled_by_the_learning_rate():
    values = served(lambda server: server.push(np.full(1000, 2, np.float32)), optimizer="descent", learning_rate=0.5)
    if values is not None:
        assert np.allclose(values, -1.0 * CLIENTS)


def test_initial_values():
    values = served(lambda server: None, initial=np.arange(1000, dtype=np.float32))
    if values is not None:
        assert np.array_equal(values, np.arange(1000))


def test_a_pull_into_an_array_of_the_caller():
    def work(server):
        mine = np.zeros(300, np.float32)
        assert server.wait(server.pull(offset=100, count=300, into=mine)) is mine
        assert np.array_equal(mine, np.arange(100, 400))

    served(work, initial=np.arange(1000, dtype=np.float32))


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match="servers = 9"):
        ParameterServer(COMM, size=10, servers=9)
    with pytest.raises(UserError, match="additive, descent, momentum, nesterov, adagrad, rmsprop, adam, adamw, ftrl"):
        ParameterServer(COMM, size=10, optimizer="sgd")

    def work(server):
        with pytest.raises(UserError, match="parameters 995 to 1004: there are 1000"):
            server.push(np.ones(10, np.float32), offset=995)
        with pytest.raises(UserError, match="there are 1000"):
            server.pull(offset=-1, count=3)
        with pytest.raises(UserError, match="into: float64 of shape .*must be 3 float32"):
            server.pull(count=3, into=np.zeros(3))

    served(work)


def test_impossible_numbers_are_named():
    for given, message in (
        ({"size": 0}, "size = 0: must be at least 1"),
        ({"copies": 0}, "copies = 0"),
        ({"threads": -1}, "threads = -1"),
        ({"shard": 0}, "shard = 0"),
        ({"seconds": 0}, "seconds = 0: must be above 0"),
        ({"initial": np.zeros(9, np.float32)}, "initial has 9 values: must have size = 10"),
        ({"initial": np.zeros(10)}, "initial values of type float64: would be rounded to float32"),
    ):
        with pytest.raises(UserError, match=message):
            ParameterServer(COMM, **{"size": 10} | given)


WRONG_CALLS = {
    "two dimensions": (lambda server: server.push(np.ones((10, 10), np.float32)), r"values of shape \(10, 10\)"),
    "float64": (lambda server: server.push(np.ones(5)), "float64: would be rounded to float32; .*astype"),
    "int64": (lambda server: server.push(np.ones(5, np.int64)), "int64: would be rounded"),
    "more values": (lambda server: server.push(np.ones(5, np.float32), indices=[1, 2]), "5 values with 2 indices"),
    "fewer values": (lambda server: server.push(np.ones(1, np.float32), indices=[1, 2]), "1 values with 2 indices"),
    "no such index": (lambda server: server.push(np.ones(2, np.float32), indices=[1, 1000]), "no parameter 1000"),
    "negative index": (lambda server: server.pull(indices=[-1, 4]), "no parameter -1; there are 1000"),
    "indices of floats": (lambda server: server.pull(indices=[0.5]), "whole numbers in one dimension"),
    "indices of two dimensions": (lambda server: server.pull(indices=[[1]]), "whole numbers in one dimension"),
    "negative count": (lambda server: server.pull(count=-5), "count = -5: must be 0 or more"),
}


def test_a_wrong_argument_changes_nothing():
    """Nothing is sent, nothing is carried, and the next push is applied."""

    def work(server):
        for name, (call, message) in WRONG_CALLS.items():
            with pytest.raises(UserError, match=message):
                call(server)
            server.wait(server.push(np.ones(1000, np.float32)))
            assert server.wait(server.pull(count=1)) is not None, name

    values = served(work)
    if values is not None:
        assert np.array_equal(values, np.full(1000, float(len(WRONG_CALLS) * CLIENTS)))


@pytest.mark.parametrize("settings", [{"copies": 1}, {"copies": 2}, {"filter": significant(0.5)}])
def test_values_of_an_index_that_occurs_twice_are_summed(settings):
    chosen, given = np.array([5, 700, 5, 5, 999]), np.array([1, 2, 4, 8, 16], np.float32)
    values = pushed_alone(lambda server: server.push(given, indices=chosen), **settings)
    if values is not None:
        assert values[[5, 700, 999]].tolist() == [13, 2, 16] and values.sum() == 31


@pytest.mark.parametrize("pairs", [False, True])
def test_a_refused_push_is_reported(pairs):
    values = np.ones(1000, np.float32)
    values[200] = np.nan

    def work(server):
        handle = server.push(values, indices=np.arange(1000) if pairs else None)
        with pytest.raises(UserError, match=r"NaN or infinity at parameter 200; nothing of 128 to \d+ was applied"):
            server.wait(handle)
        assert handle.done and "parameter 200" in handle.refused
        other = server.push(np.ones(10, np.float32))
        assert server.wait(other) is None and not other.refused

    found = served(work)
    if found is not None:
        assert np.isfinite(found).all() and found[200] == 0 and found[999] == CLIENTS and found[0] == 2 * CLIENTS


@pytest.mark.parametrize("transport", ["shared", "rma", "send"])
def test_a_pull_of_indices_takes_few_reads(transport):
    """Indices come in any order, with repetitions; scattered ones are read with what lies between them."""
    random = np.random.default_rng(0)
    chosen = np.concatenate([random.integers(0, 1000, 300), [999, 0, 0]])

    def work(server):
        handle = server.pull(indices=chosen)
        assert len(handle.requests) <= sum(map(len, server._client.transfers.runs.values()))
        assert np.array_equal(server.wait(handle), chosen)
        assert server.wait(server.pull(indices=[])).size == server.wait(server.pull(count=0)).size == 0

    served(work, initial=np.arange(1000, dtype=np.float32), transport=transport)


def test_another_thread_is_refused():
    errors = []

    def elsewhere(work):
        try:
            work()
        except UserError as error:
            errors.append(str(error))

    def work(server):
        calls = [
            server.step,
            server.pull,
            server.close,
            server.serve,
            lambda: ParameterServer(COMM, size=10),
            lambda: server.push(np.ones(3, np.float32)),
            lambda: server.wait(None),
        ]
        for call in calls:
            thread = threading.Thread(target=elsewhere, args=(call,), name="other")
            thread.start()
            thread.join()
        assert len(errors) == len(calls) and all(
            "in thread other: it belongs to the main thread" in one for one in errors
        )

    served(work)


def test_a_wait_ends_after_seconds():
    """A push waits for one that never starts: no server owes an answer, so none is named."""

    def work(server):
        never = Handle([], lambda handle: None, "nothing")
        server.seconds = 0.2
        with pytest.raises(Stall, match=r"rank \d.* has waited seconds = 0.2 for push of 10 parameters from 0"):
            server.wait(server.push(np.ones(10, np.float32), after=[never]))
        server._client.waiting.clear()
        server.seconds = 60

    served(work)


def test_a_with_block_closes():
    with ParameterServer(COMM, size=100) as server:
        if not server.serve():
            server.push(np.ones(100, np.float32))
    assert server.idle and server not in shutdown._watch.open


def test_alone_an_exception_in_a_with_block_is_only_raised():
    with pytest.raises(ValueError, match="mine"), ParameterServer(MPI.COMM_SELF, size=100) as server:
        raise ValueError("mine")
    assert server not in shutdown._watch.open


@pytest.mark.parametrize("optimizer", ["additive", "descent", "adagrad"])
def test_several_copies_give_the_result_of_one(optimizer):
    """The pushes of one client, some to the same parameters, may be folded in any way."""

    def work(server):
        last = []
        for number in range(1, 9):
            server.push(np.full(50, number, np.float32), offset=40 * number)
            pairs = np.array([20, 3, 450 + number], np.int32)
            last = [server.push(np.full(3, number, np.float32), indices=pairs, after=last)]

    one, two = (pushed_alone(work, copies=copies, optimizer=optimizer, learning_rate=0.1) for copies in (1, 2))
    if one is not None:
        assert np.abs(one).max() > 0.1 and np.allclose(one, two, atol=1e-5)


def pushed_alone(work, **settings):
    """Run `work(server)` on rank 0 while all others serve; return all parameters there, None elsewhere."""
    server = ParameterServer(COMM, 1000, max(1, COMM.size - 1), shard=128, **settings)
    result = None
    if not server.serve():
        work(server)
        server.world.wait(lambda: server.step() and server.idle, "own pushes", 60)
        result = server.wait(server.pull())
    server.close()
    return result


@pytest.mark.parametrize("optimizer", ["additive", "descent"])
def test_late_pushes_are_applied_as_they_are(optimizer):
    """Clients push many times without a pull, so that each push is late by those of all others."""

    def work(server):
        handles = [server.push(np.ones(1000, np.float32)) for _ in range(50)]
        server.wait(handles[-1])

    values = served(work, optimizer=optimizer)
    if values is not None:
        assert set(np.abs(values).tolist()) == {50.0 * CLIENTS}
