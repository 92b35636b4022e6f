"""The scribe: writes what people see of a running job, on a thread of its own.

A run directory that is full, fails or is slow stops nobody: a loud warning says what could not be written, and it is
tried again until it can be.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from adam_mpi.base.log import say

RETRY_SECONDS, WARN_SECONDS, SLOW_SECONDS = 1.0, 30.0, 10.0


class StatusWriter:
    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        """Write into `directory`; `check` is called before each write, and raises where another job has the run."""
        self.directory, self.check = directory, check
        self.wanted: dict[str, Callable[[], None]] = {}
        """What is to be written, by the name of the file; of one that comes again only the newest is."""
        self.lock, self.news = threading.Lock(), threading.Event()
        self.writing: tuple[str, float] | None = None
        """What is being written, since when."""
        self.warned: float | None = None
        """When a warning was given that nothing has taken back since."""
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="scribe", daemon=True).start()

    def want(self, name: str, write: Callable[[], None]) -> None:
        """Have a file written soon."""
        with self.lock:
            self.wanted[name] = write
        self.news.set()

    def forget(self, name: str) -> None:
        """Write nothing more of what was wanted of a file."""
        with self.lock:
            self.wanted.pop(name, None)

    def look(self) -> None:
        """Warn when something has been under way for long; raises what was no trouble with the disk."""
        if self.error is not None:
            raise self.error
        writing = self.writing
        if writing is not None and time.monotonic() - writing[1] > SLOW_SECONDS:
            self._warn(writing[0], f"not written for {time.monotonic() - writing[1]:.0f} s")

    def settle(self, seconds: float) -> bool:
        """Wait until all is written; False when that takes longer."""
        limit = time.monotonic() + seconds
        while (self.wanted or self.writing) and self.error is None:
            if time.monotonic() > limit:
                return False
            time.sleep(0.005)
        return True

    def _run(self) -> None:
        while self.error is None:
            self.news.wait(RETRY_SECONDS if self.wanted else None)
            self.news.clear()
            for name in list(self.wanted):
                self._write(name)

    def _write(self, name: str) -> None:
        with self.lock:
            write = self.wanted.pop(name, None)
            self.writing = (name, time.monotonic()) if write else None
        if write is None:
            return
        try:
            # A disk that hung for long may answer when another job has taken the run over: nothing is written then.
            self.check()
            write()
            if self.warned is not None and not self.wanted:
                self.warned = None
                say(f"{self.directory}: has caught up")
        except OSError as error:
            with self.lock:
                self.wanted.setdefault(name, write)
            self._warn(name, error.strerror or str(error))
        except Exception as error:  # raised by the main thread
            self.error = error
        self.writing = None

    def _warn(self, name: str, trouble: str) -> None:
        if self.warned is None or time.monotonic() - self.warned > WARN_SECONDS:
            self.warned = time.monotonic()
            say(f"warning: {self.directory / name}: {trouble}; it is tried again, and training goes on")
