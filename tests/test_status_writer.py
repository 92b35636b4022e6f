"""A thread writes the files that show the state of a running job: a directory that is full or hangs stops no rank."""

import errno
import json
import logging
import os
import threading
import time

import pytest

from adam_mpi.base import log as logs
from adam_mpi.base.errors import LostRun
from adam_mpi.checkpoint import owner
from adam_mpi.checkpoint.run_directory import RequestWatcher, grow
from adam_mpi.monitor import metrics, status_writer
from adam_mpi.monitor.metrics import Metrics
from adam_mpi.monitor.status_writer import StatusWriter


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(status_writer, "RETRY_SECONDS", 0.01)


def until(happened, what):
    limit = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < limit, f"{what} did not come in 20 s"
        time.sleep(1e-3)


def test_what_is_requested_is_written_and_of_several_the_newest(tmp_path):
    written = []
    go = threading.Event()
    writer = StatusWriter(tmp_path)
    writer.request("first", go.wait)
    until(lambda: writer.writing, "the first")
    for number in range(3):
        writer.request("status.json", lambda number=number: written.append(number))
    writer.request("summary.json", lambda: written.append("never"))
    writer.forget("summary.json")
    assert not writer.wait_until_written(0.01)
    go.set()
    assert writer.wait_until_written(20) and written == [2]


def test_what_fails_is_warned_about_and_retried(tmp_path, capsys):
    writer = StatusWriter(tmp_path)
    room = threading.Event()
    tries = []

    def write():
        tries.append(1)
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")

    writer.request("status.json", write)
    until(lambda: len(tries) > 2, "another try")
    writer.poll()
    said = capsys.readouterr().err
    trouble = "No space left on device; it is retried, and training continues"
    assert said == f"adam_mpi: warning: {tmp_path / 'status.json'}: {trouble}\n"
    room.set()
    assert writer.wait_until_written(20)
    until(
        lambda: "has caught up" in capsys.readouterr().err or writer.warned is None, "the message that it has caught up"
    )


