"""Local response normalization over neighboring channels; arrays are (channels, pixels and images)."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def forward(
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
def backward(
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
