"""Pools: of threads that divide jobs by number, and of scratch buffers that are reused instead of allocated."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from adam_mpi.base import trace

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
        """Return a scratch buffer of the pool with room for at least `size` values."""
        room = 1 << max(10, (size - 1).bit_length())
        try:
            return self.free[room].get_nowait()
        except Empty:
            return self._make(room)

    def give_back(self, buffer: np.ndarray) -> None:
        """Return `buffer`, which `take` gave out, to the pool of scratch buffers."""
        self.free[buffer.size].put(buffer)

    def arena_offset(self, values: np.ndarray) -> int | None:
        """Return the position of the scratch buffer `values` in the arena of the pool; None outside of it."""
        start = (values.ctypes.data - self.arena.ctypes.data) // 4
        return start if 0 <= start < self.arena.size else None

    def _make(self, room: int) -> np.ndarray:
        with self.lock:
            if self.used + room <= self.arena.size:
                self.used += room
                return self.arena[self.used - room : self.used]
        self.allocated += 1
        return np.empty(room, np.float32)


class ThreadPool:
    """Run numbered jobs on `threads` threads, of which the calling thread is one."""

    def __init__(self, threads: int, cores: Sequence[Collection[int]] = ()) -> None:
        """Start the threads of the pool, each bound to its `cores` if given; the first are the caller's, not bound."""
        self.tasks: list[SimpleQueue[list[Callable[[], None]] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, tasks in enumerate(self.tasks, 1):
            bound = cores[number] if cores else ()
            threading.Thread(target=self._run, args=(tasks, bound), name="applier", daemon=True).start()

    def run(self, jobs: Iterable[tuple[int, Callable[[], None]]]) -> None:
        """Run all `jobs` in the threads of the pool, those of one number on the same thread; return after the last.

        Raises the first exception of a job.
        """
        shares: list[list[Callable[[], None]]] = [[] for _ in range(len(self.tasks) + 1)]
        for number, job in jobs:
            shares[number % len(shares)].append(job)
        given = [(tasks, share) for tasks, share in zip(self.tasks, shares[1:], strict=True) if share]
        for tasks, share in given:
            tasks.put(share)
        try:
            for job in shares[0]:
                job()
        finally:
            errors = [self.done.get() for _ in given]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads of the pool; nothing can be run after that."""
        for tasks in self.tasks:
            tasks.put(None)

    def _run(self, tasks: SimpleQueue[list[Callable[[], None]] | None], cores: Collection[int]) -> None:
        bind(cores)
        while (jobs := tasks.get()) is not None:
            try:
                with trace.span("apply"):
                    for job in jobs:
                        job()
                self.done.put(None)
            except BaseException as error:  # raised again by `run`
                self.done.put(error)


SYSTEM = Path("/sys/devices/system/node")


def nodes(system: Path = SYSTEM) -> list[frozenset[int]]:
    """Return the cores of each NUMA node that has any; nothing where the `system` folder does not exist."""
    paths = sorted(system.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cores for path in paths if (cores := _cores(path.read_text()))]


def assign(found: Sequence[Collection[int]], allowed: Collection[int], threads: int) -> list[frozenset[int]]:
    """Return the cores of each of `threads` threads, consecutive ones on one NUMA node.

    `found` has the cores of each node, of which only the `allowed` ones count. With fewer than two nodes no thread is
    bound.
    """
    mine = [cores for node in found if (cores := frozenset(allowed).intersection(node))]
    if len(mine) < 2:
        return [frozenset()] * threads
    return [mine[thread * len(mine) // threads] for thread in range(threads)]


def cores_of_threads(threads: int) -> list[frozenset[int]]:
    """Return the cores that each of `threads` threads of this process is to be bound to."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return assign(nodes(), allowed, threads)


def bind(cores: Collection[int]) -> None:
    """Bind the calling thread to `cores` of the processor, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> frozenset[int]:
    """Return the numbers of cores in a text of the system like 0-3,8,10-11."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for edges in ranges for core in range(int(edges[0]), int(edges[-1]) + 1))
