"""Replication: every copy of a shard has the same bits, whatever was pushed and whichever way it was sent."""

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.base.pools import EMPTY, BufferPool

pytestmark = pytest.mark.mpi
COMM = MPI.COMM_WORLD
SERVERS = max(1, min(3, COMM.size - 1))
CLIENTS = max(1, COMM.size - SERVERS)
SIZE = 3000


def copies(work, **settings):
    """Run `work(server, random)` on every client; return the server, and shard -> (version, weights) of each rank."""
    server = ParameterServer(COMM, SIZE, SERVERS, shard=128, copies=3, **settings)
    if not server.serve():
        work(server, np.random.default_rng(COMM.rank))
        server.world.wait(lambda: server.step() and server.idle, "own pushes", 60)
    # Acknowledged pushes are on all copies; the windows still have the memory of served shards.
    held = server.server.shard_copies if server.server is not None else {}
    mine = {index: (own.version, own.weights.copy()) for index, own in held.items()}
    server.close()
    return server, COMM.allgather(mine)


def check(found, server):
    """Check that all copies of each shard are equal."""
    for shard in server.memory_layout.shards:
        versions, weights = zip(*(held[shard.index] for held in found if shard.index in held), strict=True)
        assert len(versions) == SERVERS and len(set(versions)) == 1, (shard.index, versions)
        assert all(np.array_equal(other, weights[0]) for other in weights), f"shard {shard.index} differs"


def push_much(server, random):
    for _ in range(30):
        server.push(random.standard_normal(SIZE, np.float32))
        server.push(random.standard_normal(50, np.float32), offset=int(random.integers(SIZE - 50)))
        server.push(random.standard_normal(20, np.float32), indices=random.choice(SIZE, 20, replace=False))


@pytest.mark.parametrize("transport", ["shared", "rma", "send"])
@pytest.mark.parametrize("optimizer", ["additive", "adagrad", "descent", "adam"])
def test_all_copies_have_the_same_bits(optimizer, transport):
    server, found = copies(push_much, optimizer=optimizer, transport=transport, learning_rate=0.1)
    check(found, server)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_push_of_some_parameters_is_the_same_step_with_copies_and_without(optimizer):
    """All others stay as they are, although a record for copies has a value for every parameter."""
    settings = {"momentum": 0.9} if optimizer == "momentum" else {}
    given = {"optimizer": optimizer, "learning_rate": 0.1, "settings": settings, "shard": 128}
    results = []
    for count in (1, 2):
        with ParameterServer(COMM, 300, SERVERS, copies=count, **given) as server:
            if not server.serve() and COMM.rank == 0:
                results.append(server.wait(server.pull(after=[pushed_some(server)])))
    if results:
        assert np.array_equal(*results) and np.count_nonzero(results[0]) == 300 and np.ptp(results[0]) > 0.1


def pushed_some(server):
    """Return the last of some pushes of all parameters, of a range, and of indices."""
    last = []
    for number in range(12):
        last = [server.push(np.ones(300, np.float32), after=last)]
        last = [server.push(np.full(9, 2, np.float32), offset=125 + number, after=last)]
        last = [server.push(np.full(2, -3, np.float32), indices=[7, 299], after=last)]
    return last[0]


@pytest.mark.parametrize("transport", ["shared", "rma"])
def test_what_is_acknowledged_is_on_every_copy_once(transport):
    def work(server, random):
        for _ in range(40):
            server.push(np.ones(SIZE, np.float32))
            server.push(np.full(7, 2, np.float32), offset=125)
            server.push(np.full(3, 4, np.float32), indices=np.array([0, 129, SIZE - 1]))

    server, found = copies(work, transport=transport)
    wanted = np.full(SIZE, 40.0 * CLIENTS)
    wanted[125:132] += 80 * CLIENTS
    wanted[[0, 129, SIZE - 1]] += 160 * CLIENTS
    check(found, server)
    for shard in server.memory_layout.shards:
        for held in found:
            if shard.index in held:
                assert np.array_equal(held[shard.index][1], wanted[shard.start : shard.stop])


def test_more_folds_than_the_arena_holds_are_copied(monkeypatch):
    """With room for one fold only, most others are sent in the rings."""
    whole = BufferPool.__init__
    monkeypatch.setattr(BufferPool, "__init__", lambda self, arena=EMPTY: whole(self, arena[:1024]))
    server, found = copies(push_much)
    check(found, server)


def test_a_step_that_is_taken_back_has_not_happened_on_any_copy():
    """Its pushes are sent again with the same numbers: none may be taken for one that was applied."""
    server = ParameterServer(COMM, SIZE, SERVERS, shard=128, copies=3)
    held = server.server.shard_copies if server.server is not None else {}
    if server.server is not None:
        server.server.session.stepper.remembers = True
    if not server.serve():
        for value in range(3):
            server.wait(server.push(np.full(SIZE, value, np.float32)))
    before = {index: (own.version, dict(own.table)) for index, own in held.items()}
    for own in held.values():
        own.take_back()
    for index, own in held.items():
        version, table = before[index]
        assert own.version == version - 1
        assert any(own.table.get(pusher, 0) < number for pusher, number in table.items()), index
    server.close()
