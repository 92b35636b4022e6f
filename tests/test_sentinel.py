"""The sentinel names the rank that died first, does not report ranks that end in order, and ends with its ranks."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from launch import Freezer

from adam_mpi.cluster import report_once, sentinel


@pytest.fixture
def failure_file(tmp_path):
    (tmp_path / "log").mkdir()
    return tmp_path / "log" / "failure.txt"


def command_line(process):
    """Return the words that started `process`; none of one that has ended and that nobody has waited for."""
    try:
        return process.cmdline()
    except psutil.ZombieProcess:
        return []


class Watched:
    """A sentinel with ranks whose deaths are the ends of their connections."""

    def __init__(self, failure_file, ranks, **options):
        self.path = sentinel.start_sentinel(failure_file, ranks, **options)
        [self.process] = [child for child in psutil.Process().children() if self.path in command_line(child)]
        # The process to be killed must not be this one.
        self.stand_in = subprocess.Popen(["sleep", "1000"])
        self.connections = [self.connect(f"rank {rank}, worker on h") for rank in range(ranks)]

    def connect(self, name):
        with mock.patch.object(sentinel.os, "getpid", lambda: self.stand_in.pid):
            return sentinel.SentinelConnection(self.path, name)

    def wait_until_idle(self, seconds=10, ranks=None):
        """Wait until the sentinel has accepted all connections, or has `ranks` left, and waits for events."""
        limit = time.monotonic() + seconds
        wanted = (len(self.connections) if ranks is None else ranks) + 5
        while self.process.num_fds() != wanted or self.process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < limit, f"the sentinel did not accept its connections in {seconds} s"
            time.sleep(0.002)

    def die(self, rank):
        self.connections[rank].socket.close()

    def leave(self, rank):
        self.connections[rank].close()

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
        for rank in range(len(watched.connections)):
            watched.die(rank)
        assert watched.ended(), "the sentinel still runs without ranks"
        watched.stand_in.kill()
        watched.stand_in.wait(10)


def test_it_names_the_first_of_several_deaths(watch, failure_file, capfd):
    watched = watch(4)
    watched.wait_until_idle()
    for rank in (2, 0, 3, 1):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "rank 2, worker on h died; the job ends\n"
    assert capfd.readouterr().err == "adam_mpi: rank 2, worker on h died; the job ends\n"


def test_ranks_that_end_in_order_are_not_reported(watch, failure_file, capfd):
    watched = watch(3)
    for rank in range(3):
        watched.leave(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_an_interruption_is_reported_unless_a_death_came_first(watch, failure_file):
    watched = watch(3)
    watched.wait_until_idle()
    watched.connections[1].close("interrupted by SIGINT")
    for rank in (0, 2):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "interrupted by SIGINT\n"
    assert json.loads((failure_file.parent.parent / "summary.json").read_text())["status"] == "interrupted"


def test_an_interruption_after_a_death_is_not_reported(watch, failure_file):
    watched = watch(2)
    watched.wait_until_idle()
    watched.die(0)
    watched.connections[1].close("interrupted by SIGTERM")
    assert watched.ended()
    assert failure_file.read_text().startswith("rank 0,")


def test_a_death_after_others_left_is_reported(watch, failure_file):
    watched = watch(3)
    watched.leave(0)
    watched.die(1)
    watched.leave(2)
    assert watched.ended()
    assert failure_file.read_text().startswith("rank 1,")


def test_a_death_is_reported_while_other_ranks_run(watch, failure_file):
    watched = watch(2)
    watched.die(1)
    limit = time.monotonic() + 10
    while not failure_file.exists() and time.monotonic() < limit:
        time.sleep(0.005)
    assert failure_file.exists(), "the sentinel reported nothing in 10 s"
    assert watched.process.is_running()


def test_a_summary_overwritten_during_the_report_is_repaired_at_the_end(watch, failure_file):
    watched = watch(2)
    watched.wait_until_idle()
    watched.die(0)
    assert report_once.wait_for_report(failure_file, 10)
    summary = failure_file.parent.parent / "summary.json"
    summary.write_text(json.dumps({"status": "running", "epochs": 3}))
    watched.die(1)
    assert watched.ended()
    assert json.loads(summary.read_text())["status"] == "failed"
    assert json.loads(summary.read_text())["epochs"] == 3


def test_a_death_that_is_survived_is_no_failure(watch, failure_file, capfd):
    watched = watch(3, survivable=True)
    watched.wait_until_idle()
    watched.die(1)
    watched.wait_until_idle(ranks=2)
    for rank in (0, 2):
        watched.connections[rank].send(sentinel.RECOVERED)
        watched.leave(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_without_a_recovery_the_first_death_is_the_cause(watch, failure_file):
    watched = watch(3, survivable=True)
    watched.wait_until_idle()
    watched.die(1)
    watched.wait_until_idle(ranks=2)
    watched.connections[0].send(sentinel.RECOVERED)
    for rank in (2, 0):
        watched.die(rank)
    assert watched.ended()
    assert failure_file.read_text() == "rank 2, worker on h died; the job ends\n"


def test_ranks_of_other_hosts_may_survive_the_loss_of_a_host(watch, failure_file, capfd):
    watched = watch(2, survivable=True, elsewhere=True)
    watched.wait_until_idle()
    for rank in (1, 0):
        watched.die(rank)
    assert watched.ended()
    assert not failure_file.exists() and capfd.readouterr().err == ""


def test_ranks_that_neither_recover_nor_end_are_killed(watch, failure_file):
    watched = watch(1, survivable=True, grace=0.5)
    hanging = separate_rank(watched.path, "compute")
    watched.wait_until_idle(ranks=2)
    watched.die(0)
    assert hanging.wait(20) == -signal.SIGKILL
    text = "rank 0, worker on h died; the job ends: the surviving ranks did not recover within 0.5 s\n"
    assert failure_file.read_text() == text


def test_a_rank_that_joins_later_is_watched_too(watch, failure_file):
    watched = watch(1)
    watched.wait_until_idle()
    watched.connections.append(watched.connect("rank 1, spawned on h"))
    watched.wait_until_idle()
    watched.leave(0)
    watched.die(1)
    assert watched.ended()
    assert failure_file.read_text() == "rank 1, spawned on h died; the job ends\n"


def test_the_list_of_ranks_is_left_only_where_the_sentinel_was_lost_too(watch, failure_file):
    for kill in (False, True):
        watched = watch(2)
        watched.wait_until_idle()
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
connection = sentinel.SentinelConnection(sys.argv[1], "rank 1, worker on h")
while sys.argv[2] == "compute":
    pass
os.kill(os.getpid(), signal.SIGSTOP)
"""


