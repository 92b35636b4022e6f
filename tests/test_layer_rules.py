"""Every kind of layer has every rule: shape, buffers, reference kernel, initial weights, engine, partition, ONNX.

A kind that lacks one raises an error that names the layer and the rule: see "A layer" in docs/howto/extending.md.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.model import network, parameters, reference_buffers, reference_steps
from adam_mpi.model.engine import program
from adam_mpi.model.layers import (
    FUNCTIONS,
    KINDS,
    Activation,
    AvgPool,
    Conv,
    Dense,
    Dropout,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    infer,
)
from adam_mpi.model.network import Network
from adam_mpi.model.partition import partition

INPUT = (1, 8, 12)
CLASSES = 2
EXAMPLES = {
    "conv": Conv(3, 3, pad=1),
    "max_pool": MaxPool(2),
    "avg_pool": AvgPool(2),
    "lrn": LocalResponseNorm(3),
    "dense": Dense(6),
    "dropout": Dropout(0.5),
    **{function: Activation(function) for function in FUNCTIONS},
}
ENGINE_ERRORS = (UserError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Unknown:
    """A kind of layer without any rule."""


def stack(*layers):
    """The shapes of a model with `layers` between a convolution and the classes."""
    return infer([Conv(4, 3), *layers, Dense(CLASSES)], INPUT, CLASSES)


def with_layer(layer, after=1):
    """The shapes of a model with `layer`, which keeps the shape of its input, put in without asking for its shape."""
    shapes = stack(Dense(6))
    size = shapes[after - 1].output
    return (*shapes[:after], LayerShape("new1", layer, size, size), *shapes[after:])


def build(shapes):
    """The emitted program for 16 images in blocks of 8."""
    return program.build(shapes, 16, lanes=8, registers=16).text


def bind(shape):
    """The reference kernels of a layer on arrays of zeros."""
    inputs = np.zeros((*shape.input, 2), np.float32)
    outputs = np.zeros((*shape.output, 2), np.float32)
    place = reference_steps.Place(inputs, outputs, np.zeros_like(inputs), np.zeros_like(outputs))
    return reference_steps.bind(shape, 0, place, arrays={}, keys=np.zeros(2, np.uint64), rows=1)


def onnx_node(shape):
    """The ONNX node of a layer."""
    pytest.importorskip("onnx")
    from adam_mpi.inference.export import onnx_file

    return onnx_file._node(shape, "before")


def test_every_kind_has_an_example_here():
    assert EXAMPLES.keys() == {*KINDS, *FUNCTIONS}
    assert all(type(layer) is KINDS.get(kind, Activation) for kind, layer in EXAMPLES.items())


@pytest.mark.parametrize("kind", EXAMPLES)
class TestEveryKind:
    def test_has_a_shape_rule(self, kind):
        shape = stack(EXAMPLES[kind])[1]
        assert shape.name == f"{kind}{2 if kind == 'conv' else 1}" and all(size > 0 for size in shape.output)

    def test_has_a_reference_kernel_with_finite_results(self, kind):
        shapes = stack(EXAMPLES[kind])
        weights = parameters.initial(shapes, seed=1)
        gradient = np.zeros_like(weights)
        pixels = np.random.default_rng(1).integers(0, 256, (3, *INPUT), np.uint8)
        context = Network(shapes, images=3, seed=1).context()
        loss, _ = context.train(weights, gradient, pixels, np.array([0, 1, 0]), np.arange(3), epoch=1)
        assert np.isfinite(loss) and np.isfinite(gradient).all() and gradient.any()

    def test_is_compiled_ahead(self, kind):
        network.warm(stack(EXAMPLES[kind]))

    def test_has_an_emitted_kernel(self, kind):
        # A layer that the engine ignores would leave the program of the stack without it.
        assert build(stack(EXAMPLES[kind])) != build(stack())

    @pytest.mark.parametrize("scheme", ["strips", "hybrid"])
    def test_has_a_partition_rule(self, kind, scheme):
        shapes = stack(EXAMPLES[kind])
        for strip in partition(shapes, 2, scheme).strips:
            assert [shape.name for shape in strip.shapes] == [shape.name for shape in shapes]

    def test_has_an_onnx_rule(self, kind):
        shape = stack(EXAMPLES[kind])[1]
        node = onnx_node(shape)
        assert (node.op_type == "Identity") == (kind == "dropout") and node.output == [shape.name]


RULES = {
    "shape rule": lambda: stack(Unknown()),
    "buffer of its output": lambda: reference_buffers.output_names(with_layer(Unknown())),
    "buffer of its errors": lambda: reference_buffers.error_names(with_layer(Unknown())),
    "reference kernel": lambda: bind(with_layer(Unknown())[1]),
    "initialization rule": lambda: parameters.initial(with_layer(Unknown()), seed=1),
    "tiny form": lambda: network.warm(with_layer(Unknown())),
    "partition rule": lambda: partition(with_layer(Unknown()), 2),
    "partition rule for units": lambda: partition(with_layer(Unknown(), after=2), 2),
    "ONNX rule": lambda: onnx_node(with_layer(Unknown())[1]),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_unknown_kind_raises_an_error_that_names_layer_and_rule(rule, monkeypatch):
    monkeypatch.setitem(KINDS, "unknown", Unknown)
    with pytest.raises(NotImplementedError, match=f"Unknown has no {rule}.*docs/howto/extending.md"):
        RULES[rule]()


def test_a_layer_that_is_no_kind_raises_an_error_that_names_it():
    with pytest.raises(NotImplementedError, match="Unknown has no kind"):
        stack(Unknown())


@pytest.mark.parametrize("after", [1, 2])
def test_an_unknown_kind_raises_in_the_engine(after):
    with pytest.raises(ENGINE_ERRORS, match="Unknown"):
        build(with_layer(Unknown(), after))


def test_an_unknown_activation_raises_an_error_that_names_it():
    with pytest.raises(NotImplementedError, match="activation 'gelu' has no reference kernel"):
        bind(with_layer(Activation("gelu"))[1])


def test_an_unknown_activation_raises_in_the_export():
    pytest.importorskip("onnx")
    with pytest.raises(NotImplementedError, match="activation 'gelu' has no ONNX rule"):
        onnx_node(with_layer(Activation("gelu"))[1])


def test_an_unknown_activation_raises_in_the_engine():
    with pytest.raises(ENGINE_ERRORS, match="gelu"):
        build(with_layer(Activation("gelu")))
