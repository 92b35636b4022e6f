"""Work on a disk in a thread of its own: the rank that started it polls for the result and never waits for the disk."""

import errno
import re
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from adam_mpi.config import Config

T = TypeVar("T")
_thread = threading.local()


def disk_seconds(config: Config) -> float:
    """Return the seconds without progress after which a disk counts as hung.

    Writing a large file may stall for a while, so the limit is longer than that for ranks.
    """
    return 2 * config.cluster.seconds


def report_progress() -> None:
    """Note that the disk task of this thread, if it has one, has made progress: its disk does not hang."""
    task = getattr(_thread, "task", None)
    if task is not None:
        task.progressed = time.monotonic()


def abandoned() -> bool:
    """Return whether the disk task of this thread was given up: nobody will ask for its result."""
    task = getattr(_thread, "task", None)
    return task is not None and task.given_up


class DiskTask(Generic[T]):
    """One piece of work on a disk, in a daemon thread."""

    def __init__(self, name: str, work: Callable[[], T], seconds: float) -> None:
        """Start the disk `work` in a thread called `name`; it is given up after `seconds` without progress."""
        self.seconds = seconds
        self.progressed = time.monotonic()
        self.given_up = False
        """Whether nobody waits for it any more; a thread inside a system call cannot be ended."""
        self.value: list[T] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        """Return whether the disk task is done, has failed, or hangs."""
        if self.thread.is_alive() and time.monotonic() - self.progressed > self.seconds:
            self.given_up = True
        return self.given_up or not self.thread.is_alive()

    def result(self) -> T:
        """Return what the disk task returned; raise its error, or OSError if it hangs. Only for one that is `over`."""
        if self.given_up:
            raise OSError(errno.ETIMEDOUT, f"the disk has taken nothing for {self.seconds:g} s")
        if self.error is not None:
            raise self.error
        return self.value[0]

    def _run(self, work: Callable[[], T]) -> None:
        """Do the disk `work` in the thread of the task, and keep its value or its error."""
        _thread.task = self
        try:
            self.value.append(work())
        except BaseException as error:  # raised where the result is asked for
            self.error = error


def reason(error: BaseException) -> str:
    """Return why the `error` of a disk was raised, in one line; its class where it has no text."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    # HDF5 lists all that it was about to do; the text of the system call stands in the middle of it.
    found = re.search(r"error message = '([^']+)'", text)
    return found[1] if found else text.partition("\n")[0]
