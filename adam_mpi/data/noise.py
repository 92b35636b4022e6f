"""Data sets of noise, for benchmarks: images or features that depend on their index only."""

import re

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import Source

IMAGES = {"train": 50_000, "test": 10_000}
PREFIX = "noise:"


def open_parts(name: str) -> dict[str, Source]:
    """Return the parts of a set of noise: "noise:3x32x32:10" has color images, "noise:440:8000" rows of 440 numbers."""
    found = re.fullmatch(r"noise:([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?:([1-9]\d*)", name)
    if found is None:
        raise UserError(f"data set {name!r}: give noise:CHANNELSxHEIGHTxWIDTH:CLASSES, or noise:FEATURES:CLASSES")
    channels, height, width, classes = (int(number or 1) for number in found.groups())
    dtype = np.dtype(np.uint8 if found[2] else np.float32)
    shape = channels, height, width
    return {part: _noise_source(part, shape, dtype, classes) for part in IMAGES}


def _noise_source(part: str, shape: tuple[int, int, int], dtype: np.dtype, classes: int) -> Source:
    """Return noise images whose pixels depend on `part` and index only, and whose labels take turns."""
    key = list(IMAGES).index(part)
    labels = np.arange(IMAGES[part]) % classes

    def draw(index: int) -> np.ndarray:
        random = np.random.Generator(np.random.SFC64([key, int(index)]))
        return random.integers(0, 256, shape, dtype) if dtype == np.uint8 else random.standard_normal(shape, dtype)

    def rows(indices: np.ndarray) -> np.ndarray:
        drawn = np.empty((len(indices), *shape), dtype)
        for place, index in enumerate(indices):
            drawn[place] = draw(index)
        return drawn

    return Source(
        name=lambda index: f"noise {part} {index}", shape=shape, dtype=dtype, labels=labels, rows=rows, classes=classes
    )
