"""A pool of scratch buffers whose sizes are powers of two, so that buffers are reused instead of allocated."""

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue

import numpy as np

EMPTY = np.empty(0, np.float32)


class BufferPool:
    """Float32 buffers, cut from `arena` while it has room and allocated after that; several threads may use it."""

    def __init__(self, arena: np.ndarray = EMPTY) -> None:
        self.free: dict[int, SimpleQueue[np.ndarray]] = defaultdict(SimpleQueue)
        self.arena = arena
        self.used = 0
        """Number of values of the arena that are cut off."""
        self.lock = threading.Lock()
        self.allocated = 0
        """Number of buffers outside the arena."""

    def take(self, size: int) -> np.ndarray:
        """Return a buffer with room for at least `size` values."""
        room = 1 << max(10, (size - 1).bit_length())
        try:
            return self.free[room].get_nowait()
        except Empty:
            return self._make(room)

    def give(self, buffer: np.ndarray) -> None:
        """Return `buffer`, which `take` gave out, to the pool."""
        self.free[buffer.size].put(buffer)

    def arena_offset(self, values: np.ndarray) -> int | None:
        """Return the position in the arena where `values` begin; None if they are not in the arena."""
        start = (values.ctypes.data - self.arena.ctypes.data) // 4
        return start if 0 <= start < self.arena.size else None

    def _make(self, room: int) -> np.ndarray:
        with self.lock:
            if self.used + room <= self.arena.size:
                self.used += room
                return self.arena[self.used - room : self.used]
        self.allocated += 1
        return np.empty(room, np.float32)
