"""Data serving: images served against images trained on per CPU second, waiting workers, stragglers, scipy's affine.

Full MNIST augmentation: rotation by 10 degrees, shift by 1.5 pixels, scale by 12 %, shear by 0.1, elastic distortion.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import _jobs
import numpy as np
from scipy import ndimage

from adam_mpi.config import LAYERS, load
from adam_mpi.data import glyphs
from adam_mpi.sharding.fields import image_fields
from adam_mpi.sharding.training_state import Phase

AFFINE = [
    "data.transform.rotation=10",
    "data.transform.shift=1.5",
    "data.transform.scale=0.12",
    "data.transform.shear=0.1",
]
FULL = [*AFFINE, "data.transform.elastic=0.6"]
BATCH, ROUNDS = 32, 9
Result = dict[str, Any]
Contender = Callable[[], tuple[int, float]]
"""Does something to images; returns how many, and the CPU seconds it took."""


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    yield from _speeds()
    yield from _waiting()
    yield from _stragglers()


def line(name: str, value: float, unit: str, target: float | None = None, most: bool = False) -> Result:
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target} | ({"most": True} if most else {})


def _speeds() -> Iterator[Result]:
    """Server, trainer and scipy in turns, in one thread each, by CPU time."""
    contenders = {
        "train": _trainer(),
        "plain": _server([]),
        "affine": _server(AFFINE),
        "full": _server(FULL),
        "warp": _warp(),
        "scipy": _scipy(),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(ROUNDS + 1):
        for name, contender in contenders.items():
            images, seconds = contender()
            if round_:  # the first one compiles
                rates[name].append(images / seconds)
    rate = {name: median(rates[name]) for name in contenders}
    for name in ("train", "plain", "affine", "full"):
        yield line(f"{'trained' if name == 'train' else f'served_{name}'}_per_cpu_second", rate[name], "images/s")
    yield line("served_affine_vs_trained", rate["affine"] / rate["train"], "x", 4.0)
    yield line("served_elastic_vs_trained", rate["full"] / rate["train"], "x", 1.5)
    yield line("affine_vs_scipy_per_image", rate["warp"] / rate["scipy"], "x", 5.0)


def _trainer() -> Contender:
    """The paper's MNIST network on batches of 32 (images and labels as they come)."""
    from adam_mpi.model import layers, parameters
    from adam_mpi.model.network import Network

    shapes = layers.infer(layers.parse(LAYERS), (1, 28, 28), 10)
    context, weights = Network(shapes, BATCH, 1, engine="generated").context(), parameters.initial(shapes, 1)
    gradient = np.zeros_like(weights)
    pixels, labels = glyphs.draw_glyphs(1, "train", np.arange(BATCH))
    ids = np.arange(BATCH)

    def train() -> int:
        for _ in range(60):
            context.train(weights, gradient, pixels, labels, ids, 1)
        return 60 * BATCH

    return _timed(train)


def _server(settings: list[str]) -> Contender:
    """A data rank and a client of it in one process: what happens to an image from the cache to the client's ask.

    The CPU time is that of the process less the client's: of one transforming thread, of reading, and of serving.
    """
    from mpi4py import MPI

    from adam_mpi.cluster.control_messages import ControlChannel
    from adam_mpi.cluster.idle import Idle
    from adam_mpi.cluster.world import World
    from adam_mpi.data.served_phase import ServedData
    from adam_mpi.data.server import DataServer
    from adam_mpi.data.sets import open_set
    from adam_mpi.worker.data_client import DataClient

    world = World(MPI.COMM_SELF, load(None, [f"train.batch={BATCH}", "data.images=12000", *settings]))
    served = ServedData(open_set(world.config.data), world.config, replicas=1)
    server = DataServer(world, ControlChannel(world.control), served)
    client = DataClient(world, image_fields((1, 28, 28)))
    phases, idle = iter(range(1000)), Idle("sleep")

    def serve() -> tuple[int, float]:
        number, images, clients = next(phases), 0, 0.0
        start = time.process_time()
        server.begin(Phase(number, "train", number + 1))
        client.next_phase()
        while client.phase.number < number or not client.drained:
            worked = server.step()
            began = time.thread_time()
            worked |= client.step()
            while (taken := client.take_batch()) is not None:
                slot, batch = taken
                images += batch.ids.size
                client.release_slot(slot)
                client.report_done(batch.epoch, batch.number, batch.ids.size, 0.0, 0)
            clients += time.thread_time() - began
            idle.back_off(worked)
        while not server.current.epoch_progress.complete:
            server.step()
        return images, time.process_time() - start - clients

    return serve


