"""Strips on real ranks: several batches in flight, computed in an order that differs from rank to rank."""

import random
import threading
import time

import numpy as np
import pytest
from strips import columns, scatter
from test_strip_context import STACKS

from adam_mpi.base import trace
from adam_mpi.config import load
from adam_mpi.model.layers import infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial
from adam_mpi.model.partition import partition
from adam_mpi.sharding.batches import image_batch

pytestmark = pytest.mark.mpi(min_size=2)
CONTEXTS = 3
BATCHES = 8
IMAGES = 6
FURTHER = ("no conv", "the paper's")


class Shuffled:
    """A queue that returns its items in random order."""

    def __init__(self, seed):
        self.items = []
        self.random = random.Random(seed)
        self.changed = threading.Condition()

    def put(self, item):
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def get(self):
        with self.changed:
            self.changed.wait_for(lambda: self.items)
            return self.items.pop(self.random.randrange(len(self.items)))


def batches(shape):
    """Yield the batches, the same on every rank."""
    draw = np.random.default_rng(7)
    for number in range(BATCHES):
        count = int(draw.integers(1, IMAGES + 1))
        pixels = draw.integers(0, 256, (count, *shape), dtype=np.uint8)
        yield image_batch(number, draw.permutation(99)[:count], draw.integers(0, 5, count), pixels, epoch=1)


def replica(settings):
    """Return a world whose ranks are the strips of one replica."""
    from mpi4py import MPI

    from adam_mpi.cluster.layout import Layout, Place
    from adam_mpi.cluster.world import World

    def arrange(hosts, _):
        roles = [("data", "worker", "server") if rank == 0 else ("worker",) for rank in range(len(hosts))]
        places = [Place(rank, host, roles[rank], 0, rank) for rank, host in enumerate(hosts)]
        return Layout(tuple(places), len(hosts))

    return World(MPI.COMM_WORLD, load(None, settings), arrange)


def fly(world, flow, cut, weights):
    """Compute all batches with `flow`; return the result and the gradient of each."""
    strip = world.place.strip
    own = scatter(cut, weights)[strip]
    waiting = list(batches(cut.shapes[0].input))
    landed = {}
    number = 0
    limit = time.monotonic() + 60
    while len(landed) < BATCHES or flow.link.held:
        assert time.monotonic() < limit, f"rank {world.rank} has computed only batches {sorted(landed)} of {BATCHES}"
        while number < BATCHES and flow.takes(number):
            batch = waiting[number]
            batch.inputs = {"input": columns(cut, batch.pixels)[strip]}
            flow.begin(number, batch, None, own, training=number % 4 != 3)
            number += 1
        flow.step()
        world.check()
        while flow.landed:
            flight = flow.landed.popleft()
            landed[flight.number] = flow.contexts[flight.context].result, flow.gradients[flight.context].copy()
            flow.release_flight(flight)
    flow.end_threads()
    return landed


@pytest.mark.parametrize("transport", ["shared", "send"])
@pytest.mark.parametrize("stack", ["overlapping pools", *(pytest.param(s, marks=pytest.mark.full) for s in FURTHER)])
def test_contexts_may_complete_in_any_order(stack, transport):
    from adam_mpi.worker.flow import Flow
    from adam_mpi.worker.link import Link, plan_channels

    delays = "inject.faults=['delay role=data at=exchange seconds=0.001']"
    world = replica([f"cluster.transport={transport}", delays])
    shape, layers = STACKS[stack]
    shapes = infer(layers, shape, 5)
    cut = partition(shapes, world.comm.size)
    weights = initial(shapes, 3)
    strip = cut.strips[world.place.strip]
    net = Network(strip.shapes, IMAGES, 11, strip=strip)
    contexts = [net.strip_context() for _ in range(CONTEXTS)]
    flow = Flow(contexts, [np.zeros(strip.parameters, np.float32) for _ in contexts], world.injector)
    flow.ready = Shuffled(world.rank)
    link = Link(world, plan_channels(cut, CONTEXTS, contexts[0].room))
    flow.attach(link)
    flow.start(2)
    recorder = trace.start(room=1000)
    landed = fly(world, flow, cut, weights)
    trace.stop()
    halos = {row: {event[0] for event in events} for row, events in recorder.rows if row.startswith("context")}
    assert halos == {f"context {number}": {"halo"} for number in range(CONTEXTS)}
    whole = Network(shapes, IMAGES, 11).context()
    for number, batch in enumerate(batches(shape)):
        gradient = np.zeros_like(weights)
        loss, correct = whole.train(weights, gradient, batch.pixels, batch.labels, batch.ids, 1)
        if number % 4 == 3:
            loss, correct = whole.evaluate(weights, batch.pixels, batch.labels)
        assert landed[number][0] == (pytest.approx(loss, rel=1e-5), correct)
        if number % 4 != 3:
            parts = world.comm.allgather(landed[number][1])
            total = np.zeros_like(gradient)
            for one, part in zip(cut.strips, parts, strict=True):
                for piece in one.pieces:
                    total[piece.start : piece.start + piece.size] += part[piece.local : piece.local + piece.size]
            np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())
    world.comm.Barrier()
    link.window.free()


