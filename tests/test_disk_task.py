"""Disk tasks run in threads of their own: they may fail in any way, or hang, and no rank waits forever."""

import logging
import threading
import time
import types

import numpy as np
import pytest
from test_snapshot import Servers

from adam_mpi.checkpoint import disk_task, snapshot_barrier
from adam_mpi.checkpoint.disk_task import DiskTask, reason, report_progress
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.cluster.control_messages import SnapshotHeld
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position


def over(task, seconds=20):
    """The task, when it is over."""
    limit = time.perf_counter() + seconds
    while not task.over:
        assert time.perf_counter() < limit, f"the task was not over in {seconds} s"
        time.sleep(1e-3)
    return task


@pytest.fixture
def clock(monkeypatch):
    """Time as the test wants it."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(disk_task.time, "monotonic", lambda: now.seconds)
    return now


def test_a_task_returns_what_its_work_returns():
    assert over(DiskTask("test", lambda: 7, 60)).result() == 7


@pytest.mark.parametrize("error", [OSError(28, "no room"), MemoryError(), SystemExit(1)])
def test_a_task_that_fails_raises_where_its_result_is_asked_for(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        over(DiskTask("test", fail, 60)).result()


def test_a_task_hangs_when_it_has_made_no_progress_for_too_long(clock):
    steps, taken = threading.Semaphore(0), threading.Semaphore(0)

    def work():
        for _ in range(3):
            steps.acquire()
            report_progress()
            taken.release()
        steps.acquire()

    task = DiskTask("test", work, 10)
    for _ in range(3):
        clock.seconds += 9
        assert not task.over
        steps.release()
        taken.acquire()
    clock.seconds += 11
    assert task.over
    with pytest.raises(OSError, match="the disk has taken nothing for 10 s"):
        task.result()
    steps.release()


def test_reasons_are_one_line():
    assert reason(MemoryError()) == "MemoryError"
    assert reason(OSError(28, "No space left on device")) == "No space left on device"
    assert reason(RuntimeError("one\ntwo")) == "one"
    text = "Unable to create file (file write failed: time = 1\n, errno = 28, error message = 'No space left', buf = 0)"
    assert reason(OSError(28, text)) == "No space left"


def take(barrier, folder):
    shard = Shard(0, "dense1", 0, 8)
    values = np.zeros(8, np.float32)
    barrier.set_limits([0], folder)
    barrier.copy_state("server-00001.h5", [shard], {"weights": {0: values}}, np.zeros(1, np.int64), Position(4))


def written(barrier):
    """What is reported of the next copy, when it is written or has failed."""
    limit = time.perf_counter() + 20
    while (report := barrier.written()) is None:
        assert time.perf_counter() < limit, "no report of the copy in 20 s"
        time.sleep(1e-3)
    return report


@pytest.mark.parametrize("error", [MemoryError(), ValueError("out of bounds"), OSError(5, "Input/output error")])
def test_a_copy_that_cannot_be_written_is_reported_whatever_the_reason(error, tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise error

    monkeypatch.setattr(snapshot_barrier.snapshot, "write_server_part", fail)
    barrier = SnapshotBarrier(1, 60)
    take(barrier, tmp_path)
    assert written(barrier) == {"error": f"{tmp_path / 'server-00001.h5'}: {reason(error)}", "hung": False}


def test_a_copy_whose_disk_hangs_is_reported_and_the_next_one_is_written(tmp_path, clock):
    go = threading.Event()
    barrier = SnapshotBarrier(1, 60, go.wait)
    take(barrier, tmp_path)
    assert barrier.written() is None
    clock.seconds += 61
    error = f"{tmp_path / 'server-00001.h5'}: the disk has taken nothing for 60 s"
    assert written(barrier) == {"error": error, "hung": True}
    go.set()
    take(barrier, tmp_path / "next")
    assert written(barrier)["file"] == "server-00001.h5"


def test_a_snapshot_whose_name_hangs_is_left_out_and_touches_nothing_later(tmp_path, clock, capsys):
    servers = Servers(tmp_path / "snapshots")
    hangs = threading.Event()
    go = threading.Event()
    coordinator = servers.snapshots
    servers.take(1, 0, 1)
    servers.change_settings(before_rename=lambda: hangs.set() or go.wait(), seconds=60, keep=1)
    servers.wait = lambda: None
    servers.take(2, 0, 2)
    thread = coordinator.sealing.thread
    assert hangs.wait(20)
    clock.seconds += 61
    coordinator.step()
    assert not coordinator.busy and "the disk has taken nothing for 60 s" in coordinator.error and coordinator.hung
    assert "warning: no snapshot: " in capsys.readouterr().err and coordinator.taken == ["epoch-0001"]
    servers.change_settings(before_rename=lambda: None)
    go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {"epoch-0001", "epoch-0002"}


def test_a_snapshot_that_cannot_be_named_is_left_out_whatever_the_reason(tmp_path, caplog):
    servers = Servers(tmp_path / "snapshots")

    def fail():
        raise MemoryError

    servers.change_settings(before_rename=fail)
    with caplog.at_level(logging.WARNING):
        servers.take(1, 0, 1)
    assert servers.snapshots.error.endswith(".part-0-1: MemoryError") and servers.snapshots.taken == []
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_server_that_does_not_answer_in_a_snapshot_is_awaited(tmp_path):
    servers = Servers(tmp_path / "snapshots")
    coordinator = servers.snapshots
    assert coordinator.awaits() == []
    coordinator.order()
    coordinator.handle(3, SnapshotHeld("server", [1]))
    assert [(wait.rank, wait.patient) for wait in coordinator.awaits()] == [(5, False)]
    coordinator.handle(5, SnapshotHeld("server", [1]))
    assert [(wait.rank, wait.patient) for wait in coordinator.awaits()] == [(3, True), (5, True)]
