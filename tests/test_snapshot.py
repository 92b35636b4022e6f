"""Snapshots on disk: whole or not there, readable with h5py, inspected and merged; and the barrier they are made at."""

import errno
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_server import LocalServer, additive

from adam_mpi.base.errors import LostRun, UserError
from adam_mpi.checkpoint import divergences, model_file, owner, snapshot
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint.hdf5_file import FORMAT, new_file
from adam_mpi.checkpoint.store_file import StoreContent, StoredShard
from adam_mpi.checkpoint.stores import Attempt, FoundStores
from adam_mpi.cli import main
from adam_mpi.cluster.control_messages import HoldSnapshot, SnapshotHeld, SnapshotWritten, TakeSnapshot
from adam_mpi.config import load
from adam_mpi.model.parameters import Tensor, views
from adam_mpi.runtime.snapshot_coordinator import SnapshotCoordinator
from adam_mpi.runtime.snapshot_seal import SnapshotSeal, SnapshotSettings
from adam_mpi.sharding.shards import cut
from adam_mpi.sharding.training_state import Position

TENSORS = (
    Tensor("conv1/weight", "conv1", (4, 3, 5, 5), 0, 300),
    Tensor("conv1/bias", "conv1", (4,), 300, 4),
    Tensor("dense1/weight", "dense1", (7, 31), 304, 217),
    Tensor("dense1/bias", "dense1", (7,), 521, 7),
)
SIZE = 528
FLAT = {"weights": np.arange(SIZE, dtype=np.float32), "state": -np.arange(SIZE, dtype=np.float32)}
ABOUT = {
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
def test_hyperslabs_cover_a_range_in_order(shape, data):
    array = np.arange(np.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, array.size - 1))
    last = data.draw(st.integers(first + 1, array.size))
    pieces = list(model_file.hyperslabs(shape, first, last))
    found = [array[slab].ravel() for slab, _, _ in pieces]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(first, last))
    for values, (_, low, high) in zip(found, pieces, strict=True):
        assert values[0] == low and values[-1] == high - 1
    assert len(pieces) <= 2 * len(shape) - 1