def test_the_wait_for_a_hanging_thread_is_limited():
    from adam_mpi.worker.flow import Flow

    flow = Flow([], [], None)
    flow.computing = 2
    with pytest.raises(TimeoutError, match=r"^2 parts of batches are still computed after 0.01 s; the job ends$"):
        flow.drop_flights(0.01)


def test_sums_over_a_replica_are_those_of_all_strips():
    from adam_mpi.worker.gradient_buffer import GradientBuffer
    from adam_mpi.worker.link import Link, plan_channels
    from adam_mpi.worker.strip_pipeline import Sums

    world = replica([])
    shapes = infer(STACKS["the paper's"][1], STACKS["the paper's"][0], 5)
    cut = partition(shapes, world.comm.size)
    strip = cut.strips[world.place.strip]
    link = Link(world, plan_channels(cut, 1, IMAGES))
    sums = Sums(link, cut)
    given = [
        GradientBuffer(0, np.full(strip.parameters, 10.0**world.rank * (turn + 1), np.float32)) for turn in range(7)
    ]
    waiting = list(given)
    got = []
    limit = time.monotonic() + 30
    while len(got) < len(given):
        assert time.monotonic() < limit, f"rank {world.rank}: {len(got)} of {len(given)} sums"
        while waiting and sums.begin(waiting[0]):
            waiting.pop(0)
        if (done := sums.step()) is not None:
            got.append(done)
        world.check()
    expected = sum(10.0**rank for rank in range(world.comm.size))
    assert got == given
    for turn, buffer in enumerate(got):
        for spans in cut.common:
            a, b = spans[strip.number]
            mine = buffer.values[strip.local(a) :][: b - a]
            np.testing.assert_allclose(mine, expected * (turn + 1))
    world.comm.Barrier()
    link.window.free()


def test_the_strip_that_has_not_read_is_reported():
    from adam_mpi.worker.gradient_buffer import GradientBuffer
    from adam_mpi.worker.link import SUMS, Link, plan_channels
    from adam_mpi.worker.strip_pipeline import Sums

    world = replica([])
    shapes = infer(STACKS["the paper's"][1], STACKS["the paper's"][0], 5)
    cut = partition(shapes, world.comm.size)
    link = Link(world, plan_channels(cut, 1, IMAGES))
    sums = Sums(link, cut)
    values = np.zeros(cut.strips[world.place.strip].parameters, np.float32)
    assert all(sums.begin(GradientBuffer(0, values)) for _ in range(SUMS))
    world.comm.Barrier()
    reads = world.rank > 0
    assert not reads or all(sums.step() for _ in range(SUMS))
    world.comm.Barrier()
    assert (sums.begin(GradientBuffer(0, values)), sums.unread) == (False, [0])
    world.comm.Barrier()
    assert reads or all(sums.step() for _ in range(SUMS))
    world.comm.Barrier()
    assert sums.unread == [] and sums.begin(GradientBuffer(0, values))
    world.comm.Barrier()
    link.window.free()
