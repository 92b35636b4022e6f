"""Report an error once: why a job ends, or what all ranks that a launcher started would print alike.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from adam_mpi.base.errors import UserError

OWNER_FILE = "ADAM_MPI_OWNER_FILE"
"""The variable with the path of the claim by which a job owns its run directory; another job that takes the directory
over removes that file."""
PRINT_SECONDS = 1.0
"""Seconds in which a launcher is expected to read what was printed."""
REPORT_SECONDS = 6.0
"""Seconds after which a run directory that does not answer is given up, and the reason is only printed."""


def report_failure(failure_file: Path, text: str, status: str = "failed", exit_code: int = 1) -> None:
    """Report `text` as the reason why the job ends, unless another process has reported already.

    A run directory that hangs does not prevent the report on stderr; one that another job owns by now is not touched.
    """
    printed = threading.Event()
    done = finishes_within(REPORT_SECONDS, lambda: _report(failure_file, text, status, exit_code, printed))
    if not done and not printed.is_set():
        print_error(text)


def finishes_within(seconds: float, work: Callable[[], object]) -> bool:
    """Call `work` of a failing rank, which may hang, on its own thread; return whether it ends within `seconds`."""
    thread = threading.Thread(target=work, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _report(failure_file: Path, text: str, status: str, exit_code: int, printed: threading.Event) -> None:
    """Print the reason `text` why the job ends, and write it into the run directory."""
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
    """Print the error `text` on stderr, and return when the launcher has read it or `PRINT_SECONDS` have passed."""
    # A replacement of sys.stderr may have no method but `write`.
    with suppress(OSError, ValueError, AttributeError):
        # One write: other processes write to the same terminal.
        sys.stderr.write(f"adam_mpi: {text}\n")
        sys.stderr.flush()
        wait_until_read(sys.stderr.fileno(), PRINT_SECONDS)


def wait_until_read(pipe: int, seconds: float) -> bool:
    """Return whether the launcher reads all of the error output `pipe` within `seconds`.

    Some launchers discard what they have not read when the job ends. A descriptor that is no pipe counts as read.
    """
    limit = time.monotonic() + seconds
    while stat.S_ISFIFO(os.fstat(pipe).st_mode) and any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def note_in_summary(failure_file: Path, text: str, status: str, exit_code: int = 1) -> None:
    """Add the reason `text` why the job failed to `summary.json`; raise OSError or ValueError if impossible."""
    path = _summary(failure_file)
    summary = json.loads(path.read_text()) if path.exists() else {}
    summary |= {"status": status, "failure": text, "exit_code": exit_code}
    part = path.with_suffix(".failed")
    part.write_text(json.dumps(summary, indent=2) + "\n")
    part.replace(path)


def repair_summary(failure_file: Path) -> None:
    """Add the reason of the failure again if the coordinator overwrote `summary.json` at the same time."""
    with suppress(OSError, ValueError):
        text = failure_file.read_text().rstrip()
        if text and json.loads(_summary(failure_file).read_text())["status"] == "running":
            note_in_summary(failure_file, text, "interrupted" if text.startswith("interrupted") else "failed")


def _summary(failure_file: Path) -> Path:
    return failure_file.parent.parent / "summary.json"


STARTED = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an mpirun of MPICH's kin or srun --mpi=pmi2",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables with the number of processes, and the launcher that sets them: the closest one to the process."""
STEP = "SLURM_STEP_NUM_TASKS"
TASK = "SLURM_PROCID"
"""Number of tasks and task number of a step that srun starts; the step of a batch script has no number of tasks."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", TASK)
"""Variables with a rank's number, which launchers set before MPI is initialized."""
CURE = (
    "start it with the mpirun of that MPI, or with srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI built for it); "
    "`srun --mpi=list` shows what there is"
)

# Seconds that a rank waits for the others to find the same error; Python starts slowly on a loaded machine.
TOGETHER_SECONDS = 60.0


def check_alone(environment: Mapping[str, str], library: str) -> None:
    """Raise UserError if this process is a whole MPI job of its own, though its launcher has started several processes.

    Each of them would train alone, in the same run directory. `library` is the version text of this process's MPI.
    """
    count, launcher = _started(environment)
    if count > 1:
        mpi = library.split("\n")[0].split(",")[0].strip("\x00 ")
        what = (
            f"{count} processes were started by {launcher}, but to this Python's MPI ({mpi}) each is a job of its own"
        )
        raise UserError(f"{what}: the launcher and the MPI do not fit; {CURE}")


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that the launcher has set in `environment`; None without a launcher."""
    given = (environment.get(name, "") for name in RANKS)
    return next((int(text) for text in given if text.isdecimal()), None)


def print_once(text: str) -> None:
    """Print the error `text` from one rank, and return when all ranks have called this or a minute has passed.

    Launchers kill every other rank when one exits with an error, so no rank may exit before the line is printed.
    """
    if not launched_rank():
        print_line(text)
    if launched_rank() is not None:
        _meet()


def print_line(text: str) -> None:
    """Print the error line `text` on stderr, and return when the launcher has read it or PRINT_SECONDS have passed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
        wait_until_read(sys.stderr.fileno(), PRINT_SECONDS)


def _meet() -> None:
    """Wait for all ranks before one prints their common error, but not forever: some may be lost, or not have it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    limit = time.monotonic() + TOGETHER_SECONDS
    barrier = MPI.COMM_WORLD.Ibarrier()
    while not barrier.Test():
        if time.monotonic() > limit:
            # MPI's finalization would wait for them.
            os._exit(2)
        time.sleep(0.001)


def _started(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many processes the launcher has started, and the launcher's name; 0 if that is unknown."""
    counts = {name: _to_count(environment[name]) for name in STARTED if name in environment}
    if counts:
        # A launcher inside of another one's job may well start a single process.
        name = min(counts, key=counts.__getitem__)
        return counts[name], STARTED[name]
    if "PMIX_RANK" in environment and _to_count(environment["PMIX_RANK"]) > 0:
        return _to_count(environment["PMIX_RANK"]) + 1, "a launcher with PMIx"
    return (_to_count(environment.get(STEP, "")), "srun") if TASK in environment else (0, "")


def _to_count(text: str) -> int:
    """Return a number of processes that the launcher's environment gives as `text`."""
    return int(text) if text.isdecimal() else 0
