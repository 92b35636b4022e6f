"""Messages for people: the log file of each rank, lines on the terminal, and numbers as text."""

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue


def format_bytes(size: float) -> str:
    """Return `size` bytes as text for people, in the unit that suits it, as in `1.5 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return `seconds` as text for people: `minutes:seconds` or `hours:minutes:seconds`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def format_ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Return ascending `numbers` as text like `0-3, 7, 9-12`; the ranges after the first `most` are left out."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(texts + ["..."] * (len(found) > most))


WRITE_SECONDS = 0.5
log = logging.getLogger(__name__)


class Handler(logging.FileHandler):
    """Write records on a thread of its own and wait for it, but not for long: a disk that hangs must not stop a rank.

    Records that cannot be written are dropped: a full disk must not fill the terminal with tracebacks.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.records: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
        self.unwritten = 0
        self.counting = threading.Lock()
        self.idle = threading.Event()
        self.thread = threading.Thread(target=self._run, name="log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have the thread write the log `record`, and wait for it unless earlier records are not written yet."""
        with self.counting:
            hangs = self.unwritten > 0
            self.unwritten += 1
            self.idle.clear()
        self.records.put(record)
        # The rank may be killed in the next moment, and its last record matters most.
        if not hangs:
            self.idle.wait(WRITE_SECONDS)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the log `record` if the disk of the log has failed; handle other errors as usual."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def flush(self) -> None:
        """Do nothing: the thread of the log flushes each record."""

    def close(self) -> None:
        """Write the remaining log records, if the disk is not hanging, and end the thread."""
        self.records.put(None)
        self.thread.join(WRITE_SECONDS)
        if not self.thread.is_alive():
            super().close()

    def _run(self) -> None:
        """Write log records in the thread of the log, until it is closed."""
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


def start_rank_log(directory: Path, rank: int, name: str) -> Path:
    """Log this rank, as `name`, to `log/rank-N.log` of the run `directory`; return the path of the log."""
    path = directory / "log" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = Handler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}: %(levelname)s %(message)s"))
    root = logging.getLogger("adam_mpi")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    return path


def print_and_log(text: str) -> None:
    """Print the warning `text` on stderr and write it into the log of this rank."""
    sys.stderr.write(f"adam_mpi: {text}\n")
    sys.stderr.flush()
    log.warning(text)
