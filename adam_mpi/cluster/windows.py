"""One-sided transfers: memory of a rank that the others of its generation read or write.

Every transfer is request-based. Nothing here waits: `Flush` and `Wait` may hang for ever on a dead
target, so callers poll their requests with `Test` and check the world for failures in between.
"""

import numpy as np
from mpi4py import MPI


class Window:
    def __init__(self, win: MPI.Win, memory: np.ndarray) -> None:
        win.Set_errhandler(MPI.ERRORS_RETURN)
        win.Lock_all(MPI.MODE_NOCHECK)
        self.win = win
        self.memory = memory

    @classmethod
    def allocate(cls, comm: MPI.Intracomm, size: int) -> "Window":
        """Memory of the window's own, for what others write: a late write then lands nowhere that matters."""
        win = MPI.Win.Allocate(max(size, 8), 1, comm=comm)
        memory = np.asarray(win.tomemory(), np.uint8)[:size]
        memory[:] = 0
        return cls(win, memory)

    @classmethod
    def over(cls, comm: MPI.Intracomm, memory: np.ndarray) -> "Window":
        """A window over memory of ours, for what others read: it outlives the window."""
        return cls(MPI.Win.Create(memory, 1, comm=comm), memory)

    def put(self, data: np.ndarray, target: int, offset: int) -> MPI.Request:
        return self.win.Rput(data, target, target=(offset, data.nbytes, MPI.BYTE))

    def get(self, into: np.ndarray, target: int, offset: int) -> MPI.Request:
        return self.win.Rget(into, target, target=(offset, into.nbytes, MPI.BYTE))

    def sync(self) -> None:
        """Make what was written locally visible to readers, and what arrived visible to us."""
        self.win.Sync()

    def free(self) -> None:
        self.win.Unlock_all()
        self.win.Free()
