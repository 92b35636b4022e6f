"""Snapshots on disk: whole or not there, read by anybody, inspected and merged; and the cut that they are made at."""

import errno
import json
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from house import House, additive
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import LostRun
from adam_mpi.checkpoint import model_file, owner, snapshot
from adam_mpi.checkpoint import resume as newest
from adam_mpi.checkpoint.store_file import Piece, Stored
from adam_mpi.checkpoint.stores import Attempt, Seen
from adam_mpi.cli import main
from adam_mpi.config import load
from adam_mpi.model.parameters import Tensor, views
from adam_mpi.runtime.checkpoint_manager import SnapshotCoordinator
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.shards import cut

TENSORS = (
    Tensor("conv1/weight", "conv1", (4, 3, 5, 5), 0, 300),
    Tensor("conv1/bias", "conv1", (4,), 300, 4),
    Tensor("dense1/weight", "dense1", (7, 31), 304, 217),
    Tensor("dense1/bias", "dense1", (7,), 521, 7),
)
SIZE = 528
FLAT = {"weights": np.arange(SIZE, dtype=np.float32), "state": -np.arange(SIZE, dtype=np.float32)}
TOLD = {
    "epochs": 2,
    "best": 0.5,
    "best_epoch": 1,
    "replicas": 2,
    "order": {"train.batch": 32},
    "config": "[run]\n",
    "kernels": None,
    "inputs": "{}",
}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_range_in_order(shape, data):
    array = np.arange(np.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, array.size - 1))
    last = data.draw(st.integers(first + 1, array.size))
    pieces = list(model_file.boxes(shape, first, last))
    found = [array[box].ravel() for box, _, _ in pieces]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(first, last))
    for values, (_, low, high) in zip(found, pieces, strict=True):
        assert values[0] == low and values[-1] == high - 1
    assert len(pieces) <= 2 * len(shape) - 1


