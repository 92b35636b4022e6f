"""What a process knows of its launcher, and how one rank of many prints a mistake that all of them made."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.sentinel import TELL_SECONDS, taken

STARTED = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an mpirun of MPICH's kin or srun --mpi=pmi2",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables with the number of processes, and who sets them: they are as near to the process as can be."""
STEP, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
"""Of what srun starts. A batch script has no number of tasks of its own step; that of the job says nothing about it."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", TASK)
"""Variables with a rank's number, which launchers give before MPI is up."""
CURE = (
    "start it with the mpirun of that MPI, or with srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI built for it); "
    "`srun --mpi=list` shows what there is"
)
# How long a rank waits for the others to have heard of the same mistake; Python starts slowly on a loaded machine.
TOGETHER_SECONDS = 60.0


def check_alone(environment: Mapping[str, str], library: str) -> None:
    """Refuse a process that is a whole MPI job of its own, though its launcher has started several of it.

    Each of them would train all by itself, in the same run directory. `library`: what its MPI says of itself.
    """
    count, who = _started(environment)
    if count > 1:
        mpi = library.split("\n")[0].split(",")[0].strip("\x00 ")
        told = f"{count} processes were started by {who}, but to this Python's MPI ({mpi}) each is a job of its own"
        raise UserError(f"{told}: the launcher and the MPI do not fit; {CURE}")


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's number among those that a launcher has started; None where none has."""
    given = (environment.get(name, "") for name in RANKS)
    return next((int(text) for text in given if text.isdecimal()), None)


def tell_together(text: str) -> None:
    """Print a line on stderr from one rank, and return when all ranks are here or have had their time.

    Launchers kill every other rank when one exits with an error, so nobody may exit before the line is out.
    """
    if not rank():
        tell(text)
    if rank() is not None:
        _meet()


def tell(text: str) -> None:
    """Print a line on stderr, and return when the launcher has read it or has had its time."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
        taken(sys.stderr.fileno(), TELL_SECONDS)


def _meet() -> None:
    """Wait for all ranks, but not for ever: some may be of another program, or lost."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    limit, met = time.monotonic() + TOGETHER_SECONDS, MPI.COMM_WORLD.Ibarrier()
    while not met.Test():
        if time.monotonic() > limit:
            # MPI's own end would wait for them.
            os._exit(2)
        time.sleep(0.001)


def _started(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many processes a launcher has started, and who it was."""
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
