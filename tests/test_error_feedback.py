"""Whole jobs that lose ranks: every push is in weights and residuals once, and every image counts."""

import re

import numpy as np
import pytest
from launch import available, given
from test_consistency import TENSORS

from adam_mpi.checkpoint import model_file
from adam_mpi.transport.conservation import count_pushes, count_withdrawn, unexplained_weights

EPOCHS = 2
IMAGES = 3200
BATCHES = 100
REPLICAS = 3
LAYOUT = ["layout.data=2", "layout.servers=2", "worker.threads=1", f"train.epochs={EPOCHS}", "train.test=false"]
CONSERVE = [
    *LAYOUT,
    f"data.images={IMAGES}",
    "data.validation=0",
    "server.shard=12000",
    "push.protocol=delta",
    "inject.conserve=true",
    "optimizer.learning_rate=1",
    "optimizer.schedule=constant",
]
RANKS = 4 + REPLICAS
STRIPS = "layout.partitions=2"
DATA = "kill rank=1 at=batch step=40"
SERVER = "kill rank=2 at=applied step=60"
WORKER = "kill rank=5 at=push step=20"
pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="needs an Open MPI that survives"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
]
full = pytest.mark.full


def run(launch, ranks, staleness, faults, *settings):
    """Run a job with `faults` to its end; return it and the members that were lost."""
    wanted = [f"consistency.staleness={staleness}", *settings]
    lines = ", ".join(f'"{fault}"' for fault in faults)
    job = launch(ranks, "train", *given(*wanted, f"inject.faults=[{lines}]"), timeout=200)
    assert (job.run / "DONE").exists(), job.said()
    dead = {member for recovery in job.summary["recoveries"] for member in recovery["members"]}
    assert len(dead) == len(faults), f"{faults}, and lost were {dead}\n{job.said()}"
    return job, dead


def weights(job):
    return model_file.read_model(job.run / "weights.h5", TENSORS)


def check_counts(job, dead):
    """Check that every push of the living is acknowledged or withdrawn, and every image is trained on or skipped."""
    withdrawn = count_withdrawn(job.run)
    known = {member: counts for member, counts in count_pushes(job.run).items() if member not in dead}
    assert all(sent == done + withdrawn[member] for member, (sent, done) in known.items()), (known, withdrawn)
    summary = job.summary
    assert summary["images"] + summary["images_skipped"] == EPOCHS * IMAGES, summary["images_skipped"]


def check_conserved(job, dead, codec):
    off = np.abs(unexplained_weights(job.run, weights(job), dead))
    # The means of onebit are rounded, in every push.
    assert off.max() < (0.1 if codec == "onebit" else 1e-4), (off.max(), int((off > 0.1).sum()))


def cases():
    quick = ("topk", "inf", DATA)
    for codec in ("topk", "onebit"):
        for staleness in ("inf", "0", "3"):
            for fault in (DATA, SERVER, WORKER):
                case = codec, staleness, fault
                yield case if case == quick else pytest.param(*case, marks=full)


@pytest.mark.parametrize(("codec", "staleness", "fault"), list(cases()))
def test_every_push_is_in_the_weights_or_the_residual_once(codec, staleness, fault, launch):
    job, dead = run(launch, RANKS, staleness, [fault], *CONSERVE, f"push.codec={codec}")
    check_conserved(job, dead, codec)
    check_counts(job, dead)
    residual = job.summary["residual"]
    assert len(residual["carried"]) == REPLICAS - (fault == WORKER) and all(residual["carried"].values())
    assert len(residual["lost"]) == (fault == WORKER)


@full
@pytest.mark.parametrize("codec", ["topk", "onebit"])
@pytest.mark.parametrize("staleness", ["inf", "0", "3"])
@pytest.mark.parametrize("fault", [DATA, WORKER])
def test_strips_withdraw_what_no_shard_has(codec, staleness, fault, launch):
    """The strip whose replica is dissolved loses its residual, and reports it."""
    job, dead = run(launch, 8, staleness, [fault], *CONSERVE, f"push.codec={codec}", STRIPS)
    check_conserved(job, dead, codec)
    check_counts(job, dead)
    assert len(job.summary["residual"]["lost"]) == (2 if fault == WORKER else 0)


@pytest.mark.parametrize(
    ("codec", "faults"),
    [
        ("none", [DATA]),
        *(
            pytest.param(codec, faults, marks=full)
            for codec in ("none", "float16")
            for faults in ([DATA], [SERVER], [WORKER], [WORKER, DATA])
        ),
    ],
)
def test_with_a_bound_every_share_of_the_living_is_pushed(codec, faults, launch):
    job, dead = run(launch, RANKS, "3", faults, *CONSERVE, f"push.codec={codec}")
    check_counts(job, dead)
    counts = count_pushes(job.run)
    summary = job.summary
    known = sum(acknowledged for _, acknowledged in counts.values())
    unknown = sum(pushed - acknowledged for member, (pushed, acknowledged) in counts.items() if member in dead)
    values = weights(job)
    assert known <= values.min() and values.max() <= known + unknown
    assert {counts[member][0] for member in counts if member not in dead} == {EPOCHS * BATCHES}
    assert summary["staleness"]["max"] <= 3 and not any("clocks ahead" in text for text in job.logs().values())
    if WORKER not in faults:
        assert summary["images_skipped"] == 0 and known == EPOCHS * BATCHES * REPLICAS


@full
def test_with_a_bound_a_replica_that_joins_takes_its_share(launch):
    job, dead = run(launch, RANKS, "3", [WORKER], *CONSERVE, "recover.respawn=true", "push.codec=topk")
    check_conserved(job, dead, "topk")
    check_counts(job, dead)


@full
@pytest.mark.parametrize("codec", ["none", "topk"])
def test_snapshots_are_taken_while_pushes_are_sent_again(codec, launch):
    """One every second: some are ordered while a replica has pushes under way that shards have already."""
    faults = ["kill rank=1 at=batch step=60", "kill rank=6 at=push step=60"]
    settings = ["snapshot.minutes=0.01", f"push.codec={codec}", "train.epochs=2"]
    job, _ = run(launch, RANKS, "3", faults, *CONSERVE, *settings)
    refused = [text for text in job.logs().values() if re.search("not at one position", text)]
    assert not refused and job.summary["snapshots"]


@full
@pytest.mark.parametrize("codec", ["topk", "onebit"])
def test_a_synchronous_run_has_the_same_bits_when_a_clock_was_computed_again(codec, launch):
    settings = [*LAYOUT, "data.images=1600", f"push.codec={codec}", "push.protocol=delta"]
    disturbed, _ = run(launch, RANKS, "0", [DATA], *settings)
    undisturbed, _ = run(launch, RANKS, "0", [], *settings)
    assert np.array_equal(weights(disturbed), weights(undisturbed))


@full
@pytest.mark.parametrize(
    "settings", [["consistency.staleness=0", "worker.threads=80"], ["train.batch=1", "push.images=64"]]
)
def test_as_many_threads_or_batches_as_a_large_node_has(settings, launch):
    job = launch(2, "train", *given("data.images=640", "train.epochs=1", *settings), timeout=200)
    assert job.returncode == 0 and job.summary["images"] > 500, job.said()
