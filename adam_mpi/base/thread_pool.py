"""A pool of threads that divide jobs by number: each thread owns its numbers, so none waits for another."""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue

from adam_mpi.base import trace


class ThreadPool:
    """Run numbered jobs on `threads` threads, of which the calling thread is one."""

    def __init__(self, threads: int, cores: Sequence[Collection[int]] = ()) -> None:
        """Start the threads, each bound to its `cores` if given; the first are the caller's, which is not bound."""
        self.tasks: list[SimpleQueue[list[Callable[[], None]] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, tasks in enumerate(self.tasks, 1):
            bound = cores[number] if cores else ()
            threading.Thread(target=self._run, args=(tasks, bound), name="applier", daemon=True).start()

    def run(self, jobs: Iterable[tuple[int, Callable[[], None]]]) -> None:
        """Run all `jobs`, those of one number always on the same thread; return when the last is done.

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
        """End the threads; nothing can be run after that."""
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
    """Return the cores of each node that has any; nothing where the `system` folder does not exist."""
    paths = sorted(system.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cores for path in paths if (cores := _cores(path.read_text()))]


def assign(found: Sequence[Collection[int]], allowed: Collection[int], threads: int) -> list[frozenset[int]]:
    """Return the cores of each of `threads` threads, consecutive ones on one node.

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
    """Bind the calling thread to `cores`, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> frozenset[int]:
    """Return the numbers in a list like 0-3,8,10-11."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for edges in ranges for core in range(int(edges[0]), int(edges[-1]) + 1))