def test_what_hangs_is_warned_about(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(status_writer, "SLOW_SECONDS", 0.01)
    go = threading.Event()
    hanging = StatusWriter(tmp_path)
    hanging.request("status.json", go.wait)
    until(lambda: hanging.poll() or hanging.warned, "a warning")
    assert "status.json: not written for 0 s; it is retried" in capsys.readouterr().err
    go.set()
    # What it prints then must not be among what the next test prints.
    assert hanging.wait_until_written(20)
    assert "has caught up" in capsys.readouterr().err


def test_an_error_that_is_not_of_the_disk_is_raised(tmp_path):
    writer = StatusWriter(tmp_path)
    writer.request("status.json", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        until(writer.poll, "the error")


def test_a_job_that_has_lost_the_run_writes_nothing_that_was_still_waiting(tmp_path):
    """Its disk hung for longer than an owner may be silent; then it answers, and the next file is due."""
    held, _ = owner.claim_run(tmp_path, [owner.this_process()])
    writer = StatusWriter(tmp_path, held.check)
    hanging = threading.Event()
    back = threading.Event()
    written = []
    writer.request("status.json", lambda: hanging.set() or back.wait(20))
    assert hanging.wait(20)
    writer.request("metrics.jsonl", lambda: written.append("a line among those of another job"))
    owner.claim_run(tmp_path, [owner.this_process()], by_force=True)
    back.set()
    with pytest.raises(LostRun, match="has been taken by process"):
        until(writer.poll, "the error")
    assert written == []


def test_a_job_that_is_over_takes_no_request_from_the_next_one(tmp_path, monkeypatch):
    """Its process may live longer, as a notebook does."""
    looked = threading.Event()
    monkeypatch.setattr(RequestWatcher, "_look", lambda watcher: looked.set())
    held, _ = owner.claim_run(tmp_path, [owner.this_process()])
    before = set(threading.enumerate())
    RequestWatcher(tmp_path, held.heartbeat())
    [thread] = [thread for thread in set(threading.enumerate()) - before if thread.name == "requests"]
    assert looked.wait(20)
    held.release()
    thread.join(20)
    assert not thread.is_alive()


def test_a_line_that_does_not_fit_is_removed_and_written_later(tmp_path, monkeypatch):
    figures = Metrics(tmp_path, tensorboard=False)
    figures.add({"line": 1}, 0)
    figures.write()
    real = os.strerror

    class Full:
        """Takes three bytes of each line."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def tell(self):
            return self.file.tell()

        def write(self, line):
            return self.file.write(line[:3])

        def truncate(self, size):
            return self.file.truncate(size)

    path, opened = figures.path, type(figures.path).open
    figures.add({"line": 2}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "open", lambda *arguments, **options: Full(opened(*arguments, **options)))
        with pytest.raises(OSError, match=real(errno.ENOSPC)):
            figures.write()
    assert path.read_text() == '{"line": 1}\n'
    figures.add({"line": 3}, 0)
    figures.write()
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 3]


LINE = {"part": "train", "done": False, "loss": 1.5, "staleness_histogram": {"0": 3, "2": 1}}


def test_events_that_could_not_be_written_go_into_another_file(tmp_path, monkeypatch):
    from test_metrics import events

    made = metrics.Events(tmp_path / "tensorboard", ("loss",))
    monkeypatch.setattr(metrics.Events, "PAUSE_SECONDS", 0.0)
    made.add_events(LINE, 10)
    made.write_events()

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made.file, "flush", fail)
    made.add_events(LINE, 20)
    with pytest.raises(OSError, match="No space"):
        made.write_events()
    made.write_events()
    assert not made.waiting
    second = next((tmp_path / "tensorboard").glob("events.*.2"))
    (tmp_path / "second").mkdir()
    second.rename(tmp_path / "second" / "events.2")
    assert events(tmp_path / "second")["loss/train"] == [(20, 1.5)]


def test_a_log_is_there_as_soon_as_it_is_written_and_blocks_no_rank(tmp_path, monkeypatch):
    root = logging.getLogger("adam_mpi")
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "propagate", root.propagate)
    monkeypatch.setattr(logs, "WRITE_SECONDS", 20.0)
    path = logs.start_rank_log(tmp_path, 3, "rank 3")
    log, [handler] = logging.getLogger("adam_mpi.test"), root.handlers
    log.warning("first")
    assert path.read_text().endswith("rank 3: WARNING first\n")
    go, stream = threading.Event(), handler.stream
    monkeypatch.setattr(logs, "WRITE_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(handler, "format", lambda record: go.wait() and record.msg)
        for number in range(100):
            log.warning("line %d", number)
        go.set()
        assert handler.idle.wait(20)
    handler.close()
    assert stream.closed and len(path.read_text().splitlines()) == 101


def test_a_log_on_a_full_disk_says_nothing_of_it(tmp_path, monkeypatch, capsys):
    root = logging.getLogger("adam_mpi")
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "propagate", root.propagate)
    logs.start_rank_log(tmp_path, 3, "rank 3")
    [handler] = root.handlers
    handler.stream.close()
    handler.stream = open("/dev/full", "w")  # noqa: SIM115
    logging.getLogger("adam_mpi.test").warning("first")
    assert handler.idle.wait(20)
    assert capsys.readouterr().err == ""


def test_requests_of_people_are_noticed(tmp_path):
    (tmp_path / "config.toml").touch()
    held, _ = owner.claim_run(tmp_path, [owner.this_process()])
    watcher = RequestWatcher(tmp_path, held.heartbeat())
    assert not watcher.stop
    grow(tmp_path, 2)
    (tmp_path / "COMPARE").touch()
    until(lambda: watcher.ranks and watcher.compare, "the requests")
    assert watcher.take_ranks() == 2 and watcher.take_compare()
    assert watcher.take_ranks() == 0 and not watcher.take_compare() and not (tmp_path / "GROW").exists()
    (tmp_path / "STOP").touch()
    until(lambda: watcher.stop, "the request to stop")
