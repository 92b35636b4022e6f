"""Data ranks and clients under mpirun, without training: who gets which images, and how often."""

from collections import Counter

import numpy as np
import pytest

from adam_mpi.cluster.control_messages import BeginPhase, ClosePhase, StopTraining
from adam_mpi.config import load
from adam_mpi.sharding.training_state import Phase, Position
from adam_mpi.worker.gradient_buffer import BatchResult, batch_result

COUNT, BATCH, SHAPE = 203, 8, (1, 2, 6)
pytestmark = pytest.mark.mpi


@pytest.fixture
def path(tmp_path_factory):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    path = comm.bcast(str(tmp_path_factory.mktemp("set") / "set.npz") if comm.rank == 0 else None)
    if comm.rank == 0:
        images = np.arange(COUNT)[:, None, None] + np.arange(12).reshape(2, 6)
        labels = np.arange(COUNT) % 10
        train = {"train_images": images.astype(np.uint8), "train_labels": labels}
        np.savez(path, **train, test_images=images[:20].astype(np.uint8), test_labels=labels[:20])
    comm.Barrier()
    return path


class DataRanks:
    """The first `data` ranks serve, the last `replicas` ranks ask; a rank may do both."""

    def __init__(self, path, data, replicas, *settings, columns=None, resumed=None):
        from mpi4py import MPI

        from adam_mpi.cluster.control_messages import ControlChannel
        from adam_mpi.cluster.layout import Layout, Place
        from adam_mpi.cluster.world import World
        from adam_mpi.data.served_phase import ServedData
        from adam_mpi.data.server import DataServer
        from adam_mpi.data.sets import open_set
        from adam_mpi.worker.data_client import DataClient

        given = [f"data.set={path}", "data.validation=0", f"train.batch={BATCH}", *settings]
        self.world = world = World(MPI.COMM_WORLD, load(None, given))
        size = world.comm.size
        places = []
        for rank in range(size):
            replica = rank - (size - replicas)
            roles = ("data",) * (rank < data) + ("worker",) * (replica >= 0)
            places.append(Place(rank, "here", roles, *((replica, 0) if replica >= 0 else ())))
        world.layout = Layout(tuple(places), 1)
        world.place = places[world.rank]
        self.channel = ControlChannel(world.control)
        roles = world.place.roles
        self.server = None
        data_set = open_set(world.config.data)
        if "data" in roles:
            served = ServedData(data_set, world.config, replicas)
            self.server = DataServer(world, self.channel, served, resumed)
        self.client = DataClient(world, data_set.description.fields, columns) if "worker" in roles else None
        self.taken: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.values: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        """Ids and all fields of each batch."""

    def begin(self, phase):
        if self.server:
            self.server.handle(BeginPhase([phase.number, phase.part, phase.epoch]))
        if self.client:
            self.client.next_phase()
        self.run(lambda: self.client is None or self.client.phase == phase)

    def run(self, ready):
        """Steps on every rank until all are ready, at least one."""
        finished = None
        while finished is None or not finished.Test():
            if self.server:
                self.server.step()
            if self.client:
                self.client.step()
            for _ in self.channel.receive():
                pass
            if finished is None and ready():
                finished = self.world.comm.Ibarrier()

    def take(self, most=10**9, report=True):
        """Take and report what arrives; True when nothing more will come."""
        while self.client and len(self.taken) < most and (found := self.client.take_batch()) is not None:
            slot, batch = found
            self.taken.append((batch.number, batch.ids.copy(), batch.pixels.copy()))
            fields = {**batch.inputs, **batch.targets}
            self.values.append((batch.ids.copy(), {name: array.copy() for name, array in fields.items()}))
            self.client.release_slot(slot)
            if report:
                self.client.report_done(batch_result(batch, np.array([1.0, 1.0])))
        return self.client is None or self.client.drained or len(self.taken) >= most

    def all_done(self):
        return self.take() and (self.server is None or self.server.current.epoch_progress.complete)

    def gather(self):
        """Images taken, by replica, on every rank."""
        mine = np.concatenate([ids for _, ids, _ in self.taken] or [np.empty(0, int)]).tolist()
        taken = self.world.comm.allgather(mine if self.client else None)
        return [ids for ids in taken if ids is not None]

    def statistics(self):
        """Statistics of all data ranks, on every rank."""
        found = self.world.comm.allgather(self.server.stats() if self.server else None)
        return [statistics for statistics in found if statistics is not None]

    def done(self):
        """Which batches are done, on every rank."""
        mine = self.server.current.epoch_progress.done if self.server else None
        return np.logical_or.reduce([done for done in self.world.comm.allgather(mine) if done is not None])


