"""Writes the files that show people the state of a running job, in a thread of its own.

A run directory that is full, fails or is slow stops no rank: a warning says what could not be written, and it is
retried until it succeeds.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from adam_mpi.base.log import print_and_log

RETRY_SECONDS = 1.0
"""Between two tries."""
WARN_SECONDS = 30.0
"""Between two warnings."""
SLOW_SECONDS = 10.0
"""After which a write that is under way is warned about."""


class StatusWriter:
    """Writes files one after the other; of a file that is requested again only the newest content."""

    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        """Write status files into `directory`; `check` is called first and raises where another job has the run."""
        self.directory = directory
        self.check = check
        self.wanted: dict[str, Callable[[], None]] = {}
        """File -> the function that writes it."""
        self.lock = threading.Lock()
        self.requested = threading.Event()
        self.writing: tuple[str, float] | None = None
        """The file that is being written, and since when."""
        self.warned: float | None = None
        """When the last warning was given; None once all is written again."""
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="status", daemon=True).start()

    def request(self, name: str, write: Callable[[], None]) -> None:
        """Have the status file `name` written soon, by calling `write`."""
        with self.lock:
            self.wanted[name] = write
        self.requested.set()

    def forget(self, name: str) -> None:
        """Drop what was requested of the status file `name`."""
        with self.lock:
            self.wanted.pop(name, None)

    def poll(self) -> None:
        """Warn when writing a status file takes long; raise an error of the thread that was not one of the disk."""
        if self.error is not None:
            raise self.error
        writing = self.writing
        if writing is not None and time.monotonic() - writing[1] > SLOW_SECONDS:
            self._warn(writing[0], f"not written for {time.monotonic() - writing[1]:.0f} s")

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until all status files are written; return False when that takes longer than `seconds`."""
        limit = time.monotonic() + seconds
        while (self.wanted or self.writing) and self.error is None:
            if time.monotonic() > limit:
                return False
            time.sleep(0.005)
        return True

    def _run(self) -> None:
        """Write the requested status files in the writer's thread."""
        while self.error is None:
            self.requested.wait(RETRY_SECONDS if self.wanted else None)
            self.requested.clear()
            for name in list(self.wanted):
                self._write(name)

    def _write(self, name: str) -> None:
        """Write the requested status file `name`; keep the request where the disk fails."""
        with self.lock:
            write = self.wanted.pop(name, None)
            self.writing = (name, time.monotonic()) if write else None
        if write is None:
            return
        try:
            # A disk that hung for long may answer when another job has taken the run: nothing is written then.
            self.check()
            write()
            if self.warned is not None and not self.wanted:
                self.warned = None
                print_and_log(f"{self.directory}: has caught up")
        except OSError as error:
            with self.lock:
                self.wanted.setdefault(name, write)
            self._warn(name, error.strerror or str(error))
        except Exception as error:  # raised by `poll` in the main thread
            self.error = error
        self.writing = None

    def _warn(self, name: str, trouble: str) -> None:
        """Warn of the status file `name` that the disk does not take, but not too often."""
        if self.warned is None or time.monotonic() - self.warned > WARN_SECONDS:
            self.warned = time.monotonic()
            print_and_log(f"warning: {self.directory / name}: {trouble}; it is retried, and training continues")
