"""Fully-connected layers: inputs are (features, images), outputs (units, images)."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def forward(weight: np.ndarray, bias: np.ndarray, inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute outputs = weight @ inputs + bias."""
    np.dot(weight, inputs, outputs)
    for unit in range(outputs.shape[0]):
        for image in range(outputs.shape[1]):
            outputs[unit, image] += bias[unit]


@njit(nogil=True, cache=True)
def backward_weights(
    errors: np.ndarray,
    inputs: np.ndarray,
    sums: np.ndarray,
    weight_gradient: np.ndarray,
    bias_gradient: np.ndarray,
) -> None:
    """Add the gradient of weight and bias, summed over the images; `sums` is flat scratch of at least one row."""
    units, features = weight_gradient.shape
    rows = sums.size // features
    for first in range(0, units, rows):
        last = min(first + rows, units)
        partial = sums[: (last - first) * features].reshape(last - first, features)
        np.dot(errors[first:last], inputs.T, partial)
        for unit in range(first, last):
            for feature in range(features):
                weight_gradient[unit, feature] += partial[unit - first, feature]
    for unit in range(units):
        for image in range(errors.shape[1]):
            bias_gradient[unit] += errors[unit, image]


@njit(nogil=True, cache=True)
def backward_data(weight: np.ndarray, errors: np.ndarray, input_errors: np.ndarray) -> None:
    """Compute the errors of the inputs."""
    np.dot(weight.T, errors, input_errors)