def resumed(epoch, done):
    """What an earlier job has done of `epoch`: the batches marked in `done`."""
    from adam_mpi.data.served_phase import Resumed

    position = Position(done.size, epoch)
    position.batches[:] = done
    return Resumed(position)


def size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def layouts():
    """Those that need all ranks: together, mpiruns of 1 to 4 ranks see 1-3 data ranks with 1-4 replicas."""
    return [(data, replicas) for data in (1, 2, 3) for replicas in (1, 2, 3, 4) if max(data, replicas) == size()]


def settings_of(mode):
    return {
        "dynamic": [],
        "static": ["epoch.assignment=static"],
        "skewed": ["data.skew=dirichlet:0.3"],
        "joint": ["consistency.staleness=0"],
        "joint and skewed": ["consistency.staleness=1", "data.skew=by_class"],
    }[mode]


@pytest.mark.parametrize("mode", ["dynamic", "static", "skewed", "joint", "joint and skewed"])
def test_each_image_exactly_once(path, mode):
    for data, replicas in layouts():
        ranks = DataRanks(path, data, replicas, *settings_of(mode))
        for number, phase in enumerate((Phase(0, "train", 1), Phase(1, "test", 1), Phase(2, "train", 2))):
            ranks.taken.clear()
            ranks.begin(phase)
            ranks.run(ranks.all_done)
            wanted = 20 if phase.part == "test" else COUNT
            counts = Counter(image for ids in ranks.gather() for image in ids)
            assert counts == dict.fromkeys(range(wanted), 1), (mode, data, replicas, number)
            assert sum(statistics["finished"] for statistics in ranks.statistics()) == wanted
            assert all(statistics["done"] and not statistics["skipped"] for statistics in ranks.statistics())


def test_shares_do_not_depend_on_the_number_of_data_ranks(path):
    """Static shares, joint batches and the pixels in them are the same however many data ranks there are."""
    for mode in ("static", "joint", "joint and skewed"):
        found = []
        for data in range(1, min(size(), 3) + 1):
            ranks = DataRanks(path, data, min(size(), 2), *settings_of(mode), "data.transform.shift=2")
            ranks.begin(Phase(0, "train", 3))
            ranks.run(ranks.all_done)
            mine = sorted((number, ids.tolist(), pixels.tolist()) for number, ids, pixels in ranks.taken)
            found.append(ranks.world.comm.allgather(mine)[-1])
        assert all(one == found[0] for one in found)


def test_quorum_ends_an_epoch_early_and_nothing_comes_twice(path):
    """The last replica stops after its first batches; the others finish; what is left is skipped and counted."""
    if size() < 2:
        pytest.skip("needs a slow replica and another")
    for data in range(1, min(size(), 3) + 1):
        ranks = DataRanks(path, data, min(size(), 4), "epoch.assignment=static", "epoch.quorum=0.5", "data.prefetch=2")
        ranks.begin(Phase(0, "train", 1))
        slow = ranks.client is not None and ranks.world.rank == size() - 1
        ranks.run(lambda ranks=ranks, slow=slow: ranks.take(1 if slow else 10**9))
        if ranks.server:
            ranks.server.handle(ClosePhase())
        # The slow one asks for more only when nothing is handed out any more.
        ranks.world.comm.Barrier()
        ranks.run(ranks.all_done)
        counts = Counter(image for ids in ranks.gather() for image in ids)
        skipped = sum(statistics["skipped"] for statistics in ranks.statistics())
        assert max(counts.values()) == 1 and skipped > 0
        assert len(counts) + skipped == COUNT
        assert sum(statistics["finished"] for statistics in ranks.statistics()) == len(counts)
        assert all(statistics["done"] for statistics in ranks.statistics())


