"""The sentinel: names the rank that died first, is silent about those that said bye, and ends with its ranks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from launch import Freezer

from adam_mpi.cluster import sentinel


@pytest.fixture
def failure_file(tmp_path):
    (tmp_path / "log").mkdir()
    return tmp_path / "log" / "failure.txt"


class Watched:
    """A sentinel with ranks whose deaths are the ends of their connections."""

    def __init__(self, failure_file, ranks, **options):
        self.path = sentinel.start(failure_file, ranks, **options)
        [self.process] = [child for child in psutil.Process().children() if self.path in child.cmdline()]
        # Whoever is to be ended must not be us.
        self.stand_in = subprocess.Popen(["sleep", "1000"])
        self.wires = [self.connect(f"rank {rank}, worker on h") for rank in range(ranks)]

    def connect(self, name):
        with mock.patch.object(sentinel.os, "getpid", lambda: self.stand_in.pid):
            return sentinel.SentinelConnection(self.path, name)

    def settle(self, seconds=10, ranks=None):
        """Until it has taken every connection, or has these left, and waits for what happens on them."""
        limit, wanted = time.monotonic() + seconds, (len(self.wires) if ranks is None else ranks) + 5
        while self.process.num_fds() != wanted or self.process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < limit, f"the sentinel did not take its connections in {seconds} s"
            time.sleep(0.002)

    def die(self, rank):
        self.wires[rank].socket.close()

    def leave(self, rank):
        self.wires[rank].bye()

    def ended(self, seconds=10):
        psutil.wait_procs([self.process], seconds)
        return not self.process.is_running()


@pytest.fixture
def watch(failure_file):
    started = []

    def start(ranks, **options):
        started.append(Watched(failure_file, ranks, **options))
        return started[-1]

    yield start
    for watched in started:
        for rank in range(len(watched.wires)):
            watched.die(rank)
        assert watched.ended(), "the sentinel goes on without ranks"
        watched.stand_in.kill()
        watched.stand_in.wait(10)


def test_it_names_the_first_of_several_deaths(watch, failure_file, capfd):
    watched = watch(4)
    watched.settle()
    for rank in (2, 0, 3, 1):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "rank 2, worker on h died; the job ends\n"
    assert capfd.readouterr().err == "adam_mpi: rank 2, worker on h died; the job ends\n"


def test_it_is_silent_about_ranks_that_said_bye(watch, failure_file, capfd):
    watched = watch(3)
    for rank in range(3):
        watched.leave(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_an_interruption_is_told_unless_a_death_came_first(watch, failure_file):
    watched = watch(3)
    watched.settle()
    watched.wires[1].bye("interrupted by SIGINT")
    for rank in (0, 2):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "interrupted by SIGINT\n"
    assert json.loads((failure_file.parent.parent / "summary.json").read_text())["status"] == "interrupted"


def test_an_interruption_after_a_death_is_no_news(watch, failure_file):
    watched = watch(2)
    watched.settle()
    watched.die(0)
    watched.wires[1].bye("interrupted by SIGTERM")
    assert watched.ended()
    assert failure_file.read_text().startswith("rank 0,")


def test_who_waits_for_the_word_gets_it_when_it_is_whole(failure_file):
    assert not sentinel.told(failure_file, 0.0)
    failure_file.touch()
    assert not sentinel.told(failure_file, 0.02)
    failure_file.write_text("the cause")
    assert sentinel.told(failure_file, 0.0)


def test_a_death_after_others_left_is_told(watch, failure_file):
    watched = watch(3)
    watched.leave(0)
    watched.die(1)
    watched.leave(2)
    assert watched.ended()
    assert failure_file.read_text().startswith("rank 1,")


def test_it_tells_while_other_ranks_go_on(watch, failure_file):
    watched = watch(2)
    watched.die(1)
    limit = time.monotonic() + 10
    while not failure_file.exists() and time.monotonic() < limit:
        time.sleep(0.005)
    assert failure_file.exists(), "the sentinel said nothing in 10 s"
    assert watched.process.is_running()


def test_a_summary_written_while_the_death_was_noted_says_it_in_the_end(watch, failure_file):
    watched = watch(2)
    watched.settle()
    watched.die(0)
    assert sentinel.told(failure_file, 10)
    summary = failure_file.parent.parent / "summary.json"
    summary.write_text(json.dumps({"status": "running", "epochs": 3}))
    watched.die(1)
    assert watched.ended()
    assert json.loads(summary.read_text())["status"] == "failed"
    assert json.loads(summary.read_text())["epochs"] == 3


def test_a_death_that_is_survived_is_no_failure(watch, failure_file, capfd):
    watched = watch(3, survivable=True)
    watched.settle()
    watched.die(1)
    watched.settle(ranks=2)
    for rank in (0, 2):
        watched.wires[rank].say(sentinel.WENT_ON)
        watched.leave(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_when_nobody_goes_on_the_first_death_was_the_cause(watch, failure_file):
    watched = watch(3, survivable=True)
    watched.settle()
    watched.die(1)
    watched.settle(ranks=2)
    watched.wires[0].say(sentinel.WENT_ON)
    for rank in (2, 0):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "rank 2, worker on h died; the job ends\n"


def test_when_a_whole_host_dies_others_elsewhere_may_go_on(watch, failure_file, capfd):
    watched = watch(2, survivable=True, elsewhere=True)
    watched.settle()
    for rank in (1, 0):
        watched.die(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_who_neither_goes_on_nor_ends_is_ended(watch, failure_file):
    watched = watch(1, survivable=True, grace=0.5)
    hanging = separate_rank(watched.path, "compute")
    watched.settle(ranks=2)
    watched.die(0)
    assert hanging.wait(20) == -signal.SIGKILL
    text = "rank 0, worker on h died; the job ends: the others have not gone on for 0.5 s\n"
    assert failure_file.read_text() == text


def test_a_rank_that_joins_later_is_watched_too(watch, failure_file):
    watched = watch(1)
    watched.settle()
    watched.wires.append(watched.connect("rank 1, spawned on h"))
    watched.settle()
    watched.leave(0)
    watched.die(1)
    assert watched.ended()
    assert failure_file.read_text() == "rank 1, spawned on h died; the job ends\n"


def test_the_list_of_its_ranks_stays_only_where_the_sentinel_went_with_them(watch, failure_file):
    for kill in (False, True):
        watched = watch(2)
        watched.settle()
        [listed] = failure_file.parent.glob("watched-*.txt")
        assert listed.read_text() == "rank 0, worker on h\nrank 1, worker on h\n"
        if kill:
            watched.process.kill()
        watched.leave(0)
        watched.leave(1)
        assert watched.ended()
        assert listed.exists() == kill


# A rank in a process of its own, which then computes or is stopped.
RANK = """
import os, signal, sys
from adam_mpi.cluster import sentinel
wire = sentinel.SentinelConnection(sys.argv[1], "rank 1, worker on h")
while sys.argv[2] == "compute":
    pass
