"""The outputs of single layers agree with the whole network, and each with the output of the layer before."""

import numpy as np
import pytest
from test_network import STACKS, block, prepare

from adam_mpi.model.network import Network
from adam_mpi.worker.diagnostics import activations


@pytest.mark.parametrize("stack", STACKS)
def test_outputs_agree_with_the_whole_network(stack):
    shapes, weights = prepare(stack)
    pixels, _, _ = block(3)
    found = activations(shapes, weights, pixels)
    assert {name: output.shape for name, output in found.items()} == {s.name: (3, *s.output) for s in shapes}
    powers = np.exp(found[shapes[-1].name].reshape(3, -1))
    expected = Network(shapes, 3, 11).context().predict(weights, pixels)
    np.testing.assert_allclose(powers / powers.sum(axis=1, keepdims=True), expected, rtol=1e-5)


def test_a_layer_in_place_leaves_the_output_before_it_unchanged():
    shapes, weights = prepare("conv relu pool")
    found = list(activations(shapes, weights, block(3)[0]).values())
    assert found[0].min() < 0
    np.testing.assert_array_equal(found[1], np.maximum(found[0], 0))