class Servers:
    """Stands in for two servers, which write their shards when a snapshot is taken, and for their control channel."""

    def __init__(self, folder, keep=2):
        self.sent = []
        self.done = 0
        settings = SnapshotSettings(folder, servers=(3, 5), tensors=TENSORS, keep=keep)
        self.snapshots = SnapshotCoordinator(self, settings, lambda: ABOUT | {"epochs": self.done})

    def change_settings(self, **settings):
        self.snapshots.settings = replace(self.snapshots.settings, **settings)

    def send(self, message, to):
        self.sent.append((to, message))

    def take(self, epoch, batches, done, fail=False):
        """Take a snapshot in `epoch` after `batches` of its batches, when `done` epochs are done."""
        self.done = done
        self.snapshots.order()
        for to, message in self.orders():
            assert message == HoldSnapshot("server")
            self.snapshots.handle(to, SnapshotHeld("server", [to, 9 - to]))
        shards = cut(TENSORS, 50)
        for to, message in self.orders():
            assert isinstance(message, TakeSnapshot) and message.role == "server" and message.clocks == [5, 6]
            position = Position(40, epoch, 32 * batches, 5)
            position.batches[:batches] = True
            own = [shard for shard in shards if shard.index % 2 == to // 5]
            state = {part: np.concatenate([v[s.start : s.stop] for s in own]) for part, v in FLAT.items()}
            path = Path(message.folder) / snapshot.file_name(to)
            snapshot.write_server_part(path, own, state, np.arange(len(own)), position.pack())
            values = {"epoch": epoch, "batches": batches, "images": 32 * batches, "clock": 5}
            answer = {"error": "no room"} if fail and to == 5 else {"file": path.name, "size": path.stat().st_size}
            self.snapshots.handle(to, SnapshotWritten("server", values | answer))
        self.wait()

    def wait(self):
        """Wait until the snapshot has its name, or cannot have it."""
        limit = time.monotonic() + 20
        while self.snapshots.busy:
            assert time.monotonic() < limit, "the snapshot was not sealed in 20 s"
            self.snapshots.step()
            time.sleep(1e-3)

    def orders(self):
        orders = self.sent
        self.sent = []
        return orders


@pytest.fixture
def taken(tmp_path):
    servers = Servers(tmp_path / "snapshots")
    servers.take(3, 7, 2)
    return tmp_path / "snapshots" / "epoch-0002-batch-000007"


def test_a_snapshot_opens_in_h5py_with_layers_by_name(taken, tmp_path):
    moved = tmp_path / "moved"
    shutil.move(taken, moved)
    with h5py.File(moved / "model.h5") as file:
        for group, flat in (("", FLAT["weights"]), ("optimizer/state/", FLAT["state"])):
            for name, view in views(flat, TENSORS).items():
                np.testing.assert_array_equal(file[group + name], view)
        assert file.attrs["epochs"] == 2 and file.attrs["config"] == "[run]\n"
    assert snapshot.check_snapshot(moved).count == 7


def replace_weights(folder, layout_of):
    """Replace the virtual datasets of a snapshot by those that `layout_of` makes of their shapes."""
    with h5py.File(folder / "model.h5", "r+", locking=False) as file:
        for tensor in TENSORS:
            del file[tensor.name]
            file.create_virtual_dataset(tensor.name, layout_of(tensor.shape))


def of_one_value(name):
    """Return a function that makes a layout in which all values are one value of the file `name`."""

    def layout_of(shape):
        layout = h5py.VirtualLayout(shape, np.float32)
        for place in np.ndindex(*shape):
            layout[place] = h5py.VirtualSource(name, "weights", (1,), np.float32)[0]
        return layout

    return layout_of


def write_one_value(path, stored=True):
    with new_file(path, snapshot.KIND) as file:
        file.create_dataset("weights", (1,) if stored else (10**12,), np.float32)
        if stored:
            file["weights"][0] = 1.0


def test_a_snapshot_that_announces_more_values_than_its_files_have_is_refused(taken, tmp_path):
    """A folder of a few kilobytes from anybody can announce any number of them."""
    total = 4 * sum(tensor.size for tensor in TENSORS)
    replace_weights(taken, lambda shape: h5py.VirtualLayout(shape, np.float32))
    with pytest.raises(
        UserError, match=rf"model.h5: incomplete: {total} bytes announced, 0 are in the files it refers"
    ):
        model_file.read_model(taken / "model.h5", TENSORS)
    write_one_value(taken / "one.h5")
    replace_weights(taken, of_one_value("one.h5"))
    with pytest.raises(UserError, match=rf"incomplete: {total} bytes announced, 4 are in the files it refers to"):
        model_file.read_model(taken / "model.h5", TENSORS)
    write_one_value(taken / "one.h5", stored=False)
    with pytest.raises(UserError, match=r"one.h5:/weights: incomplete: 4000000000000 bytes announced, 0 are in the"):
        model_file.read_model(taken / "model.h5", TENSORS)


@pytest.mark.parametrize("name", ["../one.h5", "missing.h5"])
def test_a_snapshot_that_refers_to_other_places_is_refused(name, taken):
    write_one_value(taken.parent / "one.h5")
    replace_weights(taken, of_one_value(name))
    with pytest.raises(UserError, match=rf"refers to {name}, which is no file beside it"):
        model_file.read_model(taken / "model.h5", TENSORS)


def test_a_snapshot_that_lacks_a_file_has_no_weights(taken):
    """HDF5 reads zeros where the source of a virtual dataset is missing."""
    next(taken.glob("server-*.h5")).unlink()
    with pytest.raises(UserError, match="which is no file beside it; copy a snapshot as a whole"):
        model_file.read_model(taken / "model.h5", TENSORS)


def test_weights_outside_of_their_file_are_refused(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(4000))
    tensor = Tensor("dense1/weight", "dense1", (1000,), 0, 1000)
    with new_file(tmp_path / "weights.h5", model_file.KIND) as file:
        file.create_dataset(tensor.name, (1000,), np.float32, external=[(str(tmp_path / "secret"), 0, 4000)])
    with pytest.raises(UserError, match="incomplete: 4000 bytes announced, 0 are in the file"):
        model_file.read_model(tmp_path / "weights.h5", [tensor])


def test_merged_is_one_plain_file(taken, tmp_path, capsys):
    assert main(["merge", str(taken), "-o", str(tmp_path / "one.h5")]) == 0
    shutil.rmtree(taken)
    np.testing.assert_array_equal(model_file.read_model(tmp_path / "one.h5", TENSORS), FLAT["weights"])
    with h5py.File(tmp_path / "one.h5") as file:
        assert not file["dense1/weight"].is_virtual and file["optimizer/state/dense1/weight"].shape == (7, 31)
    assert main(["inspect", str(tmp_path / "one.h5")]) == 0
    assert "dense1/weight" in capsys.readouterr().out


def test_inspect_says_what_is_in_it_and_that_it_is_whole(taken, capsys):
    assert main(["inspect", str(taken)]) == 0
    said = capsys.readouterr().out
    for text in (
        f"format {FORMAT}",
        "2 epochs and 7 batches, 224 images",
        "528 parameters",
        "7x31",
        "whole: every shard",
    ):
        assert text in said


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "format", "mixed"])
def test_what_is_not_whole_is_named_and_not_resumed_from(taken, damage, capsys):
    path = taken / "server-00005.h5"
    if damage == "flip":
        with h5py.File(path, "r+") as file:
            file["state"][3] = 7
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "missing":
        path.unlink()
    elif damage == "format":
        manifest = json.loads((taken / "snapshot.json").read_text())
        (taken / "snapshot.json").write_text(json.dumps(manifest | {"format": 1}))
    else:
        with h5py.File(path, "r+") as file:
            file["position"][16] += 1
    assert main(["inspect", str(taken)]) == 1
    assert "NOT WHOLE" in capsys.readouterr().out

    found, passed_over = resume_points.find_resume_point(load(None, ["consistency.staleness=0"]), taken.parent.parent)
    assert found is None and len(passed_over) == 1


