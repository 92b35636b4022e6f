"""Dropout whose mask is a function of (seed, epoch, image, layer, unit) alone, whatever the block or layout."""

import numpy as np
from numba import njit

# 2**64 divided by the golden ratio: multiples of it are spread evenly over the 64-bit numbers.
SPREAD = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def mix(number: np.uint64) -> np.uint64:
    """Scramble 64 bits so that each bit of the input changes half of the output's (the finalizer of splitmix64)."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


@njit(nogil=True, cache=True)
def image_keys(seed: int, epoch: int, ids: np.ndarray, keys: np.ndarray) -> None:
    """Compute the random key of each image of the block in `epoch`."""
    key = mix(mix(np.uint64(seed) + SPREAD) + np.uint64(epoch))
    for image in range(ids.size):
        keys[image] = mix(key + np.uint64(ids[image]) * SPREAD)


@njit(nogil=True, cache=True)
def drop(
    inputs: np.ndarray,
    keys: np.ndarray,
    layer: int,
    rate: float,
    scale: float,
    place: tuple[int, int, int],
    outputs: np.ndarray,
) -> None:
    """Zero a share `rate` of the units (units, images) and scale the others; the same call serves errors.

    `place` is (first, width, whole): of `whole` columns these are `width` ones from `first` on; a unit is numbered as
    in the whole layer.
    """
    limit = np.uint64(rate * 2**32)
    first, width, whole = place
    for unit in range(inputs.shape[0]):
        number = unit // width * whole + first + unit % width
        counter = np.uint64(layer) << np.uint64(40) ^ np.uint64(number)
        for image in range(inputs.shape[1]):
            draw = mix(keys[image] + counter * SPREAD) >> np.uint64(32)
            if draw < limit:
                outputs[unit, image] = 0
            else:
                outputs[unit, image] = inputs[unit, image] * scale
