"""What a launcher says that it has started, where MPI itself knows of one process only. Pure."""

from collections.abc import Mapping

from adam_mpi.errors import UserError

STARTED = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an mpirun of MPICH's kin or srun --mpi=pmi2",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables with the number of processes, and who sets them: they are as near to the process as can be."""
STEP, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
"""Of what srun starts. A batch script has no number of tasks of its own step; that of the job says nothing about it."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", TASK)
CURE = (
    "start it with the mpirun of that MPI, or with srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI built for it); "
    "`srun --mpi=list` shows what there is"
)


def check_alone(environment: Mapping[str, str], library: str) -> None:
    """Refuse a process that is a whole MPI job of its own, though its launcher has started several of it.

    Each of them would train all by itself, in the same run directory. `library`: what its MPI says of itself.
    """
    count, who = _started(environment)
    if count > 1:
        mpi = library.split("\n")[0].split(",")[0].strip("\x00 ")
        told = f"{count} processes were started by {who}, but to this Python's MPI ({mpi}) each is a job of its own"
        raise UserError(f"{told}: the launcher and the MPI do not fit; {CURE}")


def number(environment: Mapping[str, str]) -> int:
    """Which of the processes this one is, as its launcher says; 0 where none says it."""
    return next((_count(environment[name]) for name in RANKS if name in environment), 0)


def _started(environment: Mapping[str, str]) -> tuple[int, str]:
    """How many processes a launcher has started, and who it was."""
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
