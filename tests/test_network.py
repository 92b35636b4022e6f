import subprocess
import sys
import threading

import numpy as np
import pytest

from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool, infer
from adam_mpi.model.network import Network, working_set
from adam_mpi.model.parameters import initial, tensors, total, views

RELU, TANH, SIGMOID = Activation("relu"), Activation("tanh"), Activation("sigmoid")
INPUT, CLASSES = (2, 9, 8), 5
STACKS = {
    "dense only": [Dense(5)],
    "dense": [Dense(7), TANH, Dense(5)],
    "conv relu pool": [Conv(3, 3), RELU, MaxPool(2), Conv(4, 2, 1, 1), RELU, Dense(6), RELU, Dense(5)],
    "stride and overlap": [Conv(3, 4, 2, 3), TANH, MaxPool(3, 2), Dense(5)],
    "dropout": [Conv(3, 3), RELU, Dropout(0.3), MaxPool(2), Dense(9), TANH, Dropout(0.5), Dense(5)],
    "pool and dropout first": [Dropout(0.2), MaxPool(2), Conv(3, 2), SIGMOID, Dense(5)],
    "activations in a row": [Dense(8), RELU, Dropout(0.2), SIGMOID, TANH, Dropout(0.3), Dropout(0.1), RELU, Dense(5)],
    "average": [Conv(3, 2), RELU, AvgPool(2), Conv(2, 2), TANH, AvgPool(2, 1), Dense(5)],
    "normalize": [
        Conv(6, 2),
        RELU,
        LocalResponseNorm(3, 1.5, 0.4, 0.6),
        MaxPool(2),
        LocalResponseNorm(4),
        Dropout(0.2),
        Dense(5),
    ],
    "no activation": [Conv(2, 3, 3, 2), Conv(2, 2), MaxPool(1), Dense(4), Dense(5)],
}
every_stack = pytest.mark.parametrize("stack", STACKS)