def separate_rank(path, does):
    return subprocess.Popen([sys.executable, "-c", RANK, path, does])


def test_a_stopped_rank_is_killed_and_named(watch, failure_file):
    rank = separate_rank(watch(1, patience=0.5).path, "stop")
    assert rank.wait(20) == -signal.SIGKILL
    assert failure_file.read_text() == "rank 1, worker on h was stopped for 0.5 s and is ended; the job ends\n"


def test_a_rank_that_only_computes_is_not_killed(watch, failure_file):
    watched = watch(1, patience=0.1)
    busy = separate_rank(watched.path, "compute")
    stopped = separate_rank(watched.path, "stop")
    # When the rank that connected last is killed, the other has been checked as often.
    assert stopped.wait(20) == -signal.SIGKILL
    assert busy.poll() is None
    busy.kill()
    busy.wait(10)


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def freezer(request):
    """Freeze a process by a control group of its own, like a container that is paused."""
    made = Freezer.make(request.param)
    if made is None:
        pytest.skip(f"control groups of version {request.param} cannot be made here")
    yield made.freeze
    made.close()


def test_a_frozen_rank_is_killed_and_named(watch, failure_file, freezer):
    watched = watch(1, patience=0.5)
    rank = separate_rank(watched.path, "compute")
    watched.wait_until_idle(ranks=2)
    freezer(rank.pid)
    # A process that is frozen by version 1 dies only when it is thawed.
    limit = time.monotonic() + 20
    while not failure_file.exists() or not failure_file.read_text():
        assert time.monotonic() < limit, "the sentinel reported nothing in 20 s"
        time.sleep(0.01)
    assert failure_file.read_text() == "rank 1, worker on h was frozen for 0.5 s and is ended; the job ends\n"


def test_a_rank_is_killed_by_order_and_named(watch, failure_file, capfd):
    watched = watch(1, survivable=True, host="h")
    rank = separate_rank(watched.path, "compute")
    other = separate_rank(watched.path, "compute")
    watched.wait_until_idle(ranks=3)
    # A process of another host, and one that is no rank.
    sentinel.order_kill(failure_file, "g", other.pid, "was not heard of for 9 s")
    sentinel.order_kill(failure_file, "h", 1, "was not heard of for 9 s")
    sentinel.order_kill(failure_file, "h", rank.pid, "was not heard of for 9 s")
    assert rank.wait(20) == -signal.SIGKILL
    assert other.poll() is None and not failure_file.exists()
    assert "rank 1, worker on h was not heard of for 9 s and is ended\n" in capfd.readouterr().err
    other.kill()
    other.wait(10)


@pytest.mark.slow
def test_ranks_that_do_not_end_after_a_failure_are_killed(watch, failure_file):
    watched = watch(1)
    rank = separate_rank(watched.path, "compute")
    watched.wait_until_idle(ranks=2)
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


def test_it_starts_with_the_standard_library_only():
    """Packages that are not installed with Python itself would make it slow to start."""
    root = str(Path(sentinel.__file__).parents[2])
    program = "import sys; sys.path.append(sys.argv[1]); import adam_mpi.cluster.sentinel_process; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", program, root]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in loaded}
    assert packages - sys.stdlib_module_names == {"__main__", "adam_mpi"}


def test_it_leaves_no_file_behind(watch):
    watched = watch(1)
    watched.leave(0)
    assert watched.ended()
    assert not Path(watched.path).parent.exists()