OLD = f"format 3; this version reads format {FORMAT}; commit 450b6f2 is the last whose `adam_mpi merge` reads format 3"


def test_a_snapshot_of_format_3_is_refused_by_name(taken, tmp_path, capsys):
    manifest = json.loads((taken / "snapshot.json").read_text())
    (taken / "snapshot.json").write_text(json.dumps(manifest | {"format": 3}))
    assert main(["inspect", str(taken)]) == 1
    assert f"  NOT WHOLE: {taken}: {OLD}\n" in capsys.readouterr().out
    assert main(["merge", str(taken), "-o", str(tmp_path / "one.h5")]) == 2
    assert f"{taken}: {OLD}\n" in capsys.readouterr().err
    # The same by the directory of its run.
    assert main(["merge", str(taken.parent.parent), "-o", str(tmp_path / "one.h5")]) == 2
    assert f"no whole snapshot ({taken}: {OLD})" in capsys.readouterr().err and not (tmp_path / "one.h5").exists()
    found, passed_over = resume_points.find_resume_point(load(None, ["consistency.staleness=0"]), taken.parent.parent)
    assert found is None and passed_over == [f"{taken}: {OLD}"]


def test_a_file_of_weights_of_format_3_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / "weights.h5"
    model_file.write_model(path, FLAT["weights"], TENSORS, "", "{}")
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = 3
    with pytest.raises(UserError, match=re.escape(f"{path}: {OLD}")):
        model_file.read_model(path, TENSORS)
    assert main(["inspect", str(path)]) == 2
    assert f"{path}: {OLD}\n" in capsys.readouterr().err


def test_the_newest_are_kept_and_names_say_what_is_trained(tmp_path):
    servers = Servers(tmp_path)
    for epoch, batches, done in ((1, 5, 0), (1, 20, 1), (2, 3, 1), (2, 20, 2)):
        servers.take(epoch, batches, done)
        assert not servers.snapshots.busy and not servers.snapshots.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001-batch-000003", "epoch-0002"]
    # A job that resumes from an earlier snapshot goes another way: later snapshots are removed.
    again = Servers(tmp_path)
    again.take(2, 9, 1)
    assert [path.name for path in tmp_path.iterdir()] != [] and not (tmp_path / "epoch-0002").exists()


