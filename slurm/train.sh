#!/usr/bin/env bash
#SBATCH --job-name=adam_mpi
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --time=01:00:00
#
# Trains as a Slurm job on one node; submit it from the project's root:
#
#   sbatch [--ntasks=N ...] slurm/train.sh [CONFIG] [--set section.key=value ...]
#
# The run directory is runs/job-<job id>; a job that Slurm starts again goes on from there.
set -euo pipefail

# Slurm runs a copy of this file from its spool, so the place of submission says where the project is.
library=$SLURM_SUBMIT_DIR/scripts/lib.sh
if [ ! -e "$library" ]; then
    echo "slurm/train.sh: submit from the project's root; $SLURM_SUBMIT_DIR is not it." >&2
    exit 1
fi
. "$library"
[ -x "$venv/bin/python" ] || set_up

# Open MPI leaves folders behind when a job is killed.
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/adam_mpi-$SLURM_JOB_ID-XXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

run=$root/runs/job-$SLURM_JOB_ID
resume=()
[ ! -d "$run" ] || resume=(--resume)

status=0
mpi_launch "$(default_mpirun)" "${SLURM_NTASKS:-1}"
"${launch[@]}" "$venv/bin/python" -m adam_mpi train "$@" --run "$run" ${resume[@]+"${resume[@]}"} || status=$?

# mpirun can return 0 although its ranks were killed: only the marker says that the training is complete.
if [ ! -e "$run/DONE" ]; then
    echo "slurm/train.sh: $run has no DONE: the training is not complete." >&2
    exit $((status ? status : 1))
fi
exit $status
