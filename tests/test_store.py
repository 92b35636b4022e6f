"""The store of a server: laid out once, whole after any kill; a disk that fails stops only a job that requires it."""

import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import ROOT

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import store_file, write_behind
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.store_file import Record, StoreFile
from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.config import Store
from adam_mpi.sharding.shard_copy import BATCHES
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position, batch_id

SHARDS = [Shard(0, "conv1", 0, 100), Shard(1, "conv1", 100, 28), Shard(2, "dense1", 128, 300)]
PARTS = ("weights", "state", "ema")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_store_is_whole_after_each_of_200_kills():
    # Memory is enough of a disk for a kill, and quicker.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        fuzz = [sys.executable, ROOT / "tests" / "fuzz_store.py", folder, "200"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(fuzz, env=environment, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("200 kills")


def record(place, version, value=None):
    size = 4 * len(PARTS) * SHARDS[place].size if place < len(SHARDS) else 16
    body = np.full(size, version % 251 if value is None else value, np.uint8)
    return Record(place, version, 10 * version, 1, body)


def test_a_store_opens_in_h5py_and_gives_back_what_was_written(tmp_path):
    file = StoreFile(tmp_path / "s.h5", SHARDS, PARTS, 16)
    size = (tmp_path / "s.h5").stat().st_size
    for version in range(1, 6):
        file.write([record(0, version), record(2, version)])
    file.write([record(3, 7)])
    file.close()
    assert (tmp_path / "s.h5").stat().st_size == size
    stored = store_file.read_store(tmp_path / "s.h5")
    pieces, position = stored.pieces, stored.position
    assert pieces[1] is None and [piece.version for piece in pieces if piece] == [5, 5]
    assert pieces[2].start == 128 and pieces[2].images == 50 and set(pieces[2].values) == {*PARTS, BATCHES}
    assert (pieces[2].values["ema"].view(np.uint8) == 5).all() and (position == 7).all()
    with h5py.File(tmp_path / "s.h5") as plain:
        assert plain["shards"][...].tolist() == [[0, 100], [100, 28], [128, 300]]
        assert plain["headers"][0, :, 0].tolist() == [5, 4]


@pytest.mark.parametrize("damage", ["body", "header"])
def test_damage_is_noticed_and_the_version_before_is_taken(tmp_path, damage):
    path = tmp_path / "s.h5"
    file = StoreFile(path, SHARDS, PARTS, 16)
    for version in (1, 2):
        file.write([record(place, version) for place in range(3)])
    file.close()
    with h5py.File(path, "r+") as plain:
        if damage == "body":
            first = 2 * len(PARTS) * 100 + len(PARTS) * 28
            plain["bodies"][first + 3] = 1.5
        else:
            plain["headers"][1, 1, 2] = 12345
    assert [piece.version for piece in store_file.read_store(path).pieces] == [2, 1, 2]


