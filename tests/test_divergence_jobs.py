"""Jobs that diverge: they end by name, or all ranks go back to the last good snapshot with half the learning rate."""

import json

import pytest
from launch import given

PACE = "delay role=worker at=compute seconds=0.008"
"""Bounds the images per second on every machine, so that an epoch is long enough for what happens in it."""
SETTINGS = given(
    "data.images=3000",
    "train.epochs=1000",
    "train.test=false",
    "worker.threads=1",
    "layout.data=1",
    "layout.servers=1",
    "optimizer.learning_rate=0.05",
    "optimizer.schedule=constant",
    "snapshot.minutes=0",
    "observe.interval=1",
    "recover.seconds=120",
)
SYNCHRONOUS = given("consistency.staleness=0")


def faults(*lines):
    return given(f"inject.faults={json.dumps([PACE, *lines])}")


RATE = "rate role=server factor=100 step=400"
NAN = "rate role=server factor=nan step=400"
LABELS = "labels role=data step=600"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def assert_ended_by_name(job):
    """The job has failed as one whose training has diverged, and nothing looks like success."""
    assert job.returncode == 2, job.said()
    assert not (job.run / "DONE").exists() and not (job.run / "weights.h5").exists()
    failure = job.summary["failure"]
    assert "training has diverged after" in failure and "set optimizer.learning_rate below 0.05" in failure, failure
    assert job.summary["status"] == "failed" and job.stderr.count(failure) == 1, job.said()
    (divergence,) = job.summary["divergences"]
    assert divergence["what"] in failure and divergence["back_to"] == "" and divergence["learning_rate"] == 0.05


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        (RATE, []),
        pytest.param(NAN, [], marks=pytest.mark.full),
        pytest.param(LABELS, [], marks=pytest.mark.full),
        pytest.param(RATE, SYNCHRONOUS, marks=pytest.mark.full),
        pytest.param(NAN, SYNCHRONOUS, marks=pytest.mark.full),
        pytest.param(LABELS, SYNCHRONOUS, marks=pytest.mark.full),
    ],
    ids=["rate", "nan", "labels", "rate-sync", "nan-sync", "labels-sync"],
)
def test_a_job_that_diverges_ends_by_name(launch, fault, mode):
    assert_ended_by_name(launch(4, "train", *SETTINGS, *mode, *faults(fault)))


def assert_went_back(job, epochs):
    """The job has gone back once, has learned again, and is done."""
    assert job.returncode == 0 and (job.run / "DONE").exists(), job.said()
    (divergence,) = job.summary["divergences"]
    assert divergence["back_to"].startswith("epoch-") and divergence["learning_rate"] == 0.025
    assert f"all ranks go back to {divergence['back_to']}, with optimizer.learning_rate = 0.025" in job.stdout
    assert job.summary["generation"] >= 1 and job.summary["epochs"] == epochs
    assert job.summary["train_loss"] < 1 and job.summary["warnings"] == []
    known = json.loads((job.run / "divergences.json").read_text())
    assert (known["number"], known["rate_scale"]) == (1, 0.5)
    manifests = [json.loads((path / "snapshot.json").read_text()) for path in (job.run / "snapshots").iterdir()]
    assert {manifest["rate_scale"] for manifest in manifests} == {0.5}


BACK_OFF = given('train.on_divergence="back_off"', "train.epochs=14")
PASSING = "rate role=server factor=1e6 step=500 steps=1"
"""A fault that is over when the ranks have gone back."""


@pytest.mark.parametrize("mode", [[], pytest.param(SYNCHRONOUS, marks=pytest.mark.full)], ids=["async", "sync"])
def test_all_ranks_go_back_and_continue_with_half_the_rate(launch, mode):
    job = launch(4, "train", *SETTINGS, *BACK_OFF, *mode, *faults(PASSING))
    assert_went_back(job, 14)
    # The rate is part of the training state.
    again = launch(4, "train", "--run", job.run, "--resume", *given("train.epochs=15"), *faults())
    assert again.returncode == 0 and "optimizer.learning_rate is multiplied by 0.5" in again.stderr, again.said()


@pytest.mark.full
def test_without_a_snapshot_training_begins_again_from_the_initial_weights(launch):
    settings = [*SETTINGS, *BACK_OFF, *given("data.images=12000", "train.epochs=2")]
    job = launch(4, "train", *settings, *faults("rate role=server factor=1e6 step=200 steps=1"))
    assert job.returncode == 0, job.said()
    (divergence,) = job.summary["divergences"]
    assert divergence["back_to"] == "the initial weights" and divergence["epoch"] == 1
    assert "begins from the initial weights, at 0 images" in job.stdout and job.summary["train_loss"] < 1


@pytest.mark.full
@pytest.mark.parametrize("transport", ["rma", "send"])
def test_all_ranks_go_back_on_every_transport(launch, transport):
    settings = [*SETTINGS, *BACK_OFF, *given(f"cluster.transport={transport}", "optimizer.momentum=0.5")]
    assert_went_back(launch(4, "train", *settings, *faults(PASSING)), 14)


@pytest.mark.full
def test_strips_and_a_running_average_go_back_too(launch):
    settings = given("layout.partitions=2", "optimizer.ema=0.1", "consistency.staleness=0")
    assert_went_back(launch(4, "train", *SETTINGS, *BACK_OFF, *settings, *faults(PASSING)), 14)


@pytest.mark.full
def test_a_fault_that_stays_ends_the_job_after_the_last_back_off(launch):
    job = launch(4, "train", *SETTINGS, *given('train.on_divergence="back_off"'), *faults(NAN))
    assert job.returncode == 2 and not (job.run / "DONE").exists(), job.said()
    assert len(job.summary["divergences"]) == 6
    assert "it has gone back 5 times; set optimizer.learning_rate below 0.0015625" in job.summary["failure"]


@pytest.mark.full
@pytest.mark.parametrize("mode", [[], SYNCHRONOUS], ids=["async", "sync"])
@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_rank_that_is_lost_while_all_go_back_is_left_behind(launch, mpi, rank, mode):
    if mpi.name != "openmpi":
        pytest.skip("only Open MPI survives a lost rank")
    layout = given("layout.data=2", "layout.servers=2", "server.copies=2")
    strikes = faults(PASSING.replace("role=server", "rank=2"), f"kill rank={rank} at=recover step=1")
    job = launch(6, "train", *SETTINGS, *layout, *BACK_OFF, *mode, *strikes)
    assert_went_back(job, 14)
    assert job.summary["ranks"]["total"] == 5
