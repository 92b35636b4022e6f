"""Training continues when any rank dies: real jobs, real kills, with an MPI that survives lost ranks."""

import json

import chaos
import h5py
import numpy as np
import pytest
from launch import available, given
from test_train import SMOOTH

from adam_mpi.checkpoint.run_directory import compare_copies, grow
from adam_mpi.transport.conservation import count_pushes, read_copies

pytestmark = [
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
]
full = pytest.mark.full
ADAM = ("optimizer.kind=adam", "optimizer.momentum=0", "optimizer.learning_rate=0.002", "optimizer.epsilon=1e-3")
# Ranks 0 and 1 serve data, 2 to 4 parameters, 5 to 7 train; every server has a dozen shards.
SETTINGS = given(
    "layout.servers=3",
    "layout.data=2",
    "server.shard=20000",
    "data.images=6000",
    "train.epochs=12",
    "train.target=0.85",
    "observe.interval=0.2",
)


def survive(launch, *faults, ranks=8, more=()):
    """Run a job with these `faults`; check that it ends well and that no acknowledged push is lost."""
    listed = ", ".join(f'"{fault}"' for fault in faults)
    job = launch(ranks, "train", *SETTINGS, *given(f"inject.faults=[{listed}]", *more))
    assert job.returncode == 0 and (job.run / "DONE").exists(), job.said()
    assert job.left_over() == [] and "Traceback" not in job.stderr
    summary = job.summary
    pushes, recoveries = summary["pushes"], summary["recoveries"]
    assert pushes["sent"] >= pushes["acknowledged"] > 0 == pushes["short"]
    assert 0 <= pushes["applied"] - pushes["acknowledged"] - pushes["unacknowledged_of_dead"] <= pushes["given_up"]
    assert summary["generation"] == recoveries[-1]["generation"] > 0
    check_rates(job.metrics())
    return summary


def check_rates(lines):
    """Check that the rate of an epoch is its images over the seconds of all generations that have trained it."""
    lines = [line for line in lines if line["part"] == "train"]
    for end in (line for line in lines if line["done"]):
        since = min(line["seconds"] for line in lines if line["epoch"] == end["epoch"])
        assert end["images"] / end["images_per_second"] > end["seconds"] - since - 0.01, end


@pytest.mark.parametrize(
    ("fault", "role"),
    [
        ("kill rank=0 at=batch step=60", "data"),
        ("kill rank=6 at=push step=10", "worker"),
        pytest.param("kill rank=3 at=applied step=30", "server", marks=full),
        pytest.param("kill rank=1 at=batch step=40", "data", marks=full),
        pytest.param("kill rank=4 at=prepare step=20", "server", marks=full),
        pytest.param("kill rank=2 at=apply step=50", "server", marks=full),
        pytest.param("kill rank=7 at=evaluate step=3", "worker", marks=full),
        pytest.param("kill rank=0 at=rename", "data", marks=full),
    ],
)
def test_a_job_continues_without_a_rank(fault, role, launch):
    summary = survive(launch, fault)
    assert summary["stopped_by"] == "target"
    [recovery] = summary["recoveries"]
    assert recovery["dead"][0].startswith(f"rank {recovery['members'][0]}, {role}")
    assert summary["ranks"]["total"] == 7 and recovery["seconds"] is not None
    if role == "server":
        assert recovery["promoted"] > 0


@pytest.mark.parametrize(
    "faults",
    [
        ("kill rank=2 at=apply step=30", "kill rank=4 at=apply step=30"),
        pytest.param(("kill rank=0 at=batch step=50", "kill rank=1 at=batch step=50"), marks=full),
        pytest.param(("kill rank=6 at=push step=10", "kill rank=3 at=recover"), marks=full),
        # Of four servers, one that is lost leaves copies to rebuild.
        pytest.param(
            ("kill rank=3 at=applied step=20", "kill rank=2 at=rebuild step=2", "layout.servers=4"), marks=full
        ),
    ],
)
def test_a_job_continues_without_two_ranks(faults, launch):
    ranks = 8 + len(faults) - 2
    summary = survive(launch, *faults[:2], ranks=ranks, more=faults[2:])
    assert summary["ranks"]["total"] == ranks - 2 and summary["stopped_by"] == "target"
    assert len({member for recovery in summary["recoveries"] for member in recovery["members"]}) == 2


def test_a_strip_that_is_lost_leaves_a_standby_for_the_next_that_dies(launch):
    """Two replicas of two strips: the first half of one becomes the second half of the other."""
    faults = "kill rank=6 at=compute step=20", "kill rank=8 at=compute step=60"
    summary = survive(launch, *faults, ranks=9, more=["layout.partitions=2"])
    assert summary["stopped_by"] == "target" and len(summary["recoveries"]) == 2
    assert summary["ranks"]["replicas"] == 1 and summary["ranks"]["worker"] == 2


