"""Whole jobs: codecs, the three kinds of consistency, layouts and transports, with every push counted.

The MPIs take turns, so that both see some of it and nothing is run twice.
"""

from itertools import cycle, product

import numpy as np
import pytest
from launch import available, start

from adam_mpi.checkpoint import model_file
from adam_mpi.config import LAYERS
from adam_mpi.data.glyphs import SIDE
from adam_mpi.model import layers, parameters

TENSORS = parameters.tensors(layers.infer(layers.parse(LAYERS), (1, SIDE, SIDE), 10))
TURNS = cycle(range(2))
# Every test starts jobs, through `train`.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that runs a training job with `replicas`, `servers` and `settings` to its end."""
    jobs = []

    def call(replicas, servers, *settings, mpi=None, timeout=250):
        mpi = mpi or available()[next(TURNS) % len(available())]
        wanted = [f"layout.servers={servers}", "layout.data=1", "worker.threads=1", *settings]
        words = [word for setting in wanted for word in ("--set", setting)]
        folder = tmp_path_factory.mktemp("job")
        jobs.append(start(mpi, 1 + replicas + servers, "train", *words, folder=folder))
        job = jobs[-1].wait(timeout)
        assert job.returncode == 0 and job.summary["status"] == "done", job.said()
        return job

    yield call
    for job in jobs:
        job.end()


def weights(job):
    return model_file.read_model(job.run / "weights.h5", TENSORS)


def check_counts(job):
    """Check that every server has applied every push once."""
    pushes = job.summary["pushes"]
    assert pushes["sent"] == pushes["acknowledged"] == pushes["applied"] > 0
    assert pushes["duplicates"] == pushes["refused"] == 0


# Few images, and shards so small that three servers have at least eight each.
SMALL = ["data.images=640", "data.validation=0.0", "train.epochs=1", "server.shard=8192"]


def small(train, replicas, servers, staleness, *settings, **options):
    job = train(replicas, servers, *SMALL, f"consistency.staleness={staleness}", *settings, **options)
    check_counts(job)
    return job


CODECS = {"float16": 1.9, "bfloat16": 1.9, "onebit": 25, "topk": 25}
# Synchronous training is deterministic, so that accuracies can be compared.
WHOLE = [
    "push.protocol=delta",
    "train.epochs=2",
    "train.batch=64",
    "optimizer.learning_rate=0.06",
    "consistency.staleness=0",
]


@pytest.fixture(scope="module")
def uncompressed(train):
    return train(2, 1, *WHOLE)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_train_as_well_with_fewer_bytes(codec, train, uncompressed):
    job = train(2, 1, *WHOLE, f"push.codec={codec}")
    check_counts(job)
    assert uncompressed.summary["test_accuracy"] > 0.98
    assert job.summary["test_accuracy"] >= uncompressed.summary["test_accuracy"] - 0.005
    assert CODECS[codec] * job.summary["pushes"]["bytes"] <= uncompressed.summary["pushes"]["bytes"]


COMBINATIONS = list(product((1, 2, 3), (1, 2, 3), ("0", "2", "inf")))
QUICK = [(2, 3, "2"), (3, 2, "0"), (3, 3, "inf")]


@pytest.mark.parametrize(
    ("replicas", "servers", "staleness"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.full) for c in COMBINATIONS],
)
def test_every_layout_keeps_the_bound_on_staleness(replicas, servers, staleness, train):
    job = small(train, replicas, servers, staleness)
    assert job.summary["staleness"]["max"] <= float(staleness)
    if staleness != "inf":
        assert job.summary["pushes"]["sent"] == 20 * replicas


ADAPTIVE = ["optimizer.learning_rate=0.002", "optimizer.epsilon=1e-3", "optimizer.schedule=constant"]
RULES = [
    [],
    ["optimizer.momentum=0.9", "optimizer.learning_rate=0.01"],
    ["optimizer.clip_norm=0.2", "optimizer.clip_tensor=0.3", "optimizer.momentum=0.9"],
    *([f"optimizer.kind={kind}", *ADAPTIVE] for kind in ("adagrad", "rmsprop", "adam", "adamw", "ftrl")),
]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES, ids=" ".join)
@pytest.mark.parametrize("mpi", available(), ids=lambda mpi: mpi.name)
def test_synchronous_training_gives_equal_bits_and_the_numbers_of_one_replica(mpi, rule, train):
    # The same MPI: with one that survives a lost rank, shards have copies, and messages are summed before the step.
    first, again, single = (small(train, *layout, "0", *rule, mpi=mpi) for layout in ((2, 2), (2, 2), (1, 1)))
    assert np.array_equal(weights(first), weights(again))
    assert np.abs(weights(first) - weights(single)).max() < 1e-5


def test_one_thread_alone_takes_the_steps_of_synchronous_training(train):
    # With a schedule, messages of one push may be stepped at the rates before and after its first one is counted.
    settings = ["optimizer.learning_rate=0.03", "optimizer.momentum=0.9", "optimizer.schedule=constant"]
    alone, synchronous = (small(train, 1, 1, bound, *settings, mpi=available()[0]) for bound in ("inf", "0"))
    assert np.array_equal(weights(alone), weights(synchronous))
    assert alone.summary["delay"]["max"] == 0


@pytest.mark.full
def test_the_rate_and_momentum_of_synchronous_training_serve_asynchronous_training(train):
    settings = ["train.epochs=3", "optimizer.learning_rate=0.03", "optimizer.momentum=0.9", "push.protocol=delta"]
    job = train(4, 2, *settings)
    check_counts(job)
    assert job.summary["test_accuracy"] > 0.95


@pytest.mark.parametrize(
    ("staleness", "least", "most"),
    [("0", 0, 0), ("2", 2, 2), ("inf", 5, 1000)],
)
def test_a_slow_replica_holds_the_others_back_as_far_as_configured(staleness, least, most, train):
    # Enough images that the fast one gets ahead, on a busy machine too, and batches that take longer than a poll.
    images = 9600 if staleness == "inf" else 1600
    settings = [f"data.images={images}", "train.batch=64", "push.images=64", "kernels.engine=reference"]
    # Few messages in a push: gradients are added to a push that waits for a slot, and it counts once.
    settings += ["server.shard=262144"]
    job = small(train, 2, 1, staleness, 'inject.faults=["slow rank=3 factor=5"]', *settings)
    assert least <= job.summary["staleness"]["max"] <= most
    assert (job.summary["staleness"]["clock_wait"] > 0.05) == (staleness != "inf")


@pytest.mark.parametrize(
    ("transport", "staleness"),
    [
        ("rma", "inf"),
        ("send", "1"),
        pytest.param("rma", "1", marks=pytest.mark.full),
        pytest.param("send", "inf", marks=pytest.mark.full),
    ],
)
def test_other_transports_train_too(transport, staleness, train):
    small(train, 2, 2, staleness, f"cluster.transport={transport}")


def test_weights_pulled_in_half_the_bytes(train):
    whole, half = (small(train, 1, 2, "0", f"pull.codec={codec}") for codec in ("none", "bfloat16"))
    assert half.summary["pulls"]["bytes"] < 0.6 * whole.summary["pulls"]["bytes"]
    assert np.abs(weights(whole) - weights(half)).max() < 0.02
