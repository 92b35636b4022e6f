"""Softmax and cross-entropy over (classes, images)."""

import numpy as np
from numba import njit


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
