"""A process that is a whole MPI job of its own, though its launcher has started several, is refused."""

import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.cluster import report_once

LIBRARY = "Open MPI v5.0.8, package: Debian\x00"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "4 processes were started by Open MPI's mpirun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "2 processes were started by an mpirun of MPICH's kin"),
        ({"FLUX_JOB_SIZE": "8"}, "8 processes were started by flux run"),
        ({"PMIX_RANK": "3"}, "4 processes were started by a launcher with PMIx"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, "4 processes were started by srun"),
    ],
)
def test_several_jobs_instead_of_one_are_refused_with_the_cause_and_the_cure(environment, said):
    with pytest.raises(UserError) as refused:
        report_once.check_alone(environment, LIBRARY)
    assert said in str(refused.value) and "(Open MPI v5.0.8) each is a job of its own" in str(refused.value)
    assert "srun --mpi=list" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1"},
        {"PMIX_RANK": "0"},
        # A batch script's own step, and one process of an allocation of several tasks.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # mpirun -n 1 whose daemons were started by srun, on several nodes.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_job_of_one_rank_is_not_refused(environment):
    report_once.check_alone(environment, LIBRARY)


def test_the_rank_is_that_of_the_closest_launcher():
    assert report_once.launched_rank({}) is None
    assert report_once.launched_rank({"SLURM_PROCID": "2"}) == 2
    assert report_once.launched_rank({"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "2"}) == 0