def test_other_files_beside_snapshots_are_neither_resumed_from_nor_removed(tmp_path):
    folder = tmp_path / "snapshots"
    servers = Servers(folder)
    servers.take(1, 5, 0)
    servers.take(2, 3, 1)
    first, last = snapshot.list_snapshots(folder)[::-1]
    others = ["keep-epoch-0001", "paper-best", "epoch-9999", "epoch-0001-mine", ".mine"]
    for name in others:
        shutil.copytree(first, folder / name)
    (folder / "zz-notes.txt").write_text("mine")
    assert snapshot.list_snapshots(folder) == [last, first]
    found, passed_over = resume_points.find_resume_point(load(None, ["consistency.staleness=0"]), tmp_path)
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
    trained = [(9999, 0, 5), (10000, 0, 6), (10000, 999999, 7), (10000, 1000000, 8), (123456, 0, 9)]
    for epochs, batches, images in trained[::-1]:
        path = tmp_path / snapshot.folder_name(epochs, batches)
        path.mkdir()
        manifest = {"format": FORMAT, "name": path.name, "images": images, "epochs": epochs, "batches": batches}
        (path / "snapshot.json").write_text(json.dumps(manifest))
    names = [snapshot.folder_name(epochs, batches) for epochs, batches, _ in trained]
    assert [path.name for path in snapshot.list_snapshots(tmp_path)] == names


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["before", "between", "whole", "last"])
def test_a_kill_while_a_snapshot_is_renamed_leaves_one(tmp_path, at, monkeypatch):
    """With only one kept: the coordinator is killed at each step of giving a second one the name of the first."""
    folder = tmp_path / "snapshots"
    servers = Servers(folder, keep=1)
    servers.take(3, 7, 2)
    first = json.loads((folder / "epoch-0002-batch-000007" / "snapshot.json").read_text())

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if at == "before":
            patch.setattr(SnapshotSeal, "_rename", killed)
        elif at == "last":
            patch.setattr(SnapshotSettings, "clear", killed)
        else:
            servers.change_settings(before_rename=killed)
        servers.take(3, 7, 2)
    if at == "whole":
        # The newer one is not: its manifest was not on disk.
        [part] = folder.glob(".part-*")
        (part / "snapshot.json").unlink()
    snapshot.finish_renames(folder)
    found, passed_over = resume_points.find_resume_point(load(None, ["consistency.staleness=0"]), tmp_path)
    assert found.path.name == "epoch-0002-batch-000007" and passed_over == []
    older = json.loads((found.path / "snapshot.json").read_text()) == first
    assert older == (at in ("before", "whole"))
    # The next coordinator removes the rest.
    Servers(folder, keep=1)
    assert [path.name for path in folder.iterdir()] == ["epoch-0002-batch-000007"]


def test_a_disk_that_fails_when_another_coordinator_takes_over_costs_no_snapshot(tmp_path, monkeypatch):
    """The one before was lost between two renames: what it leaves has a name when the disk works again."""
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


def test_the_last_good_snapshot_stays_until_a_newer_one_is_known_to_be_good(tmp_path):
    """A snapshot of diverged weights must not be the only one."""
    servers = Servers(tmp_path, keep=1)

    def names():
        return [path.name for path in snapshot.list_snapshots(tmp_path)]

    servers.take(1, 5, 0)
    servers.snapshots.confirm(time.time())
    servers.take(1, 6, 0)
    servers.take(1, 7, 0)
    assert names() == ["epoch-0000-batch-000005", "epoch-0000-batch-000007"]
    # The loss was good before the last one was taken, which says nothing about it.
    servers.snapshots.confirm(servers.snapshots.times["epoch-0000-batch-000007"])
    assert servers.snapshots.good == ["epoch-0000-batch-000005", "epoch-0000-batch-000006"]
    servers.snapshots.confirm(time.time())
    servers.take(1, 8, 0)
    assert names() == ["epoch-0000-batch-000007", "epoch-0000-batch-000008"]
    # Another one of that name is not known to be good.
    servers.take(1, 7, 0)
    assert "epoch-0000-batch-000007" not in servers.snapshots.good


