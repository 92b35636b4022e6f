"""Transfers between ranks behind one interface: `put` and `get` return requests, and nothing here waits.

A window is memory of a rank that the others of its generation read or write. `Flush` and `Wait` may hang for ever on
a dead target, so callers poll their requests with `Test` and check the world for failures in between.
"""

from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI


class Window:
    """One-sided: the target takes no part, but must keep calling into MPI."""

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


class SendWindow:
    """The same with two-sided messages, for MPIs whose one-sided path is poor: the target serves in `sync`."""

    ORDER, PUT, GET = 1, 1, 2

    def __init__(self, comm: MPI.Intracomm, memory: np.ndarray) -> None:
        self.comm, self.memory = comm.Dup(), memory
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.tags = 0
        # Requests with the memory they work on, which must stay until they are complete.
        self.under_way: deque[tuple[MPI.Request, Any]] = deque()

    @classmethod
    def allocate(cls, comm: MPI.Intracomm, size: int) -> "SendWindow":
        return cls(comm, np.zeros(size, np.uint8))

    over = classmethod(lambda cls, comm, memory: cls(comm, memory))

    def put(self, data: np.ndarray, target: int, offset: int) -> MPI.Request:
        return self.comm.Isend(data, target, self._order(self.PUT, target, offset, data.nbytes))

    def get(self, into: np.ndarray, target: int, offset: int) -> MPI.Request:
        # The tag is known before the order is sent, so that the answer always finds its receive.
        request = self.comm.Irecv(into, target, self._next_tag())
        self._order(self.GET, target, offset, into.nbytes, self.tags)
        return request

    def sync(self) -> None:
        """Carry out what others have ordered."""
        while self.under_way and self.under_way[0][0].Test():
            self.under_way.popleft()
        status = MPI.Status()
        while self.comm.Iprobe(tag=self.ORDER, status=status):
            order = np.empty(4, np.int64)
            self.comm.Recv(order, status.source, self.ORDER)
            kind, offset, size, tag = order.tolist()
            memory = self.memory[offset : offset + size]
            move = self.comm.Irecv if kind == self.PUT else self.comm.Isend
            self.under_way.append((move(memory, status.source, tag), memory))

    def free(self) -> None:
        self.comm.Free()

    def _next_tag(self) -> int:
        self.tags = self.tags % 30_000 + 1
        return self.tags + self.ORDER

    def _order(self, kind: int, target: int, offset: int, size: int, tag: int = 0) -> int:
        tag = tag + self.ORDER if tag else self._next_tag()
        order = np.array([kind, offset, size, tag], np.int64)
        self.under_way.append((self.comm.Isend(order, target, self.ORDER), order))
        return tag


WINDOWS: dict[str, type[Window] | type[SendWindow]] = {"rma": Window, "send": SendWindow}
