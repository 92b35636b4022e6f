"""Reference kernels of single numbers: loading pixels, activation functions, dropout; and of softmax and cross-entropy.

Derivatives are computed from the outputs; inputs and outputs may be the same array. NaN stays NaN, so that a diverged
run shows.
"""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def load_pixels(pixels: np.ndarray, count: int, levels: np.ndarray, outputs: np.ndarray) -> None:
    """Look up the pixels of the first `count` images in `levels`, image-innermost; the other images become zero.

    `levels` has a row for each channel, or one row for all.
    """
    channels, height, width, images = outputs.shape
    for channel in range(channels):
        table = levels[channel % len(levels)]
        for row in range(height):
            for column in range(width):
                for image in range(count):
                    outputs[channel, row, column, image] = table[pixels[image, channel, row, column]]
                for image in range(count, images):
                    outputs[channel, row, column, image] = 0


@njit(nogil=True, cache=True)
def relu(inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute max(inputs, 0)."""
    for index in range(inputs.size):
        outputs[index] = max(inputs[index], 0)


@njit(nogil=True, cache=True)
def relu_backward(outputs: np.ndarray, errors: np.ndarray) -> None:
    """Set the errors of outputs that are not positive to zero."""
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
    """Set a share `rate` of the units (units, images) to zero and scale the others; the same call serves errors.

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


@njit(nogil=True, cache=True)
def softmax(logits: np.ndarray, probabilities: np.ndarray, normalizers: np.ndarray) -> None:
    """Compute probabilities, and as `normalizers` the logarithm of each image's sum of exponentials."""
    classes, images = logits.shape
    for image in range(images):
        peak = logits[0, image]
        for index in range(1, classes):
            peak = max(peak, logits[index, image])
        total = 0.0
        for index in range(classes):
            probabilities[index, image] = np.exp(logits[index, image] - peak)
            total += probabilities[index, image]
        for index in range(classes):
            probabilities[index, image] /= total
        normalizers[image] = peak + np.log(total)


@njit(nogil=True, cache=True)
def cross_entropy(
    logits: np.ndarray,
    normalizers: np.ndarray,
    labels: np.ndarray,
    count: int,
    errors: np.ndarray,
) -> tuple[float, int]:
    """Turn probabilities into errors in place, zero past `count`; return the loss sum and the number correct."""
    classes, images = logits.shape
    loss = 0.0
    correct = 0
    for image in range(count):
        label = labels[image]
        loss += normalizers[image] - logits[label, image]
        errors[label, image] -= 1
        correct += np.argmax(logits[:, image]) == label
    for index in range(classes):
        for image in range(count, images):
            errors[index, image] = 0
    return loss, correct
