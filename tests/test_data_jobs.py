"""Whole jobs on data of all kinds: shares, quorum, skew, features, and memory of the data rank."""

import json
import re

import numpy as np
import psutil
import pytest

DENSE = 'model.layers=[{kind="dense",units=10}]'
QUICK = ["train", "--set", DENSE, "--set", "train.epochs=2", "--set", "data.images=1600"]


def settings(*given):
    """With the plain kernels: generating others for models that are used once takes longer than the tests."""
    return [word for one in ("kernels.engine=reference", *given) for word in ("--set", one)]


def epochs(job):
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["part"] == "train" and line["done"]]


@pytest.mark.parametrize(
    "given",
    [
        ["layout.data=3", "layout.servers=1"],
        ["layout.data=2", "layout.servers=1", "epoch.assignment=static"],
        pytest.param(["layout.data=1", "layout.servers=1", "data.skew=dirichlet:0.2"], marks=pytest.mark.full),
        pytest.param(["layout.data=2", "layout.servers=1", "consistency.staleness=0"], marks=pytest.mark.full),
        ["layout.data=1", "layout.servers=1", "consistency.staleness=1", "data.skew=by_class"],
    ],
)
def test_every_image_is_trained_on_once_per_epoch(launch, given):
    job = launch(6, *QUICK, *settings(*given))
    assert job.returncode == 0, job.said()
    assert [(line["images"], line["images_skipped"]) for line in epochs(job)] == [(1600, 0)] * 2
    assert job.summary["images"] == 3200 and job.summary["images_bad"] == 0


def test_quorum_leaves_a_straggler_behind(launch):
    """One of four replicas takes a hundred times as long: the epoch does not wait for its share."""
    slow = 'inject.faults=["delay rank=5 at=compute seconds=0.05"]'
    shares = settings("layout.data=1", "layout.servers=1", "epoch.assignment=static", "epoch.quorum=0.75", slow)
    job = launch(6, *QUICK, *shares)
    assert job.returncode == 0, job.said()
    for line in epochs(job):
        assert line["images_skipped"] > 0 and line["images"] + line["images_skipped"] == 1600
    assert job.summary["images_skipped"] == sum(line["images_skipped"] for line in epochs(job))


def test_dynamic_assignment_gives_a_straggler_less(launch):
    slow = 'inject.faults=["delay rank=3 at=compute seconds=0.05"]'
    job = launch(4, *QUICK, *settings("layout.data=1", "layout.servers=1", slow))
    assert job.returncode == 0, job.said()
    assert [line["images"] for line in epochs(job)] == [1600, 1600]
    images = {rank: worker["images"] for rank, worker in job.summary["workers"].items()}
    assert images["3"] < images["2"] / 2 and sum(images.values()) == 3200


def test_features_with_bad_rows(launch, tmp_path):
    random = np.random.default_rng(0)
    centers, labels = random.standard_normal((4, 20)), np.arange(2400) % 4
    features = (centers[labels] + 0.5 * random.standard_normal((2400, 20))).astype(np.float32) * 50 + 300
    features[[7, 90]] = np.nan
    np.savez(tmp_path / "set.npz", features=features, labels=labels)
    given = [
        f"data.set={tmp_path / 'set.npz'}",
        "data.transform.normalize=true",
        "train.epochs=2",
        'model.layers=[{kind="dense",units=4}]',
        "data.validation=0",
    ]
    stopped = launch(2, "train", *settings(*given))
    assert stopped.returncode == 2 and "set.npz:features.npy, image" in stopped.stderr, stopped.said()
    job = launch(2, "train", *settings(*given, "data.on_bad=skip"))
    assert job.returncode == 0, job.said()
    assert job.summary["images_bad"] == 2 and job.summary["test_accuracy"] > 0.95
    assert job.summary["images"] in (2 * 1998, 2 * 1999, 2 * 2000)


def test_a_data_rank_holds_its_memory_at_the_limit(launch, start_job, tmp_path):
    """A set of 98 MB through a cache of 9 MB; measured from outside."""
    images = np.random.default_rng(0).integers(0, 256, (32_000, 3, 32, 32), np.uint8)
    labels = np.arange(32_000) % 10
    # A job that has learned nothing would fail.
    images[:, :, :8] = 25 * labels[:, None, None, None]
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    given = [
        f"data.set={tmp_path / 'set.npz'}",
        f"data.cache={9 << 20}",
        "data.validation=0",
        "train.epochs=2",
        "train.batch=64",
        DENSE,
        "layout.data=1",
        "layout.servers=1",
    ]
    job = start_job(3, "train", *settings(*given))
    grown = 0
    first: int | None = None
    while job.process.poll() is None:
        for process in job.ranks():
            memory = memory_of_data_rank(process)
            if memory and (job.run / "log").exists() and "phase 0" in job.logs().get("rank-00000", ""):
                first = first or memory
                grown = max(grown, memory - first)
    assert job.wait().returncode == 0, job.said()
    assert first is not None and job.summary["images"] == 2 * (32_000 - round(32_000 / 6))
    # The cache, the batches on their way, and what the rest of a rank takes when it starts to work.
    assert grown < 32 << 20, f"grown by {grown >> 20} MB"


def memory_of_data_rank(process):
    try:
        environment = process.environ()
        rank = environment.get("OMPI_COMM_WORLD_RANK") or environment.get("PMI_RANK")
        return process.memory_info().rss if rank == "0" else 0
    except psutil.Error:
        return 0


def test_a_nan_in_the_test_part_shows_before_the_job_has_a_directory(launch, tmp_path):
    arrays = {name: np.zeros((60, 5), np.float32) for name in ("train_x", "test_x")}
    arrays["test_x"][41, 2] = np.inf
    np.savez(tmp_path / "set.npz", **arrays, train_y=np.arange(60) % 3, test_y=np.arange(60) % 3)
    layers = 'model.layers=[{kind="dense",units=3}]'
    job = launch(2, "train", *settings(f"data.set={tmp_path / 'set.npz'}", layers))
    assert job.returncode == 2 and not job.run.exists(), job.said()
    assert re.search(r"^adam_mpi: \S+test_x.npy, image 41: holds NaN or infinity; repair it, or", job.stderr, re.M)


def test_a_job_reports_and_monitors_the_metrics_that_it_is_given(launch):
    """On normalized images, of which data ranks send bytes."""
    wanted = 'train.metrics=["auc", "top3", "accuracy"]'
    job = launch(3, *QUICK, *settings(wanted, "train.monitor=auc", "data.transform.normalize=true"))
    assert job.returncode == 0, job.said()
    summary = job.summary
    assert summary["monitor"] == {"name": "auc", "mode": "max"}
    assert 0.5 < summary["test_auc"] <= 1 and summary["test_accuracy"] <= summary["test_top3"] <= 1
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    validated = [line["auc"] for line in lines if line["part"] == "validation" and line["done"]]
    assert summary["best_auc"] == max(validated) and summary["best_epoch"] == 1 + validated.index(max(validated))
    # What is computed in evaluation only is not in the lines of training.
    assert all("auc" not in line and "top3" in line for line in lines if line["part"] == "train")
    assert f"test auc {summary['test_auc']:.4g}" in job.stdout and "top3 0." in job.stdout
    assert 'kernels: reference (kernels.engine = "reference")' in job.stdout
