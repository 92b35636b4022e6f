"""A pool of threads that divide jobs by number: each thread owns its numbers, so none waits for another."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import SimpleQueue

from adam_mpi.base import numa, trace


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
        numa.bind(cores)
        while (jobs := tasks.get()) is not None:
            try:
                with trace.span("apply"):
                    for job in jobs:
                        job()
                self.done.put(None)
            except BaseException as error:  # raised again by `run`
                self.done.put(error)
