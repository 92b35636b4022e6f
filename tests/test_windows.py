"""Transfers of every kind of window, only polled, on every rank of a real MPI job of any size."""

import numpy as np
import psutil
import pytest
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.base.errors import RankFailure, UserError
from adam_mpi.cluster.shared_memory import map_file
from adam_mpi.cluster.windows import WINDOWS, SendWindow, SharedWindow, SurvivingWindow, Window, choose_kind
from adam_mpi.cluster.world import World

pytestmark = pytest.mark.mpi
SECONDS = 30
SIZE = 400_012


def pattern(rank):
    return np.arange(SIZE // 4, dtype=np.float32) * (rank + 1)


class Party:
    """A rank with its neighbors, which makes windows of one kind and serves them while it waits."""

    def __init__(self, kind):
        self.world = World(MPI.COMM_WORLD, config.load())
        self.kind = kind
        self.window = None
        self.rank = self.world.rank
        self.size = self.world.comm.size
        self.left = (self.rank - 1) % self.size
        self.right = (self.rank + 1) % self.size

    def offer(self, values):
        """Make a window from which others read `values`."""
        self.window = self.kind.to_read(self.world.comm, self.world.node, values.nbytes)
        self.window.memory[: values.nbytes] = values.view(np.uint8)
        self.meet()
        return self.window

    def take(self, size):
        """Make a window of `size` bytes into which others write."""
        self.window = self.kind.to_write(self.world.comm, self.world.node, size)
        assert self.window.memory.nbytes >= size and not self.window.memory.any()
        self.meet()  # no rank writes into memory that another has not cleared yet
        return self.window

    def wait(self, done, what):
        def served():
            self.window.sync()
            return done()

        self.world.wait(served, what, SECONDS)

    def meet(self):
        self.wait(self.world.comm.Ibarrier().Test, "all ranks")

    def part(self):
        self.meet()
        self.window.free()


@pytest.fixture(params=[*WINDOWS.values(), SurvivingWindow])
def party(request):
    return Party(request.param)


def test_get_reads_the_memory_of_another_rank(party):
    window = party.offer(pattern(party.rank))
    into = np.zeros(1000, np.float32)
    party.wait(window.get(into, party.left, 4 * 5000).Test, f"the memory of rank {party.left}")
    assert np.array_equal(into, pattern(party.left)[5000:6000])
    party.part()


def test_what_is_written_locally_is_seen_by_later_gets(party):
    into = np.zeros(1, np.int64)
    window = party.offer(np.zeros(8, np.int64))
    window.memory.view(np.int64)[3] = 41 + party.rank
    window.sync()

    def seen():
        party.wait(window.get(into, party.left, 8 * 3).Test, f"a read from rank {party.left}")
        return into[0] == 41 + party.left

    party.wait(seen, f"the value of rank {party.left}")
    party.part()


def test_many_concurrent_gets_return_the_right_pieces(party):
    window = party.offer(pattern(party.rank))
    pieces = 50
    into = np.zeros((party.size, pieces, 100), np.float32)
    requests = [
        window.get(into[rank, piece], rank, 400 * piece) for piece in range(pieces) for rank in range(party.size)
    ]
    party.wait(lambda: MPI.Request.Testall(requests), "all pieces of all ranks")
    for rank in range(party.size):
        assert np.array_equal(into[rank].ravel(), pattern(rank)[: 100 * pieces])
    party.part()


def test_a_put_that_is_only_tested_arrives_whole(party):
    window = party.take(2 * SIZE)
    data = pattern(party.rank)
    request = window.put(data, party.right, SIZE)
    arrived = window.memory[SIZE : 2 * SIZE].view(np.float32)
    party.wait(lambda: np.array_equal(arrived, pattern(party.left)), f"the put of rank {party.left}")
    party.wait(request.Test, f"the own put to rank {party.right}")
    assert not window.memory[:SIZE].any()
    party.part()


def test_ranks_of_one_node_access_each_other_directly_where_memory_is_shared(party):
    window = party.offer(pattern(party.rank))
    near = window.memory_of(party.left, 0, SIZE)
    assert (near is not None) == issubclass(party.kind, SharedWindow)
    assert near is None or np.array_equal(near.view(np.float32), pattern(party.left))
    party.part()


def test_a_window_may_be_empty_on_a_rank(party):
    window = party.take(1024 if party.rank == 0 else 0)
    data = np.full(1, party.rank + 1, np.uint8)
    request = window.put(data, 0, 64 * party.rank)
    places = [64 * rank for rank in range(party.size)] if party.rank == 0 else []
    party.wait(lambda: all(window.memory[place] == place // 64 + 1 for place in places), "the puts of all ranks")
    party.wait(request.Test, "the own put")
    party.part()


def test_the_default_kind_is_one_sided_unless_a_rank_may_be_lost():
    transport = config.load().cluster.transport
    assert choose_kind(transport, survivable=False) is SharedWindow
    assert choose_kind(transport, survivable=True) is SurvivingWindow
    assert choose_kind("rma", survivable=True) is Window and choose_kind("send", survivable=False) is SendWindow


def test_a_window_that_cannot_be_freed_releases_its_memory(party):
    size = 64 << 20
    process = psutil.Process()
    window = party.take(size)
    window.memory[:] = 1
    party.meet()
    before = process.memory_info().rss
    window.forget()
    assert before - process.memory_info().rss > 0.9 * size
    assert not window.memory[4096:-4096].any()
    party.part()


def test_a_window_that_survives_leaves_neither_mappings_nor_descriptors():
    """MPI's own windows keep both, and a file in /dev/shm, until the end of a job that has lost a rank."""
    party = Party(SurvivingWindow)
    process = psutil.Process()

    def used():
        named = [mapping for mapping in process.memory_maps(grouped=False) if "adam_mpi" in mapping.path]
        return len(named), process.num_fds()

    first = None
    for _ in range(4):
        window = party.take(SIZE)
        assert used()[0] == party.size
        kept = window.memory[100:200]
        window.forget()
        # A view keeps the memory it shows, and no other.
        assert used()[0] == 1 and not kept.any()
        del kept
        assert used()[0] == 0
        first = first or used()
        assert used() == first


def test_memory_that_cannot_be_mapped_is_reported(monkeypatch):
    with pytest.raises(RankFailure, match="process 99999999 is gone"):
        map_file(99999999, 3, 8)

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("adam_mpi.cluster.shared_memory.os.open", refuse)
    with pytest.raises(UserError, match=r'process 12 .*: Operation not permitted; set cluster.transport = "send"'):
        map_file(12, 3, 8)
