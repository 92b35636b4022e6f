"""The two ranks of the halo bench: run by it under MPI; the first prints a JSON object for each line."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from _models import MODELS
from mpi4py import MPI

from adam_mpi.cluster.world import World
from adam_mpi.config import load
from adam_mpi.inference.strip_evaluation import arrange
from adam_mpi.model.engine import conv_choice
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial
from adam_mpi.model.partition import partition
from adam_mpi.sharding.batches import Batch, image_batch, shares
from adam_mpi.worker import link
from adam_mpi.worker.flow import Flow
from adam_mpi.worker.gradient_buffer import GradientBuffer, add_scaled
from adam_mpi.worker.link import Link
from adam_mpi.worker.partitioned_replica import REST_SECONDS
from adam_mpi.worker.strip_pipeline import Sums

SHAPES = MODELS["alexnet"].shapes
IMAGES, IN_FLIGHT, ROUNDS, SECONDS = 32, 2, 5, 60.0
"""Of a rank's batch, and of each part in flight of a replica whose batch is as large as that of two ranks."""
ONE = np.float32(1)
Shapes = tuple[LayerShape, ...]
DELAY = "inject.faults=['delay role=worker at=exchange seconds=0.002']"


def batch(number: int, images: int, columns: tuple[int, int], shapes: Shapes, edges: tuple[int, ...] = ()) -> Batch:
    """`edges`: those of the ranks of a hybrid replica, which have pixels of their own images only."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 256, (images, *shapes[0].input), dtype=np.uint8)
    labels = draw.integers(0, shapes[-1].output[0], images)
    own = slice(*edges[MPI.COMM_WORLD.rank :][:2]) if edges else slice(images)
    part = pixels[own, ..., columns[0] : columns[1]].copy()
    return replace(image_batch(number, np.arange(images), labels, part, epoch=1), edges=edges)


class Replica:
    """One of as many strips as there are ranks, with so many batches of so many images in flight."""

    def __init__(
        self, in_flight: int, images: int, *settings: str, scheme: str = "strips", shapes: Shapes = SHAPES
    ) -> None:
        self.world = World(MPI.COMM_WORLD, load(None, list(settings)), arrange)
        self.cut = partition(shapes, MPI.COMM_WORLD.size, scheme)
        strip = self.cut.strips[MPI.COMM_WORLD.rank]
        net = Network(strip.shapes, images, 1, engine="generated", strip=strip)
        contexts = [net.strip_context() for _ in range(in_flight)]
        self.flow = Flow(contexts, [np.zeros(strip.parameters, np.float32) for _ in contexts], self.world.injector)
        self.link = Link(self.world, link.plan_channels(self.cut, in_flight, contexts[0].room, contexts[0].own_room))
        self.flow.attach(self.link)
        self.flow.start(1)
        self.sums = Sums(self.link, self.cut)
        flat = initial(shapes, 1)
        self.weights = np.concatenate([flat[piece.start : piece.start + piece.size] for piece in strip.pieces])
        self.total = GradientBuffer(0, np.zeros_like(self.weights))
        edges = shares(images, MPI.COMM_WORLD.size) if self.cut.hybrid else ()
        self.batch, self.begun, self.next = batch(1, images, strip.columns, shapes, edges), 0, 0
        self.waited = self.idle = 0.0
        """Seconds in which a batch waited for the other strip, and those of them in which no other was computed."""

    def train(self, batches: int) -> float:
        """So many of them, and a sum over the strips for each; returns the seconds it took."""
        flow, landed, end = self.flow, {}, self.begun + batches
        unsummed: deque[GradientBuffer] = deque()
        MPI.COMM_WORLD.Barrier()
        began = last = time.perf_counter()
        while self.next < end or unsummed or self.sums.busy or self.link.held:
            while self.begun < end and flow.takes(self.begun):
                flow.begin(self.begun, self.batch, None, self.weights, training=True)
                self.begun += 1
            if not flow.step() and (flow.idle or not flow.rest(REST_SECONDS)):
                os.sched_yield()
            while flow.landed:
                flight = flow.landed.popleft()
                landed[flight.number] = flight
            while self.next in landed:
                flight = landed.pop(self.next)
                add_scaled(self.total.values, flow.gradients[flight.context], ONE)
                flow.release_flight(flight)
                unsummed.append(self.total)
                self.next += 1
            while unsummed and self.sums.begin(unsummed[0]):
                unsummed.popleft()
            self.sums.step()
            now = time.perf_counter()
            # At the end there is nothing left to compute meanwhile.
            waited = (now - last) * (bool(flow.parked) and self.begun < end)
            self.waited, self.idle, last = self.waited + waited, self.idle + waited * (not flow.computing), now
            assert now < began + SECONDS, f"{self.next} of {end} batches are through"
        return time.perf_counter() - began

    def compute(self) -> float:
        """All segments of a batch without exchanges; returns the seconds of CPU it took."""
        given, began = self.batch, time.thread_time()
        block = given.pixels, given.labels, given.ids, given.epoch
        for segment in self.flow.contexts[0].begin(self.weights, self.flow.gradients[0], *block):
            for work in (*segment.work, *segment.meanwhile):
                work()
        return time.thread_time() - began

    def exchange(self) -> float:
        """Once through all exchanges of a batch, one after the other; returns the seconds it took."""
        link, context, number = self.link, self.flow.contexts[0], self.begun + 1
        ports = sorted(self.flow.ports[0].items(), key=lambda item: (item[0].direction, item[0].exchange))
        self._wait(lambda: link.finished(0, number - 1) and all(link.clear(channel) for _, (channel, _, _) in ports))
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        for port, (channel, out, into) in ports:
            context.exchange_buffers[port.exchange].pack(port.direction, out)
            link.post(channel, number, {to: values.size for to, values in out.items()})
            self._wait(lambda channel=channel: link.arrived(channel, number))
            context.exchange_buffers[port.exchange].unpack(port.direction, into)
        took = time.perf_counter() - began
        link.finish(0, number)
        self.begun = self.next = number
        return took

    def _wait(self, until: Callable[[], bool]) -> None:
        limit = time.perf_counter() + SECONDS
        while not until():
            os.sched_yield()
            assert time.perf_counter() < limit, "the other strip does not answer"

    def end(self) -> None:
        self.flow.end_threads()
        MPI.COMM_WORLD.Barrier()
        self.link.window.free()


class Alone:
    """A whole model on each rank."""

    def __init__(self) -> None:
        self.context, self.weights = Network(SHAPES, IMAGES, 1, engine="generated").context(), initial(SHAPES, 1)
        self.gradient, self.total = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.batch = batch(1, IMAGES, (0, SHAPES[0].input[2]), SHAPES)

    def train(self, batches: int) -> float:
        MPI.COMM_WORLD.Barrier()
        began, given = time.perf_counter(), self.batch
        for _ in range(batches):
            self.context.train(self.weights, self.gradient, given.pixels, given.labels, given.ids, 1, overwrite=True)
            add_scaled(self.total, self.gradient, ONE)
        return time.perf_counter() - began


def turns(*contenders: Callable[[], float]) -> list[list[float]]:
    """Seconds of each contender, the slower rank's; the first turn does not count."""
    took: list[list[float]] = [[] for _ in contenders]
    for turn in range(ROUNDS + 1):
        for times, contender in zip(took, contenders, strict=True):
            seconds = MPI.COMM_WORLD.allreduce(contender(), MPI.MAX)
            times += [seconds] if turn else []
    return took


