"""Report once why a job ends: on stderr, in `log/failure.txt` of the run directory and in `summary.json`.

The process that creates the failure file reports; whatever another process reports later is a consequence. Standard
library only: the sentinel, which starts without installed packages, reports too.
"""

import fcntl
import json
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OWNER_FILE = "ADAM_MPI_OWNER_FILE"
"""The variable with the path of the claim by which a job owns its run directory; another job that takes the directory
over removes that file."""
PRINT_SECONDS = 1.0
"""Seconds in which a launcher is expected to read what was printed."""
REPORT_SECONDS = 6.0
"""Seconds after which a run directory that does not answer is given up, and the reason is only printed."""


def report(failure_file: Path, text: str, status: str = "failed", exit_code: int = 1) -> None:
    """Report `text` as the reason why the job ends, unless another process has reported already.

    A run directory that hangs does not prevent the report on stderr; one that another job owns by now is not touched.
    """
    printed = threading.Event()
    done = finishes_within(REPORT_SECONDS, lambda: _report(failure_file, text, status, exit_code, printed))
    if not done and not printed.is_set():
        print_error(text)


def finishes_within(seconds: float, work: Callable[[], object]) -> bool:
    """Call `work`, which may hang, on a thread of its own; return whether it has finished within `seconds`."""
    thread = threading.Thread(target=work, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _report(failure_file: Path, text: str, status: str, exit_code: int, printed: threading.Event) -> None:
    if OWNER_FILE in os.environ and not Path(os.environ[OWNER_FILE]).exists():
        return print_error(text)
    try:
        file = failure_file.open("x")
    except FileExistsError:
        # The caller ends the job next, and with it the process that is about to report; unless that one was killed.
        if wait_for_report(failure_file, 2 * PRINT_SECONDS):
            return
        file = failure_file.open("w")
    except OSError:
        printed.set()
        return print_error(text)
    # Before the file has content: a process that finds content may end the job, and this process with it.
    with suppress(OSError, ValueError):
        note_in_summary(failure_file, text, status, exit_code)
    printed.set()
    print_error(text)
    with suppress(OSError), file:
        file.write(text + "\n")


def wait_for_report(failure_file: Path, seconds: float) -> bool:
    """Return whether another process reports within `seconds` why the job ends."""
    limit = time.monotonic() + seconds
    while not (failure_file.exists() and failure_file.stat().st_size):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def reported_exit_code(failure_file: Path) -> int:
    """Return the exit code of the report: 2 for an error that a restart would repeat, else 1."""
    with suppress(OSError, ValueError, KeyError):
        return json.loads(_summary(failure_file).read_text())["exit_code"]
    return 1


def print_error(text: str) -> None:
    """Print `text` on stderr, and return when the launcher has read it or `PRINT_SECONDS` have passed."""
    # A replacement of sys.stderr may have no method but `write`.
    with suppress(OSError, ValueError, AttributeError):
        # One write: other processes write to the same terminal.
        sys.stderr.write(f"adam_mpi: {text}\n")
        sys.stderr.flush()
        wait_until_read(sys.stderr.fileno(), PRINT_SECONDS)


def wait_until_read(pipe: int, seconds: float) -> bool:
    """Return whether the launcher reads all of `pipe` within `seconds`.

    Some launchers discard what they have not read when the job ends. A descriptor that is no pipe counts as read.
    """
    limit = time.monotonic() + seconds
    while stat.S_ISFIFO(os.fstat(pipe).st_mode) and any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def note_in_summary(failure_file: Path, text: str, status: str, exit_code: int = 1) -> None:
    """Add the reason `text` to `summary.json` of the run; raise OSError or ValueError where that is impossible."""
    path = _summary(failure_file)
    summary = json.loads(path.read_text()) if path.exists() else {}
    summary |= {"status": status, "failure": text, "exit_code": exit_code}
    part = path.with_suffix(".failed")
    part.write_text(json.dumps(summary, indent=2) + "\n")
    part.replace(path)


def repair_summary(failure_file: Path) -> None:
    """Add the reason again if the coordinator overwrote the summary at the same time; it writes no more by now."""
    with suppress(OSError, ValueError):
        text = failure_file.read_text().rstrip()
        if text and json.loads(_summary(failure_file).read_text())["status"] == "running":
            note_in_summary(failure_file, text, "interrupted" if text.startswith("interrupted") else "failed")


def _summary(failure_file: Path) -> Path:
    return failure_file.parent.parent / "summary.json"
