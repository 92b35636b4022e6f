"""What a process knows of its launcher, and how one of many ranks prints an error that all of them have."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.failure_report import PRINT_SECONDS, wait_until_read

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


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that the launcher has set in `environment`; None without a launcher."""
    given = (environment.get(name, "") for name in RANKS)
    return next((int(text) for text in given if text.isdecimal()), None)


def print_once(text: str) -> None:
    """Print the line `text` on stderr from one rank, and return when all ranks have called this or a minute has passed.

    Launchers kill every other rank when one exits with an error, so no rank may exit before the line is printed.
    """
    if not rank():
        print_line(text)
    if rank() is not None:
        _meet()


def print_line(text: str) -> None:
    """Print the line `text` on stderr, and return when the launcher has read it or `PRINT_SECONDS` have passed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
        wait_until_read(sys.stderr.fileno(), PRINT_SECONDS)


def _meet() -> None:
    """Wait for all ranks, but not forever: some may be lost, or not have the error."""
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
    """Return how many processes the launcher has started, and its name; 0 if that is unknown."""
    counts = {name: _count(environment[name]) for name in STARTED if name in environment}
    if counts:
        # A launcher inside of another one's job may well start a single process.
        name = min(counts, key=counts.__getitem__)
        return counts[name], STARTED[name]
    if "PMIX_RANK" in environment and _count(environment["PMIX_RANK"]) > 0:
        return _count(environment["PMIX_RANK"]) + 1, "a launcher with PMIx"
    return (_count(environment.get(STEP, "")), "srun") if TASK in environment else (0, "")


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0