def test_a_store_that_is_closed_leaves_no_thread_behind(tmp_path):
    """A server opens another one in every generation."""
    before = set(threading.enumerate())
    file = StoreFile(tmp_path / "store.h5", [Shard(0, "dense", 0, 10)], ["weights"], 64)
    started = set(threading.enumerate()) - before
    file.close()
    for thread in started:
        thread.join(10)
    assert started and not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("version", "cure"),
    [
        (99, "use the version that wrote it"),
        (3, "commit 450b6f2 is the last whose `adam_mpi merge` reads format 3"),
        (4, "commit bb9d377 is the last whose `adam_mpi merge` reads format 4"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path, version, cure):
    path = tmp_path / "s.h5"
    StoreFile(path, SHARDS, PARTS, 16).close()
    with h5py.File(path, "r+") as plain:
        plain.attrs["format"] = version
    with pytest.raises(UserError, match=f"^{path}: format {version}; this version reads format {FORMAT}; {cure}$"):
        store_file.read_store(path)


class ServerThread:
    """The main thread of a server in small: updates by number, and a store behind it."""

    def __init__(self, path, interval=0.05, required=False, before_write=lambda: None):
        self.update = 0
        config = Store(interval=interval, required=required)
        self.store = WriteBehind(path, config, SHARDS, PARTS, 16, self.copy, before_write)

    def copy(self, place, buffer):
        buffer[:] = self.update
        return self.update, self.update, self.update / 4

    def apply(self):
        self.update += 1
        for place in range(4):
            self.store.mark_dirty(place)

    def until(self, happened, what):
        limit = time.monotonic() + 20
        while not happened():
            self.store.step()
            assert time.monotonic() < limit, f"{what} did not come in 20 s"
            time.sleep(1e-3)

    def close(self):
        self.until(self.store.close, "the end")
        self.store.thread.join(20)
        assert not self.store.thread.is_alive(), "the writing thread did not end in 20 s"

    def on_disk(self, path):
        return {piece.version for piece in store_file.read_store(path).pieces}


def test_many_updates_are_combined_in_one_write(tmp_path):
    server = ServerThread(tmp_path / "s.h5", interval=4.0)
    server.until(lambda: server.store.complete and not server.store.in_flight, "the first write")
    before = server.store.written
    for _ in range(100):
        server.apply()
        server.store.step()
    server.until(lambda: server.store.lag == 0, "the write")
    assert server.store.written == 2 * before and server.on_disk(tmp_path / "s.h5") == {100}
    assert {float(piece.values[BATCHES]) for piece in store_file.read_store(tmp_path / "s.h5").pieces} == {25.0}
    server.apply()
    server.close()
    assert server.on_disk(tmp_path / "s.h5") == {101}


@pytest.mark.timeout(60)
def test_at_the_end_updates_gather_no_more(tmp_path):
    gate = threading.Event()
    server = ServerThread(tmp_path / "s.h5", interval=1000.0, before_write=gate.wait)
    server.until(lambda: len(server.store.in_flight) == 4, "four copies in flight")
    server.apply()
    gate.set()
    server.close()
    assert server.on_disk(tmp_path / "s.h5") == {1}


def test_a_disk_that_takes_nothing_at_the_end_is_given_up_with_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(write_behind, "CLOSE_SECONDS", 0.2)
    gate = threading.Event()
    server = ServerThread(tmp_path / "s.h5", interval=1000.0, before_write=gate.wait)
    server.until(lambda: server.store.in_flight, "a copy in flight")
    server.until(server.store.close, "the end")
    assert "the disk has taken nothing for 0.2 s; it ends" in capsys.readouterr().err
    gate.set()


def test_the_last_flush_continues_while_the_disk_takes_something(tmp_path, monkeypatch):
    """However slow it is: what counts is when it took something for the last time."""
    monkeypatch.setattr(write_behind, "CLOSE_SECONDS", 5.0)
    monkeypatch.setattr(write_behind, "BUFFERS", 1)
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(write_behind.time, "monotonic", lambda: now.seconds)
    gates = threading.Semaphore(0)
    server = ServerThread(tmp_path / "s.h5", interval=1000.0, before_write=gates.acquire)
    for _ in range(4):
        while len(server.store.in_flight) == 0:
            server.store.step()
        now.seconds += 4.0
        assert not server.store.close()
        gates.release()
        while server.store.done.empty():
            time.sleep(1e-3)
        server.store.step()
    assert now.seconds == 16.0 and server.store.close()


def test_the_main_thread_does_not_wait_for_the_note_of_what_is_acknowledged(tmp_path, monkeypatch):
    go, noted = threading.Event(), []

    def slow(self, *figures):
        go.wait()
        noted.append(figures)

    monkeypatch.setattr(StoreFile, "note_acknowledged", slow)
    server = ServerThread(tmp_path / "s.h5")
    server.until(lambda: server.store.complete, "the first write")
    for pushes in range(1, 100):
        server.store.note_acknowledged(pushes, 10 * pushes)
        server.store.step()
    assert noted == []
    go.set()
    server.until(lambda: noted[-1:] == [(99, 990)], "the note")
    server.close()


def test_what_is_acknowledged_is_noted_whatever_else_is_written(tmp_path):
    server = ServerThread(tmp_path / "s.h5")
    server.until(lambda: server.store.complete, "the first write")
    server.store.note_acknowledged(7, 70)
    server.until(lambda: store_file.read_store(tmp_path / "s.h5").images == 70, "the note")
    server.store.note_acknowledged(8, 80)
    server.close()
    stored = store_file.read_store(tmp_path / "s.h5")
    assert (stored.pushes, stored.images) == (8, 80)


def test_a_folder_that_cannot_be_written_is_named_and_caught_up_with(tmp_path, capsys):
    (tmp_path / "folder").write_text("in the way")
    server = ServerThread(tmp_path / "folder" / "s.h5")
    server.until(lambda: server.store.warned, "a warning")
    server.apply()
    server.until(lambda: server.store.lag > 0.1, "falling behind")
    said = capsys.readouterr().err
    assert f"warning: store {tmp_path / 'folder' / 's.h5'}: " in said and "s behind; training continues" in said
    (tmp_path / "folder").unlink()
    server.until(lambda: server.store.lag == 0 and not server.store.warned, "catching up")
    assert "has caught up" in capsys.readouterr().err and server.on_disk(tmp_path / "folder" / "s.h5") == {1}


def test_a_full_disk_leaves_the_last_version_and_is_caught_up_with(tmp_path, capsys):
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    server = ServerThread(tmp_path / "s.h5")
    server.until(lambda: server.store.complete and not server.store.in_flight, "the first write")
    # No byte may be written beyond this one: like a disk without room, for this process.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        server.apply()
        server.until(lambda: server.store.error and server.store.lag > 0.05, "an error")
        assert server.on_disk(tmp_path / "s.h5") == {0}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    server.until(lambda: server.store.lag == 0, "catching up")
    assert server.on_disk(tmp_path / "s.h5") == {1} and "File too large" in capsys.readouterr().err


def test_the_warning_of_a_slow_disk_says_how_far_behind_it_is(tmp_path, capsys):
    go = threading.Event()
    server = ServerThread(tmp_path / "s.h5", before_write=go.wait)
    server.until(lambda: server.store.warned, "a warning")
    for _ in range(200):
        server.apply()
    assert re.search(r"slow disk; \d+\.\d s behind", capsys.readouterr().err)
    go.set()
    server.until(lambda: server.store.lag == 0, "catching up")
    assert server.on_disk(tmp_path / "s.h5") == {200}


@pytest.mark.parametrize("trouble", ["slow disk", "Not a directory|File exists"])
def test_a_store_that_is_required_ends_the_job(tmp_path, trouble):
    go = threading.Event()
    if trouble != "slow disk":
        (tmp_path / "folder").write_text("in the way")
        go.set()
    server = ServerThread(tmp_path / "folder" / "s.h5", required=True, before_write=go.wait)
    with pytest.raises(UserError, match=f"store .*s.h5: ({trouble}); store.required = true"):
        server.until(lambda: False, "the error")
    go.set()


def test_a_position_knows_the_batches_of_its_last_epoch():
    position = Position(20)
    position.add(np.array([batch_id(1, 3), batch_id(1, 19)]))
    position.add(np.empty(0, np.int64))
    assert position.epoch == 1 and np.flatnonzero(position.batches).tolist() == [3, 19]
    position.add(np.array([batch_id(2, 0)]))
    position.images, position.clock = 1 << 40, 5
    again = Position.unpack(position.pack())
    assert again.agrees(position) and again.count == 1 and again.batches[0] and again.epoch == 2
    again.batches[7] = True
    assert not again.agrees(position) and len(position.pack()) == Position.packed_bytes(20)
