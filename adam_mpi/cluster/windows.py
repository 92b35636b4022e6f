"""Transfers between ranks behind one interface: `put` and `get` return requests, and nothing here waits.

A window is memory of a rank that the others of its generation read or write. `Flush` and `Wait` may hang forever on a
dead target, so callers poll their requests with `Test` and check the world for failures in between.
"""

from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.shared_memory import map_node_memory, memory_fence, release_pages

Request = MPI.Request
kept: list["Window"] = []
"""Windows that could not be freed: MPI still has the addresses of their memory."""


class Window:
    """One-sided transfers: the target takes no part, but must keep calling into MPI."""

    late = True
    """Whether transfers may still arrive through MPI when the generation is over, so that the memory has to stay."""

    def __init__(self, win: MPI.Win, memory: np.ndarray) -> None:
        win.Set_errhandler(MPI.ERRORS_RETURN)
        win.Lock_all(MPI.MODE_NOCHECK)
        self.win = win
        self.memory = memory

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "Window":
        """Make a window of `size` bytes of this rank for others to write (collective).

        MPI allocates the memory, so that a late write does no harm.
        """
        win = MPI.Win.Allocate(max(size, 8), 1, comm=comm)
        memory = np.asarray(win.tomemory(), np.uint8)[:size]
        memory[:] = 0
        return cls(win, memory)

    @classmethod
    def to_read(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "Window":
        """Make a window of `size` bytes of this rank for others to read (collective); its memory outlives it."""
        memory = np.zeros(max(size, 8), np.uint8)
        return cls(MPI.Win.Create(memory, 1, comm=comm), memory)

    def put(self, data: np.ndarray, target: int, offset: int) -> Request:
        """Start to write `data` to byte `offset` of rank `target`'s window; `data` must not change until it is done."""
        return self.win.Rput(data, target, target=(offset, data.nbytes, MPI.BYTE))

    def get(self, into: np.ndarray, target: int, offset: int) -> Request:
        """Start to fill `into` from byte `offset` of rank `target`'s window."""
        return self.win.Rget(into, target, target=(offset, into.nbytes, MPI.BYTE))

    def memory_of(self, target: int, offset: int, size: int) -> np.ndarray | None:
        """Return `size` bytes of rank `target`'s window from `offset` on, or None where they are not shared memory."""
        return None

    def sync(self) -> None:
        """Make local writes into the window visible to readers, and what has arrived visible to this rank."""
        self.win.Sync()

    def free(self) -> None:
        """Free the window (collective)."""
        self.win.Unlock_all()
        self.win.Free()

    def forget(self) -> None:
        """Release the memory of a window that cannot be freed; a late transfer finds empty pages there."""
        release_pages(self.memory)
        kept.append(self)


class SharedWindow(Window):
    """Shared memory between the ranks of a node, one-sided transfers to other nodes."""

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> None:
        shared = MPI.Win.Allocate_shared(max(size, 8), 1, comm=node)
        super().__init__(shared, np.asarray(shared.tomemory(), np.uint8)[: max(size, 8)])
        self.memory[:] = 0
        node.Barrier()
        members = MPI.Group.Translate_ranks(node.Get_group(), None, comm.Get_group())
        self.near = {rank: np.asarray(shared.Shared_query(place)[0], np.uint8) for place, rank in enumerate(members)}
        self.far = None if node.size == comm.size else self._between_nodes(comm)

    def _between_nodes(self, comm: MPI.Intracomm) -> Window:
        return Window(MPI.Win.Create(self.memory, 1, comm=comm), self.memory)

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "SharedWindow":
        return cls(comm, node, size)

    to_read = to_write

    def memory_of(self, target: int, offset: int, size: int) -> np.ndarray | None:
        return self.near[target][offset : offset + size] if target in self.near else None

    def put(self, data: np.ndarray, target: int, offset: int) -> Request:
        if target in self.near:
            np.copyto(self.near[target][offset : offset + data.nbytes], data.reshape(-1).view(np.uint8))
            return MPI.REQUEST_NULL
        assert self.far is not None
        return self.far.put(data, target, offset)

    def get(self, into: np.ndarray, target: int, offset: int) -> Request:
        if target in self.near:
            np.copyto(into.reshape(-1).view(np.uint8), self.near[target][offset : offset + into.nbytes])
            return MPI.REQUEST_NULL
        assert self.far is not None
        return self.far.get(into, target, offset)

    def sync(self) -> None:
        super().sync()
        if self.far is not None:
            self.far.sync()

    def free(self) -> None:
        if self.far is not None:
            self.far.free()
        super().free()


class SendWindow(Window):
    """Two-sided messages, for MPIs whose one-sided transfers are slow: the target serves requests in `sync`."""

    ORDER = 1
    """The tag of orders; transfers have tags of their own."""
    PUT = 1
    GET = 2

    def __init__(self, comm: MPI.Intracomm, memory: np.ndarray) -> None:
        self.comm = comm.Dup()
        self.memory = memory
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.tags = 0
        # Requests with the memory they work on, which must stay until they are complete.
        self.under_way: deque[tuple[MPI.Request, Any]] = deque()

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "SendWindow":
        return cls(comm, np.zeros(size, np.uint8))

    to_read = to_write

    def put(self, data: np.ndarray, target: int, offset: int) -> Request:
        tag = self._next_tag()
        self._order(self.PUT, target, offset, data.nbytes, tag)
        return self.comm.Isend(data, target, tag)

    def get(self, into: np.ndarray, target: int, offset: int) -> Request:
        # The tag is known before the order is sent, so that the answer always finds its receive.
        tag = self._next_tag()
        request = self.comm.Irecv(into, target, tag)
        self._order(self.GET, target, offset, into.nbytes, tag)
        return request

    def sync(self) -> None:
        """Start the transfers that other ranks have ordered from this window."""
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

    def forget(self) -> None:
        self.under_way.clear()
        release_pages(self.memory)

    def _next_tag(self) -> int:
        self.tags = self.tags % 30_000 + 1
        return self.tags + self.ORDER

    def _order(self, kind: int, target: int, offset: int, size: int, tag: int) -> None:
        order = np.array([kind, offset, size, tag], np.int64)
        self.under_way.append((self.comm.Isend(order, target, self.ORDER), order))


class SurvivingWindow(SharedWindow):
    """Shared memory within a node and messages between nodes, without a window of MPI.

    A one-sided transfer to a rank on another node that dies meanwhile may never return from Open MPI (`Rget` was seen
    to hang), while a message to it fails. And MPI's own shared memory cannot be freed without the dead ranks: a job
    that loses many ranks would fill its address space and /dev/shm.
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> None:
        self.near = map_node_memory(comm, node, size)
        self.memory = self.near[comm.rank]
        self.far = None if node.size == comm.size else SendWindow(comm, self.memory)
        # What other ranks of the node still write goes into pages that are no longer read.
        self.late = self.far is not None

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "SurvivingWindow":
        return cls(comm, node, size)

    to_read = to_write

    def sync(self) -> None:
        memory_fence()
        if self.far is not None:
            self.far.sync()

    def free(self) -> None:
        if self.far is not None:
            self.far.free()
            self.far = None
        self.forget()

    def forget(self) -> None:
        """Drop the window memory of this rank and of the others; it is unmapped with the last array over it."""
        if self.far is not None:
            self.far.forget()
        self.near = {}
        self.memory = np.empty(0, np.uint8)
        self.far = None


WINDOWS: dict[str, type[Window]] = {"shared": SharedWindow, "rma": Window, "send": SendWindow}


def choose_kind(transport: str, survivable: bool) -> type[Window]:
    """Return the class of windows for `cluster.transport` = `transport` in a job that is `survivable` or not."""
    return SurvivingWindow if survivable and transport == "shared" else WINDOWS[transport]