def ratio(one: list[float], other: list[float]) -> float:
    return median(a / b for a, b in zip(one, other, strict=True))


def exchanges() -> Iterator[dict[str, Any]]:
    replicas = [Replica(1, IMAGES, f"cluster.transport={kind}") for kind in ("shared", "send")]
    shared, mpi = turns(*(lambda r=r: median(r.exchange() for _ in range(10)) for r in replicas))
    for name, times in {"exchange_shared": shared, "exchange_mpi": mpi}.items():
        yield {"name": name, "value": round(1e6 * median(times)), "unit": "us"}
    yield {"name": "exchange_mpi_vs_shared", "value": round(ratio(mpi, shared), 2), "unit": "x"}
    for replica in replicas:
        replica.end()


def strips() -> Iterator[dict[str, Any]]:
    alone, replica, hybrid = Alone(), Replica(IN_FLIGHT, IMAGES), Replica(IN_FLIGHT, IMAGES, scheme="hybrid")
    ranks, cut, rounds = turns(lambda: alone.train(3), lambda: replica.train(6), lambda: hybrid.train(6))
    hidden = MPI.COMM_WORLD.allreduce(1 - replica.idle / replica.waited, MPI.MIN)
    yield {"name": "exchange_hidden", "value": round(hidden, 3), "unit": "share"}
    yield {
        "name": "strips_vs_ranks",
        "value": round(ratio(ranks, cut), 3),
        "unit": "x",
        "images_per_second": [round(6 * IMAGES / median(cut)), round(6 * IMAGES / median(ranks))],
    }
    yield {"name": "hybrid_vs_ranks", "value": round(ratio(ranks, rounds), 3), "unit": "x"}
    for ended in (replica, hybrid):
        ended.end()


def borders() -> Iterator[dict[str, Any]]:
    """Borders first against all columns at once: what that costs, and what it hides with one part in flight."""
    first, seconds = Replica(1, IMAGES, DELAY), conv_choice.MESSAGE_SECONDS
    conv_choice.MESSAGE_SECONDS = float("inf")
    whole, conv_choice.MESSAGE_SECONDS = Replica(1, IMAGES, DELAY), seconds
    for name, way in (("border_first_cpu_vs_whole", Replica.compute), ("border_first_late_vs_whole", late)):
        one, other = turns(*(lambda way=way, r=r: way(r) for r in (whole, first)))
        yield {"name": name, "value": round(ratio(one, other), 3), "unit": "x"}
    for replica in (first, whole):
        replica.end()


def late(replica: Replica) -> float:
    return replica.train(6)


def delayed(images: int, name: str) -> Iterator[dict[str, Any]]:
    free, one, four = Replica(1, images), Replica(1, images, DELAY), Replica(4, images, DELAY)
    _, alone, together = turns(lambda: free.train(12), lambda: one.train(12), lambda: four.train(12))
    compute = free.flow.busy / free.next
    yield {
        "name": name,
        "value": round(ratio(alone, together), 2),
        "unit": "x",
        "images": images,
        "compute_ms_per_batch": round(1e3 * compute, 1),
        "images_per_second": [round(12 * images / median(together)), round(12 * images / median(alone))],
    }
    for replica in (free, one, four):
        replica.end()


def main() -> None:
    flights = delayed(1, "in_flight_4_vs_1"), delayed(4, "in_flight_4_vs_1_of_4")
    for line in chain(exchanges(), strips(), borders(), *flights):
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
