"""A log file per rank; nothing of it goes to the terminal."""

import logging
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

WRITE_SECONDS = 0.5
log = logging.getLogger(__name__)


class Handler(logging.FileHandler):
    """Writes on a thread of its own, and is waited for, but not for long: a disk that hangs stops nobody who logs.

    What cannot be written is passed over: a full disk is no reason to fill the terminal with tracebacks.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.records: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
        self.unwritten, self.counting, self.idle = 0, threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with self.counting:
            hangs, self.unwritten = self.unwritten > 0, self.unwritten + 1
            self.idle.clear()
        self.records.put(record)
        # In time for whoever is killed in the next moment.
        if not hangs:
            self.idle.wait(WRITE_SECONDS)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def flush(self) -> None:
        """Nothing to do: each record is flushed by the thread."""

    def close(self) -> None:
        """Write what is left, if the disk takes it, and end the thread."""
        self.records.put(None)
        self.thread.join(WRITE_SECONDS)
        if not self.thread.is_alive():
            super().close()

    def _run(self) -> None:
        while (record := self.records.get()) is not None:
            try:
                logging.FileHandler.emit(self, record)
                if self.stream:
                    self.stream.flush()
            except OSError:
                self.handleError(record)
            with self.counting:
                self.unwritten -= 1
                if not self.unwritten:
                    self.idle.set()


def start(directory: Path, rank: int, name: str) -> Path:
    """Log this rank to `log/rank-N.log` of the run directory."""
    path = directory / "log" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = Handler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}: %(levelname)s %(message)s"))
    root = logging.getLogger("adam_mpi")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    return path


def say(text: str) -> None:
    """Say something where people see it, and in the log."""
    sys.stderr.write(f"adam_mpi: {text}\n")
    sys.stderr.flush()
    log.warning(text)
