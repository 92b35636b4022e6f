"""Load pixels into the first layer's input, and compute activation functions over flat arrays and their derivatives.

Derivatives are computed from the outputs; inputs and outputs may be the same array. NaN stays NaN, so that a diverged
run shows.
"""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def load_pixels(pixels: np.ndarray, count: int, levels: np.ndarray, outputs: np.ndarray) -> None:
    """Look up the pixels of the first `count` images in `levels`, image-innermost; the other images become zero."""
    channels, height, width, images = outputs.shape
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                for image in range(count):
                    outputs[channel, row, column, image] = levels[pixels[image, channel, row, column]]
                for image in range(count, images):
                    outputs[channel, row, column, image] = 0


@njit(nogil=True, cache=True)
def relu(inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute max(inputs, 0)."""
    for index in range(inputs.size):
        outputs[index] = max(inputs[index], 0)


@njit(nogil=True, cache=True)
def relu_backward(outputs: np.ndarray, errors: np.ndarray) -> None:
    """Zero the errors of outputs that are not positive."""
    for index in range(errors.size):
        if outputs[index] <= 0:
            errors[index] = 0


@njit(nogil=True, cache=True)
def tanh(inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute the hyperbolic tangent of the inputs."""
    for index in range(inputs.size):
        outputs[index] = np.tanh(inputs[index])


@njit(nogil=True, cache=True)
def tanh_backward(outputs: np.ndarray, errors: np.ndarray) -> None:
    """Multiply the errors by 1 - outputs ** 2."""
    for index in range(errors.size):
        errors[index] *= 1 - outputs[index] * outputs[index]


@njit(nogil=True, cache=True)
def sigmoid(inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute 1 / (1 + exp(-inputs))."""
    for index in range(inputs.size):
        outputs[index] = 1 / (1 + np.exp(-inputs[index]))


@njit(nogil=True, cache=True)
def sigmoid_backward(outputs: np.ndarray, errors: np.ndarray) -> None:
    """Multiply the errors by outputs * (1 - outputs)."""
    for index in range(errors.size):
        errors[index] *= outputs[index] * (1 - outputs[index])
