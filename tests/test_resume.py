"""A run goes on from its last whole snapshot, on the same layout with the same bits, on another to rounding."""

import re
import shutil

import h5py
import numpy as np
import pytest
from launch import given, spread

# Longer than its jobs may take, so that a job that hangs is ended by its own limit, which names the rank.
pytestmark = pytest.mark.timeout(430)
STEADY = given("data.images=2000", "consistency.staleness=0", "optimiser.schedule=constant", "optimiser.momentum=0.5")


def both(values):
    return pytest.mark.parametrize(("case", "mpi"), spread(values), indirect=["mpi"])


@pytest.fixture
def train(launch):
    def call(ranks, epochs, *arguments, **options):
        job = launch(ranks, "train", *STEADY, *given(f"train.epochs={epochs}"), *arguments, **options)
        assert job.returncode == 0, job.said()
        return job

    return call


def weights(run):
    found = {}
    with h5py.File(run / "weights.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def trained(job):
    return [line["epoch"] for line in job.metrics() if line["done"] and line["part"] == "train"]


@both([3])
def test_a_resumed_run_ends_like_an_uncut_one(case, train, tmp_path):
    whole, cut = train(case, 3), train(case, 2)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(cut.run, elsewhere)
    before = (cut.run / "metrics.jsonl").read_text()

    resumed = train(case, 3, "--run", cut.run, "--resume")
    assert trained(resumed) == [1, 2, 3] and (cut.run / "metrics.jsonl").read_text().startswith(before)
    assert resumed.summary["status"] == "done" and resumed.summary["epochs"] == 3 and (cut.run / "DONE").exists()
    expected = weights(whole.run)
    assert all(array.tobytes() == expected[name].tobytes() for name, array in weights(cut.run).items())

    train(case + 2, 3, "--run", elsewhere, "--resume")
    for name, array in weights(elsewhere).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


@both(["kill", "stop short"])
def test_a_run_cut_short_goes_on_at_its_last_whole_snapshot(case, launch, train):
    # The server stores after each epoch: its third time is the third epoch's.
    fault = given('inject.faults=["kill rank=1 at=store step=3"]')
    killed = launch(3, "train", *STEADY, *given("train.epochs=4"), *fault)
    assert killed.returncode != 0 and killed.summary["status"] == "failed"
    if case == "stop short":
        # As if the second snapshot had not been finished either.
        (killed.run / "snapshots" / "epoch-0002" / "whole.json").unlink()
    last = 2 if case == "kill" else 1
    resumed = train(3, 4, "--run", killed.run, "--resume", "--set", "inject.faults=[]")
    log = resumed.logs()["rank-00000"]
    began = re.findall(r"phase 0: train, epoch (\d+)", log)
    assert [int(epoch) for epoch in began] == [1, last + 1]
    assert resumed.summary["status"] == "done" and "failure" not in resumed.summary


@both([2])
def test_resuming_a_run_without_a_snapshot_starts_it(case, launch, train):
    killed = launch(case, "train", *STEADY, *given('inject.faults=["kill rank=1 at=start"]'))
    assert killed.returncode != 0
    resumed = train(case, 1, "--run", killed.run, "--resume")
    assert trained(resumed) == [1]


@both([1])
def test_resuming_a_finished_run_only_tests_it(case, train):
    first = train(case, 1)
    expected = weights(first.run)
    again = train(case, 1, "--run", first.run, "--resume")
    assert trained(again) == [1] and again.summary["test_accuracy"] == first.summary["test_accuracy"]
    assert all(array.tobytes() == expected[name].tobytes() for name, array in weights(first.run).items())


@both([3])
def test_another_model_is_refused_by_the_one_rank_that_sees_it(case, launch, train):
    first = train(case, 1)
    other = given('model.layers=["relu", {kind = "dense", units = 10}]')
    refused = launch(case, "train", *STEADY, *other, "--run", first.run, "--resume")
    told = re.findall(r"^adam_mpi: .*", refused.stderr, re.M)
    assert refused.returncode == 2 and len(told) == 1 and "Traceback" not in refused.stderr, refused.said()
    assert re.match(r"adam_mpi: rank 1, server on \S+: .*parameters", told[0])
    assert refused.summary["status"] == "failed" and refused.left_over() == []