@pytest.mark.parametrize("mode", ["dynamic", "static", "skewed"])
def test_a_resumed_epoch_serves_what_is_not_acknowledged(path, mode):
    for data, replicas in layouts():
        first = DataRanks(path, data, replicas, *settings_of(mode))
        first.begin(Phase(0, "train", 2))
        first.run(lambda ranks=first: ranks.take(2))
        # What was handed out and not reported is lost with the first ranks.
        reported = [image for ids in first.gather() for image in ids]
        while sum(statistics["finished"] for statistics in first.statistics()) < len(reported):
            first.run(lambda: True)
        done = first.done()
        assert 0 < done.sum() < len(done)

        other = data if mode == "skewed" else max(1, data - 1)
        second = DataRanks(path, other, replicas, *settings_of(mode), resumed=resumed(2, done))
        second.begin(Phase(0, "train", 2))
        second.run(second.all_done)
        counts = Counter(image for ids in second.gather() for image in ids)
        assert counts + Counter(reported) == dict.fromkeys(range(COUNT), 1)
        assert second.done().all()


def test_a_report_without_images_may_come_after_the_end_of_its_phase(path):
    ranks = DataRanks(path, 1, size())
    for number in (0, 1):
        ranks.begin(Phase(number, "train", number + 1))
        if number and ranks.client:
            ranks.client.report_done(BatchResult(0, 0, 0, np.zeros(2), 1))
        ranks.run(ranks.all_done)
    assert sum(statistics["finished"] for statistics in ranks.statistics()) == COUNT


