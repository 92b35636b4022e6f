"""Every kernel, in float32, against slow float64 NumPy over odd shapes."""

import numpy as np
import pytest
import reference

from adam_mpi.model.input_format import InputFormat
from adam_mpi.model.kernels import activations_and_loss, conv_and_dense, pool_and_norm

# channels, rows, columns, images, maps, kernel, stride, pad, output rows computed at a time
CONVS = [
    (1, 1, 1, 1, 1, 1, 1, 0, 1),
    (1, 1, 1, 3, 2, 3, 1, 2, 2),
    (1, 1, 1, 2, 1, 5, 3, 4, 9),
    (1, 5, 5, 1, 1, 5, 1, 0, 1),
    (1, 5, 7, 67, 3, 2, 1, 0, 1),
    (1, 28, 28, 4, 10, 5, 1, 0, 7),
    (2, 4, 9, 8, 3, 1, 3, 0, 1),
    (2, 9, 4, 5, 3, 2, 5, 1, 2),
    (3, 6, 6, 16, 4, 3, 1, 1, 6),
    (3, 6, 5, 17, 4, 3, 2, 1, 2),
    (3, 11, 13, 2, 5, 4, 3, 3, 3),
    (4, 7, 3, 33, 1, 3, 1, 2, 4),
    (5, 2, 2, 64, 6, 2, 2, 1, 1),
    (7, 3, 8, 9, 2, 3, 4, 2, 100),
    (8, 1, 10, 6, 8, 1, 1, 0, 1),
    (10, 12, 12, 3, 20, 5, 1, 0, 3),
]
# channels, rows, columns, images, size, stride
POOLS = [
    (1, 1, 1, 1, 1, 1),
    (1, 2, 2, 67, 2, 2),
    (2, 5, 5, 3, 2, 2),
    (1, 7, 4, 8, 3, 2),
    (3, 6, 6, 5, 3, 1),
    (2, 9, 8, 16, 2, 5),
    (4, 13, 13, 2, 3, 2),
    (1, 4, 9, 17, 4, 3),
    (5, 3, 3, 33, 1, 2),
    (10, 24, 24, 4, 2, 2),
]
# features, units, images, rows of the scratch
DENSES = [
    (1, 1, 1, 1),
    (3, 1, 5, 1),
    (1, 7, 67, 2),
    (17, 10, 1, 3),
    (320, 40, 64, 40),
    (33, 65, 9, 13),
    (5, 4, 2, 100),
]


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def close(given, wanted):
    """Agreement to float32 rounding of sums, relative to the largest value."""
    np.testing.assert_allclose(given, wanted, rtol=0, atol=5e-6 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_conv(case):
    channels, height, width, images, maps, kernel, stride, pad, rows = case
    weight, bias, inputs = random(maps, channels, kernel, kernel), random(maps), random(channels, height, width, images)
    wanted = reference.conv_forward(weight, bias, inputs, stride, pad)
    span = min(rows, wanted.shape[1]) * wanted.shape[2] * images
    columns, products = np.full(weight[0].size * span, np.nan, np.float32), np.full(maps * span, np.nan, np.float32)
    outputs = np.full(wanted.shape, np.nan, np.float32)
    conv_and_dense.conv_forward(weight, bias, inputs, stride, pad, pad, rows, columns, products, outputs)
    close(outputs, wanted)

    errors = random(*wanted.shape) + 0.5
    weight_wanted, bias_wanted, input_wanted = reference.conv_backward(weight, inputs, errors, stride, pad)
    sums, weight_gradient, bias_gradient = np.full(weight.size, np.nan, np.float32), weight.copy(), bias.copy()
    scratch = columns, products, sums
    conv_and_dense.conv_backward_weights(
        errors, inputs, stride, pad, pad, rows, *scratch, weight_gradient, bias_gradient
    )
    close(weight_gradient, weight + weight_wanted)
    close(bias_gradient, bias + bias_wanted)

    input_errors = np.full(inputs.shape, np.nan, np.float32)
    conv_and_dense.conv_backward_data(weight, errors, stride, pad, pad, rows, columns, products, input_errors)
    close(input_errors, input_wanted)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pool(case, ties):
    *shape, size, stride = case
    inputs = random(*shape).round() if ties else random(*shape)
    wanted, wanted_winners = reference.pool_forward(inputs, size, stride)
    outputs, winners = np.zeros(wanted.shape, np.float32), np.zeros(wanted.shape, np.int32)
    pool_and_norm.max_pool(inputs, size, stride, outputs, winners)
    np.testing.assert_array_equal(outputs, wanted)
    np.testing.assert_array_equal(winners, wanted_winners)

    errors, input_errors = random(*wanted.shape), np.full(shape, np.nan, np.float32)
    pool_and_norm.max_pool_backward(errors, winners, size, stride, input_errors)
    close(input_errors, reference.pool_backward(errors, winners, shape))


@pytest.mark.parametrize("case", DENSES, ids=str)
def test_dense(case):
    features, units, images, rows = case
    weight, bias = random(units, features), random(units)
    inputs, errors = random(features, images), random(units, images)
    outputs, input_errors = np.full_like(errors, np.nan), np.full_like(inputs, np.nan)
    conv_and_dense.dense_forward(weight, bias, inputs, outputs)
    close(outputs, weight.astype(np.float64) @ inputs + bias[:, None])

    weight_gradient, bias_gradient = weight.copy(), bias.copy()
    conv_and_dense.dense_backward_weights(
        errors, inputs, np.full(rows * features, np.nan, np.float32), weight_gradient, bias_gradient
    )
    close(weight_gradient, weight + errors.astype(np.float64) @ inputs.T)
    close(bias_gradient, bias + errors.sum(axis=1, dtype=np.float64))

    conv_and_dense.dense_backward_data(weight, errors, input_errors)
    close(input_errors, weight.T.astype(np.float64) @ errors)


FUNCTIONS = {
    "relu": (lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1, 0)),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2),
}