class Servers:
    """Stands in for servers and their post: two that write their shards when they are told to cut."""

    def __init__(self, folder, keep=2):
        self.sent, self.done = [], 0
        self.snapshots = SnapshotCoordinator(
            self, (3, 5), folder, keep, False, TENSORS, lambda: TOLD | {"epochs": self.done}
        )

    def send(self, message, to):
        self.sent.append((to, message))

    def take(self, epoch, batches, done, fail=False):
        """A snapshot in this epoch after so many of its batches."""
        self.done = done
        self.snapshots.order()
        for to, message in self.orders():
            assert message["order"] == "hold"
            self.snapshots.hear(to, {"kind": "held", "role": "server", "clocks": [to, 9 - to]})
        shards = cut(TENSORS, 50)
        for to, message in self.orders():
            assert message["order"] == "cut" and message["clocks"] == [5, 6]
            position = Position(40, epoch, 32 * batches, 5)
            position.batches[:batches] = True
            own = [shard for shard in shards if shard.index % 2 == to // 5]
            state = {part: np.concatenate([v[s.start : s.stop] for s in own]) for part, v in FLAT.items()}
            path = conductor_path(message, to)
            snapshot.write(path, own, state, np.arange(len(own)), position.pack())
            word = {"epoch": epoch, "batches": batches, "images": 32 * batches, "clock": 5}
            answer = {"error": "no room"} if fail and to == 5 else {"file": path.name, "size": path.stat().st_size}
            self.snapshots.hear(to, {"kind": "stored", "role": "server", **word, **answer})
        self.settle()

    def settle(self):
        """Until the snapshot has its name, or cannot have it."""
        limit = time.monotonic() + 20
        while self.snapshots.busy:
            assert time.monotonic() < limit, "the snapshot was not sealed in 20 s"
            self.snapshots.step()
            time.sleep(1e-3)

    def orders(self):
        orders, self.sent = self.sent, []
        return orders


def conductor_path(message, server):
    return Path(message["folder"]) / snapshot.file_name(server)


@pytest.fixture
def taken(tmp_path):
    servers = Servers(tmp_path / "snapshots")
    servers.take(3, 7, 2)
    return tmp_path / "snapshots" / "epoch-0002-batch-000007"


def test_a_snapshot_opens_in_h5py_with_layers_by_name(taken, tmp_path):
    moved = tmp_path / "moved"
    shutil.move(taken, moved)
    with h5py.File(moved / "model.h5") as file:
        for group, flat in (("", FLAT["weights"]), ("optimizer/", FLAT["state"])):
            for name, view in views(flat, TENSORS).items():
                np.testing.assert_array_equal(file[group + name], view)
        assert file.attrs["epochs"] == 2 and file.attrs["config"] == "[run]\n"
    assert snapshot.check(moved).count == 7


def test_merged_is_one_plain_file(taken, tmp_path, capsys):
    assert main(["merge", str(taken), "-o", str(tmp_path / "one.h5")]) == 0
    shutil.rmtree(taken)
    np.testing.assert_array_equal(model_file.read(tmp_path / "one.h5", TENSORS), FLAT["weights"])
    with h5py.File(tmp_path / "one.h5") as file:
        assert not file["dense1/weight"].is_virtual and file["optimizer/dense1/weight"].shape == (7, 31)
    assert main(["inspect", str(tmp_path / "one.h5")]) == 0
    assert "dense1/weight" in capsys.readouterr().out


def test_inspect_tells_what_is_in_it_and_that_it_is_whole(taken, capsys):
    assert main(["inspect", str(taken)]) == 0
    said = capsys.readouterr().out
    for word in ("format 3", "2 epochs and 7 batches, 224 images", "528 parameters", "7x31", "whole: every shard"):
        assert word in said


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "format", "mixed"])
def test_what_is_not_whole_is_told_and_not_gone_on_from(taken, damage, capsys):
    path = taken / "server-00005.h5"
    if damage == "flip":
        with h5py.File(path, "r+") as file:
            file["state"][3] = 7
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "missing":
        path.unlink()
    elif damage == "format":
        told = json.loads((taken / "snapshot.json").read_text())
        (taken / "snapshot.json").write_text(json.dumps(told | {"format": 1}))
    else:
        with h5py.File(path, "r+") as file:
            file["position"][16] += 1
    assert main(["inspect", str(taken)]) == 1
    assert "NOT WHOLE" in capsys.readouterr().out

    found, passed_over = newest.find(load(None, ["consistency.staleness=0"]), taken.parent.parent)
    assert found is None and len(passed_over) == 1


def test_the_newest_are_kept_and_names_say_what_is_trained(tmp_path):
    servers = Servers(tmp_path)
    for epoch, batches, done in ((1, 5, 0), (1, 20, 1), (2, 3, 1), (2, 20, 2)):
        servers.take(epoch, batches, done)
        assert not servers.snapshots.busy and not servers.snapshots.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001-batch-000003", "epoch-0002"]
    # Whoever goes on from an earlier one goes another way: what was later is not to be found again.
    again = Servers(tmp_path)
    again.take(2, 9, 1)
    assert [path.name for path in tmp_path.iterdir()] != [] and not (tmp_path / "epoch-0002").exists()


def test_what_else_lies_beside_snapshots_is_neither_gone_on_from_nor_removed(tmp_path):
    folder = tmp_path / "snapshots"
    servers = Servers(folder)
    servers.take(1, 5, 0)
    servers.take(2, 3, 1)
    first, last = snapshot.own(folder)[::-1]
    others = ["keep-epoch-0001", "paper-best", "epoch-9999", "epoch-0001-mine", ".mine"]
    for name in others:
        shutil.copytree(first, folder / name)
    (folder / "zz-notes.txt").write_text("mine")
    assert snapshot.own(folder) == [last, first]
    found, passed_over = newest.find(load(None, ["consistency.staleness=0"]), tmp_path)
    assert found.path == first and passed_over == []
    again = Servers(folder)
    for batches in (6, 7, 8):
        again.take(2, batches, 1)
    assert {path.name for path in folder.iterdir()} == {
        *others,
        "zz-notes.txt",
        "epoch-0001-batch-000007",
        "epoch-0001-batch-000008",
    }