def test_a_resumed_joint_epoch_continues_with_the_next_clock(path):
    done = np.zeros(-(-COUNT // BATCH), bool)
    done[:20] = True
    ranks = DataRanks(path, 1, size(), "consistency.staleness=0", resumed=resumed(1, done))
    ranks.begin(Phase(0, "train", 1))
    ranks.run(ranks.all_done)
    numbers = sorted({number for number, _, _ in ranks.taken})
    assert numbers == list(range(20, len(done)))
    assert sum(statistics["finished"] for statistics in ranks.statistics()) == COUNT - 20 * BATCH


def test_only_the_columns_asked_for_are_sent(path):
    for columns in ((0, 2), (1, 5), (5, 6)):
        for mode in ("dynamic", "joint"):
            ranks = DataRanks(path, 1, size(), *settings_of(mode), columns=columns)
            ranks.begin(Phase(0, "train", 1))
            ranks.run(ranks.all_done)
            source = ranks.server.served.data if ranks.server else None
            everything = ranks.world.comm.bcast(source and source.read("train", np.arange(COUNT))[0])
            for _, ids, pixels in ranks.taken:
                assert pixels.shape == (len(ids), 1, 2, columns[1] - columns[0])
                np.testing.assert_array_equal(pixels, everything[ids][..., columns[0] : columns[1]])


def test_bad_images_are_left_out_of_their_batches(path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        features = np.ones((COUNT, 12), np.float32)
        features[::5] = np.nan
        np.savez(
            path,
            train_images=features,
            train_labels=np.arange(COUNT) % 3,
            test_images=features[1:3],
            test_labels=np.arange(2),
        )
    comm.Barrier()
    for mode in ("dynamic", "joint"):
        ranks = DataRanks(path, 1, size(), *settings_of(mode), "data.on_bad=skip")
        ranks.client.shape = (12, 1, 1)
        ranks.client.columns = (0, 1)
        for epoch in (1, 2):
            ranks.taken.clear()
            ranks.begin(Phase(epoch, "train", epoch))
            ranks.run(ranks.all_done)
            images = [image for ids in ranks.gather() for image in ids]
            statistics = ranks.statistics()[0]
            assert len(images) == len(set(images)) == COUNT - len(statistics["bad"]) == statistics["finished"]
            assert len(statistics["bad"]) == len(range(0, COUNT, 5)) and statistics["done"]
            assert all(pixels.dtype == np.float32 and (pixels == 1).all() for _, _, pixels in ranks.taken)


def test_a_job_stopped_inside_an_epoch_leaves_all_replicas_at_the_same_clock(path):
    for data, replicas in layouts():
        ranks = DataRanks(path, data, replicas, "consistency.staleness=0", "data.prefetch=4")
        ranks.begin(Phase(0, "train", 1))
        # Replicas are not equally far when the data ranks receive the stop, one after the other.
        ranks.run(lambda ranks=ranks: ranks.take(2 + ranks.world.rank))
        if ranks.server:
            ranks.server.handle(StopTraining())
        # A data rank that is late to see that all are ready would hand out the whole epoch before it receives it.
        ranks.world.comm.Barrier()
        ranks.run(ranks.take)
        numbers = ranks.world.comm.allgather([number for number, _, _ in ranks.taken] if ranks.client else None)
        taken = [found for found in numbers if found is not None]
        assert all(found == list(range(len(taken[0]))) for found in taken) and 2 <= len(taken[0]) < 26
        if ranks.client:
            ranks.client.next_phase()
        ranks.run(lambda ranks=ranks: ranks.client is None or ranks.client.stopped)


def test_a_late_ask_gets_nothing_of_the_next_phase(path):
    from adam_mpi.sharding import message_formats as batch

    ranks = DataRanks(path, 1, size())
    ranks.begin(Phase(0, "train", 1))
    ranks.run(ranks.all_done)
    if ranks.server:
        ranks.server.begin(Phase(1, "test", 1))
    if ranks.client:
        # As if this ask of the first phase had been under way all the time.
        slot = ranks.client.free.pop()
        ranks.client._send_ask(slot, 0, [batch.ANY, 0, 0, 0, 0, 1, 0, 6])
        ranks.client.asking.append(slot)
    ranks.run(lambda: ranks.client is None or not ranks.client.asking)
    assert ranks.client is None or not ranks.client.arrived


def test_an_ask_may_come_before_its_phase(path):
    ranks = DataRanks(path, 1, size(), "consistency.staleness=0")
    if ranks.client:
        ranks.client.phase = Phase(0, "train", 1)
        ranks.client.shares = 26
        ranks.client.exhausted = set()
        ranks.client._allocate()
    ranks.run(lambda: ranks.server is None or len(ranks.server.asks) > 0)
    if ranks.server:
        ranks.server.begin(Phase(0, "train", 1))
    ranks.run(ranks.all_done)
    assert sum(statistics["finished"] for statistics in ranks.statistics()) == COUNT


def test_named_inputs_and_targets_arrive_with_their_images(path):
    from mpi4py import MPI

    arrays = {
        "x": np.arange(COUNT * 3).reshape(COUNT, 3).astype(np.float16),
        "tokens": np.arange(COUNT * 2).reshape(COUNT, 2),
        "y": np.arange(COUNT * 5).reshape(COUNT, 5) / 7,
        "marks": np.arange(COUNT * 3).reshape(COUNT, 3) % 2 == 1,
    }
    named = path.replace("set.npz", "named.npz")
    if MPI.COMM_WORLD.rank == 0:
        np.savez(named, **{f"{part}_{name}": array for part in ("train", "test") for name, array in arrays.items()})
    MPI.COMM_WORLD.Barrier()
    ranks = DataRanks(named, 1, size(), 'data.inputs=["tokens","x"]', 'data.targets=["y","marks"]')
    ranks.begin(Phase(0, "train", 1))
    ranks.run(ranks.all_done)
    assert Counter(image for ids in ranks.gather() for image in ids) == dict.fromkeys(range(COUNT), 1)
    if not ranks.values:
        return
    names = list(ranks.values[0][1])
    assert names == ["tokens", "x", "y", "marks"]
    # The order in which a set is split into parts.
    order = np.random.RandomState(2014).permutation(COUNT)
    for ids, fields in ranks.values:
        for name, values in fields.items():
            np.testing.assert_array_equal(values, arrays[name][order[ids]].astype(values.dtype))
