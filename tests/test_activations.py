"""Layer by layer: the same as the network as a whole, and each output as its layer makes it of the one before."""

import numpy as np
import pytest
from test_network import STACKS, block, prepare

from adam_mpi.model.network import Network
from adam_mpi.worker.diagnostics import activations


@pytest.mark.parametrize("stack", STACKS)
def test_agree_with_the_whole_network(stack):
    shapes, weights = prepare(stack)
    pixels, _, _ = block(3)
    found = activations(shapes, weights, pixels)
    assert {name: output.shape for name, output in found.items()} == {s.name: (3, *s.output) for s in shapes}
    powers = np.exp(found[shapes[-1].name].reshape(3, -1))
    expected = Network(shapes, 3, 11).context().predict(weights, pixels)
    np.testing.assert_allclose(powers / powers.sum(axis=1, keepdims=True), expected, rtol=1e-5)


def test_a_layer_in_place_leaves_the_one_before_as_it_was():
    shapes, weights = prepare("conv relu pool")
    found = list(activations(shapes, weights, block(3)[0]).values())
    assert found[0].min() < 0
    np.testing.assert_array_equal(found[1], np.maximum(found[0], 0))