@full
def test_synchronous_strips_come_to_the_same_numbers(launch):
    clocks = given("consistency.staleness=0", "data.images=1000", "train.epochs=2", "train.target=0")
    clocks += given(SMOOTH, "server.shard=2000", "layout.partitions=2")
    faults = 'inject.faults=["kill rank=6 at=compute step=12", "kill rank=3 at=applied step=60"]'
    disturbed, undisturbed = (launch(9, "train", *SETTINGS, *clocks, *given(*more)) for more in ([faults], []))
    assert disturbed.returncode == 0 and len(disturbed.summary["recoveries"]) == 2, disturbed.said()
    for layer in ("conv1", "dense1", "dense2"):
        ours, wanted = (weights(job, layer) for job in (disturbed, undisturbed))
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_loss_while_the_last_snapshot_is_taken_leaves_no_job_without_its_weights(launch):
    summary = survive(launch, "kill rank=3 at=store", more=["train.epochs=1", "train.target=0"])
    assert len(summary["snapshots"]) == 1 and summary["stopped_by"] == "epochs"


def test_a_shard_without_a_copy_ends_the_job_and_is_named(launch):
    fault = 'inject.faults=["kill role=server at=apply step=30"]'
    job = launch(4, "train", *given("data.images=1000", "train.epochs=1000", fault))
    assert job.returncode not in (0, 2) and job.left_over() == []
    assert job.summary["status"] == "failed" and not (job.run / "DONE").exists()
    assert job.summary["failure"].startswith("rank 1, server on")
    assert "no copy is left of" in job.summary["failure"]


def test_a_rank_that_is_lost_at_the_start_ends_the_job_and_is_named(launch):
    job = launch(8, "train", *SETTINGS, *given('inject.faults=["kill rank=3 at=start"]'))
    assert job.returncode not in (0, 2) and job.left_over() == []
    assert "rank 3, server on" in job.summary["failure"]


@pytest.mark.parametrize(
    ("rule", "point"),
    [
        ((), "applied"),
        pytest.param(ADAM, "applied", marks=full),
        # After the servers have sent each other norms, and before a step.
        pytest.param((*ADAM, "optimizer.clip_norm=0.3"), "apply", marks=full),
    ],
)
def test_synchronous_training_comes_to_the_same_numbers(rule, point, launch):
    clocks = given("consistency.staleness=0", "data.images=1000", "train.epochs=2", "train.target=0")
    clocks += given(SMOOTH, "server.shard=2000", *rule)
    faults = 'inject.faults=["kill rank=6 at=compute step=12", "kill rank=3 at=applied step=60"]'
    disturbed = launch(8, "train", *SETTINGS, *clocks, *given(faults))
    assert disturbed.returncode == 0 and len(disturbed.summary["recoveries"]) == 2, disturbed.said()
    undisturbed = launch(8, "train", *SETTINGS, *clocks)
    for key in ("validation_loss", "test_loss"):
        assert disturbed.summary[key] == pytest.approx(undisturbed.summary[key], rel=1e-4), key
    pushes = disturbed.summary["pushes"]
    assert pushes["applied"] == pushes["acknowledged"] + pushes["unacknowledged_of_dead"]
    for layer in ("conv1", "dense1", "dense2"):
        ours, wanted = (weights(job, layer) for job in (disturbed, undisturbed))
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def weights(job, layer):
    with h5py.File(job.run / "weights.h5") as file:
        return file[f"{layer}/weight"][:]


ENDLESS = given("train.epochs=1000", "train.target=0")
DETECTOR = [
    word
    for name, value in (("", 1), ("_thread", 1), ("_period", 0.2), ("_timeout", 1.5))
    for word in ("--mca", f"mpi_ft_detector{name}", str(value))
]


def reached(job, generation):
    """Wait until `generation` has begun."""
    file = job.run / "log" / f"generation-{generation}.json"
    return job.until(lambda: file.exists() and any(line["done"] for line in job.metrics()), f"generation {generation}")


def stop(job):
    summary = stop_spawned(job)
    assert job.process.returncode == 0, job.said()
    return summary


def stop_spawned(job):
    """Stop a job with spares: mpirun fails when processes that ranks have started end without MPI_Finalize."""
    (job.run / "STOP").touch()
    job.wait(60)
    assert job.summary["status"] == "stopped" and job.left_over() == [], job.said()
    return job.summary


@pytest.mark.parametrize("rule", [("optimizer.momentum=0.5",), pytest.param(ADAM, marks=full)])
def test_all_copies_are_the_same_after_a_loss(rule, start_job):
    """Of four servers, one that is lost leaves copies to rebuild; the rule has all that a step can count."""
    more = given("layout.servers=4", 'inject.faults=["kill rank=3 at=applied step=20"]')
    more += given(*rule, "optimizer.decay=0.001", "optimizer.ema=0.01")
    job = reached(start_job(9, "train", *SETTINGS, *ENDLESS, *more), 1)
    text, same = compare_copies(job.run, 60)
    assert same and int(text.split()[0]) > 10, text
    # Once all copies are complete, every comparison is one of all of them.
    job.until(lambda: compare_copies(job.run, 60)[0] == compare_copies(job.run, 60)[0], "the same count twice")
    assert stop(job)["recoveries"][0]["rebuilt"] > 0


