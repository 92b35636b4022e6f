"""Evaluate a trained network on its test images for the report: its confusion matrix and its worst errors."""

from dataclasses import dataclass

import numpy as np

from adam_mpi.data.sets import open_set
from adam_mpi.inference.trained import Trained

BLOCK = 1024
"""Images that are evaluated at once."""


@dataclass(frozen=True)
class Evaluated:
    """The confusion matrix, and the images whose class has the least probability."""

    confusion: np.ndarray
    """[class, predicted class] -> images."""
    images: np.ndarray
    """The worst images, (count, channels, rows, columns)."""
    labels: np.ndarray
    """The class of each of them."""
    predicted: np.ndarray
    """The predicted class of each of them."""
    probabilities: np.ndarray
    """The probability that the network gives to the class of each of them."""


def evaluate(model: Trained, worst: int) -> Evaluated:
    """Evaluate `model` on its test images, and keep the `worst` of them; raise UserError without a data set."""
    data = open_set(model.config.data)
    confusion = np.zeros((model.inputs.classes,) * 2, np.int64)
    kept: list[tuple[float, int, int, np.ndarray]] = []
    for first in range(0, data.description.test, BLOCK):
        _, images, labels = data.read_usable("test", np.arange(first, min(first + BLOCK, data.description.test)))
        probabilities = model.predict(images)
        predicted = probabilities.argmax(axis=1)
        own = probabilities[np.arange(len(labels)), labels]
        np.add.at(confusion, (labels, predicted), 1)
        found = [(float(own[i]), int(labels[i]), int(predicted[i]), images[i]) for i in np.argsort(own)[:worst]]
        kept = sorted([*kept, *found], key=lambda one: one[0])[:worst]
    return Evaluated(
        confusion=confusion,
        images=np.array([image for *_, image in kept]),
        labels=np.array([label for _, label, _, _ in kept]),
        predicted=np.array([prediction for _, _, prediction, _ in kept]),
        probabilities=np.array([probability for probability, *_ in kept]),
    )
