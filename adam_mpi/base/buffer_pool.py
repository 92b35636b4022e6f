"""Scratch buffers by powers of two: taken, given back, and never allocated again."""

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue

import numpy as np

NOTHING = np.empty(0, np.float32)


class BufferPool:
    """Float32 buffers, of an arena as long as it lasts; several threads may take and give at the same time."""

    def __init__(self, arena: np.ndarray = NOTHING) -> None:
        self.free: dict[int, SimpleQueue[np.ndarray]] = defaultdict(SimpleQueue)
        self.arena, self.cut, self.lock = arena, 0, threading.Lock()
        self.allocated = 0

    def take(self, size: int) -> np.ndarray:
        """A buffer with room for at least so many values."""
        room = 1 << max(10, (size - 1).bit_length())
        try:
            return self.free[room].get_nowait()
        except Empty:
            return self._make(room)

    def give(self, buffer: np.ndarray) -> None:
        self.free[buffer.size].put(buffer)

    def place(self, values: np.ndarray) -> int | None:
        """Where in the arena these values begin, if they are there."""
        start = (values.ctypes.data - self.arena.ctypes.data) // 4
        return start if 0 <= start < self.arena.size else None

    def _make(self, room: int) -> np.ndarray:
        with self.lock:
            if self.cut + room <= self.arena.size:
                self.cut += room
                return self.arena[self.cut - room : self.cut]
        self.allocated += 1
        return np.empty(room, np.float32)