def _warp() -> Contender:
    from adam_mpi.data.transform import Transformer

    images = glyphs.draw_glyphs(1, "train", np.arange(2000))[0]
    ids, wanted = np.arange(len(images)), load(None, AFFINE).data.transform
    transformer = Transformer(wanted, images.shape[1:], images.dtype, 1, images[:0])
    return _timed(lambda: len(transformer(images, ids, 1)))


def _scipy() -> Contender:
    images = glyphs.draw_glyphs(1, "train", np.arange(400))[0][:, 0]
    matrix, offset, output = np.array([[0.98, 0.1], [-0.1, 1.02]]), np.array([0.5, -0.5]), np.empty((28, 28), np.uint8)

    def transform() -> int:
        for image in images:
            ndimage.affine_transform(image, matrix, offset, order=1, mode="nearest", output=output)
        return len(images)

    return _timed(transform)


def _timed(work: Callable[[], int]) -> Contender:
    """By the CPU time of this thread: libraries may have others that only wait."""

    def contender() -> tuple[int, float]:
        start = time.thread_time()
        return work(), time.thread_time() - start

    return contender


def _waiting() -> Iterator[Result]:
    """One data rank, one worker with one trainer thread, full augmentation: does the worker wait for data?"""
    summary, _ = _jobs.run(3, "train.epochs=3", "worker.threads=1", "layout.data=1", "layout.servers=1", *FULL)
    (worker,) = summary["workers"].values()
    together = worker["busy"] + worker["starved"]
    yield line("worker_waiting_for_data", worker["starved"] / together, "share", 0.02, most=True)
    total = sum(summary["cpu_seconds"].values())
    for rank, role in enumerate(("data", "server", "worker")):
        yield line(f"cpu_share_of_{role}_rank", summary["cpu_seconds"][str(rank)] / total, "share")


def _stragglers() -> Iterator[Result]:
    """Four replicas that take 20 ms per batch (asleep: cores shall not count), then one that takes three times that."""
    settings = [
        "data.images=16000",
        "train.epochs=1",
        "worker.threads=1",
        "layout.data=1",
        "layout.servers=1",
        'model.layers=[{kind="dense",units=10}]',
    ]
    even, uneven = '["delay role=worker at=compute seconds=0.02"{}]'.format, ',"delay rank=5 at=compute seconds=0.04"'
    static, slow = "epoch.assignment=static", f"inject.faults={even(uneven)}"
    balanced = _epoch_seconds(*settings, f"inject.faults={even('')}")
    dynamic, shares = _epoch_seconds(*settings, slow), _epoch_seconds(*settings, slow, static)
    quorum = _epoch_seconds(*settings, slow, static, "epoch.quorum=0.75")
    # Three replicas and a third do the work of four.
    yield line("straggler_dynamic_vs_ideal", dynamic / (balanced * 4 / (3 + 1 / 3)), "x", 1.25, most=True)
    yield line("straggler_static_vs_quorum", shares / quorum, "x", 1.0)


def _epoch_seconds(*settings: str) -> float:
    _, phases = _jobs.run(6, *settings)
    first = phases[0]
    return first["images"] / first["images_per_second"]
