import math
from itertools import pairwise

import numpy as np
import pytest

from adam_mpi.model.layers import Activation, Conv, Dense, Dropout, MaxPool, infer
from adam_mpi.model.parameters import Tensor, initial, tensors, total, views

RELU = Activation("relu")
STACK = [Conv(8, 3), MaxPool(2), Dropout(0.1), RELU, Dense(300), Activation("tanh"), Dense(10)]
SHAPES = infer(STACK, (2, 12, 12), 10)


def test_tensors_follow_each_other_without_gaps():
    found = tensors(SHAPES)
    names = "conv1/weight conv1/bias dense1/weight dense1/bias dense2/weight dense2/bias"
    assert " ".join(tensor.name for tensor in found) == names
    assert found[0] == Tensor("conv1/weight", "conv1", (8, 2, 3, 3), 0, 144)
    assert found[2] == Tensor("dense1/weight", "dense1", (300, 200), 152, 60000)
    assert all(after.offset == before.offset + before.size for before, after in pairwise(found))
    assert found[-1].offset + found[-1].size == total(SHAPES) == sum(shape.parameters for shape in SHAPES)


def test_views_share_the_flat_memory():
    flat = np.arange(total(SHAPES), dtype=np.float32)
    named = views(flat, tensors(SHAPES))
    assert named["dense1/weight"].shape == (300, 200) and named["dense1/weight"][1, 0] == 152 + 200
    named["dense2/bias"][-1] = -1
    assert flat[-1] == -1


def test_initial_is_he_before_relu_and_glorot_elsewhere():
    named = views(initial(SHAPES, 7), tensors(SHAPES))
    assert named["conv1/weight"].std() == pytest.approx(math.sqrt(2 / 18), rel=0.15)
    assert named["dense1/weight"].std() == pytest.approx(math.sqrt(2 / 500), rel=0.02)
    assert named["dense2/weight"].std() == pytest.approx(math.sqrt(2 / 310), rel=0.05)
    assert abs(named["dense1/weight"].mean()) < 1e-3
    assert not any(named[f"{layer}/bias"].any() for layer in ("conv1", "dense1", "dense2"))


def test_initial_is_four_times_glorot_before_sigmoid():
    shapes = infer([Dense(300), Activation("sigmoid"), Dense(10)], (2, 10, 10), 10)
    named = views(initial(shapes, 7), tensors(shapes))
    assert named["dense1/weight"].std() == pytest.approx(4 * math.sqrt(2 / 500), rel=0.02)
    assert named["dense2/weight"].std() == pytest.approx(math.sqrt(2 / 310), rel=0.05)


def test_initial_depends_on_the_seed_and_the_layer_only():
    first = initial(SHAPES, 7)
    assert first.dtype == np.float32 and first.shape == (total(SHAPES),)
    np.testing.assert_array_equal(first, initial(SHAPES, 7))
    assert (first != initial(SHAPES, 8)).any() and (first != initial(SHAPES, -1)).any()
    # Another first layer of the same output leaves the second one's values alone.
    other = infer([Conv(8, 3), *STACK[1:4], Dense(300), *STACK[5:]], (1, 12, 12), 10)
    dense = views(initial(other, 7), tensors(other))["dense1/weight"]
    np.testing.assert_array_equal(dense, views(first, tensors(SHAPES))["dense1/weight"])


def test_layers_have_different_values():
    shapes = infer([Dense(10), Dense(10), Dense(10)], (10, 1, 1), 10)
    named = views(initial(shapes, 0), tensors(shapes))
    assert (named["dense1/weight"] != named["dense2/weight"]).all()
