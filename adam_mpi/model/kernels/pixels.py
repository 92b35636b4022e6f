"""Load the pixels of a block into the first layer's input."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def load(pixels: np.ndarray, count: int, levels: np.ndarray, outputs: np.ndarray) -> None:
    """Look up the first `count` images' pixels in `levels`, image-innermost; the other images become zero."""
    channels, height, width, images = outputs.shape
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                for image in range(count):
                    outputs[channel, row, column, image] = levels[pixels[image, channel, row, column]]
                for image in range(count, images):
                    outputs[channel, row, column, image] = 0
