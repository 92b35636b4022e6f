"""The weights of a trainer thread: rounds of batches, and what they add to the shared weights."""

import threading

import numpy as np
import pytest
from launch import given, spread

from adam_mpi.base import machine
from adam_mpi.model.engine import jit, program
from adam_mpi.model.layers import Activation, Conv, Dense, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial, spans, total
from adam_mpi.worker.thread_weights import ROUND, ThreadWeights

RATE = 0.01
RELU = Activation("relu")
SHAPES = infer([Conv(2, 3), RELU, Dense(12), RELU, Dense(3)], (1, 5, 5), 3)


def blocks(count, seed=0):
    random = np.random.default_rng(seed)
    return [
        (random.integers(0, 256, (4, 1, 5, 5), dtype=np.uint8), random.integers(0, 3, 4), np.arange(4))
        for _ in range(count)
    ]


def work(copy, batches, buffer):
    for batch in batches:
        copy.context.train(copy.weights, copy.gradient, *batch, 1, copy.begin(), **copy.options)
        copy.step(buffer, -RATE, 1.0)


@pytest.mark.parametrize("alone", [False, True])
def test_a_thread_takes_the_steps_of_plain_descent(alone):
    network = Network(SHAPES, 4, 0)
    shared = initial(SHAPES, 0)
    wanted = shared.copy()
    sums = np.zeros_like(shared)
    gradient = np.zeros_like(shared)
    buffer = np.zeros_like(shared)
    copy = ThreadWeights(network, shared, 0, alone)
    for number, batch in enumerate(blocks(2 * ROUND), start=1):
        network.context().train(wanted, gradient, *batch, 1, overwrite=True)
        wanted -= np.float32(RATE) * gradient
        sums += gradient
        work(copy, [batch], buffer)
        if alone or number % ROUND == 0:
            np.testing.assert_allclose(shared, wanted, atol=1e-6)
            np.testing.assert_allclose(buffer, sums, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_allclose(copy.weights, wanted, atol=1e-6)
            assert np.abs(shared - wanted).max() > 1e-4


def test_a_push_ends_a_round_and_the_next_begins_with_the_shared_weights():
    network = Network(SHAPES, 4, 0)
    shared = initial(SHAPES, 0)
    buffer = np.zeros_like(shared)
    copy = ThreadWeights(network, shared, 0, False)
    copy.begin()
    copy.gradient[:] = 1
    copy.step(buffer, -RATE, 1.0, last=True)
    assert (buffer == 1).all()
    np.testing.assert_allclose(shared, initial(SHAPES, 0) - RATE, atol=1e-6)
    copy.end(buffer, -RATE, 1.0)
    assert (buffer == 1).all()
    shared += 5
    assert copy.begin()
    np.testing.assert_array_equal(copy.weights, shared)


def test_threads_end_their_rounds_apart():
    copies = [
        ThreadWeights(Network(SHAPES, 4, 0), np.zeros(total(SHAPES), np.float32), index, False)
        for index in range(ROUND)
    ]
    assert sorted(copy.length for copy in copies) == list(range(1, ROUND + 1))


def test_two_threads_lose_next_to_nothing():
    network = Network(SHAPES, 4, 0)
    shared = np.zeros(total(SHAPES), np.float32)
    buffers = [np.zeros_like(shared) for _ in range(2)]

    def descend(index):
        copy = ThreadWeights(network, shared, index, False)
        for _ in range(100 * ROUND):
            copy.begin()
            copy.gradient[:] = -1
            copy.step(buffers[index], -1.0, 1.0)
        copy.end(buffers[index], -1.0, 1.0)

    threads = [threading.Thread(target=descend, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = -sum(buffer.mean() for buffer in buffers)
    assert given > 200 and shared.mean() == pytest.approx(given, rel=0.05)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.full)])
def large(request, monkeypatch):
    """Return a network of four lanes whose first dense layer is too large for copies, and the span of that layer."""
    monkeypatch.setattr(machine, "lanes", lambda: 4)
    monkeypatch.setattr(program, "COPIED", 100)
    if request.param == "plain":
        monkeypatch.setattr(jit, "run", lambda text, lanes, inputs: jit.uncompiled(text, lanes))
        monkeypatch.setattr(jit, "apply_fused", lambda text, lanes: jit.uncompiled(text, lanes, "apply_fused"))
    return Network(SHAPES, 4, 0, engine="generated", batches=ROUND), spans(SHAPES)["dense1"]


def test_layers_too_large_for_a_copy_are_read_where_they_are_shared(large):
    network, (start, stop) = large
    assert network.uncopied == network.fused_layers == ("dense1",)
    assert network.copied() == [(0, start), (stop, total(SHAPES))]
    shared = initial(SHAPES, 0)
    batches = blocks(2)
    buffer = np.zeros_like(shared)
    copy = ThreadWeights(network, shared, 0, False)
    work(copy, batches, buffer)
    # The copy has steps in it, the shared weights have not; of the large layer there is no copy and no gradient.
    assert not copy.weights[start:stop].any() and (copy.weights[:start] != shared[:start]).any()
    assert not copy.gradient[start:stop].any() and copy.gradient[:start].any()
    np.testing.assert_array_equal(shared, initial(SHAPES, 0))
    mixed = copy.weights.copy()
    mixed[start:stop] = shared[start:stop]
    wanted = network.context().evaluate(mixed, *batches[0][:2])
    assert copy.context.evaluate(copy.weights, *batches[0][:2]) == wanted
    copy.end(buffer, -RATE, 1.0)
    assert (shared[start:stop] != initial(SHAPES, 0)[start:stop]).any()


@pytest.mark.parametrize("alone", [False, True])
def test_large_layers_take_the_step_of_their_gradient_over_a_round(large, alone):
    network, (start, stop) = large
    shared = initial(SHAPES, 0)
    buffer = np.zeros_like(shared)
    copy = ThreadWeights(network, shared, 0, alone)
    for number in range(2 * ROUND):
        if number % ROUND == 0 or alone:
            before = shared.copy()
            sums = buffer.copy()
            gradient = np.zeros_like(shared)
        (batch,) = blocks(1, number)
        # The same weights, with gradients that are written; the copied layers have stepped meanwhile.
        mixed = copy.weights.copy() if copy.batches else shared.copy()
        mixed[start:stop] = shared[start:stop]
        network.context().train(mixed, gradient, *batch, 1)
        work(copy, [batch], buffer)
    np.testing.assert_allclose(buffer[start:stop], (sums + gradient)[start:stop], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shared[start:stop], (before - RATE * gradient)[start:stop], atol=1e-6)
    assert not copy.gradient[start:stop].any()


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("case", "mpi"), spread([2]), indirect=["mpi"])
def test_two_threads_with_copies_reach_the_accuracy_of_one(case, launch):
    """How soon depends on what else uses the cores: the staler the copies, the slower the start."""
    settings = given("data.images=6000", "train.epochs=12", "push.images=128", "pull.images=128", "train.target=0.95")
    one, two = (launch(1, "train", *settings, *given(f"worker.threads={threads}")) for threads in (1, case))
    assert one.returncode == two.returncode == 0, two.said()
    assert one.summary["stopped_by"] == two.summary["stopped_by"] == "target"
    assert two.summary["images"] == 6000 * two.summary["epochs"]
