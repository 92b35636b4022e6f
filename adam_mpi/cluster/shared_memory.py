"""Memory shared between the processes of one node, without MPI: anonymous files, mapped through /proc."""

import ctypes
import mmap
import os
import weakref

import numpy as np
from mpi4py import MPI
from numba import njit, types

from adam_mpi.base.errors import RankFailure, UserError
from adam_mpi.base.native import define
from adam_mpi.cluster.world import gather

REMOVE = getattr(mmap, "MADV_REMOVE", 9)
LIBRARY = ctypes.CDLL(None, use_errno=True)
LIBRARY.mmap.restype = ctypes.c_void_p


def map_node_memory(comm: MPI.Intracomm, node: MPI.Intracomm, size: int) -> dict[int, np.ndarray]:
    """Allocate `size` zero bytes of shared memory; return that of all ranks of `node`, by rank (collective).

    The memory is in anonymous files, which vanish with the last process that has them open, however it ends. Raises
    RankFailure when a rank is lost meanwhile.
    """
    file = os.memfd_create("adam_mpi", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        files = gather(comm, (os.getpid(), file, size))
        members = MPI.Group.Translate_ranks(node.Get_group(), None, comm.Get_group())
        memory = {rank: map_file(*files[rank]) for rank in members}
        # The file stays open until all other ranks have opened it.
        comm.Barrier()
    finally:
        os.close(file)
    return memory


def map_file(pid: int, file: int, size: int) -> np.ndarray:
    """Return the shared memory in the `file` of `size` bytes that process `pid` of this host has open.

    It is unmapped with the last view of it; Python's own mmap would keep a descriptor open for each. Raises RankFailure
    if the process is gone, and UserError if its files are not accessible.
    """
    if not size:
        return np.empty(0, np.uint8)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RankFailure(f"process {pid} is gone, and its memory with it") from None
    except PermissionError as error:
        # Ranks in containers of their own may not access each other.
        what = f"the memory of process {pid} on this host cannot be shared: {error.strerror}"
        raise UserError(f'{what}; set cluster.transport = "send"') from None
    try:
        address = _map_shared(descriptor, size)
    finally:
        os.close(descriptor)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, LIBRARY.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    return np.ctypeslib.as_array(memory)


def _map_shared(descriptor: int, size: int) -> int:
    """Map `size` bytes of the shared memory file `file` into this process."""
    address = LIBRARY.mmap(
        None,
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED,
        descriptor,
        ctypes.c_long(0),
    )
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    return address


def release_pages(memory: np.ndarray) -> None:
    """Return the whole pages of mapped `memory`, shared or not, to the system; their addresses stay valid."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        return
    address = ctypes.c_void_p(first)
    length = ctypes.c_size_t(size)
    # REMOVE is for shared memory; it fails for private memory, which DONTNEED releases.
    if LIBRARY.madvise(address, length, REMOVE):
        LIBRARY.madvise(address, length, mmap.MADV_DONTNEED)


_fence = define(lambda builder: builder.fence("seq_cst"), types.void)


@njit(nogil=True, cache=True)
def memory_fence() -> None:
    """Order the accesses to shared memory before the call before those after it."""
    _fence()
