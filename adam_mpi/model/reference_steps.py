"""The reference kernels of each layer, bound once to its buffers, so that a training step only runs a list of calls."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.exchange import Exchange
from adam_mpi.model.kernels import activations_and_loss, conv_and_dense, pool_and_norm
from adam_mpi.model.layers import (
    Activation,
    AvgPool,
    Conv,
    Dense,
    Dropout,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    missing_rule,
)

Views = dict[str, np.ndarray]
Forward = Callable[[Views], None]
Backward = Callable[[Views, Views], None]
FUNCTIONS = {
    "relu": (activations_and_loss.relu, activations_and_loss.relu_backward),
    "tanh": (activations_and_loss.tanh, activations_and_loss.tanh_backward),
    "sigmoid": (activations_and_loss.sigmoid, activations_and_loss.sigmoid_backward),
}


@dataclass(frozen=True)
class Place:
    """The arrays that one layer works on, each (channels, rows, columns, images)."""

    inputs: np.ndarray
    outputs: np.ndarray
    input_errors: np.ndarray
    errors: np.ndarray


@dataclass(frozen=True)
class Steps:
    """The calls of one layer: forward in training and in inference, and back to its weights and to its inputs."""

    forward: Forward
    inference: Forward
    backward_weights: Backward | None
    backward_data: Backward


def bind(
    shape: LayerShape, index: int, place: Place, arrays: dict[str, np.ndarray], keys: np.ndarray, rows: int
) -> Steps:
    """Return the calls of a layer that work on the arrays in `place`.

    `index` is the layer's index in the whole model, `arrays` holds the scratch buffers, `keys` are the random keys of
    the images, `rows` is the number of output rows that a convolution computes at a time. Raises NotImplementedError
    for a layer without a reference kernel.
    """
    layer = shape.layer
    if isinstance(layer, Conv):
        return _conv(shape, layer, place, arrays, rows)
    if isinstance(layer, Dense):
        return _dense(shape.name, place, arrays["sums"])
    if isinstance(layer, LocalResponseNorm):
        return _normalize(layer, place, arrays[f"{shape.name}/scales"])
    if isinstance(layer, AvgPool):
        return _average(layer, place)
    if isinstance(layer, MaxPool):
        return _pool(layer, place, arrays[f"{shape.name}/winners"])
    if isinstance(layer, Dropout):
        return _dropout(shape, layer, index, place, keys)
    if isinstance(layer, Exchange):
        return Steps(_leave, _leave, None, _leave_errors)
    if isinstance(layer, Activation) and layer.function in FUNCTIONS:
        return _activation(layer, place)
    raise missing_rule(layer, "reference kernel (bind in model/reference_steps.py)")


def _conv(shape: LayerShape, layer: Conv, place: Place, arrays: dict[str, np.ndarray], rows: int) -> Steps:
    weight = f"{shape.name}/weight"
    bias = f"{shape.name}/bias"
    window = (layer.stride, layer.pad, shape.margins[0], rows)
    scratch = (arrays["columns"], arrays["products"])
    sums = arrays["sums"]

    def forward(weights: Views) -> None:
        conv_and_dense.conv_forward(weights[weight], weights[bias], place.inputs, *window, *scratch, place.outputs)

    def backward_weights(weights: Views, gradients: Views) -> None:
        gradient = (gradients[weight], gradients[bias])
        conv_and_dense.conv_backward_weights(place.errors, place.inputs, *window, *scratch, sums, *gradient)

    def backward_data(weights: Views, gradients: Views) -> None:
        conv_and_dense.conv_backward_data(weights[weight], place.errors, *window, *scratch, place.input_errors)

    return Steps(forward, forward, backward_weights, backward_data)


def _dense(name: str, place: Place, sums: np.ndarray) -> Steps:
    weight = f"{name}/weight"
    bias = f"{name}/bias"
    inputs = _matrix(place.inputs)
    outputs = _matrix(place.outputs)
    input_errors = _matrix(place.input_errors)
    errors = _matrix(place.errors)

    def forward(weights: Views) -> None:
        conv_and_dense.dense_forward(weights[weight], weights[bias], inputs, outputs)

    def backward_weights(weights: Views, gradients: Views) -> None:
        conv_and_dense.dense_backward_weights(errors, inputs, sums, gradients[weight], gradients[bias])

    def backward_data(weights: Views, gradients: Views) -> None:
        conv_and_dense.dense_backward_data(weights[weight], errors, input_errors)

    return Steps(forward, forward, backward_weights, backward_data)


def _pool(layer: MaxPool, place: Place, winners: np.ndarray) -> Steps:
    def forward(weights: Views) -> None:
        pool_and_norm.max_pool(place.inputs, layer.size, layer.stride, place.outputs, winners)

    def backward(weights: Views, gradients: Views) -> None:
        pool_and_norm.max_pool_backward(place.errors, winners, layer.size, layer.stride, place.input_errors)

    return Steps(forward, forward, None, backward)


def _average(layer: AvgPool, place: Place) -> Steps:
    def forward(weights: Views) -> None:
        pool_and_norm.avg_pool(place.inputs, layer.size, layer.stride, place.outputs)

    def backward(weights: Views, gradients: Views) -> None:
        pool_and_norm.avg_pool_backward(place.errors, layer.size, layer.stride, place.input_errors)

    return Steps(forward, forward, None, backward)


def _normalize(layer: LocalResponseNorm, place: Place, scales: np.ndarray) -> Steps:
    inputs, outputs, input_errors, errors = (
        values.reshape(len(values), -1) for values in (place.inputs, place.outputs, place.input_errors, place.errors)
    )
    flat_scales = scales.reshape(inputs.shape)
    offset = float(layer.offset)
    window = (layer.size, float(layer.scale), float(layer.power))

    def forward(weights: Views) -> None:
        pool_and_norm.normalize(inputs, offset, *window, outputs, flat_scales)

    def backward(weights: Views, gradients: Views) -> None:
        pool_and_norm.normalize_backward(errors, inputs, outputs, flat_scales, *window, input_errors)

    return Steps(forward, forward, None, backward)


def _dropout(shape: LayerShape, layer: Dropout, index: int, place: Place, keys: np.ndarray) -> Steps:
    inputs = _matrix(place.inputs)
    outputs = _matrix(place.outputs)
    errors = _matrix(place.errors)
    mask = (keys, index, float(layer.rate), outputs.dtype.type(1 / (1 - layer.rate)), shape.within)

    def forward(weights: Views) -> None:
        activations_and_loss.drop(inputs, *mask, outputs)

    def inference(weights: Views) -> None:
        np.copyto(outputs, inputs)

    def backward(weights: Views, gradients: Views) -> None:
        activations_and_loss.drop(errors, *mask, errors)

    return Steps(forward, inference, None, backward)


def _activation(layer: Activation, place: Place) -> Steps:
    function, derivative = FUNCTIONS[layer.function]
    inputs = place.inputs.reshape(-1)
    outputs = place.outputs.reshape(-1)
    errors = place.errors.reshape(-1)

    def forward(weights: Views) -> None:
        function(inputs, outputs)

    def backward(weights: Views, gradients: Views) -> None:
        derivative(outputs, errors)

    return Steps(forward, forward, None, backward)


def _leave(weights: Views) -> None:
    """Do nothing: `StripContext` runs exchanges between its segments."""


def _leave_errors(weights: Views, gradients: Views) -> None:
    """Do nothing on the way back either."""


def _matrix(values: np.ndarray) -> np.ndarray:
    """Return (channels, rows, columns, images) as (units, images)."""
    return values.reshape(-1, values.shape[-1])
