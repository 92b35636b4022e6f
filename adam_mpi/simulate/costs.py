"""What things cost on this machine: each measured for a moment, on one core."""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from adam_mpi.config import Config
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.sets import Description, open_set
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.planning.plan import network
from adam_mpi.server import apply_kernels
from adam_mpi.server.optimizer_rules import Coefficients as Numbers
from adam_mpi.sharding.phases import Phase
from adam_mpi.simulate.cluster import Costs
from adam_mpi.transport import mailbox
from adam_mpi.worker import gradient_buffer
from adam_mpi.worker.thread_weights import ThreadWeights

# Long enough for steady figures; parameters of the largest model that is not measured by a part of it.
SECONDS, MOST = 0.7, 1 << 24
# Bytes that go through the caches between two pushes or pulls of a rank: nothing of the first is left in them. Between
# two batches of a thread it is what main threads do with the weights, so many times.
CACHES, TIMES = 1 << 25, 6
WIRED, LEAST_WIRED, MOST_WIRED = 30, 1 << 20, 1 << 22  # messages that are sent over a wire, and bytes of each
WIRE_SECONDS = 10.0


@dataclass(frozen=True)
class Setting:
    """Of the job whose costs are wanted."""

    hosts: int
    threads: int
    """That train on a host."""
    own: int
    """Of one worker."""
    images: int
    """That a thread computes at once."""
    captured: Sequence[str]
    """Layers that push factors."""


def measured(
    costs: Costs, config: Config, data: Description, shapes: tuple[LayerShape, ...], setting: Setting
) -> Costs:
    """With a figure of this machine in place of every 0.

    What is done with bytes is measured on as many as the model has, which are in no cache.
    """
    size = min(MOST, parameters.total(shapes))
    measures: dict[str, Callable[[], float]] = {
        "image": lambda: _image(network(config, data, shapes, setting.captured), config, data, setting),
        "prepare": lambda: _prepare(config),
        "copy": lambda: _copy(size),
        "sign": lambda: _sign(size),
        "wire": lambda: _wire(min(max(4 * size, LEAST_WIRED), MOST_WIRED)) if setting.hosts > 1 else 0.0,
        "apply": lambda: _apply(size),
        "pull": lambda: _pull(size),
    }
    unknown = {name: work for name, work in measures.items() if not getattr(costs, name)}
    if unknown:
        # Kernels may have to be compiled for it, which takes a while.
        print(f"measuring on this machine: {', '.join(unknown)}", file=sys.stderr, flush=True)
    return replace(costs, **{name: work() for name, work in unknown.items()})


def _seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Of one call, by the median; the first one may compile."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 3:
        before()
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return median(times)


def _image(net: Network, config: Config, data: Description, setting: Setting) -> float:
    """With as many threads at once as train on a host, as far as there are cores: they get in each other's way."""
    threads, images = min(setting.threads, os.cpu_count() or 1), setting.images
    shared = [parameters.initial(net.shapes, config.run.seed) for _ in range(0, threads, setting.own)]
    alone = setting.own == 1 or config.push.images <= config.train.batch
    draw = np.random.default_rng(config.run.seed)
    pixels = draw.integers(0, 256, (images, *data.shape)).astype(data.dtype)
    labels, ids = draw.integers(0, data.classes, images), np.arange(images)

    def thread(index: int) -> float:
        own = ThreadWeights(net, shared[index // setting.own], index, alone)
        context, total = own.context, np.zeros_like(own.gradient)

        def train() -> None:
            if not config.asynchronous:
                # The step is the servers'.
                context.train(own.shared, own.gradient, pixels, labels, ids, 0, True)
                return
            context.train(own.weights, own.gradient, pixels, labels, ids, 0, own.begin(), **own.options)
            own.step(total, 1e-9, 1.0)

        return _cold(train, min(CACHES, TIMES * own.gradient.nbytes)) / images

    with ThreadPoolExecutor(threads) as pool:
        return median(pool.map(thread, range(threads)))


def _prepare(config: Config) -> float:
    images = np.arange(config.train.batch)
    preparation = BatchLoader(open_set(config.data), config.run.seed)
    return _seconds(lambda: preparation.prepare(Phase(0, "train", 1), images)) / images.size


def _cold(work: Callable[[], object], between: int = CACHES) -> float:
    """The same, of something between two calls of which so many other bytes are used."""
    (other,) = _arrays(1, between // 4)
    return _seconds(work, lambda: np.add(other, 1, out=other))


def _arrays(count: int, size: int) -> list[np.ndarray]:
    return [np.ones(size, np.float32) for _ in range(count)]


def _copy(size: int) -> float:
    body, values = (array.view(np.uint32) for array in _arrays(2, size))
    return _cold(lambda: mailbox.copy(body, values)) / (4 * size)


def _sign(size: int) -> float:
    (message,) = _arrays(1, size)
    return _cold(lambda: mailbox.checksum(message.view(np.uint32))) / (4 * size)


def _wire(size: int) -> float:
    """For one of the two sides; what MPI adds is little beside the system's copies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
    # Neither side waits for ever, should the other fail.
    for side in (sender, receiver):
        side.settimeout(WIRE_SECONDS)
    sent, arrived = bytes(size), bytearray(size)

    def receive(left: int) -> None:
        while left:
            left -= receiver.recv_into(arrived, min(left, size))

    def send(messages: int) -> None:
        received = pool.submit(receive, messages * size)
        for _ in range(messages):
            sender.sendall(sent)
        received.result()

    with sender, receiver, ThreadPoolExecutor(1) as pool:
        send(1)
        begun = time.process_time()
        send(WIRED)
        return (time.process_time() - begun) / (2 * WIRED * size)


def _apply(size: int) -> float:
    weights, mail = _arrays(2, size)
    starts, scales = np.zeros(1, np.int64), np.full(1, 1e-9, np.float32)
    numbers = np.array(Numbers(gain=1), np.float32)
    step = partial(apply_kernels.step, apply_kernels.DESCENT, weights, weights, mail, starts, scales, numbers)
    return _cold(step) / (4 * size)


def _pull(size: int) -> float:
    local, arrived, latest = _arrays(3, size)
    values, rows = np.zeros((1, size), np.float32), np.zeros(1, np.int64)

    def pull() -> None:
        latest[:] = local
        arrived[:] = latest
        gradient_buffer.renew(local, arrived, values, rows, np.float32(0))

    return _cold(pull) / (4 * size)
