"""An errand: work on a disk, done by a thread of its own. Whoever ordered it looks now and then, and never waits."""

import errno
import re
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from adam_mpi.config import Config

T = TypeVar("T")
_here = threading.local()


def disk_seconds(config: Config) -> float:
    """After which a disk that has taken nothing hangs: the writing of large files may stand still for a while."""
    return 2 * config.cluster.seconds


def advance() -> None:
    """Tell that the errand of this thread, if it has one, has got further: its disk does not hang."""
    errand = getattr(_here, "errand", None)
    if errand is not None:
        errand.advanced = time.monotonic()


def abandoned() -> bool:
    """Whether nobody waits any more for what this thread does."""
    errand = getattr(_here, "errand", None)
    return errand is not None and errand.given_up


class DiskTask(Generic[T]):
    def __init__(self, name: str, work: Callable[[], T], seconds: float) -> None:
        """Begin the work; it is given up when it has not got further for so many seconds."""
        self.seconds, self.advanced = seconds, time.monotonic()
        self.given_up = False
        """Whether nobody waits for it any more; a thread inside the system cannot be ended."""
        self.value: list[T] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        """Whether it is done, has failed, or hangs."""
        if self.thread.is_alive() and time.monotonic() - self.advanced > self.seconds:
            self.given_up = True
        return self.given_up or not self.thread.is_alive()

    def result(self) -> T:
        """What came of one that is over; raises its error, or an OSError when it hangs."""
        if self.given_up:
            raise OSError(errno.ETIMEDOUT, f"the disk has taken nothing for {self.seconds:g} s")
        if self.error is not None:
            raise self.error
        return self.value[0]

    def _run(self, work: Callable[[], T]) -> None:
        _here.errand = self
        try:
            self.value.append(work())
        except BaseException as error:  # raised where the result is wanted
            self.error = error


def reason(error: BaseException) -> str:
    """What went wrong, in a few words; of errors that say nothing, their kind."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    # HDF5 tells of all that it was about to do.
    systems = re.search(r"error message = '([^']+)'", text)
    return systems[1] if systems else text.partition("\n")[0]
