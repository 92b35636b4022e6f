"""Measure the costs of a simulation on this machine, each for a moment, on one core."""

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
from adam_mpi.optimizer import kernels, rules
from adam_mpi.optimizer.settings import BatchCounts, Settings
from adam_mpi.planning.plan import network
from adam_mpi.sharding.training_state import Phase
from adam_mpi.simulate.hosts import Costs
from adam_mpi.transport import mailbox
from adam_mpi.worker import gradient_buffer
from adam_mpi.worker.thread_weights import ThreadWeights

SECONDS = 0.7
"""How long each cost is measured: long enough for steady figures."""
MOST = 1 << 24
"""Parameters of the largest model that is measured as a whole."""
CACHES = 1 << 25
"""Bytes that are used between two pushes or pulls of a rank, so that nothing of the first is left in a cache."""
TIMES = 6
"""Bytes that main threads use between two batches of a thread, as a multiple of the weights."""
WIRED = 30
"""Messages that are sent to measure TCP."""
LEAST_WIRED = 1 << 20
MOST_WIRED = 1 << 22
"""Bytes of the smallest and of the largest of these messages."""
WIRE_SECONDS = 10.0
"""How long either side of the TCP connection waits for the other."""


@dataclass(frozen=True)
class Setting:
    """The properties of the job that costs depend on."""

    hosts: int
    threads: int
    """Trainer threads of all workers on a host."""
    own: int
    """Trainer threads of one worker."""
    images: int
    """Images that a thread computes at once."""
    captured: Sequence[str]
    """Layers that push factors."""


def measure(costs: Costs, config: Config, data: Description, shapes: tuple[LayerShape, ...], setting: Setting) -> Costs:
    """Return the `costs` of a simulation with every 0 replaced by a measurement on this machine.

    Costs of bytes are measured on as many bytes as the model has, which are in no cache.
    """
    size = min(MOST, parameters.total(shapes))
    measures: dict[str, Callable[[], float]] = {
        "image": lambda: _measure_image(network(config, data, shapes, setting.captured), config, data, setting),
        "prepare": lambda: _measure_preparation(config),
        "copy": lambda: _measure_message_copy(size),
        "sign": lambda: _measure_checksum(size),
        "wire": lambda: _measure_tcp(min(max(4 * size, LEAST_WIRED), MOST_WIRED)) if setting.hosts > 1 else 0.0,
        "apply": lambda: _measure_step(size),
        "pull": lambda: _measure_pull(size),
    }
    unknown = {name: work for name, work in measures.items() if not getattr(costs, name)}
    if unknown:
        # Kernels may have to be compiled first, which takes a while.
        print(f"measuring on this machine: {', '.join(unknown)}", file=sys.stderr, flush=True)
    return replace(costs, **{name: work() for name, work in unknown.items()})


def _median_seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the measured median time of a call of `work`, without the first; call `before` before each."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 3:
        before()
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return median(times)


def _measure_image(net: Network, config: Config, data: Description, setting: Setting) -> float:
    """Measure the cost of training an image in all threads of a host, which share caches and memory."""
    threads = min(setting.threads, os.cpu_count() or 1)
    images = setting.images
    shared = [parameters.initial(net.shapes, config.run.seed) for _ in range(0, threads, setting.own)]
    alone = setting.own == 1 or config.push.images <= config.train.batch
    draw = np.random.default_rng(config.run.seed)
    pixels = draw.integers(0, 256, (images, *data.shape)).astype(data.form.dtype)
    labels = draw.integers(0, data.classes, images)
    ids = np.arange(images)

    def thread(index: int) -> float:
        own = ThreadWeights(net, shared[index // setting.own], index, alone)
        context = own.context
        total = np.zeros_like(own.gradient)

        def train() -> None:
            if not config.asynchronous:
                # The servers take the step.
                context.train(own.shared, own.gradient, pixels, labels, ids=ids, epoch=0, overwrite=True)
                return
            overwrite = own.begin()
            context.train(
                own.weights, own.gradient, pixels, labels, ids=ids, epoch=0, overwrite=overwrite, **own.options
            )
            own.step(total, -1e-9, 1.0)

        return _median_seconds_cold(train, min(CACHES, TIMES * own.gradient.nbytes)) / images

    with ThreadPoolExecutor(threads) as pool:
        return median(pool.map(thread, range(threads)))


def _measure_preparation(config: Config) -> float:
    """Measure the cost of preparing an image on a data rank."""
    images = np.arange(config.train.batch)
    loader = BatchLoader(open_set(config.data), config.run.seed)
    return _median_seconds(lambda: loader.prepare(Phase(0, "train", 1), images)) / images.size


def _median_seconds_cold(work: Callable[[], object], between: int = CACHES) -> float:
    """Return the measured median time of a call of `work` when other bytes are used `between` two calls."""
    (other,) = _arrays_of_ones(1, between // 4)
    return _median_seconds(work, lambda: np.add(other, 1, out=other))


def _arrays_of_ones(count: int, size: int) -> list[np.ndarray]:
    """Return `count` arrays of `size` ones to measure with."""
    return [np.ones(size, np.float32) for _ in range(count)]


def _measure_message_copy(size: int) -> float:
    """Measure the cost of copying a byte into a message."""
    body, values = (array.view(np.uint32) for array in _arrays_of_ones(2, size))
    return _median_seconds_cold(lambda: mailbox.copy_words(body, values)) / (4 * size)


def _measure_checksum(size: int) -> float:
    """Measure the cost of the checksum of a byte."""
    (message,) = _arrays_of_ones(1, size)
    return _median_seconds_cold(lambda: mailbox.message_checksum(message.view(np.uint32))) / (4 * size)


def _measure_tcp(size: int) -> float:
    """Measure the cost of TCP on one of the two sides, per byte; MPI adds little to the system's copies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
    # If one side fails, the other must not wait for ever.
    for side in (sender, receiver):
        side.settimeout(WIRE_SECONDS)
    sent = bytes(size)
    arrived = bytearray(size)

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


def _measure_step(size: int) -> float:
    """Measure the cost of a server's step, per byte of a push."""
    weights, pushed = _arrays_of_ones(2, size)
    scales = np.full(1, 1e-9, np.float32)
    rule = rules.RULES["descent"]
    rows = rules.coefficients(rule, Settings(), 1.0, BatchCounts(0, 1, 1))
    states = np.zeros((0, size), np.float32)
    step = partial(kernels.step, rule.kernel, weights, states, pushed, np.zeros(1, np.int64), scales, rows)
    return _median_seconds_cold(step) / (4 * size)


def _measure_pull(size: int) -> float:
    """Measure the cost of taking in a byte of weights on a worker."""
    local, arrived, latest = _arrays_of_ones(3, size)
    values = np.zeros((1, size), np.float32)
    rows = np.zeros(1, np.int64)

    def pull() -> None:
        latest[:] = local
        arrived[:] = latest
        gradient_buffer.renew(local, arrived, values, rows, np.float32(0))

    return _median_seconds_cold(pull) / (4 * size)