def block(count, seed=0, shape=INPUT, classes=CLASSES):
    """Pixels, labels and ids."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, random.integers(0, classes, count), random.permutation(1000)[:count]


def prepare(stack, dtype=np.float32):
    """Shapes, and weights whose biases are not zero."""
    shapes = infer(STACKS[stack], INPUT, CLASSES)
    weights = initial(shapes, 3) + 0.05 * np.random.default_rng(4).standard_normal(total(shapes))
    return shapes, weights.astype(dtype)


def gradient_of(context, weights, pixels, labels, ids):
    gradient = np.zeros_like(weights)
    return *context.train(weights, gradient, pixels, labels, ids, 1), gradient


@every_stack
def test_gradient_agrees_with_finite_differences(stack):
    shapes, weights = prepare(stack, np.float64)
    context, data, step = Network(shapes, 4, 11, np.float64).context(), block(3), 1e-6
    _, _, gradient = gradient_of(context, weights, *data)
    chosen = np.random.default_rng(0).permutation(len(weights))[:60]
    for tensor in tensors(shapes):
        chosen = np.append(chosen, [tensor.offset, tensor.offset + tensor.size - 1])
    for index in chosen:
        losses = []
        for sign in (1, -1):
            moved = weights.copy()
            moved[index] += sign * step
            losses.append(gradient_of(context, moved, *data)[0])
        assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-7)


@every_stack
def test_float32_agrees_with_float64(stack):
    shapes, weights = prepare(stack)
    data = block(6)
    single = gradient_of(Network(shapes, 6, 11).context(), weights, *data)
    double = gradient_of(Network(shapes, 6, 11, np.float64).context(), weights.astype(np.float64), *data)
    assert single[0] == pytest.approx(double[0], rel=1e-5) and single[1] == double[1]
    np.testing.assert_allclose(single[2], double[2], atol=1e-5 * np.abs(double[2]).max())


@every_stack
def test_blocks_split_up_and_tails_add_up_to_the_whole(stack):
    shapes, weights = prepare(stack, np.float64)
    pixels, labels, ids = block(13)
    whole = gradient_of(Network(shapes, 13, 11, np.float64).context(), weights, pixels, labels, ids)
    context = Network(shapes, 5, 11, np.float64).context()
    loss, correct, gradient = 0.0, 0, np.zeros_like(weights)
    for start in (0, 5, 10):
        part = slice(start, start + 5)
        result = context.train(weights, gradient, pixels[part], labels[part], ids[part], 1)
        loss, correct = loss + result[0], correct + result[1]
    assert loss == pytest.approx(whole[0]) and correct == whole[1]
    np.testing.assert_allclose(gradient, whole[2], rtol=1e-9, atol=1e-12)


def test_order_of_images_does_not_matter_with_dropout():
    shapes, weights = prepare("dropout", np.float64)
    context, (pixels, labels, ids) = Network(shapes, 8, 11, np.float64).context(), block(8)
    first = gradient_of(context, weights, pixels, labels, ids)
    second = gradient_of(context, weights, pixels[::-1], labels[::-1], ids[::-1])
    assert first[0] == pytest.approx(second[0])
    np.testing.assert_allclose(first[2], second[2], rtol=1e-9, atol=1e-12)
    another_epoch, _ = context.train(weights, np.zeros_like(weights), pixels, labels, ids, 2)
    assert another_epoch != pytest.approx(first[0])


def test_gradient_is_added_and_weights_are_only_read():
    shapes, weights = prepare("conv relu pool")
    context, data = Network(shapes, 4, 0).context(), block(4)
    before, gradient = weights.copy(), np.zeros_like(weights)
    for _ in range(2):
        context.train(weights, gradient, *data, 0)
    np.testing.assert_array_equal(weights, before)
    np.testing.assert_allclose(gradient, 2 * gradient_of(context, weights, *data)[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stack", "calls"), [("dense only", 1), ("dense", 4), ("pool and dropout first", 4)])
def test_errors_go_no_further_back_than_the_first_weights(stack, calls):
    shapes, _ = prepare(stack)
    assert len(Network(shapes, 2, 0).context().backward) == calls


def test_two_threads_give_what_one_gives():
    shapes, weights = prepare("dropout")
    network, blocks, rounds = Network(shapes, 16, 11), [block(16, seed) for seed in (1, 2)], 30
    alone = [gradient_of(network.context(), weights, *data) for data in blocks]
    results: dict[int, list] = {0: [], 1: []}
    start = threading.Barrier(2)

    def work(index):
        context = network.context()
        start.wait()
        results[index] = [gradient_of(context, weights, *blocks[index]) for _ in range(rounds)]

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        assert len(results[index]) == rounds
        for loss, correct, gradient in results[index]:
            assert (loss, correct) == alone[index][:2]
            np.testing.assert_array_equal(gradient, alone[index][2])


@every_stack
def test_evaluate_and_predict_agree_and_leave_out_dropout(stack):
    shapes, weights = prepare(stack)
    context, (pixels, labels, ids) = Network(shapes, 8, 11).context(), block(5)
    gradient_of(context, weights, pixels, labels, ids)
    loss, correct = context.evaluate(weights, pixels, labels)
    probabilities = context.predict(weights, pixels)
    assert probabilities.shape == (5, CLASSES) and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)
    assert loss == pytest.approx(-np.log(probabilities[np.arange(5), labels]).sum(), rel=1e-5)
    assert correct == (probabilities.argmax(axis=1) == labels).sum()

    # Without its dropout layers the stack gives the same in training.
    plain = infer([layer for layer in STACKS[stack] if not isinstance(layer, Dropout)], INPUT, CLASSES)
    assert gradient_of(Network(plain, 5, 0).context(), weights, pixels, labels, ids)[0] == pytest.approx(loss, rel=1e-5)


def test_dense_flattens_in_channel_row_column_order():
    shapes = infer([Dense(2)], (2, 3, 2), 2)
    weights = np.zeros(total(shapes), np.float32)
    pixels = np.zeros((1, 2, 3, 2), np.uint8)
    pixels[0, 1, 2, 0] = 255
    views(weights, tensors(shapes))["dense1/weight"][0, 1 * 6 + 2 * 2 + 0] = 4
    probability = Network(shapes, 1, 0).context().predict(weights, pixels)[0, 0]
    assert probability == pytest.approx(1 / (1 + np.exp(-4)), rel=1e-5)


def test_blocks_of_any_kind_of_array_are_read():
    shapes, weights = prepare("conv relu pool")
    context, (pixels, labels, ids) = Network(shapes, 4, 0).context(), block(8)
    wanted = gradient_of(context, weights, pixels[::2].copy(), labels[::2].copy(), ids[::2].copy())
    pixels.flags.writeable = False
    given = gradient_of(context, weights, pixels[::2], labels[::2].astype(np.uint8), ids[::2].astype(np.int32))
    np.testing.assert_array_equal(given[2], wanted[2])


def test_float32_numbers_are_taken_as_they_are():
    shapes, weights = prepare("conv relu pool")
    context, (pixels, labels, ids) = Network(shapes, 5, 0).context(), block(4)
    levels = (np.arange(256) / 255).astype(np.float32)[pixels]
    bytes_result = gradient_of(context, weights, pixels, labels, ids)
    # Something else in between: the fifth image of the block must be cleared.
    context.evaluate(weights, *block(5, seed=1)[:2])
    result = gradient_of(context, weights, levels, labels, ids)
    assert result[:2] == bytes_result[:2]
    np.testing.assert_array_equal(result[2], bytes_result[2])


def test_a_diverged_network_shows():
    shapes, weights = prepare("conv relu pool")
    weights[0] = np.nan
    assert np.isnan(gradient_of(Network(shapes, 4, 0).context(), weights, *block(4))[0])


def test_training_learns_where_the_light_is():
    shapes = infer([Conv(4, 3), RELU, MaxPool(2), Dense(16), RELU, Dropout(0.2), Dense(4)], (1, 8, 8), 4)
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 256)
    pixels = random.integers(0, 120, (256, 1, 8, 8), dtype=np.uint8)
    for image, label in enumerate(labels):
        row, column = 4 * (label // 2), 4 * (label % 2)
        pixels[image, 0, row : row + 4, column : column + 4] += 80
    weights, context = initial(shapes, 0), Network(shapes, 32, 5).context()
    before, _ = context.evaluate(weights, pixels[:32], labels[:32])
    for epoch in range(10):
        for start in range(0, 256, 32):
            part, gradient = np.arange(start, start + 32), np.zeros_like(weights)
            context.train(weights, gradient, pixels[part], labels[part], part, epoch)
            weights -= 0.1 / 32 * gradient
    after, correct = context.evaluate(weights, pixels[:32], labels[:32])
    assert after < before / 4 and correct >= 31


def test_working_set_is_what_a_context_takes():
    shapes, _ = prepare("dropout")
    for dtype in (np.float32, np.float64):
        network = Network(shapes, 7, 0, dtype)
        arrays = network.context().arrays.values()
        assert all(array.ctypes.data % 64 == 0 for array in arrays)
        assert 0 <= network.bytes - sum(array.nbytes for array in arrays) < 64 * len(arrays)
    assert Network(shapes, 7, 0).bytes == working_set(shapes, 7) < working_set(shapes, 8)


WARMED = """
import numpy as np
from adam_mpi.model import layers, network, parameters
from adam_mpi.model.kernels import activations_and_loss, conv_and_dense, pool_and_norm

