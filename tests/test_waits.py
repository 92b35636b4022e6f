"""Nothing waits for ever: cut networks, silent and frozen ranks, disks that are full or hang, in real jobs."""

import re
import shutil
import time
import types
from dataclasses import replace

import psutil
import pytest
from launch import Disk, Freezer, available, given
from local_server import LocalServer, additive

from adam_mpi.checkpoint.run_directory import grow
from adam_mpi.server.server import Server

full = pytest.mark.full
survivable = [
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
]
# Ranks 0 and 1 serve data, 2 to 4 parameters, 5 to 7 train.
EIGHT = given("layout.servers=3", "layout.data=2", "server.shard=20000", "observe.interval=0.2", "data.images=6000")
ENDLESS = given("train.epochs=1000000", "snapshot.minutes=0")
SMALL = 'model.layers=[{kind="dense", units=10}]', "data.images=6000", "observe.interval=0.2"
SECONDS = 10
SIDE = r"rank \d+, [^;]*? on (h\d)"


def surviving(test):
    for mark in survivable:
        test = mark(test)
    return test


def training(job):
    return job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")


def continued(job, generation=1):
    """Check that training continues in `generation`, then stop the job."""
    job.until(lambda: (job.run / "log" / f"generation-{generation}.json").exists(), f"generation {generation}", 90)
    images = job.metrics()[-1]["images_trained"]
    job.until(lambda: job.metrics()[-1]["images_trained"] > images + 1000, "more images", 90)
    (job.run / "STOP").touch()
    job.wait(100)
    assert (job.run / "STOPPED").exists(), job.said()
    return job.summary


@full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("staleness", ["0", "3", "inf"])
def test_a_cut_between_two_hosts_ends_the_job_by_name_in_time(staleness, hosts, start_job):
    # With all data on h0: what is cut off is a worker's way to a server, and a server's to its copies.
    keys = given(f"consistency.staleness={staleness}", f"cluster.seconds={SECONDS}", "layout.data=1")
    job = training(start_job(8, "train", *EIGHT, *ENDLESS, *keys, environment=hosts.environment))
    hosts.call("cut", "h1", "h2")
    since = time.time()
    job.wait(60)
    failure = job.run / "log" / "failure.txt"
    took = failure.stat().st_mtime - since
    cause = failure.read_text()
    sides = re.fullmatch(rf"{SIDE} has waited for .* from {SIDE} since \S+ \S+ s; the job ends\n", cause)
    assert sides and set(sides.groups()) == {"h1", "h2"}, cause
    assert job.summary["failure"] == cause.strip()
    assert took < SECONDS + 5, f"{took} s: {cause}"
    assert not (job.run / "DONE").exists()
    assert job.left_over() == []


@full
@surviving
@pytest.mark.timeout(200)
def test_a_silent_rank_is_ended_and_the_others_continue(start_job):
    """Its main thread hangs, though it is not stopped."""
    keys = given('inject.faults=["delay rank=3 at=apply seconds=1000"]', "cluster.seconds=6")
    job = start_job(8, "train", *EIGHT, *ENDLESS, *keys)
    summary = continued(job)
    assert summary["recoveries"][0]["members"] == [3]
    assert re.search(r"adam_mpi: rank 3, server on \S+ has sent nothing for 6 s and is ended", job.stderr), job.said()


@full
@surviving
@pytest.mark.timeout(200)
def test_a_frozen_rank_is_ended_and_the_others_continue(start_job):
    if (freezer := Freezer.make()) is None:
        pytest.skip("no control groups of version 2 that we may make")
    job = training(start_job(8, "train", *EIGHT, *ENDLESS, *given("cluster.stopped=1")))
    freezer.freeze(job.rank(7).pid)
    summary = continued(job)
    freezer.close()
    assert summary["recoveries"][0]["members"] == [7]
    assert re.search(r"adam_mpi: rank 7, worker .* was frozen for 1 s and is ended", job.stderr), job.said()


@full
@surviving
@pytest.mark.timeout(200)
def test_a_rank_that_joined_later_is_watched_too(start_job):
    job = start_job(8, "train", *EIGHT, *ENDLESS, *given("cluster.stopped=1"), options=("--host", "localhost:12"))
    training(job)
    grow(job.run, 1)
    job.until(lambda: (job.run / "log" / "generation-1.json").exists(), "generation 1", 90)
    [joined] = [process for process in psutil.Process(job.process.pid).children(True) if "join" in process.cmdline()]
    job.until(lambda: "rank 8" in "".join(f.read_text() for f in job.run.glob("log/watched-*")), "its connection")
    joined.suspend()
    summary = continued(job, 2)
    assert summary["recoveries"][-1]["members"] == [8]
    assert re.search(r"adam_mpi: rank 8, .* was stopped for 1 s and is ended", job.stderr), job.said()


@pytest.fixture
def disk(tmp_path):
    """A file system that can be filled."""
    try:
        with Disk.make(tmp_path / "disk") as made:
            yield made
    except OSError as error:
        pytest.skip(f"no file system of our own: {error}")


@full
@pytest.mark.timeout(200)
def test_a_full_run_directory_stops_no_rank_until_the_results_are_due(disk, start_job, tmp_path):
    # With a small network, so that snapshots fit.
    keys = given(*SMALL, f"store.dir={tmp_path / 'store'}", "observe.tensorboard=true")
    job = training(start_job(4, "train", "--run", disk.folder / "run", *ENDLESS, *keys))
    disk.fill()
    job.until(lambda: "No space left on device; it is retried" in job.stderr, "the warning")
    lines = len(job.metrics())
    disk.empty()
    job.until(lambda: "has caught up" in job.stderr, "its last word on that")
    job.until(lambda: len(job.metrics()) > lines + 10, "more figures")
    seconds = [line["seconds"] for line in job.metrics()]
    assert seconds == sorted(seconds)
    (job.run / "STOP").touch()
    job.wait(60)
    assert (job.run / "STOPPED").exists() and "Traceback" not in job.stderr, job.said()