def test_snapshots_are_in_the_order_of_what_is_trained_however_long_their_names_are(tmp_path):
    told = [(9999, 0, 5), (10000, 0, 6), (10000, 999999, 7), (10000, 1000000, 8), (123456, 0, 9)]
    for epochs, batches, images in told[::-1]:
        path = tmp_path / snapshot.name(epochs, batches)
        path.mkdir()
        manifest = {"format": 3, "name": path.name, "images": images, "epochs": epochs, "batches": batches}
        (path / "snapshot.json").write_text(json.dumps(manifest))
    assert [path.name for path in snapshot.own(tmp_path)] == [snapshot.name(*done[:2]) for done in told]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["before", "between", "whole", "last"])
def test_a_kill_while_a_snapshot_is_renamed_leaves_one(tmp_path, at, monkeypatch):
    """With only one kept: the head is killed at each step of giving a second one the name of the first."""
    folder = tmp_path / "snapshots"
    servers = Servers(folder, keep=1)
    servers.take(3, 7, 2)
    first = json.loads((folder / "epoch-0002-batch-000007" / "snapshot.json").read_text())

    def killed(*_):
        raise Killed

    if at == "before":
        monkeypatch.setattr(servers.snapshots, "_rename", killed)
    elif at == "last":
        monkeypatch.setattr(servers.snapshots, "_clear", killed)
    else:
        servers.snapshots.renaming = killed
    with pytest.raises(Killed):
        servers.take(3, 7, 2)
    if at == "whole":
        # The newer one is not: its manifest was not on disk.
        [part] = folder.glob(".part-*")
        (part / "snapshot.json").unlink()
    snapshot.restore(folder)
    found, passed_over = newest.find(load(None, ["consistency.staleness=0"]), tmp_path)
    assert found.path.name == "epoch-0002-batch-000007" and passed_over == []
    older = json.loads((found.path / "snapshot.json").read_text()) == first
    assert older == (at in ("before", "whole"))
    # Whoever goes on removes the rest.
    Servers(folder, keep=1)
    assert [path.name for path in folder.iterdir()] == ["epoch-0002-batch-000007"]


def test_a_disk_that_fails_when_a_head_takes_over_costs_no_snapshot(tmp_path, monkeypatch):
    """The one before lost its place between two renames: what it leaves has a name when the disk is well again."""
    folder = tmp_path / "snapshots"
    Servers(folder).take(3, 7, 2)
    (folder / "epoch-0002-batch-000007").rename(folder / ".old-1")

    def fail(path, target):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "rename", fail)
        Servers(folder)
    assert [path.name for path in folder.iterdir()] == [".old-1"]
    Servers(folder)
    assert [path.name for path in folder.iterdir()] == ["epoch-0002-batch-000007"]


def test_a_job_that_has_lost_the_run_names_and_removes_nothing(tmp_path):
    servers = Servers(tmp_path, keep=1)
    servers.take(1, 5, 0)

    servers.snapshots.owner, _ = owner.take(tmp_path / "run", [owner.process()])
    servers.take(1, 5, 0)
    owner.take(tmp_path / "run", [owner.process()], by_force=True)
    with pytest.raises(LostRun):
        servers.take(1, 6, 0)
    assert [path.name for path in snapshot.own(tmp_path)] == ["epoch-0000-batch-000005"]


def store_of(counts, position, **about):
    """A life whose shards have so many images."""
    pieces = [Piece(0, 10, 1, 3, images, 10**18, {}) for images in counts]
    stored = Stored(pieces, position.pack(), 9, 400, 10**18 + 15 * 10**9)
    told = {"parameters": SIZE, "replicas": 2, "order": {}, "interval": 2.0}
    return Seen(1, Attempt(Path("somewhere/0001"), told, {"server-00003.h5": stored}), **about)


@pytest.mark.parametrize(
    ("counts", "images", "kind"),
    [((99, 300), 300, "snapshot"), ((225, 300), 300, "store"), ((224, 300), 300, "snapshot"), ((300,), 90, "snapshot")],
)
def test_a_store_is_as_new_as_its_oldest_shard(taken, counts, images, kind):
    """The snapshot has 224 images."""
    seen = store_of(counts, Position(40, 3, images))
    found, _ = newest.find(load(None), taken.parent.parent, seen)
    assert found.kind == kind