stack = layers.parse([
    {"kind": "conv", "channels": 2, "kernel": 3}, "relu", {"kind": "dropout", "rate": 0},
    {"kind": "max_pool", "size": 2}, {"kind": "lrn"}, {"kind": "conv", "channels": 2, "kernel": 2}, "tanh",
    {"kind": "avg_pool", "size": 2}, {"kind": "dense", "units": 5}, "sigmoid",
    {"kind": "dense", "units": 3},
])
shapes = layers.infer(stack, (2, 9, 8), 3)
network.warm(shapes)
modules = activations_and_loss, conv_and_dense, pool_and_norm
kernels = [kernel for module in modules for kernel in vars(module).values() if hasattr(kernel, "signatures")]
known = [len(kernel.signatures) for kernel in kernels]
context, weights = network.Network(shapes, 4, 0).context(), parameters.initial(shapes, 0)
block, labels = np.zeros((3, 2, 9, 8), np.uint8), np.zeros(3, np.int32)
context.train(weights, np.zeros_like(weights), block, labels, labels, 1)
context.evaluate(weights, block, labels)
context.predict(weights, block)
assert sum(known) > 0 and [len(kernel.signatures) for kernel in kernels] == known
"""


def test_warm_leaves_nothing_to_compile():
    done = subprocess.run([sys.executable, "-c", WARMED], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
