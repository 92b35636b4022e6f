"""The format of a network's input: bytes that a table of levels maps to numbers, or numbers as they are. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

BYTES = 256
"""Values of a byte."""


@dataclass(frozen=True)
class InputFormat:
    """What the kernel that loads a block of images gets, and how it maps bytes to numbers."""

    dtype: str = "uint8"
    """The type of the values: bytes, or floats that are taken as they are."""
    mean: tuple[float, ...] = ()
    """Mean of each channel of bytes that are normalized; empty for bytes that are scaled to 0 to 1."""
    factor: tuple[float, ...] = ()
    """1 / deviation of each channel of bytes that are normalized."""

    @property
    def bytes(self) -> bool:
        """Return whether the values are bytes."""
        return self.dtype == "uint8"

    def levels(self, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Return the number that each byte stands for, a row for each channel, or one row for all channels."""
        values = np.arange(BYTES)
        if not self.mean:
            return (values / (BYTES - 1)).astype(dtype).reshape(1, BYTES)
        mean = np.array(self.mean, np.float32)[:, None]
        factor = np.array(self.factor, np.float32)[:, None]
        return ((values.astype(np.float32) - mean) * factor).astype(dtype)


SCALED_BYTES = InputFormat()
"""Bytes that are scaled to 0 to 1."""
