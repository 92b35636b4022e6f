"""Noise of any size, for plans and measurements of models whose data set is not at hand: nobody can learn it."""

import re

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import Source

TRAIN, TEST = 50_000, 10_000
PREFIX = "noise:"


def open_parts(name: str) -> dict[str, Source]:
    """ "noise:3x32x32:10" has color images of ten classes, "noise:440:8000" rows of 440 numbers."""
    found = re.fullmatch(r"noise:([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?:([1-9]\d*)", name)
    if found is None:
        raise UserError(f"data set {name!r}: give noise:CHANNELSxHEIGHTxWIDTH:CLASSES, or noise:FEATURES:CLASSES")
    channels, height, width, classes = (int(number or 1) for number in found.groups())
    dtype = np.dtype(np.uint8 if found[2] else np.float32)
    shape = channels, height, width
    return {
        part: _source(part, shape, dtype, classes, count, key)
        for key, (part, count) in enumerate({"train": TRAIN, "test": TEST}.items())
    }


def _source(part: str, shape: tuple[int, int, int], dtype: np.dtype, classes: int, count: int, key: int) -> Source:
    def draw(index: int) -> np.ndarray:
        random = np.random.Generator(np.random.SFC64([key, int(index)]))
        return random.integers(0, 256, shape, dtype) if dtype == np.uint8 else random.standard_normal(shape, dtype)

    def rows(indices: np.ndarray) -> np.ndarray:
        drawn = np.empty((len(indices), *shape), dtype)
        for place, index in enumerate(indices):
            drawn[place] = draw(index)
        return drawn

    return Source(lambda index: f"noise {part} {index}", shape, dtype, np.arange(count) % classes, rows, classes)
