"""A trained network judged on its test images: what it takes for what, and where it is most wrong."""

from dataclasses import dataclass

import numpy as np

from adam_mpi.data.sets import open_set
from adam_mpi.inference.trained import Trained

BLOCK = 1024


@dataclass(frozen=True)
class Evaluated:
    confusion: np.ndarray
    """[class, taken for] -> images."""
    images: np.ndarray
    """The worst ones, (count, channels, rows, columns)."""
    labels: np.ndarray
    taken: np.ndarray
    """What each of them was taken for."""
    probabilities: np.ndarray
    """The probability that the network gave to what it is."""


def judge(model: Trained, worst: int) -> Evaluated:
    data = open_set(model.config.data)
    confusion = np.zeros((model.inputs.classes,) * 2, np.int64)
    kept: list[tuple[float, int, int, np.ndarray]] = []
    for first in range(0, data.description.test, BLOCK):
        _, images, labels = data.read_usable("test", np.arange(first, min(first + BLOCK, data.description.test)))
        probabilities = model.predict(images)
        taken, probabilities = probabilities.argmax(axis=1), probabilities[np.arange(len(labels)), labels]
        np.add.at(confusion, (labels, taken), 1)
        found = [
            (float(probabilities[i]), int(labels[i]), int(taken[i]), images[i])
            for i in np.argsort(probabilities)[:worst]
        ]
        kept = sorted([*kept, *found], key=lambda one: one[0])[:worst]
    columns = list(zip(*kept, strict=True))
    return Evaluated(confusion, np.array(columns[3]), *(np.array(columns[place]) for place in (1, 2, 0)))