@full
def test_a_job_continues_without_a_rank_that_is_stopped(start_job):
    job = start_job(8, "train", *SETTINGS, *ENDLESS, *given("cluster.stopped=1"))
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    job.rank(7).suspend()
    reached(job, 1)
    assert stop(job)["recoveries"][0]["members"] == [7]


def started_with_detector(start_job):
    """Start a job with Open MPI's detector of stopped ranks; it crashes or hangs at some starts, so try again."""
    for _ in range(6):
        job = start_job(8, "train", *SETTINGS, *ENDLESS, *given("cluster.stopped=0"), options=DETECTOR)
        try:
            return job.until(lambda job=job: any(line["images"] for line in job.metrics()), "its first images", 30)
        except pytest.fail.Exception:
            job.end()
    pytest.fail("no start of six was good")


@full
@pytest.mark.timeout(300)
def test_a_stopped_rank_that_wakes_up_finds_that_it_is_evicted(start_job):
    job = started_with_detector(start_job)
    stopped = job.rank(2)
    stopped.suspend()
    reached(job, 1)
    stopped.resume()
    stopped.wait(30)
    assert "was declared dead; generation 1 continued without it" in job.logs()["rank-00002"]
    assert stop(job)["recoveries"][0]["members"] == [2]


@full
def test_more_ranks_join_a_running_job_and_lost_ones_are_replaced(start_job):
    more = given("recover.respawn=true", 'inject.faults=["kill rank=3 at=applied step=20"]')
    job = start_job(8, "train", *SETTINGS, *ENDLESS, *more, options=("--host", "localhost:12"))
    reached(job, 2)
    grow(job.run, 2)
    reached(job, 3)
    summary = stop_spawned(job)
    assert summary["ranks"]["total"] == 10 and summary["ranks"]["server"] == 3


@full
def test_a_lost_strip_is_replaced(start_job):
    more = given("layout.partitions=2", "recover.respawn=true", 'inject.faults=["kill rank=6 at=compute step=20"]')
    job = start_job(9, "train", *SETTINGS, *ENDLESS, *more, options=("--host", "localhost:12"))
    reached(job, 2)
    images = job.metrics()[-1]["images_trained"]
    job.until(lambda: job.metrics()[-1]["images_trained"] > images + 1000, "more images with it")
    summary = stop_spawned(job)
    assert summary["ranks"]["replicas"] == 2 and summary["recoveries"][0]["members"] == [6]


def spares_ready(job, count):
    """Wait until `count` spares are ready, as the coordinator of the last generation knows."""

    def told():
        file, begun = job.run / "status.json", job.run.glob("log/generation-*.json")
        status = json.loads(file.read_text()) if file.exists() else {"time": 0.0}
        newest = max((path.stat().st_mtime for path in begun), default=0.0)
        return status["time"] > newest and status["spares"]["ready"] == count

    return job.until(told, f"{count} spares", 150)


@full
@pytest.mark.timeout(300)
def test_spares_take_the_places_of_lost_ranks_at_once_and_nothing_acknowledged_is_lost(start_job):
    """A worker, the coordinator and a server die: each time one generation ends, and the next has all its ranks."""
    more = given("layout.data=1", "recover.spares=1")
    job = start_job(8, "train", *given(*chaos.CONSERVATION), *SETTINGS, *ENDLESS, *more)
    for generation, rank in enumerate((5, 0, 2), 1):
        spares_ready(job, 1)
        job.rank(rank).kill()
        reached(job, generation)
    spares_ready(job, 1)
    summary = stop_spawned(job)
    assert [recovery["members"] for recovery in summary["recoveries"]] == [[5], [0], [2]]
    assert summary["ranks"]["total"] == 8 and summary["ranks"]["server"] == 3
    assert all(word["cpu"] > 0 for word in summary["started"]) and summary["started"]
    conserved(job.run, dead={5, 0, 2})


def conserved(run, dead):
    """Check that every parameter of every copy is the number of acknowledged pushes; those of `dead` may be in it."""
    told = count_pushes(run)
    least = sum(acknowledged for _, acknowledged in told.values())
    most = least + sum(pushed - acknowledged for member, (pushed, acknowledged) in told.items() if member in dead)
    copies = read_copies(run)
    assert least > 0 and copies and all(len(same) >= 2 for same in copies.values())
    for same in copies.values():
        assert all(np.array_equal(other, same[0]) for other in same[1:])
        assert least <= same[0].min() and same[0].max() <= most


@full
@pytest.mark.timeout(300)
def test_spares_end_with_a_job_that_did_not_need_them_and_mpirun_succeeds(start_job):
    job = start_job(4, "train", *given("data.images=2000", "observe.interval=0.2", "recover.spares=2"), *ENDLESS)
    spares_ready(job, 2)
    idle = [process for process in job.ranks() if "join" in process.cmdline()]
    before = [sum(process.cpu_times()[:2]) for process in idle]
    began = len(job.metrics())
    job.until(lambda: len(job.metrics()) >= began + 20, "20 lines more")
    spent = [sum(process.cpu_times()[:2]) - cpu for process, cpu in zip(idle, before, strict=True)]
    assert len(spent) == 2 and max(spent) < 0.02 * 4 + 0.02, spent
    assert stop(job)["generation"] == 0
