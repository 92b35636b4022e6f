"""Codecs with error feedback when ranks are lost: every push is in the weights and in what is carried, once."""

import numpy as np
import pytest
from launch import available, given
from test_consistency import TENSORS

from adam_mpi.durable import model
from adam_mpi.worker.conservation import counted, given_up, unexplained

CONSERVE = [
    "data.images=3200", "server.shard=12000", "inject.conserve=true", "optimiser.rate=1", "push.protocol=delta",
    "optimiser.schedule=constant", "layout.data=2", "layout.servers=2", "train.epochs=3", "train.test=false",
    "data.validation=0", "worker.threads=1",
]  # fmt: skip
DATA, WORKER, SERVER = 1, 5, 2
ONE_MPI = [
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="needs an Open MPI that survives"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
]
pytestmark = [pytest.mark.timeout(200), *ONE_MPI]
full = pytest.mark.full


def conserve(launch, ranks, codec, staleness, fault, *settings):
    """Runs a conservation job to its end; returns it and who was lost."""
    wanted = [*CONSERVE, f"push.codec={codec}", f"consistency.staleness={staleness}", *settings]
    job = launch(ranks, "train", *given(*wanted, f'inject.faults=["{fault}"]'), timeout=180)
    assert (job.run / "DONE").exists(), job.said()
    dead = {member for recovery in job.summary["recoveries"] for member in recovery["members"]}
    assert dead, f"nobody was lost: {fault}\n{job.said()}"
    return job, dead


@pytest.mark.parametrize(
    ("codec", "staleness", "fault"),
    [
        ("topk", "inf", f"kill rank={DATA} at=batch step=40"),
        pytest.param("topk", "0", f"kill rank={DATA} at=batch step=40", marks=full),
        pytest.param("topk", "3", f"kill rank={DATA} at=batch step=40", marks=full),
        pytest.param("onebit", "inf", f"kill rank={DATA} at=batch step=40", marks=full),
        pytest.param("onebit", "0", f"kill rank={DATA} at=batch step=40", marks=full),
        pytest.param("onebit", "3", f"kill rank={DATA} at=batch step=40", marks=full),
        pytest.param("topk", "inf", f"kill rank={SERVER} at=applied step=60", marks=full),
        pytest.param("topk", "inf", f"kill rank={WORKER} at=push step=20", marks=full),
        pytest.param("topk", "0", f"kill rank={WORKER} at=push step=20", marks=full),
        pytest.param("topk", "3", f"kill rank={WORKER} at=push step=20", marks=full),
        pytest.param("onebit", "inf", f"kill rank={WORKER} at=push step=20", marks=full),
    ],
)
def test_every_push_is_in_the_weights_or_carried_once(codec, staleness, fault, launch):
    job, dead = conserve(launch, 7, codec, staleness, fault)
    weights = model.read(job.run / "weights.h5", TENSORS)
    off = np.abs(unexplained(job.run, weights, dead))
    # The means of onebit are rounded.
    assert off.max() < (1e-2 if codec == "onebit" else 1e-4), (off.max(), int((off > 1e-2).sum()))
    back = given_up(job.run)
    told = {member: counts for member, counts in counted(job.run).items() if member not in dead}
    assert all(pushed == known + back[member] for member, (pushed, known) in told.items()), (told, back)
