"""Targets of a data set: how many outputs they need, and which values are allowed."""

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import Source
from adam_mpi.sharding.fields import CLASSES, SEQUENCES, SETS, VECTORS, Field


def outputs(source: Source) -> int:
    """Return how many outputs a network needs for the data set's first target: its classes, or values of one image."""
    if source.target.kind in (CLASSES, SEQUENCES):
        return source.classes or int(source.labels.max()) + 1
    return source.target.values


def allowed(labels: np.ndarray, target: Field, classes: int) -> tuple[np.ndarray, str]:
    """Return which images have an allowed target, and which targets are allowed."""
    inner = tuple(range(1, labels.ndim))
    if target.kind == VECTORS:
        return np.all(np.isfinite(labels), axis=inner), "are finite numbers"
    if target.kind == SETS:
        return np.all(labels <= 1, axis=inner), "are 0 and 1"
    if target.kind == SEQUENCES:
        return np.all(labels >= -1, axis=inner), "are whole numbers from 0, and -1 for positions that do not count"
    return (labels >= 0) & (labels < classes), f"are 0 to {classes - 1}"


def check_labels(name: str, source: Source) -> None:
    """Raise UserError for target labels that count from 1, which would make an empty class, or drop the last."""
    lowest = int(source.labels.min())
    highest = int(source.labels.max())
    if lowest == 1 < highest and highest == (source.classes or len(np.unique(source.labels))):
        raise UserError(
            f"data set {name!r}: labels count from 1 to {highest}; they must count from 0 to {highest - 1}: subtract 1"
        )
