"""Whole jobs train, whatever the number of ranks and the MPI, and leave everything in their run directory."""

import h5py
import pytest
from launch import given, spread

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import snapshot
from adam_mpi.cli import main
from adam_mpi.data.sets import describe

QUICK = given("data.images=3000", "train.epochs=2", "observe.interval=0.5")
TRAIN_IMAGES = 22_000
# Longer than its jobs may take, so that a job that hangs is ended by its own limit, which names the rank.
pytestmark = pytest.mark.timeout(330)

# Rounding stays rounding: where a max-pooling has a near-tie, it would decide which pixel learns.
SMOOTH = """model.layers=[
    {kind = "conv", channels = 8, kernel = 5}, "tanh", {kind = "avg_pool", size = 2},
    {kind = "conv", channels = 16, kernel = 5}, "tanh", {kind = "avg_pool", size = 2},
    {kind = "dense", units = 100}, "tanh", {kind = "dense", units = 10}]"""


def both(values):
    return pytest.mark.parametrize(("case", "mpi"), spread(values), indirect=["mpi"])


def finished(job):
    assert job.returncode == 0, job.said()
    assert job.summary["status"] == "done" and (job.run / "DONE").exists()
    assert job.stderr == "" and f"summary: {job.run / 'summary.json'}" in job.stdout
    logs = job.logs()
    assert len(logs) == job.summary["ranks"]["total"] and all(log.endswith("INFO finished\n") for log in logs.values())
    assert config.load(job.run / "config.toml")
    return job


def weights(job):
    """All weights by name."""
    found = {}
    with h5py.File(job.run / "weights.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if "/" in name else None)
    return found


def curve(job):
    """Losses of the epochs, in training and in validation."""
    return [line["loss"] for line in job.metrics() if line["done"] and line["part"] != "test"]


def check_counts(summary, images):
    pushes, pulls, staleness = summary["pushes"], summary["pulls"], summary["staleness"]
    assert pushes["sent"] == pushes["acknowledged"] == pushes["applied"] > 0
    assert pushes["duplicates"] == pushes["refused"] == 0
    assert summary["images"] == images
    size = 4 * 298_090
    assert pushes["bytes"] >= pushes["sent"] * size and 0 < pulls["bytes"] <= pulls["count"] * 2 * size
    histogram = {int(lead): count for lead, count in staleness["histogram"].items()}
    assert sum(histogram.values()) == pushes["sent"] * max(1, summary["ranks"]["server"])
    assert staleness["max"] == max(histogram) and 0 <= staleness["mean"] <= staleness["max"]


def check_summary(summary, ranks, seconds):
    assert summary["generation"] == 0 and summary["recoveries"] == []
    assert 0 < summary["seconds"] < seconds
    assert summary["images_per_second"] > summary["images"] / summary["seconds"] * 0.99
    # The mean over the first epoch has its untrained beginning in it, at a loss of 2.3.
    highest_loss = 1.0 if summary["epochs"] == 1 else 0.5
    assert 0.97 <= summary["validation_accuracy"] <= 1 and 0 < summary["train_loss"] < highest_loss
    roles = summary["ranks"]
    wanted = {1: (1, 1, 1), 2: (1, 1, 1)}.get(ranks, (1, ranks - 1 - max(1, ranks // 4), max(1, ranks // 4)))
    assert (roles["data"], roles["worker"], roles["server"]) == wanted and roles["total"] == ranks
    origin = summary["provenance"]
    assert origin["hosts"] and origin["cpu"] and origin["python"] and origin["seed"] == 1
    assert all(version != "not installed" for version in origin["packages"].values())
    assert "train" in origin["command"] and "commit" in origin


@both([1, 2, 3, 4, 5, 8])
def test_any_number_of_ranks_trains(case, launch, mpi):
    # Good validation ends it sooner, and a job that never gets there takes its four epochs.
    job = finished(launch(case, "train", *given("train.target=0.985")))
    epochs = range(1, job.summary["epochs"] + 1)
    check_counts(job.summary, len(epochs) * TRAIN_IMAGES)
    check_summary(job.summary, case, job.seconds)
    assert job.summary["test_accuracy"] >= 0.97
    done = [(line["part"], line["epoch"]) for line in job.metrics() if line["done"]]
    assert done == [(part, epoch) for epoch in epochs for part in ("train", "validation")] + [("test", len(epochs))]
    names = {"openmpi": "Open MPI", "mpich": "MPICH"}
    assert names.get(mpi.name, "") in job.summary["provenance"]["mpi"]


@both([3])
def test_eval_gives_the_accuracies_of_the_run(case, launch, capsys):
    job = finished(launch(case, "train", *QUICK))
    assert main(["eval", str(job.run)]) == 0
    told = capsys.readouterr().out
    said = dict(line.split(": accuracy ") for line in told.splitlines())
    # A file of weights, a snapshot, and a run that was stopped, which has snapshots only.
    (job.run / "weights.h5").rename(job.folder / "mine.h5")
    for path in (job.folder / "mine.h5", snapshot.list_snapshots(job.run / "snapshots")[-1], job.run):
        assert main(["eval", str(path)]) == 0
        assert capsys.readouterr().out == told
    for part in ("validation", "test"):
        accuracy = float(said[part].split(",")[0])
        assert accuracy == pytest.approx(job.summary[f"{part}_accuracy"], abs=1e-4)


def mnist_missing():
    try:
        describe(config.Data(set="mnist"))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(mnist_missing()), reason=mnist_missing())
@both([4])
def test_mnist_in_two_epochs(case, launch):
    # The best by validation accuracy of fifteen recipes. The default rate is small: it suits eight ranks as well.
    steps = given("optimizer.learning_rate=0.02", "optimizer.momentum=0.9", "consistency.staleness=4")
    job = finished(launch(case, "train", *given("data.set=mnist", "train.epochs=2"), *steps, timeout=300))
    check_counts(job.summary, 2 * 55_000)
    assert job.summary["test_accuracy"] >= 0.985


@both([3])
def test_slow_servers_get_no_larger_pushes_than_twice_the_usual(case, launch):
    """A larger push, summed up while others are not acknowledged, is a step that may diverge."""
    slow = given('inject.faults=["delay role=server at=apply seconds=0.1"]', "train.epochs=1")
    summary = finished(launch(case, "train", *QUICK, *slow)).summary
    assert summary["pushes"]["sent"] >= summary["images"] / 64


@both([4])
def test_one_rank_and_four_synchronous_ones_give_the_same_loss_curve_and_bits(case, launch):
    settings = [*QUICK, *given("consistency.staleness=0", SMOOTH)]
    alone, four, again = (finished(launch(ranks, "train", *settings)) for ranks in (1, case, case))
    assert len(curve(alone)) == 4 and curve(alone)[2] < 0.9 * curve(alone)[0]
    assert curve(four) == pytest.approx(curve(alone), rel=1e-5)
    assert four.summary["staleness"]["max"] == 0
    first, second = weights(four), weights(again)
    assert len(first) == 8 and all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert curve(four) == curve(again)


@both(["target", "patience"])
def test_training_stops_early(case, launch):
    stop = {"target": "train.target=0.3", "patience": "train.patience=1"}[case]
    still = given("optimizer.learning_rate=0") if case == "patience" else []
    job = finished(launch(3, "train", *QUICK, *given("train.epochs=50", stop), *still))
    assert job.summary["stopped_by"] == case and job.summary["epochs"] < 50
