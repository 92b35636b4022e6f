"""Scratch buffers by powers of two: taken, given back, and never allocated again."""

from collections import defaultdict
from queue import Empty, SimpleQueue

import numpy as np


class Pool:
    """Float32 buffers; several threads may take and give at the same time."""

    def __init__(self) -> None:
        self.free: dict[int, SimpleQueue[np.ndarray]] = defaultdict(SimpleQueue)
        self.allocated = 0

    def take(self, size: int) -> np.ndarray:
        """A buffer with room for at least so many values."""
        room = 1 << max(10, (size - 1).bit_length())
        try:
            return self.free[room].get_nowait()
        except Empty:
            self.allocated += 1
            return np.empty(room, np.float32)

    def give(self, buffer: np.ndarray) -> None:
        self.free[buffer.size].put(buffer)
