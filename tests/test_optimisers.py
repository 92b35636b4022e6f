"""Each optimiser of the servers, in a job of one rank, against the textbook rule in one loop."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi.checkpoint import model_file
from adam_mpi.checkpoint.owner import process
from adam_mpi.checkpoint.stores import Seen
from adam_mpi.cluster.world import World
from adam_mpi.config import load
from adam_mpi.data.order import Order
from adam_mpi.data.sets import open_set
from adam_mpi.model import parameters
from adam_mpi.model.network import Network
from adam_mpi.runtime import generation, run
from adam_mpi.sharding.phases import Phase

EPOCHS, IMAGES, BATCH = 2, 200, 16
SMALL = [{"kind": "conv", "maps": 4, "kernel": 5}, "relu", {"kind": "pool", "size": 4}, {"kind": "dense", "units": 10}]
SETTINGS = [
    f"train.epochs={EPOCHS}", f"data.images={IMAGES}", f"train.batch={BATCH}", "data.validation=0.0",
    "consistency.staleness=0", "worker.threads=1", "server.shard=128", "optimiser.rate=0.2",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Every job takes the same drawn data set."""
    with pytest.MonkeyPatch.context() as patch:
        data = open_set(load(None, SETTINGS).data)
        patch.setattr(generation, "open_set", lambda _: data)
        yield data


def trained(settings, folder):
    """The weights that a job of one rank leaves, with the configuration it had."""
    config = load(None, [*SETTINGS, *settings])
    config.model.layers = SMALL
    world = World(MPI.COMM_SELF, config)
    entry = generation.enter(config, str(folder / "run"), False, world, [process()], False)
    job = generation.prepare(config, entry, False, world, math.inf, Seen())
    crew = generation.crew(world, job)
    run._serve(world, crew)
    crew.free()
    job.owner.release()
    return model_file.read(folder / "run" / "weights.h5", parameters.tensors(job.shapes)), config, job.shapes


def gradients(config, shapes, weights, data):
    """(gradient of the mean loss on `weights` as they are then, images before it), batch by batch."""
    context = Network(shapes, BATCH, config.run.seed).context()
    for epoch in range(1, EPOCHS + 1):
        order = Order(Phase(0, "train", epoch), data.description.train, BATCH, config.run.seed)
        for number in range(len(order)):
            images, gradient = order[number], np.zeros(weights.size, np.float32)
            pixels, labels = data.read("train", images)
            context.train(weights.astype(np.float32), gradient, pixels, labels, images, epoch)
            yield gradient.astype(float) / BATCH, (epoch - 1) * IMAGES + number * BATCH


def rate(optimiser, images):
    done = images / (EPOCHS * IMAGES)
    schedules = {"constant": 1, "step": 0.3 ** math.floor(3 * done), "cosine": (1 + math.cos(math.pi * done)) / 2}
    rising = (images + 1) / (EPOCHS * IMAGES * optimiser.warm_up) if optimiser.warm_up else 1
    return optimiser.rate * schedules[optimiser.schedule] * min(1, rising)


def textbook(config, shapes, data):
    """The same training in one loop, in float64."""
    optimiser = config.optimiser
    weights = parameters.initial(shapes, config.run.seed).astype(float)
    state, mean = np.zeros_like(weights), weights.copy()
    for gradient, images in gradients(config, shapes, weights, data):
        step, decayed = rate(optimiser, images), gradient + optimiser.decay * weights
        if optimiser.where == "worker":
            weights -= step * gradient
        elif optimiser.kind == "adagrad":
            state += decayed**2
            weights -= step * decayed / (np.sqrt(state) + 1e-8)
        else:
            state[:] = optimiser.momentum * state + decayed
            ahead = decayed + optimiser.momentum * state if optimiser.kind == "nesterov" else state
            weights -= step * ahead
        mean += optimiser.average * (weights - mean)
    return mean if optimiser.average else weights


@pytest.mark.parametrize(
    "settings",
    [
        ["optimiser.schedule=constant"],
        ["optimiser.momentum=0.9", "optimiser.rate=0.02"],
        ["optimiser.kind=nesterov", "optimiser.momentum=0.9", "optimiser.rate=0.02"],
        ["optimiser.kind=adagrad", "optimiser.rate=0.02"],
        ["optimiser.momentum=0.5", "optimiser.decay=0.01"],
        ["optimiser.kind=adagrad", "optimiser.rate=0.02", "optimiser.decay=0.01"],
        ["optimiser.schedule=step"],
        ["optimiser.schedule=cosine", "optimiser.warm_up=0.3"],
        ["optimiser.where=worker"],
        ["optimiser.average=0.1", "optimiser.momentum=0.5"],
    ],
    ids=" ".join,
)
def test_one_replica_follows_the_textbook(settings, drawn, tmp_path):
    weights, config, shapes = trained(settings, tmp_path)
    wanted = textbook(config, shapes, drawn)
    assert np.abs(wanted - parameters.initial(shapes, config.run.seed)).max() > 0.05
    assert np.abs(weights - wanted).max() < 1e-5
