"""Max pooling, which keeps the position in the input plane of each window's largest value; average pooling."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def forward(inputs: np.ndarray, size: int, stride: int, outputs: np.ndarray, winners: np.ndarray) -> None:
    """Compute the largest input of each window as `outputs`, and its position as `winners`: the first of equal ones."""
    channels, height, width, images = outputs.shape
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                y = row * stride
                x = column * stride
                for image in range(images):
                    outputs[channel, row, column, image] = inputs[channel, y, x, image]
                    winners[channel, row, column, image] = y * inputs.shape[2] + x
                for step in range(1, size * size):
                    y = row * stride + step // size
                    x = column * stride + step % size
                    place = y * inputs.shape[2] + x
                    for image in range(images):
                        value = inputs[channel, y, x, image]
                        if value > outputs[channel, row, column, image]:
                            outputs[channel, row, column, image] = value
                            winners[channel, row, column, image] = place


@njit(nogil=True, cache=True)
def backward(errors: np.ndarray, winners: np.ndarray, size: int, stride: int, input_errors: np.ndarray) -> None:
    """Add each error to the winner of its window."""
    channels, height, width, images = errors.shape
    input_errors[:] = 0
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                for step in range(size * size):
                    y = row * stride + step // size
                    x = column * stride + step % size
                    place = y * input_errors.shape[2] + x
                    for image in range(images):
                        if winners[channel, row, column, image] == place:
                            input_errors[channel, y, x, image] += errors[channel, row, column, image]


@njit(nogil=True, cache=True)
def average(inputs: np.ndarray, size: int, stride: int, outputs: np.ndarray) -> None:
    """Compute the mean of each window."""
    channels, height, width, images = outputs.shape
    outputs[:] = 0
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                for step in range(size * size):
                    y = row * stride + step // size
                    x = column * stride + step % size
                    for image in range(images):
                        outputs[channel, row, column, image] += inputs[channel, y, x, image] / (size * size)


@njit(nogil=True, cache=True)
def average_backward(errors: np.ndarray, size: int, stride: int, input_errors: np.ndarray) -> None:
    """Add to each input of a window an equal share of its error."""
    channels, height, width, images = errors.shape
    input_errors[:] = 0
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                for step in range(size * size):
                    y = row * stride + step // size
                    x = column * stride + step % size
                    for image in range(images):
                        input_errors[channel, y, x, image] += errors[channel, row, column, image] / (size * size)