def test_a_run_resumes_from_nothing_that_was_spoiled(tmp_path):
    folder = tmp_path / "snapshots"
    config = load(None, ["consistency.staleness=0"])
    servers = Servers(folder, keep=5)
    for batches in (5, 6, 7):
        servers.take(1, batches, 0)
    times = [servers.snapshots.times[f"epoch-0000-batch-00000{batches}"] for batches in (5, 6, 7)]
    assert resume_points.find_resume_point(config, tmp_path)[0].position.count == 7
    divergences.add(tmp_path, (times[0], times[2]), number=1, rate_scale=0.5)
    found, passed_over = resume_points.find_resume_point(config, tmp_path)
    assert found.position.count == 5 and len(passed_over) == 2
    assert passed_over[0].endswith("epoch-0000-batch-000007: training diverged before it was taken")
    # Later ones are good.
    servers.take(1, 8, 0)
    assert resume_points.find_resume_point(config, tmp_path)[0].position.count == 8
    divergences.add(tmp_path, (time.time(), time.time() + 1), number=2, rate_scale=0.25)
    known = divergences.read(tmp_path)
    assert (known.number, known.rate_scale, len(known.spoiled)) == (2, 0.25, 2) and known.spoils(times[1])
    assert divergences.read(folder) == divergences.Divergences()


def test_a_store_that_was_begun_before_a_divergence_is_passed_over(tmp_path):
    stored = store_of([300], Position(40, 1, 300))
    config = load(None)
    assert resume_points.find_resume_point(config, tmp_path, stored)[0].kind == "store"
    divergences.add(tmp_path, (1.0, 2.0), number=1, rate_scale=0.5)
    found, passed_over = resume_points.find_resume_point(config, tmp_path, stored)
    assert found is None and passed_over[0].endswith("training diverged after it was begun")


def test_a_job_that_has_lost_the_run_names_and_removes_nothing(tmp_path):
    servers = Servers(tmp_path, keep=1)
    servers.take(1, 5, 0)

    first, _ = owner.claim_run(tmp_path / "run", [owner.this_process()])
    servers.change_settings(owner=first)
    servers.take(1, 5, 0)
    owner.claim_run(tmp_path / "run", [owner.this_process()], by_force=True)
    with pytest.raises(LostRun):
        servers.take(1, 6, 0)
    assert [path.name for path in snapshot.list_snapshots(tmp_path)] == ["epoch-0000-batch-000005"]


def store_of(counts, position, **about):
    """An attempt whose shards have `counts` images."""
    times = {"version": 1, "pushes": 3, "nanoseconds": 10**18}
    pieces = [StoredShard(start=0, size=10, images=images, values={}, **times) for images in counts]
    stored = StoreContent(pieces, position.pack(), 9, 400, 10**18 + 15 * 10**9)
    description = {"parameters": SIZE, "replicas": 2, "order": {}, "interval": 2.0, "began": 1}
    return FoundStores(1, Attempt(Path("somewhere/0001"), description, {"server-00003.h5": stored}), **about)


@pytest.mark.parametrize(
    ("counts", "images", "kind"),
    [((99, 300), 300, "snapshot"), ((225, 300), 300, "store"), ((224, 300), 300, "snapshot"), ((300,), 90, "snapshot")],
)
def test_a_store_is_as_new_as_its_oldest_shard(taken, counts, images, kind):
    """The snapshot has 224 images."""
    seen = store_of(counts, Position(40, 3, images))
    found, _ = resume_points.find_resume_point(load(None), taken.parent.parent, seen)
    assert found.kind == kind


def test_what_a_store_has_lost_is_reported_with_its_measured_age(tmp_path):
    found, _ = resume_points.find_resume_point(load(None), tmp_path, store_of((31, 52), Position(40, 3, 52)))
    lost = "shards of 31 to 52 images; up to 6 acknowledged pushes of 369 images are lost, none older than 15.0 s"
    assert f"{lost} when the job ended" in found.note