@full
@pytest.mark.timeout(200)
def test_without_room_for_its_results_a_job_fails_by_name(disk, start_job, tmp_path):
    keys = given(*SMALL, f"store.dir={tmp_path / 'store'}")
    job = training(start_job(4, "train", "--run", disk.folder / "run", *ENDLESS, *keys))
    disk.fill()
    job.until(lambda: "No space left on device; it is retried" in job.stderr, "the warning")
    (job.run / "STOP").touch()
    job.wait(60)
    cause = "^adam_mpi: rank 0, data on .*the (last snapshot|results) could not be written: .*No space"
    assert re.search(cause, job.stderr, re.M), job.said()
    assert not (job.run / "STOPPED").exists() and job.returncode


@full
@pytest.mark.timeout(200)
def test_a_finished_job_waits_for_a_slow_last_flush(launch):
    """Longer than any rank may be silent."""
    keys = given("train.epochs=1", "data.images=2000", "store.interval=1", "cluster.seconds=5")
    fault = given('inject.faults=["delay role=server at=write seconds=12"]')
    job = launch(4, "train", *keys, *fault)
    assert job.returncode == 0 and (job.run / "DONE").exists(), job.said()


@full
@pytest.mark.timeout(200)
def test_a_snapshot_that_hangs_ends_a_job_by_name_at_its_end(launch):
    keys = given("train.epochs=1", "data.images=2000", "cluster.seconds=3")
    fault = given('inject.faults=["delay rank=1 at=snapshot seconds=1000"]')
    job = launch(4, "train", *keys, *fault, timeout=80)
    assert job.returncode and not (job.run / "DONE").exists()
    cause = r"the last snapshot could not be written: \S+server-00001.h5: the disk has taken nothing for 6 s"
    assert re.search(rf"adam_mpi: rank 0, data on \S+: {cause}", job.stderr), job.said()


@full
def test_a_temporary_folder_may_have_a_long_name(launch, tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    # Open MPI has sockets in there too.
    kept = {"PRTE_MCA_prte_tmpdir_base": "/tmp", "OMPI_MCA_orte_tmpdir_base": "/tmp"}
    job = launch(2, "train", *given("data.images=1000", "train.epochs=1"), environment={"TMPDIR": str(folder)} | kept)
    assert job.returncode == 0 and (job.run / "DONE").exists(), job.said()
    shutil.rmtree(folder)


def far_server(staleness, copies=1):
    """A server and a pusher between whom messages travel, as between two hosts."""
    config = additive(transport="send")
    config.consistency.staleness = staleness
    local = LocalServer(config, 1000)
    if copies > 1:
        # The pusher's side of it: here is no second server that could have one.
        rings = local.pushes.rings
        layout = replace(rings.memory_layout, peers=replace(rings.memory_layout.peers, count=copies - 1))
        rings.generation = replace(rings.generation, memory_layout=layout)
    return local


def kinds(waits):
    return {(wait.what.split()[1], wait.patient) for wait in waits}


@pytest.mark.parametrize(("staleness", "copies"), [(0, 1), (3, 2), (float("inf"), 2)])
def test_the_arrival_of_a_push_is_owed_at_once_and_its_application_by_others_may_take_long(staleness, copies):
    """With clocks a server waits for the other replicas, with copies for the other servers: it is not to blame."""
    local = far_server(staleness, copies)
    local.server.session.barrier.hold()
    local.pushes.push(local.gradient_buffer(1.0))
    local.pushes.step()
    assert kinds(local.pushes.awaits()) == {("arrival", False), ("acknowledgement", True)}

    def arrived():
        local.server.step()
        local.pushes.step()
        return kinds(local.pushes.awaits()) == {("acknowledgement", True)}

    local.world.wait(arrived, "the server to say what has arrived", 20)
    local.server.session.barrier.release()
    local.apply_pushes()
    assert list(local.pushes.awaits()) == []
    local.free()


def test_without_clocks_and_copies_the_acknowledgement_of_a_push_is_owed_at_once():
    local = far_server(float("inf"))
    local.pushes.push(local.gradient_buffer(1.0))
    local.pushes.step()
    assert kinds(local.pushes.awaits()) == {("acknowledgement", False)}
    local.apply_pushes()
    local.free()


def test_a_pull_waits_patiently_for_a_clock_but_not_for_an_answer():
    local = far_server(0)
    local.pulls.start(least=1)
    local.pulls.step()
    assert kinds(local.pulls.awaits()) == {("heads", False), ("1,", True)}
    [turn] = [wait.turn for wait in local.pulls.awaits() if not wait.patient]

    def answered():
        local.server.step()
        local.pulls.step()
        return local.pulls.reads > turn + 2

    local.world.wait(answered, "answers", 20)
    local.push(1.0)
    local.world.wait(lambda: local.server.step() or local.pulls.step(), "the pull", 20)
    assert list(local.pulls.awaits()) == []
    local.free()


def test_a_server_waits_for_reports_of_its_copies():
    server = Server.__new__(Server)
    server.session = types.SimpleNamespace(replicator=None, clipped=None)
    assert server.awaits() == []
    lanes = {3: types.SimpleNamespace(sent=["record"], applied=7), 4: types.SimpleNamespace(sent=[], applied=9)}
    server.session.replicator = types.SimpleNamespace(ring_senders=lanes)
    assert [(wait.rank, wait.turn, wait.patient) for wait in server.awaits()] == [(3, 7, False)]
