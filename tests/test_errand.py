"""What touches a disk is done by threads of their own: it may fail in any way, or hang, and nobody waits for ever."""

import logging
import threading
import time
import types

import numpy as np
import pytest
from test_snapshot import Servers

from adam_mpi.checkpoint import disk_task as errands
from adam_mpi.checkpoint import snapshot_barrier as cuts
from adam_mpi.checkpoint.disk_task import DiskTask, advance, reason
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.shards import Shard


def over(errand, seconds=20):
    limit = time.perf_counter() + seconds
    while not errand.over:
        assert time.perf_counter() < limit, f"the errand was not over in {seconds} s"
        time.sleep(1e-3)
    return errand


@pytest.fixture
def clock(monkeypatch):
    """Time as the test wants it."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(errands.time, "monotonic", lambda: now.seconds)
    return now


def test_an_errand_gives_what_it_was_sent_for():
    assert over(DiskTask("test", lambda: 7, 60)).result() == 7


@pytest.mark.parametrize("error", [OSError(28, "no room"), MemoryError(), SystemExit(1)])
def test_an_errand_that_fails_raises_where_its_result_is_wanted(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        over(DiskTask("test", fail, 60)).result()


def test_an_errand_hangs_when_it_has_not_got_further_for_too_long(clock):
    steps, taken = threading.Semaphore(0), threading.Semaphore(0)

    def work():
        for _ in range(3):
            steps.acquire()
            advance()
            taken.release()
        steps.acquire()

    errand = DiskTask("test", work, 10)
    for _ in range(3):
        clock.seconds += 9
        assert not errand.over
        steps.release()
        taken.acquire()
    clock.seconds += 11
    assert errand.over
    with pytest.raises(OSError, match="the disk has taken nothing for 10 s"):
        errand.result()
    steps.release()


def test_reasons_are_one_line():
    assert reason(MemoryError()) == "MemoryError"
    assert reason(OSError(28, "No space left on device")) == "No space left on device"
    assert reason(RuntimeError("one\ntwo")) == "one"
    text = "Unable to create file (file write failed: time = 1\n, errno = 28, error message = 'No space left', buf = 0)"
    assert reason(OSError(28, text)) == "No space left"


def take(cut, folder):
    shard, values = Shard(0, "dense1", 0, 8), np.zeros(8, np.float32)
    cut.at([0], folder)
    cut.take("server-00001.h5", [shard], {"weights": {0: values}}, np.zeros(1, np.int64), Position(4))


def word(cut):
    limit = time.perf_counter() + 20
    while (told := cut.written()) is None:
        assert time.perf_counter() < limit, "no word of the copy in 20 s"
        time.sleep(1e-3)
    return told


@pytest.mark.parametrize("error", [MemoryError(), ValueError("out of bounds"), OSError(5, "Input/output error")])
def test_a_copy_that_cannot_be_written_is_told_whatever_the_reason(error, tmp_path, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(cuts.snapshot, "write", fail)
    cut = SnapshotBarrier(1, 60)
    take(cut, tmp_path)
    assert word(cut) == {"error": f"{tmp_path / 'server-00001.h5'}: {reason(error)}", "hung": False}


def test_a_copy_whose_disk_hangs_is_told_and_the_next_one_is_written(tmp_path, clock):
    go = threading.Event()
    cut = SnapshotBarrier(1, 60, go.wait)
    take(cut, tmp_path)
    assert cut.written() is None
    clock.seconds += 61
    told = word(cut)
    assert told == {"error": f"{tmp_path / 'server-00001.h5'}: the disk has taken nothing for 60 s", "hung": True}
    go.set()
    take(cut, tmp_path / "next")
    assert word(cut)["file"] == "server-00001.h5"


def test_a_snapshot_whose_name_hangs_is_left_out_and_touches_nothing_later(tmp_path, clock, capsys):
    servers, hangs, go = Servers(tmp_path / "snapshots"), threading.Event(), threading.Event()
    conductor = servers.snapshots
    servers.take(1, 0, 1)
    conductor.renaming, conductor.seconds, conductor.keep = lambda: hangs.set() or go.wait(), 60, 1
    servers.settle = lambda: None
    servers.take(2, 0, 2)
    thread = conductor.sealing.thread
    assert hangs.wait(20)
    clock.seconds += 61
    conductor.step()
    assert not conductor.busy and "the disk has taken nothing for 60 s" in conductor.error and conductor.hung
    assert "warning: no snapshot: " in capsys.readouterr().err and conductor.taken == ["epoch-0001"]
    conductor.renaming = lambda: None
    go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {"epoch-0001", "epoch-0002"}


def test_a_snapshot_that_cannot_be_named_is_left_out_whatever_the_reason(tmp_path, caplog):
    servers = Servers(tmp_path / "snapshots")

    def fail():
        raise MemoryError

    servers.snapshots.renaming = fail
    with caplog.at_level(logging.WARNING):
        servers.take(1, 0, 1)
    assert servers.snapshots.error.endswith(".part-0-1: MemoryError") and servers.snapshots.taken == []
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_who_does_not_answer_in_a_snapshot_is_awaited(tmp_path):
    servers = Servers(tmp_path / "snapshots")
    conductor = servers.snapshots
    assert conductor.awaits() == []
    conductor.order()
    conductor.hear(3, {"kind": "held", "role": "server", "clocks": [1]})
    assert [(wait.rank, wait.patient) for wait in conductor.awaits()] == [(5, False)]
    conductor.hear(5, {"kind": "held", "role": "server", "clocks": [1]})
    assert [(wait.rank, wait.patient) for wait in conductor.awaits()] == [(3, True), (5, True)]
