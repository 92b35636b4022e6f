"""Compiled kernels of metrics: each adds what it finds in the outputs and targets of a batch to sums."""

import numpy as np
from numba import njit

LIMIT = 16.0
"""Scores are binned by their logit, which is cut off at plus and minus this."""


@njit(nogil=True, cache=True)
def count_top(most: int, sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count the images whose class is among the `most` largest outputs; of equal ones the first is the largest."""
    for image in range(outputs.shape[0]):
        own = targets[image]
        value = outputs[image, own]
        before = 0
        for index in range(outputs.shape[1]):
            before += outputs[image, index] > value or (outputs[image, index] == value and index < own)
        # NaN is no answer.
        sums[0] += before < most and not np.isnan(value)


@njit(nogil=True, cache=True)
def count_labels(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count the labels of sets that are predicted right, a probability above one half, and all labels."""
    for image in range(outputs.shape[0]):
        for index in range(outputs.shape[1]):
            sums[0] += (outputs[image, index] > 0.5) == (targets[image, index] > 0)
    sums[1] += outputs.size


@njit(nogil=True, cache=True)
def count_positions(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count the positions of sequences whose class has the largest output, and all positions that have a class."""
    for image in range(targets.shape[0]):
        for position in range(targets.shape[1]):
            own = targets[image, position]
            if own >= 0:
                sums[0] += np.argmax(outputs[image, position]) == own
                sums[1] += 1


@njit(nogil=True, cache=True)
def add_absolute_errors(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Add the absolute differences of outputs and targets, and their number."""
    for image in range(outputs.shape[0]):
        for index in range(outputs.shape[1]):
            sums[0] += abs(float(outputs[image, index]) - float(targets[image, index]))
    sums[1] += outputs.size


@njit(nogil=True, cache=True)
def add_squares(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count images; of each output add the targets, their squares and the squared errors."""
    sums[0] += outputs.shape[0]
    for image in range(outputs.shape[0]):
        for index in range(outputs.shape[1]):
            target = float(targets[image, index])
            error = float(outputs[image, index]) - target
            sums[3 * index + 1] += target
            sums[3 * index + 2] += target * target
            sums[3 * index + 3] += error * error


@njit(nogil=True, cache=True)
def _bin(probability: float, bins: int) -> int:
    """Return the bin of a probability: bins are equally wide in its logit."""
    inside = min(max(float(probability), 1e-12), 1 - 1e-12)
    place = (np.log(inside) - np.log(1 - inside) + LIMIT) / (2 * LIMIT)
    return int(min(max(place * bins, 0.0), bins - 1.0))


@njit(nogil=True, cache=True)
def count_classes_in_bins(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count the probabilities of each class, of images that are not of that class and of those that are, by bin."""
    bins = sums.size // (2 * outputs.shape[1])
    for image in range(outputs.shape[0]):
        for index in range(outputs.shape[1]):
            row = 2 * index + (targets[image] == index)
            sums[row * bins + _bin(outputs[image, index], bins)] += 1


@njit(nogil=True, cache=True)
def count_labels_in_bins(sums: np.ndarray, outputs: np.ndarray, targets: np.ndarray) -> None:
    """Count the probabilities of each label, of images without and with that label, by bin."""
    bins = sums.size // (2 * outputs.shape[1])
    for image in range(outputs.shape[0]):
        for index in range(outputs.shape[1]):
            row = 2 * index + (targets[image, index] > 0)
            sums[row * bins + _bin(outputs[image, index], bins)] += 1
