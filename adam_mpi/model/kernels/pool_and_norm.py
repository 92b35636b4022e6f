"""Reference kernels of max-pooling, average-pooling and local response normalization."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def max_pool(inputs: np.ndarray, size: int, stride: int, outputs: np.ndarray, winners: np.ndarray) -> None:
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
def max_pool_backward(
    errors: np.ndarray, winners: np.ndarray, size: int, stride: int, input_errors: np.ndarray
) -> None:
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
def avg_pool(inputs: np.ndarray, size: int, stride: int, outputs: np.ndarray) -> None:
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
def avg_pool_backward(errors: np.ndarray, size: int, stride: int, input_errors: np.ndarray) -> None:
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


@njit(nogil=True, cache=True)
def normalize(
    inputs: np.ndarray, offset: float, size: int, scale: float, power: float, outputs: np.ndarray, scales: np.ndarray
) -> None:
    """Compute outputs = inputs / scales ** power; a window of `size` channels starts size // 2 before its own."""
    channels, places = inputs.shape
    for channel in range(channels):
        first = max(0, channel - size // 2)
        last = min(channels, channel - size // 2 + size)
        for place in range(places):
            total = 0.0
            for other in range(first, last):
                total += inputs[other, place] * inputs[other, place]
            scales[channel, place] = offset + scale / size * total
            outputs[channel, place] = inputs[channel, place] * scales[channel, place] ** -power


@njit(nogil=True, cache=True)
def normalize_backward(
    errors: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    scales: np.ndarray,
    size: int,
    scale: float,
    power: float,
    input_errors: np.ndarray,
) -> None:
    """Compute the errors of the inputs: a channel's own, less those through the scales of all windows that it is in."""
    channels, places = inputs.shape
    for channel in range(channels):
        first = max(0, channel + size // 2 - size + 1)
        last = min(channels, channel + size // 2 + 1)
        for place in range(places):
            total = 0.0
            for other in range(first, last):
                total += errors[other, place] * outputs[other, place] / scales[other, place]
            own = errors[channel, place] * scales[channel, place] ** -power
            input_errors[channel, place] = own - 2 * scale / size * power * inputs[channel, place] * total