@pytest.mark.parametrize("size", [1, 7, 67, 1000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation(name, size):
    function, slope = FUNCTIONS[name]
    inputs, errors = random(size) * 3, random(size) + 1
    values, back = inputs.copy(), errors.copy()
    getattr(activations_and_loss, name)(values, values)
    close(values, function(inputs.astype(np.float64)))
    getattr(activations_and_loss, f"{name}_backward")(values, back)
    close(back, errors * slope(inputs.astype(np.float64)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_at_the_edges(name):
    values = np.array([-np.inf, -100, 0, 100, np.inf, np.nan], np.float32)
    getattr(activations_and_loss, name)(values, values)
    low, middle, high = {"relu": (0, 0, np.inf), "tanh": (-1, 0, 1), "sigmoid": (0, 0.5, 1)}[name]
    assert values[0] == low and values[2] == middle and values[4] == high
    assert np.isnan(values[5]), "a diverged network must show"


def test_pixels_are_scaled_and_the_tail_is_zero():
    block = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 4), dtype=np.uint8)
    outputs = np.full((2, 3, 4, 5), np.nan, np.float32)
    activations_and_loss.load_pixels(block, 3, InputFormat().levels(), outputs)
    close(outputs[..., :3], block[:3].transpose(1, 2, 3, 0) / 255)
    assert not outputs[..., 3:].any()


@pytest.mark.parametrize(("classes", "images", "count"), [(1, 1, 1), (2, 3, 3), (10, 67, 60), (1000, 4, 1)])
def test_softmax_cross_entropy(classes, images, count):
    logits = random(classes, images) * 20
    labels = np.random.default_rng(1).integers(0, classes, images)
    labels[0] = logits[:, 0].argmax()
    errors, normalizers = np.zeros_like(logits), np.zeros(images, np.float32)
    activations_and_loss.softmax(logits, errors, normalizers)
    probabilities = reference.softmax(logits.astype(np.float64))
    close(errors, probabilities)

    total, correct = activations_and_loss.cross_entropy(logits, normalizers, labels, count, errors)
    chosen = probabilities[labels[:count], np.arange(count)]
    assert total == pytest.approx(-np.log(chosen).sum(), rel=1e-5, abs=1e-6)
    assert correct == (probabilities.argmax(axis=0) == labels)[:count].sum() >= 1
    close(errors[:, :count], (probabilities - np.eye(classes)[labels].T)[:, :count])
    assert not errors[:, count:].any()


def test_cross_entropy_of_a_hopeless_guess_is_finite():
    logits = np.array([[0], [1000]], np.float32)
    errors, normalizers = np.zeros_like(logits), np.zeros(1, np.float32)
    activations_and_loss.softmax(logits, errors, normalizers)
    assert activations_and_loss.cross_entropy(logits, normalizers, np.array([0]), 1, errors) == (1000, 0)


def mask(ids, seed=1, epoch=2, layer=3, rate=0.3, units=500):
    """Which units of which images are kept."""
    keys, values = np.zeros(len(ids), np.uint64), np.ones((units, len(ids)), np.float32)
    activations_and_loss.image_keys(seed, epoch, np.asarray(ids), keys)
    activations_and_loss.drop(
        values, keys, layer, rate, np.float32(1 / (1 - rate)), (0, len(values), len(values)), values
    )
    close(values[values != 0], 1 / (1 - rate))
    return values != 0


def test_dropout_keeps_the_right_share_everywhere():
    kept = mask(np.arange(400))
    assert kept.mean() == pytest.approx(0.7, abs=0.005)
    assert np.abs(kept.mean(axis=0) - 0.7).max() < 0.1 and np.abs(kept.mean(axis=1) - 0.7).max() < 0.12
    assert mask(np.arange(5), rate=0.0).all()


def test_dropout_does_not_depend_on_the_block():
    whole = mask(np.arange(100))
    chosen = np.array([70, 3, 99])
    np.testing.assert_array_equal(mask(chosen), whole[:, chosen])
    np.testing.assert_array_equal(mask(chosen, units=20), whole[:20, chosen])


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 3}, {"layer": 4}, {"ids": np.arange(64, 128)}], ids=str)
def test_dropout_changes_with_every_key(change):
    """Unrelated masks at rate 0.3 agree in 0.7 * 0.7 + 0.3 * 0.3 = 0.58 of the units."""
    first, second = mask(np.arange(64)), mask(**{"ids": np.arange(64), **change})
    assert (first == second).mean() == pytest.approx(0.58, abs=0.01)
    shifted = (first[1:] == second[:-1]).mean(), (first[:, 1:] == second[:, :-1]).mean()
    assert shifted == pytest.approx((0.58, 0.58), abs=0.015)
