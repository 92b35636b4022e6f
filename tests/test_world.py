"""The world of one generation, on every rank of a real MPI job of any size."""

import time
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.base.errors import RankFailure, UserError
from adam_mpi.cluster.world import Interrupted, World
from adam_mpi.runtime.rank_runtime import RankRuntime

pytestmark = pytest.mark.mpi


@pytest.fixture
def world():
    return World(MPI.COMM_WORLD, config.load())


def test_all_ranks_have_the_same_layout(world):
    assert all(layout == world.layout for layout in world.comm.allgather(world.layout))
    assert world.place.rank == world.rank == MPI.COMM_WORLD.rank
    assert len(world.layout.places) == len(world.hosts) == MPI.COMM_WORLD.size


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_every_replica_has_a_communicator_of_its_strips(partitions):
    if partitions > MPI.COMM_WORLD.size:
        with pytest.raises(UserError, match=f"layout.partitions = {partitions}"):
            World(MPI.COMM_WORLD, config.load(None, [f"layout.partitions={partitions}"]))
        return
    world = World(MPI.COMM_WORLD, config.load(None, [f"layout.partitions={partitions}"]))
    assert (world.replica is None) == (world.place.replica is None)
    if world.replica is not None:
        places = [world.layout.places[rank] for rank in world.replica.allgather(world.rank)]
        assert [place.strip for place in places] == list(range(partitions))
        assert {place.replica for place in places} == {world.place.replica}


def test_ranks_of_a_node_are_together(world):
    here = [place.rank for place in world.layout.places if place.host == world.place.host]
    assert world.node.allgather(world.rank) == here


def test_each_purpose_has_a_queue_of_its_own(world):
    to = (world.rank + 1) % world.comm.size
    source = (world.rank - 1) % world.comm.size
    sent = [comm.isend(name, to, 7) for name, comm in (("control", world.control), ("traffic", world.traffic))]
    assert world.traffic.recv(source=source, tag=7) == "traffic"
    assert world.control.recv(source=source, tag=7) == "control"
    MPI.Request.waitall(sent)


def test_a_healthy_world_passes_its_check_and_finishes(world):
    for _ in range(100):
        world.check()
    world.finish()


def test_a_noted_signal_ends_the_next_check(world):
    world.signal = 15
    with pytest.raises(Interrupted, match="SIGTERM"):
        world.check()


def test_a_wait_in_vain_names_the_rank_and_what_it_waited_for(world):
    with pytest.raises(RankFailure, match=rf"^rank {world.rank}, .* waited 0.05 s for a message that is never sent$"):
        world.wait(lambda: False, "a message that is never sent", 0.05)


def test_a_rank_rests_until_a_thread_of_its_worker_is_done():
    slept = []
    worker = SimpleNamespace(rest=lambda seconds: slept.append(("thread", seconds)) or busy)
    runtime = RankRuntime(None, {"data": None, "worker": worker}, None, [])
    busy = True
    runtime.rest(0.001)
    busy = False
    began = time.monotonic()
    runtime.rest(0.01)
    assert slept == [("thread", 0.001), ("thread", 0.01)] and time.monotonic() - began >= 0.01
