#!/usr/bin/env bash
#SBATCH --job-name=adam_mpi
#SBATCH --nodes=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Trains as a Slurm job, on one node or several; submit it from the project's root:
#
#   sbatch --ntasks=N [--cpus-per-task=N --time=T ...] slurm/train.sh [CONFIG] [--set section.key=value ...]
#   sbatch --nodes=N --ntasks-per-node=N [...] slurm/train.sh ...
#
# No number of tasks is given above: it would win over --ntasks-per-node.
#
# As a task of an array, `slurm/train.sh @FILE` takes the arguments in that line of the file: `adam_mpi sweep` writes it.
#
# The run directory is runs/job-<job id>, or the one of --run. Before its time is up the job takes a snapshot and is queued again; started
# again, for whatever reason, it goes on from there. A failed job is started again ADAM_MPI_RESTARTS times (default: 2).
set -euo pipefail

# Slurm runs a copy of this file from its spool, so the place of submission says where the project is.
library=$SLURM_SUBMIT_DIR/scripts/lib.sh
if [ ! -e "$library" ]; then
    echo "slurm/train.sh: submit from the project's root; $SLURM_SUBMIT_DIR is not it." >&2
    exit 1
fi
. "$library"
[ -x "$venv/bin/python" ] || set_up

# Open MPI leaves files behind when a job is killed: they have a folder of their own, which it makes on every node.
# TMPDIR itself stays as each node has it.
files=$(mktemp -d "${TMPDIR:-/tmp}/adam_mpi-$SLURM_JOB_ID-XXXX")
export PRTE_MCA_prte_tmpdir_base=$files OMPI_MCA_orte_tmpdir_base=$files
trap 'remove_on_all_nodes "$files"' EXIT

case ${1:-} in @*) arguments=$(array_task "${1#@}") || exit 2; eval "set -- $arguments" ;; esac
run=$(run_directory --run "$root/runs/job-$SLURM_JOB_ID" "$@")
threads=()
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || threads=(--set "worker.threads=$SLURM_CPUS_PER_TASK")

# The warning: a snapshot at once, then the job is to end by itself; if that takes too long, the snapshot must do.
warned='' job='' grace=80
warn() {
    warned=yes
    mkdir -p "$run"
    touch "$run/STOP"
    [ -n "$job" ] || return 0
    kill -USR1 "$job" || true
    (sleep $grace && kill -TERM "$job") &
}
trap warn USR1

# Without a number of tasks Slurm gives each node one.
ranks=${SLURM_NTASKS:-${SLURM_NNODES:-1}}
[ "$ranks" -gt 1 ] || echo "slurm/train.sh: one rank does everything; for more: sbatch --ntasks=8 slurm/train.sh ..."
mpi_launch "$(default_mpirun)" "$ranks"
status=0
supervise "$run" "${ADAM_MPI_RESTARTS:-2}" "${clean[@]}" "${launch[@]}" "$venv/bin/python" -m adam_mpi train \
    ${threads[@]+"${threads[@]}"} "$@" --run "$run" --resume || status=$?

if [ -n "$warned" ] && [ $status != 0 ] && [ $status != 2 ]; then
    echo "slurm/train.sh: out of time; queued again, to go on from $run."
    scontrol requeue "$SLURM_JOB_ID"
    # Slurm ends this script when it has taken the job back.
    sleep 60
fi
[ $status != 3 ] || status=0
exit $status
