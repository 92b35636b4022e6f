"""The activations and errors that contexts of both engines keep of dense layers, and their products."""

from queue import SimpleQueue

import numpy as np
import pytest

from adam_mpi.cluster.fault_injection import Injector
from adam_mpi.cluster.layout import Place
from adam_mpi.config import Config
from adam_mpi.data.sets import Description
from adam_mpi.model.engine import jit, program
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.layers import Activation, Conv, Dense, Dropout, MaxPool, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial, tensors, total, views
from adam_mpi.planning import plan
from adam_mpi.sharding.batches import image_batch
from adam_mpi.sharding.push_protocol import Matrix
from adam_mpi.worker import gradient_buffer, trainer
from adam_mpi.worker.batch_filter import BatchFilter
from adam_mpi.worker.thread_weights import ThreadWeights

RELU = Activation("relu")
TANH = Activation("tanh")
STACKS = {
    "dropout": ((2, 5, 4), [Conv(3, 2), RELU, MaxPool(2), Dropout(0.3), Dense(9), RELU, Dropout(0.5), Dense(5), TANH]),
    "dense only": ((1, 3, 3), [Dense(7), TANH, Dropout(0.4), Dense(16), RELU]),
    "first dense": ((3, 1, 3), [Dropout(0.2), Dense(4), RELU]),
}
IMAGES = 70
pytestmark = pytest.mark.filterwarnings("ignore:overflow")


def network(stack):
    shape, layers = STACKS[stack]
    return infer([*layers, Dense(3)], shape, 3)


def plain(shapes, captured, lanes, images=IMAGES):
    built = program.build(shapes, images, lanes, 16, captured=captured)
    return EngineContext(shapes, images, 11, built, jit.uncompiled(built.text, built.lanes))


def block(shapes, count):
    random = np.random.default_rng(count)
    pixels = random.integers(0, 256, (count, *shapes[0].input), dtype=np.uint8)
    return pixels, random.integers(0, 3, count), random.permutation(1000)[:count], 1


def dense_layers(shapes):
    return [shape.name for shape in shapes if isinstance(shape.layer, Dense)]


# A pass is 64 images: 70 take two, and neither 1, 50, 66 nor 70 fill their last block.
@pytest.mark.parametrize("count", [1, 4, 50, 66, 70])
@pytest.mark.parametrize("stack", STACKS)
def test_the_engine_keeps_what_the_reference_keeps(stack, count):
    shapes = network(stack)
    captured = dense_layers(shapes)
    weights = initial(shapes, 5)
    reference = Network(shapes, IMAGES, 11, np.float64, captured=captured).context()
    # A program for 5 images of 16 lanes is one for few images.
    for lanes, images in ((4, IMAGES), (16, IMAGES), (16, 5))[: 3 if count <= 5 else 2]:
        context = plain(shapes, captured, lanes, images)
        gradient = np.zeros(total(shapes), np.float32)
        context.train(weights, gradient, *block(shapes, count))
        reference.train(weights.astype(float), np.zeros(total(shapes)), *block(shapes, count))
        gradients = views(gradient, tensors(shapes))
        for layer in captured:
            activations, errors = context.factors(layer)
            for kept, wanted in zip((activations, errors), reference.factors(layer), strict=True):
                assert kept.shape == wanted.shape and kept.shape[0] == count
                np.testing.assert_allclose(kept, wanted, atol=2e-6)
            np.testing.assert_allclose(errors.T @ activations, gradients[f"{layer}/weight"], atol=1e-5)


def test_a_small_block_leaves_nothing_of_a_larger_one_before_it():
    shapes = network("dropout")
    context, fresh = (plain(shapes, ["dense2"], 4) for _ in range(2))
    weights = initial(shapes, 5)
    gradient = np.zeros(total(shapes), np.float32)
    context.train(weights, gradient, *block(shapes, 70))
    for one in (context, fresh):
        one.train(weights, gradient, *block(shapes, 3))
    for kept, wanted in zip(context.factors("dense2"), fresh.factors("dense2"), strict=True):
        np.testing.assert_array_equal(kept, wanted)


def test_no_memory_is_used_where_no_layer_is_captured():
    shapes = network("dropout")
    one, all_ = (program.build(shapes, IMAGES, 8, 16, captured=names) for names in ([], dense_layers(shapes)))
    assert one.kept == {} and "turn_errors" not in one.text and one.floats < all_.floats


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_kernels_keep_the_same():
    shapes = network("first dense")
    captured = dense_layers(shapes)
    weights = initial(shapes, 5)
    compiled = Network(shapes, IMAGES, 11, engine="generated", captured=captured).context()
    contexts = [compiled, plain(shapes, captured, 4)]
    for context in contexts:
        context.train(weights, np.zeros(total(shapes), np.float32), *block(shapes, 67))
    for layer in captured:
        for kept, wanted in zip(*(context.factors(layer) for context in contexts), strict=True):
            np.testing.assert_allclose(kept, wanted, atol=2e-6)


def test_a_job_that_pushes_factors_computes_with_the_generated_kernels():
    description = Description("small", (1, 3, 3), 3, 10, 0, 10)
    assert plan.network(Config(), description, network("dense only"), ["dense1"]).program is not None


@pytest.mark.parametrize(
    ("sizes", "pushes"), [((5, 8, 8), [[5, 8]]), ((8, 5, 8), [[8, 5]]), ((3, 8, 8, 8), [[3, 8], [8, 8]])]
)
def test_a_small_batch_before_others_leaves_room_for_their_factors(sizes, pushes):
    """The last batch of an epoch may reach a thread before others."""
    shapes = network("dense only")
    network_ = Network(shapes, 8, 11, engine="reference", captured=["dense1"])
    pool = gradient_buffer.GradientPool(4, total(shapes), {"dense1": Matrix(0, 9, 7)}, 16)
    copy = ThreadWeights(network_, initial(shapes, 5), 0, True)
    place = Place(0, "here", ("worker",))
    thread = trainer.Trainer(
        0,
        network_,
        copy,
        batch_filter=BatchFilter(Config(), total(shapes), []),
        pool=pool,
        results=SimpleQueue(),
        injector=Injector([], place, 1),
    )
    scales = gradient_buffer.StepScales(weights=-0.1, push=1.0, predicted=-0.1)
    pushed = []
    for number, size in enumerate(sizes):
        pixels, labels, ids, _ = block(shapes, size)
        task = trainer.train(image_batch(number, ids, labels, pixels, phase=1), None, scales, images=16, largest=8)
        if (full := task(thread).gradient) is not None:
            pushed.append([done.images for done in full.done])
            assert full.factors["dense1"].count == full.images
    assert pushed == pushes
