"""What a rank knows of its launcher before MPI is up, and how one of many tells a mistake that all of them made."""

import os
import sys
import time
from contextlib import suppress

from adam_mpi.cluster.sentinel import TELL_SECONDS, taken

# A rank's number as launchers give it, before MPI is up.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# How long a rank waits for the others to have heard of the same mistake; Python starts slowly on a loaded machine.
TOGETHER_SECONDS = 60.0


def rank() -> int | None:
    """Return this process's number among those that a launcher has started; None where none has."""
    given = (os.environ.get(name, "") for name in RANK_VARIABLES)
    return next((int(text) for text in given if text.isdigit()), None)


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
