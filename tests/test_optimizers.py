"""Each optimizer of the servers, in a job of one rank, against the textbook rule in one loop."""

import math

import numpy as np
import pytest
from mpi4py import MPI
from textbook import step_of

from adam_mpi.checkpoint import model_file
from adam_mpi.checkpoint.claim_file import this_process
from adam_mpi.checkpoint.stores import FoundStores
from adam_mpi.cluster.world import World
from adam_mpi.config import load
from adam_mpi.data.epoch import Order
from adam_mpi.data.sets import open_set
from adam_mpi.model import parameters
from adam_mpi.model.network import Network
from adam_mpi.optimizer.rules import RULES
from adam_mpi.optimizer.settings import settings_of
from adam_mpi.runtime import agreement, begin_generation, run
from adam_mpi.runtime.job import JobRequest
from adam_mpi.sharding.training_state import Phase

EPOCHS = 2
IMAGES = 200
BATCH = 16
SMALL = [
    {"kind": "conv", "channels": 4, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 4},
    {"kind": "dense", "units": 10},
]
SETTINGS = [
    f"train.epochs={EPOCHS}",
    f"data.images={IMAGES}",
    f"train.batch={BATCH}",
    "data.validation=0.0",
    "consistency.staleness=0",
    "worker.threads=1",
    "server.shard=128",
    "optimizer.learning_rate=0.2",
]


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Let every job use the same generated data set."""
    with pytest.MonkeyPatch.context() as patch:
        data = open_set(load(None, SETTINGS).data)
        for module in (agreement, begin_generation):
            patch.setattr(module, "open_set", lambda _: data)
        yield data


def trained(settings, folder):
    """Return the final weights of a job of one rank, its configuration and its layer shapes."""
    config = load(None, [*SETTINGS, *settings])
    config.model.layers = SMALL
    world = World(MPI.COMM_SELF, config)
    request = JobRequest(directory=str(folder / "run"))
    claimed = agreement.claim_run(config, request, world, [this_process()])
    job = agreement.prepare_job(config, claimed, request, world, FoundStores())
    runtime = begin_generation.begin_generation(world, job)
    run._run_roles(world, runtime)
    runtime.free()
    job.owner.release()
    return model_file.read_model(folder / "run" / "weights.h5", parameters.tensors(job.shapes)), config, job.shapes


def gradients(config, shapes, weights, data):
    """Yield (gradient of the mean loss on the current `weights`, images before it), batch by batch."""
    context = Network(shapes, BATCH, config.run.seed).context()
    for epoch in range(1, EPOCHS + 1):
        order = Order(Phase(0, "train", epoch), data.description.train, BATCH, config.run.seed)
        for number in range(len(order)):
            images, gradient = order[number], np.zeros(weights.size, np.float32)
            pixels, labels = data.read("train", images)
            context.train(weights.astype(np.float32), gradient, pixels, labels, images, epoch)
            yield gradient.astype(float) / BATCH, (epoch - 1) * IMAGES + number * BATCH


def rate(optimizer, images):
    done = images / (EPOCHS * IMAGES)
    schedules = {"constant": 1, "step": 0.3 ** math.floor(3 * done), "cosine": (1 + math.cos(math.pi * done)) / 2}
    rising = (images + 1) / (EPOCHS * IMAGES * optimizer.warmup) if optimizer.warmup else 1
    return optimizer.learning_rate * schedules[optimizer.schedule] * min(1, rising)


def clipped(gradient, optimizer, tensors):
    """Return the gradient with each tensor clipped, and then all of it."""
    gradient = gradient.copy()
    for tensor in tensors if optimizer.clip_tensor else ():
        part = gradient[tensor.offset : tensor.offset + tensor.size]
        part *= min(1, optimizer.clip_tensor / np.linalg.norm(part))
    return gradient * min(1, optimizer.clip_norm / np.linalg.norm(gradient)) if optimizer.clip_norm else gradient


def textbook(config, shapes, data):
    """Return the weights after the same training in one loop, in float64."""
    optimizer = config.optimizer
    weights = parameters.initial(shapes, config.run.seed).astype(float)
    name = "descent" if optimizer.where == "worker" else optimizer.kind
    states = np.zeros((len(RULES[name].states), weights.size))
    mean = weights.copy()
    for number, (gradient, images) in enumerate(gradients(config, shapes, weights, data)):
        gradient = clipped(gradient, optimizer, parameters.tensors(shapes))
        step, settings = rate(optimizer, images), settings_of(optimizer)
        weights[:], states = step_of(name, weights, states, gradient, step, number, settings)
        mean += optimizer.ema * (weights - mean)
    return mean if optimizer.ema else weights


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.schedule=constant"],
        ["optimizer.momentum=0.9", "optimizer.learning_rate=0.02"],
        ["optimizer.kind=nesterov", "optimizer.momentum=0.9", "optimizer.learning_rate=0.02"],
        ["optimizer.kind=adagrad", "optimizer.learning_rate=0.02"],
        ["optimizer.momentum=0.5", "optimizer.decay=0.01"],
        ["optimizer.kind=adagrad", "optimizer.learning_rate=0.02", "optimizer.decay=0.01"],
        ["optimizer.kind=rmsprop", "optimizer.learning_rate=0.002", "optimizer.beta2=0.99", "optimizer.epsilon=1e-4"],
        ["optimizer.kind=adam", "optimizer.learning_rate=0.005", "optimizer.decay=0.01", "optimizer.epsilon=1e-4"],
        ["optimizer.kind=adamw", "optimizer.learning_rate=0.005", "optimizer.decay=0.1", "optimizer.epsilon=1e-4"],
        ["optimizer.kind=ftrl", "optimizer.schedule=constant", "optimizer.l1=0.001", "optimizer.decay=0.01"],
        ["optimizer.clip_norm=0.2", "optimizer.momentum=0.9"],
        ["optimizer.clip_norm=0.4", "optimizer.clip_tensor=0.3", "optimizer.decay=0.01", "server.threads=2"],
        ["optimizer.schedule=step"],
        ["optimizer.schedule=cosine", "optimizer.warmup=0.3"],
        ["optimizer.where=worker"],
        ["optimizer.ema=0.1", "optimizer.momentum=0.5"],
    ],
    ids=" ".join,
)
def test_one_replica_follows_the_textbook(settings, drawn, tmp_path):
    weights, config, shapes = trained(settings, tmp_path)
    wanted = textbook(config, shapes, drawn)
    assert np.abs(wanted - parameters.initial(shapes, config.run.seed)).max() > 0.05
    assert np.abs(weights - wanted).max() < 1e-5