def test_what_a_store_has_lost_is_told_with_its_measured_age(tmp_path):
    found, _ = newest.find(load(None), tmp_path, store_of((31, 52), Position(40, 3, 52)))
    told = "shards of 31 to 52 images; up to 6 acknowledged pushes of 369 images are lost, none older than 15.0 s"
    assert f"{told} when the job ended" in found.note


def test_a_server_that_cannot_write_leaves_no_snapshot(tmp_path):
    servers = Servers(tmp_path)
    servers.take(1, 5, 0, fail=True)
    assert servers.snapshots.error == "no room" and list(tmp_path.iterdir()) == []
    servers.take(1, 6, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0000-batch-000006"]


def test_a_server_holds_back_what_is_after_the_cut(tmp_path):
    house = House(additive(), 300)
    house.push(1.0)
    server = house.server
    assert server.cut.hold() == [1]
    for _ in range(3):
        house.pushes.push(house.contribution(1.0))

    def move(happened):
        server.step()
        house.pushes.step()
        return happened()

    house.world.wait(lambda: move(lambda: len(server.staged) == 3), "pushes", 20)
    assert (house.weights == 1).all()
    server.cut.at([3], tmp_path)
    house.world.wait(lambda: move(lambda: server.cut.limits is None), "the cut", 20)
    house.settle()
    assert (house.weights == 4).all()
    house.world.wait(lambda: (tmp_path / "server-00000.h5").exists(), "the file", 20)
    with h5py.File(tmp_path / "server-00000.h5") as file:
        assert (file["weights"][...] == 3).all() and file["shards"].shape == (3, 4)
    house.free()


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_at_the_cut_weights_and_residual_are_all_that_was_pushed(tmp_path, codec):
    """A pusher far ahead of its server: what it has not packed by then belongs to later clocks."""
    house, draw = House(additive(codec=codec), 300), np.random.default_rng(1)
    pushes, server = house.pushes, house.server
    values = draw.standard_normal((12, 300)).astype(np.float32)

    def push(rows):
        for row in rows:
            pushes.push(house.contribution(row))

    push(values[:8])
    server.cut.hold()
    assert pushes.snapshot.hold(pushes.sent) == [8]
    push(values[8:])
    server.cut.at([8], tmp_path)
    pushes.snapshot.at([8], tmp_path)
    house.settle()
    files = [tmp_path / "server-00000.h5", tmp_path / "residual-00000.h5"]
    house.world.wait(lambda: all(file.exists() for file in files), "the files", 20)
    with h5py.File(files[0]) as stored, h5py.File(files[1]) as left_out:
        kept, carried = stored["weights"][...], left_out["residual"][...]
    assert np.abs(carried).max() > 0.1
    np.testing.assert_allclose(kept + carried, values[:8].sum(axis=0), atol=1e-4)
    np.testing.assert_allclose(house.weights + pushes.residual.values, values.sum(axis=0), atol=1e-4)
    house.free()


@pytest.mark.parametrize("pushers", [1, 2, 3, 5])
def test_what_pushers_carried_goes_on_with_any_number_of_them(tmp_path, pushers):
    rows = np.random.default_rng(2).standard_normal((3, SIZE)).astype(np.float32)
    names = [snapshot.residual_name(ring) for ring in range(3)]
    shards = cut(TENSORS, 50)
    for name, row in zip(names, rows, strict=True):
        snapshot.write(tmp_path / name, shards, {"residual": row}, np.zeros(len(shards)), Position(0).pack())
    files = tuple((name,) for name in names)
    resume = newest.Resume("snapshot", tmp_path, 1, Position(8), (0.0, 0), SIZE, 3, {}, "", files)
    whole = [(0, SIZE)]
    carried = [newest.residual(resume, replica, pushers, whole)[0:SIZE] for replica in range(pushers)]
    np.testing.assert_allclose(sum(carried), rows.sum(axis=0), atol=1e-5)
    if pushers == 3:
        np.testing.assert_array_equal(carried, rows)