os.kill(os.getpid(), signal.SIGSTOP)
"""


def separate_rank(path, does):
    return subprocess.Popen([sys.executable, "-c", RANK, path, does])


def test_a_stopped_rank_is_ended_and_named(watch, failure_file):
    rank = separate_rank(watch(1, patience=0.5).path, "stop")
    assert rank.wait(20) == -signal.SIGKILL
    assert failure_file.read_text() == "rank 1, worker on h was stopped for 0.5 s and is ended; the job ends\n"


def test_a_rank_that_only_computes_is_let_be(watch, failure_file):
    watched = watch(1, patience=0.1)
    busy = separate_rank(watched.path, "compute")
    stopped = separate_rank(watched.path, "stop")
    # By the time the one that came last is ended, the other has been looked at as often.
    assert stopped.wait(20) == -signal.SIGKILL
    assert busy.poll() is None
    busy.kill()
    busy.wait(10)


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def freezer(request):
    """Freezes a process by a control group of its own, like a container that is paused."""
    made = Freezer.make(request.param)
    if made is None:
        pytest.skip(f"no control groups of version {request.param} that we may make")
    yield made.freeze
    made.close()


def test_a_frozen_rank_is_ended_and_named(watch, failure_file, freezer):
    watched = watch(1, patience=0.5)
    rank = separate_rank(watched.path, "compute")
    watched.settle(ranks=2)
    freezer(rank.pid)
    # What is frozen by version 1 dies only when it is let go.
    limit = time.monotonic() + 20
    while not failure_file.exists() or not failure_file.read_text():
        assert time.monotonic() < limit, "the sentinel said nothing in 20 s"
        time.sleep(0.01)
    assert failure_file.read_text() == "rank 1, worker on h was frozen for 0.5 s and is ended; the job ends\n"


def test_a_rank_that_the_head_hears_no_more_of_is_ended_and_named(watch, failure_file, capfd):
    watched = watch(1, survivable=True, host="h")
    rank, other = (separate_rank(watched.path, "compute") for _ in range(2))
    watched.settle(ranks=3)
    # Of another host, and of nobody.
    sentinel.order_end(failure_file, "g", other.pid, "was not heard of for 9 s")
    sentinel.order_end(failure_file, "h", 1, "was not heard of for 9 s")
    sentinel.order_end(failure_file, "h", rank.pid, "was not heard of for 9 s")
    assert rank.wait(20) == -signal.SIGKILL
    assert other.poll() is None and not failure_file.exists()
    assert "rank 1, worker on h was not heard of for 9 s and is ended\n" in capfd.readouterr().err
    other.kill()
    other.wait(10)


def test_who_does_not_end_when_the_failure_is_told_is_ended(watch, failure_file):
    watched = watch(1)
    rank = separate_rank(watched.path, "compute")
    watched.settle(ranks=2)
    failure_file.write_text("the cause\n")
    assert rank.wait(30) == -signal.SIGKILL


def test_a_temporary_folder_may_have_a_long_name(watch, failure_file, tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(sentinel.tempfile, "tempdir", str(folder))
    watched = watch(1)
    assert len(watched.path) <= sentinel.SOCKET_PATH
    watched.die(0)
    assert watched.ended() and failure_file.read_text().startswith("rank 0,")


def test_a_run_directory_that_hangs_silences_nobody(failure_file, capsys, monkeypatch):
    monkeypatch.setattr(sentinel, "REPORT_SECONDS", 0.1)
    go = threading.Event()

    def hang(*arguments):
        go.wait()
        raise OSError

    monkeypatch.setattr(sentinel.Path, "open", hang)
    sentinel.report(failure_file, "the cause")
    assert capsys.readouterr().err == "adam_mpi: the cause\n"
    monkeypatch.undo()
    go.set()


def test_it_leaves_no_file_behind(watch):
    watched = watch(1)
    watched.leave(0)
    assert watched.ended()
    assert not Path(watched.path).parent.exists()


def test_only_the_first_report_counts(failure_file, capsys):
    sentinel.report(failure_file, "the cause")
    sentinel.report(failure_file, "a consequence", "interrupted")
    assert failure_file.read_text() == "the cause\n"
    assert capsys.readouterr().err == "adam_mpi: the cause\n"


def test_who_comes_second_lets_the_first_one_tell(failure_file):
    """It ends the job next: under MPICH a message that nobody had read by then was lost."""
    failure_file.touch()
    second = threading.Thread(target=sentinel.report, args=(failure_file, "a consequence"))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    failure_file.write_text("the cause\n")
    second.join(10)
    assert not second.is_alive() and failure_file.read_text() == "the cause\n"


def test_who_comes_second_tells_if_the_first_one_does_not(failure_file, capsys, monkeypatch):
    monkeypatch.setattr(sentinel, "TELL_SECONDS", 0.01)
    failure_file.touch()
    sentinel.report(failure_file, "a consequence")
    assert "a consequence" in capsys.readouterr().err and failure_file.read_text() == "a consequence\n"


def test_what_was_told_is_taken_when_the_launcher_has_read_it():
    reader, writer = os.pipe()
    os.write(writer, b"the cause\n")
    assert not sentinel.taken(writer, 0.0)
    os.read(reader, 100)
    assert sentinel.taken(writer, 0.0)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("before", [None, {"status": "running", "epochs": 3}])
def test_a_report_is_noted_in_the_summary(failure_file, before):
    summary = failure_file.parent.parent / "summary.json"
    if before:
        summary.write_text(json.dumps(before))
    sentinel.report(failure_file, "by hand", "interrupted")
    noted = {"status": "interrupted", "failure": "by hand", "exit_code": 1}
    assert json.loads(summary.read_text()) == (before or {}) | noted


def test_the_exit_code_is_that_of_the_first_report(failure_file):
    assert sentinel.exit_code(failure_file) == 1
    sentinel.report(failure_file, "not a number", exit_code=2)
    sentinel.report(failure_file, "a consequence", exit_code=1)
    assert sentinel.exit_code(failure_file) == 2


def test_a_run_directory_that_is_gone_does_not_silence_a_report(tmp_path, capsys):
    sentinel.report(tmp_path / "gone" / "log" / "failure.txt", "the cause")
    assert capsys.readouterr().err == "adam_mpi: the cause\n"
