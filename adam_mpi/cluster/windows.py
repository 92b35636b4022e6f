"""Transfers between ranks behind one interface: `put` and `get` return requests, and nothing here waits.

A window is memory of a rank that the others of its generation read or write. `Flush` and `Wait` may hang for ever on
a dead target, so callers poll their requests with `Test` and check the world for failures in between.
"""

import ctypes
import mmap
import os
import weakref
from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI
from numba import njit, types

from adam_mpi.base.errors import RankFailure, UserError
from adam_mpi.base.native import define
from adam_mpi.cluster.world import gather

Request = MPI.Request
REMOVE = getattr(mmap, "MADV_REMOVE", 9)
LIBRARY = ctypes.CDLL(None, use_errno=True)
LIBRARY.mmap.restype = ctypes.c_void_p
kept: list["Window"] = []
"""Windows that could not be freed: MPI still has the addresses of their memory."""


class Window:
    """One-sided: the target takes no part, but must keep calling into MPI."""

    late = True
    """Whether something may still arrive through MPI when the generation is over, so that the memory has to stay."""

    def __init__(self, win: MPI.Win, memory: np.ndarray) -> None:
        win.Set_errhandler(MPI.ERRORS_RETURN)
        win.Lock_all(MPI.MODE_NOCHECK)
        self.win = win
        self.memory = memory

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "Window":
        """Memory of the window's own, for what others write: a late write then lands nowhere that matters."""
        win = MPI.Win.Allocate(max(size, 8), 1, comm=comm)
        memory = np.asarray(win.tomemory(), np.uint8)[:size]
        memory[:] = 0
        return cls(win, memory)

    @classmethod
    def to_read(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "Window":
        """A window over memory of ours, for what others read: it outlives the window."""
        memory = np.zeros(max(size, 8), np.uint8)
        return cls(MPI.Win.Create(memory, 1, comm=comm), memory)

    def put(self, data: np.ndarray, target: int, offset: int) -> Request:
        return self.win.Rput(data, target, target=(offset, data.nbytes, MPI.BYTE))

    def get(self, into: np.ndarray, target: int, offset: int) -> Request:
        return self.win.Rget(into, target, target=(offset, into.nbytes, MPI.BYTE))

    def direct(self, target: int, offset: int, size: int) -> np.ndarray | None:
        """The target's memory itself, where this rank can reach it; then nothing needs to be put or got."""
        return None

    def sync(self) -> None:
        """Make what was written locally visible to readers, and what arrived visible to us."""
        self.win.Sync()

    def free(self) -> None:
        self.win.Unlock_all()
        self.win.Free()

    def forget(self) -> None:
        """Give the memory back, of a window that cannot be freed; whatever still came would find empty pages there."""
        give_back(self.memory)
        kept.append(self)


def give_back(memory: np.ndarray) -> None:
    """The whole pages of it, shared or not, to the system; their addresses stay."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        advise = LIBRARY.madvise
        address, length = ctypes.c_void_p(first), ctypes.c_size_t(size)
        # Of memory that is shared the first is right, of other memory the second.
        if advise(address, length, REMOVE):
            advise(address, length, mmap.MADV_DONTNEED)


class SharedWindow(Window):
    """Ranks of one node reach into each other's memory; one-sided transfers go to the other nodes."""

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

    def direct(self, target: int, offset: int, size: int) -> np.ndarray | None:
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
    """The same with two-sided messages, for MPIs whose one-sided path is poor: the target serves in `sync`."""

    ORDER, PUT, GET = 1, 1, 2

    def __init__(self, comm: MPI.Intracomm, memory: np.ndarray) -> None:
        self.comm, self.memory = comm.Dup(), memory
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

    def forget(self) -> None:
        self.under_way.clear()
        give_back(self.memory)

    def _next_tag(self) -> int:
        self.tags = self.tags % 30_000 + 1
        return self.tags + self.ORDER

    def _order(self, kind: int, target: int, offset: int, size: int, tag: int) -> None:
        order = np.array([kind, offset, size, tag], np.int64)
        self.under_way.append((self.comm.Isend(order, target, self.ORDER), order))


class SurvivingWindow(SharedWindow):
    """Shared inside a node, messages between nodes, and no window of MPI.

    A one-sided transfer to a rank on another node that dies meanwhile may never come back out of Open MPI (`Rget` was
    seen to wait in there for ever). A message to it fails as it should. And MPI's own shared memory cannot be freed
    without the dead: a job that loses many ranks would fill its address space and /dev/shm.
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> None:
        self.near = share(comm, node, size)
        self.memory = self.near[comm.rank]
        self.far = None if node.size == comm.size else SendWindow(comm, self.memory)
        # What others of the node still write goes into pages that nobody looks at any more.
        self.late = self.far is not None

    @classmethod
    def to_write(cls, comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> "SurvivingWindow":
        return cls(comm, node, size)

    to_read = to_write

    def sync(self) -> None:
        fence()
        if self.far is not None:
            self.far.sync()

    def free(self) -> None:
        if self.far is not None:
            self.far.free()
            self.far = None
        self.forget()

    def forget(self) -> None:
        """Let go of the memory, ours and that of others; it is gone with the last array that shows a part of it."""
        if self.far is not None:
            self.far.forget()
        self.near, self.memory, self.far = {}, np.empty(0, np.uint8), None


def share(comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> dict[int, np.ndarray]:
    """Collective over `comm`: return `size` zeros of ours and the memory of the others on our node, by rank of `comm`.

    It is in files without a name: nothing is left of them when the last process that has them is gone, however it went.
    Raises RankFailure when a rank is lost meanwhile.
    """
    file = os.memfd_create("adam_mpi", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        told = gather(comm, (os.getpid(), file, size))
        members = MPI.Group.Translate_ranks(node.Get_group(), None, comm.Get_group())
        near = {rank: mapped(*told[rank]) for rank in members}
        # Everybody has opened what is open here.
        comm.Barrier()
    finally:
        os.close(file)
    return near


def mapped(pid: int, file: int, size: int) -> np.ndarray:
    """Return the memory in a file that a process of this host has open; it is unmapped with the last view of it.

    Python's own mmap would keep a descriptor open for each. Raises RankFailure if the process is gone, and UserError if
    it may not be looked at.
    """
    if not size:
        return np.empty(0, np.uint8)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RankFailure(f"process {pid} is gone, and its memory with it") from None
    except PermissionError as error:
        # Ranks in containers of their own may not look at each other.
        why = f"the memory of process {pid} on this host cannot be shared: {error.strerror}"
        raise UserError(f'{why}; set cluster.transport = "send"') from None
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = LIBRARY.mmap(None, ctypes.c_size_t(size), access, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, LIBRARY.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    return np.ctypeslib.as_array(memory)


_fence = define(lambda builder: builder.fence("seq_cst"), types.void)


@njit(nogil=True, cache=True)
def fence() -> None:
    """Keep the reads and writes before it before those after it."""
    _fence()


WINDOWS: dict[str, type[Window]] = {"shared": SharedWindow, "rma": Window, "send": SendWindow}


def choose_kind(transport: str, survivable: bool) -> type[Window]:
    """What `cluster.transport` stands for; `survivable`: ranks go on when another one is lost."""
    return SurvivingWindow if survivable and transport == "shared" else WINDOWS[transport]
