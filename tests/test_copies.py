"""Copies that are behind when the others are lost: real jobs, with an MPI that survives a lost rank."""

import chaos
import pytest
from launch import available, given, start
from test_train import SMOOTH

from adam_mpi.transport.conservation import count_pushes

pytestmark = [
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
    pytest.mark.full,
]
# Rank 0 serves data, 1 to 4 parameters, 5 to 7 train. Rank 3 is slow: rebuilding its copies takes seconds.
SLOW = given(
    *chaos.CONSERVATION,
    "layout.data=1",
    "layout.servers=4",
    "server.copies=4",
    "server.shard=2000",
    "data.images=1600",
    'inject.faults=["delay rank=3 at=apply seconds=0.04"]',
)
MORE = 5


def acknowledged(job):
    """Return how many pushes were acknowledged, as recorded outside of the program's own counts."""
    if not (job.run / "conservation").exists():
        return 0
    return sum(known for _, known in count_pushes(job.run).values())


@pytest.mark.timeout(430)
@pytest.mark.parametrize("pushes", [1, MORE])
def test_a_copy_that_lacks_acknowledged_pushes_does_not_serve(pushes, mpi, tmp_path):
    """One server dies, then all others whose copies were complete: the one that is left has old copies only."""
    job = start(mpi, 8, "train", *SLOW, folder=tmp_path)
    try:
        job.until(lambda: acknowledged(job) >= MORE, "its first pushes", 100)
        job.rank(1).kill()
        job.until((job.run / "log" / "generation-1.json").exists, "generation 1", 100)
        before = acknowledged(job)
        job.until(lambda: acknowledged(job) >= before + pushes, "more pushes", 100)
        others = job.rank(2), job.rank(4)
        for other in others:
            other.kill()
        job.wait(200)
    finally:
        job.end()
    assert job.left_over() == []
    if (job.run / "DONE").exists():
        # The copies were rebuilt before: then nothing is lost.
        chaos.conserved(job.run, job.summary)
        assert job.summary["pushes"]["short"] == 0
    else:
        failure = job.summary["failure"]
        assert "rank 2, server on" in failure and "rank 4, server on" in failure and "--resume" in failure, failure
        assert "only copies are left that were being rebuilt and may lack acknowledged pushes" in failure, failure


# Ranks 0 and 1 serve data, 2 to 6 parameters, 7 to 9 train.
SYNCHRONOUS = given(
    "consistency.staleness=0",
    "layout.servers=5",
    "layout.data=2",
    "server.shard=100",
    "data.images=1000",
    "train.epochs=2",
    "observe.interval=0.2",
    SMOOTH,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a job without faults: any layout has the same weights at the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    clocks = [*SYNCHRONOUS, *given("layout.servers=1", "layout.data=1")]
    openmpi = next(mpi for mpi in available() if mpi.name == "openmpi")
    return start(openmpi, 1, "train", *clocks, folder=folder).wait(200)


@pytest.mark.timeout(430)
@pytest.mark.parametrize("step", [5, 8, 10, 12, 14, 16, 18, 20, 30])
def test_a_second_loss_while_copies_are_rebuilt_in_synchronous_training(step, mpi, tmp_path, undisturbed):
    faults = f'inject.faults=["kill rank=2 at=apply step=40", "kill rank=3 at=rebuild step={step}"]'
    job = start(mpi, 10, "train", *SYNCHRONOUS, *given(faults), folder=tmp_path).wait(200)
    assert (job.run / "DONE").exists() and job.left_over() == [], job.said()
    assert chaos.distance(job, undisturbed) < 1e-4
    dead = {member for recovery in job.summary["recoveries"] for member in recovery["members"]}
    assert job.summary["pushes"]["short"] == 0 and dead == {2, 3}, job.summary["recoveries"]
