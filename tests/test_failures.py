"""A rank that dies, raises or is interrupted ends the whole job within seconds, and the right one is named."""

import re
import signal
import time
from datetime import datetime

import pytest
from launch import available, given, spread

# Would train for hours.
ENDLESS = given("data.images=1000", "train.epochs=1000000", "observe.interval=0.2")
SECONDS = 5.0
# Jobs run without survival, also where the MPI has it.
MORTAL = {"ADAM_MPI_SURVIVE": "no"}
PLACES = {
    0: r"rank 0, data on \S+",
    1: r"rank 1, server on \S+",
    3: r"rank 3, worker \(replica 1, strip 0\) on \S+",
}
POINTS = {0: "batch", 1: "apply", 3: "compute"}


def struck(job):
    """Return when the injected fault happened, by the log of its rank."""
    [line] = re.findall(r"^(\S+ \S+) .* injected (?:kill|raise) at", "\n".join(job.logs().values()), re.M)
    return datetime.strptime(line, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def check_end(job, since, said, status="failed"):
    """Check that the job has ended in time, and that one line and the summary say why."""
    assert job.returncode != 0
    assert time.time() - since < SECONDS, job.said()
    assert job.left_over() == []
    assert job.summary["status"] == status
    cause = job.summary["failure"].partition("\n")[0]
    assert re.fullmatch(said, cause), job.said()
    told = re.findall(r"^adam_mpi: (.*)", job.stderr, re.M)
    # mpirun of Open MPI shows nothing more after Ctrl-C.
    assert told == [cause] or (told == [] and status == "interrupted"), job.said()
    assert not (job.run / "DONE").exists()


def training(job):
    return job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")


@pytest.mark.parametrize("rank", PLACES)
def test_a_killed_rank_is_named(rank, launch):
    fault = f'inject.faults=["kill rank={rank} at={POINTS[rank]} step=30"]'
    job = launch(4, "train", *ENDLESS, *given(fault), environment=MORTAL)
    check_end(job, struck(job), rf"{PLACES[rank]} died; the job ends")
    assert "Traceback" not in job.stderr


def test_an_unexpected_error_at_the_start_ends_the_job(launch, tmp_path):
    # No check expects this error; the other ranks wait for rank 0 inside MPI by then.
    (tmp_path / "run" / "STOP").mkdir(parents=True)
    job = launch(3, "train", "--run", tmp_path / "run", *ENDLESS, timeout=60)
    assert "IsADirectoryError" in job.stderr and job.left_over() == []


@pytest.mark.parametrize(("rank", "mpi"), spread(list(PLACES)), indirect=["mpi"])
def test_a_rank_that_raises_is_named_with_its_traceback(rank, launch):
    fault = f'inject.faults=["raise rank={rank} at={POINTS[rank]} step=30"]'
    job = launch(4, "train", *ENDLESS, *given(fault))
    check_end(job, struck(job), rf"{PLACES[rank]} raised")
    for text in (job.stderr, job.summary["failure"]):
        assert text.count("Traceback (most recent call last)") == 1
        assert re.search(rf"InjectedFault: injected at {POINTS[rank]}, step 30, on {PLACES[rank]}", text)


@pytest.mark.parametrize("point", ["start", "push", "pull", "evaluate", "store"])
@pytest.mark.full
def test_a_fault_at_any_point_ends_the_job(point, launch):
    role = "server" if point == "store" else "worker"
    fault = given(f'inject.faults=["kill role={role} at={point}"]')
    job = launch(3, "train", *ENDLESS, *fault, environment=MORTAL)
    check_end(job, struck(job), rf"rank \d, {role} .*died; the job ends")


def test_a_rank_killed_from_outside_is_named(start_job):
    job = training(start_job(4, "train", *ENDLESS, environment=MORTAL))
    job.rank(3).kill()
    since = time.time()
    check_end(job.wait(30), since, rf"{PLACES[3]} died; the job ends")


@pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank")
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_without_survival_too_a_dead_rank_ends_the_job(rank, start_job):
    job = training(start_job(4, "train", *ENDLESS, environment=MORTAL))
    job.rank(rank).kill()
    since = time.time()
    check_end(job.wait(30), since, rf"{PLACES[rank]} died; the job ends")


@pytest.mark.parametrize(("rank", "mpi"), spread([3, 0]), indirect=["mpi"])
def test_a_stopped_rank_is_ended_and_so_is_the_job(rank, start_job):
    job = training(start_job(4, "train", *ENDLESS, *given("cluster.stopped=1"), environment=MORTAL))
    job.rank(rank).suspend()
    since = time.time()
    check_end(job.wait(30), since, rf"{PLACES[rank]} was stopped for 1 s and is ended; the job ends")


@pytest.mark.full
def test_a_rank_that_compiles_for_long_is_not_taken_for_dead(launch, tmp_path):
    keys = given("data.images=1000", "train.epochs=1", "cluster.stopped=1")
    job = launch(4, "train", *keys, timeout=200, environment={"XDG_CACHE_HOME": str(tmp_path / "cold")})
    assert job.returncode == 0, job.said()
    assert job.summary["status"] == "done" and "compiling kernels" in job.stdout


def test_control_c_ends_in_order(start_job):
    job = training(start_job(4, "train", *ENDLESS))
    since = time.time()
    job.process.send_signal(signal.SIGINT)
    check_end(job.wait(30), since, "interrupted by SIG(INT|TERM)", "interrupted")
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(("ranks", "mpi"), spread([1, 3]), indirect=["mpi"])
def test_pushes_that_are_not_finite_are_refused_and_counted(ranks, launch):
    # In step, two clocks: the first leads to weights that overflow in the second, which is not most of the images.
    settings = "data.images=1000", "data.validation=0", "train.batch=500", "train.epochs=1", "train.test=false"
    job = launch(ranks, "train", *given(*settings, "optimizer.learning_rate=1e30", "consistency.staleness=0"))
    assert job.returncode == 0, job.said()
    pushes = job.summary["pushes"]
    assert pushes["refused"] > 0 and pushes["sent"] == pushes["acknowledged"] == pushes["applied"]
    assert "NaN or infinity" in "".join(job.logs().values())