def test_a_server_that_cannot_write_leaves_no_snapshot(tmp_path):
    servers = Servers(tmp_path)
    servers.take(1, 5, 0, fail=True)
    assert servers.snapshots.error == "no room" and list(tmp_path.iterdir()) == []
    servers.take(1, 6, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0000-batch-000006"]


def test_a_server_holds_back_what_is_after_the_barrier(tmp_path):
    local = LocalServer(additive(), 300)
    local.push(1.0)
    server = local.server
    assert server.session.barrier.hold() == [1]
    for _ in range(3):
        local.pushes.push(local.gradient_buffer(1.0))

    def move(happened):
        server.step()
        local.pushes.step()
        return happened()

    local.world.wait(lambda: move(lambda: len(server.session.staged.by_shard) == 3), "pushes", 20)
    assert (local.weights == 1).all()
    server.session.barrier.set_limits([3], tmp_path)
    local.world.wait(lambda: move(lambda: server.session.barrier.limits is None), "the barrier", 20)
    local.apply_pushes()
    assert (local.weights == 4).all()
    local.world.wait(lambda: (tmp_path / "server-00000.h5").exists(), "the file", 20)
    with h5py.File(tmp_path / "server-00000.h5") as file:
        assert (file["weights"][...] == 3).all() and file["shards"].shape == (3, 4)
    local.free()


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_at_the_barrier_weights_and_residual_are_all_that_was_pushed(tmp_path, codec):
    """A pusher far ahead of its server: what it has not packed by then belongs to later clocks."""
    local, draw = LocalServer(additive(codec=codec), 300), np.random.default_rng(1)
    pushes, server = local.pushes, local.server
    values = draw.standard_normal((12, 300)).astype(np.float32)

    def push(rows):
        for row in rows:
            pushes.push(local.gradient_buffer(row))

    push(values[:8])
    server.session.barrier.hold()
    assert pushes.snapshot.hold(pushes.sent) == [8]
    push(values[8:])
    server.session.barrier.set_limits([8], tmp_path)
    pushes.snapshot.at([8], tmp_path)
    local.apply_pushes()
    files = [tmp_path / "server-00000.h5", tmp_path / "residual-00000.h5"]
    local.world.wait(lambda: all(file.exists() for file in files), "the files", 20)
    with h5py.File(files[0]) as stored, h5py.File(files[1]) as left_out:
        kept, carried = stored["weights"][...], left_out["residual"][...]
    assert np.abs(carried).max() > 0.1
    np.testing.assert_allclose(kept + carried, values[:8].sum(axis=0), atol=1e-4)
    np.testing.assert_allclose(local.weights + pushes.residual.values, values.sum(axis=0), atol=1e-4)
    local.free()


@pytest.mark.parametrize("pushers", [1, 2, 3, 5])
def test_residuals_are_carried_forward_with_any_number_of_pushers(tmp_path, pushers):
    rows = np.random.default_rng(2).standard_normal((3, SIZE)).astype(np.float32)
    names = [snapshot.residual_name(ring) for ring in range(3)]
    shards = cut(TENSORS, 50)
    for name, row in zip(names, rows, strict=True):
        snapshot.write_server_part(
            tmp_path / name, shards, {"residual": row}, np.zeros(len(shards)), Position(0).pack()
        )
    files = tuple((name,) for name in names)
    resume = resume_points.Resume(
        kind="snapshot",
        path=tmp_path,
        epochs=1,
        position=Position(8),
        best=(0.0, 0),
        parameters=SIZE,
        replicas=3,
        order={},
        note="",
        residuals=files,
    )
    whole = [(0, SIZE)]
    carried = [resume_points.read_residual(resume, replica, pushers, whole)[0:SIZE] for replica in range(pushers)]
    np.testing.assert_allclose(sum(carried), rows.sum(axis=0), atol=1e-5)
    if pushers == 3:
        np.testing.assert_array_equal(carried, rows)
