"""What each layer does with its buffers: kernel calls bound once, so that a training step only runs a list."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.exchange import Exchange
from adam_mpi.model.kernels import conv, dense, dropout, local_response_norm, pointwise, pool
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LayerShape, LocalResponseNorm, MaxPool

Views = dict[str, np.ndarray]
Forward = Callable[[Views], None]
Backward = Callable[[Views, Views], None]

FUNCTIONS = {
    "relu": (pointwise.relu, pointwise.relu_backward),
    "tanh": (pointwise.tanh, pointwise.tanh_backward),
    "sigmoid": (pointwise.sigmoid, pointwise.sigmoid_backward),
}


@dataclass(frozen=True)
class Place:
    """The arrays one layer works on; (channels, rows, columns, images) all of them."""

    inputs: np.ndarray
    outputs: np.ndarray
    input_errors: np.ndarray
    errors: np.ndarray


@dataclass(frozen=True)
class Steps:
    """One layer's work: forward in training and without; back to its weights' gradient and its inputs' errors."""

    forward: Forward
    inference: Forward
    backward_weights: Backward | None
    backward_data: Backward


def bind(
    shape: LayerShape, index: int, place: Place, arrays: dict[str, np.ndarray], keys: np.ndarray, rows: int
) -> Steps:
    """The steps of the layer at `index`; `arrays` has the scratch, `keys` are those of the images, `rows` is a
    convolution's group of output rows."""
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
    return _activation(layer, place)


def _conv(shape: LayerShape, layer: Conv, place: Place, arrays: dict[str, np.ndarray], rows: int) -> Steps:
    weight, bias = f"{shape.name}/weight", f"{shape.name}/bias"
    inputs, outputs, input_errors, errors = place.inputs, place.outputs, place.input_errors, place.errors
    columns, products, sums = arrays["columns"], arrays["products"], arrays["sums"]
    window = layer.stride, layer.pad, shape.margins[0], rows

    def forward(weights: Views) -> None:
        conv.forward(weights[weight], weights[bias], inputs, *window, columns, products, outputs)

    def backward_weights(weights: Views, gradients: Views) -> None:
        scratch = columns, products, sums
        conv.backward_weights(errors, inputs, *window, *scratch, gradients[weight], gradients[bias])

    def backward_data(weights: Views, gradients: Views) -> None:
        conv.backward_data(weights[weight], errors, *window, columns, products, input_errors)

    return Steps(forward, forward, backward_weights, backward_data)


def _dense(name: str, place: Place, sums: np.ndarray) -> Steps:
    weight, bias = f"{name}/weight", f"{name}/bias"
    inputs, outputs = _matrix(place.inputs), _matrix(place.outputs)
    input_errors, errors = _matrix(place.input_errors), _matrix(place.errors)

    def forward(weights: Views) -> None:
        dense.forward(weights[weight], weights[bias], inputs, outputs)

    def backward_weights(weights: Views, gradients: Views) -> None:
        dense.backward_weights(errors, inputs, sums, gradients[weight], gradients[bias])

    def backward_data(weights: Views, gradients: Views) -> None:
        dense.backward_data(weights[weight], errors, input_errors)

    return Steps(forward, forward, backward_weights, backward_data)


def _pool(layer: MaxPool, place: Place, winners: np.ndarray) -> Steps:
    def forward(weights: Views) -> None:
        pool.forward(place.inputs, layer.size, layer.stride, place.outputs, winners)

    def backward(weights: Views, gradients: Views) -> None:
        pool.backward(place.errors, winners, layer.size, layer.stride, place.input_errors)

    return Steps(forward, forward, None, backward)


def _average(layer: AvgPool, place: Place) -> Steps:
    def forward(weights: Views) -> None:
        pool.average(place.inputs, layer.size, layer.stride, place.outputs)

    def backward(weights: Views, gradients: Views) -> None:
        pool.average_backward(place.errors, layer.size, layer.stride, place.input_errors)

    return Steps(forward, forward, None, backward)


def _normalize(layer: LocalResponseNorm, place: Place, scales: np.ndarray) -> Steps:
    inputs, outputs, input_errors, errors = (
        values.reshape(len(values), -1) for values in (place.inputs, place.outputs, place.input_errors, place.errors)
    )
    flat_scales = scales.reshape(inputs.shape)
    size, offset, scale, power = layer.size, float(layer.offset), float(layer.scale), float(layer.power)

    def forward(weights: Views) -> None:
        local_response_norm.forward(inputs, size, offset, scale, power, outputs, flat_scales)

    def backward(weights: Views, gradients: Views) -> None:
        local_response_norm.backward(errors, inputs, outputs, flat_scales, size, scale, power, input_errors)

    return Steps(forward, forward, None, backward)


def _dropout(shape: LayerShape, layer: Dropout, index: int, place: Place, keys: np.ndarray) -> Steps:
    inputs, outputs, errors = _matrix(place.inputs), _matrix(place.outputs), _matrix(place.errors)
    rate, scale, within = float(layer.rate), outputs.dtype.type(1 / (1 - layer.rate)), shape.within

    def forward(weights: Views) -> None:
        dropout.drop(inputs, keys, index, rate, scale, within, outputs)

    def inference(weights: Views) -> None:
        np.copyto(outputs, inputs)

    def backward(weights: Views, gradients: Views) -> None:
        dropout.drop(errors, keys, index, rate, scale, within, errors)

    return Steps(forward, inference, None, backward)


def _activation(layer: Activation, place: Place) -> Steps:
    function, derivative = FUNCTIONS[layer.function]
    inputs, outputs, errors = place.inputs.reshape(-1), place.outputs.reshape(-1), place.errors.reshape(-1)

    def forward(weights: Views) -> None:
        function(inputs, outputs)

    def backward(weights: Views, gradients: Views) -> None:
        derivative(outputs, errors)

    return Steps(forward, forward, None, backward)


def _leave(weights: Views) -> None:
    """An exchange is no work of kernels: see `StripContext`."""


def _leave_errors(weights: Views, gradients: Views) -> None:
    """The same on the way back."""


def _matrix(values: np.ndarray) -> np.ndarray:
    """(channels, rows, columns, images) as (units, images)."""
    return values.reshape(-1, values.shape[-1])
