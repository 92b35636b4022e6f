# Set-up and the choice of mpirun's options, for scripts/train, scripts/test, slurm/train.sh and the tests. Source it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
venv_mpich=$root/.venv-mpich
# Put before a command line to remove the zero bytes and the warning that Open MPI writes at every start.
clean=("$venv/bin/python" -I -S "$root/scripts/clean_output")

say() { echo "set-up: $*"; }

fail() { echo "$*" >&2; exit 1; }

# The first Python on PATH that is new enough.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "adam_mpi needs Python 3.11 or newer; found $(python3 --version 2>/dev/null || echo none)." \
        "Put a newer python3 first on PATH."
}

# The mpirun that the site offers: on PATH, and not the one of our own environments.
site_mpirun() {
    local folder
    while IFS= read -r -d : folder; do
        if [ -x "$folder/mpirun" ] && [ ! -e "$folder/../pyvenv.cfg" ]; then
            echo "$folder/mpirun"
            return
        fi
    done <<<"$PATH:"
}

# The mpirun that starts our jobs: the site's before our own.
default_mpirun() {
    local site
    site=$(site_mpirun)
    echo "${site:-$venv/bin/mpirun}"
}

# pip is what a half-made environment lacks.
make_venv() {
    local python
    [ -x "$1/bin/pip" ] && return
    python=$(find_python) || exit 1
    say "making ${1##*/} with $("$python" --version)"
    "$python" -m venv "$1" \
        || fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv."
}

# The place counts too: an environment that was copied must not go on with the code of its old place.
stamp() { { echo "$root"; cat "$root/setup.cfg" "$root/pyproject.toml"; } | cksum; }

up_to_date() { [ "$(cat "$1/.set-up-$2" 2>/dev/null)" = "$(stamp)" ]; }

pip_install() {
    local python=$1/bin/python
    shift
    "$python" -m pip install --quiet --disable-pip-version-check "$@" || fail "pip could not install it; why is above."
}

# install [EXTRA...]: the package, editable, with these extras; pip is not called when nothing has changed.
install() {
    local extra extras missing=()
    for extra in package "$@"; do
        up_to_date "$venv" "$extra" || missing+=("$extra")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    extras=$(IFS=,; echo "$*")
    say "installing adam_mpi${extras:+[$extras]} into .venv; the first time takes a minute or two"
    (cd "$root" && pip_install "$venv" -e ".${extras:+[$extras]}") || exit 1
    for extra in "${missing[@]}"; do stamp >"$venv/.set-up-$extra"; done
}

# set_up [EXTRA...]: .venv in the project's root, with an MPI from PyPI only where the site has none.
set_up() {
    local site extras=("$@")
    site=$(site_mpirun)
    [ -n "$site" ] || extras+=(mpi)
    make_venv "$venv"
    install ${extras[@]+"${extras[@]}"}
    say "ready; MPI: ${site:-Open MPI from PyPI, in .venv}"
}

# A second MPI beside the first would overwrite its mpirun, so MPICH has a small environment of its own
# that borrows the packages of .venv.
set_up_mpich() {
    local packages
    make_venv "$venv_mpich"
    up_to_date "$venv_mpich" mpich && return
    say "installing MPICH into .venv-mpich"
    pip_install "$venv_mpich" "$(mpich_requirement)"
    packages=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    "$venv_mpich/bin/python" - "$packages" <<'PYTHON' || exit 1
import pathlib, site, sys
pathlib.Path(site.getsitepackages()[0], "adam_mpi.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")
PYTHON
    stamp >"$venv_mpich/.set-up-mpich"
}

mpich_requirement() { sed -n '/^mpich =/{n;s/ //gp;}' "$root/setup.cfg"; }

# mpi_launch MPIRUN RANKS: sets the array `launch` to the start of a command line, with the options this MPI wants here.
# With ADAM_MPI_HOSTS the ranks are on the test hosts that scripts/hosts has made there, as evenly as can be.
mpi_launch() {
    # Slots beyond the ranks are for those that join later (recover.spares, recover.respawn, adam_mpi grow).
    local lab=${ADAM_MPI_HOSTS:-} hosts="localhost:$(($2 + 8))"
    [ -z "$lab" ] || hosts=$(test_hosts "$lab" "$2")
    launch=("$1" -n "$2")
    case $("$1" --version 2>&1) in
    *"Open MPI"* | *OpenRTE*)
        # ob1 is the transport that reports failures; UCX's windows complain.
        launch+=($(binding) --mca pml ob1 --mca osc ^ucx --mca mpi_yield_when_idle 1 $(survival "$1"))
        # In a Slurm job the allocation says how many ranks there may be.
        [ -n "${SLURM_JOB_ID:-}" ] || launch+=(--host "$hosts")
        [ -z "$lab" ] || launch+=(--prtemca plm_ssh_agent "$lab/agent")
        [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        ;;
    *)
        # UCX would find that the test hosts are one machine, and go past the network between them.
        [ -z "$lab" ] || export UCX_TLS=tcp,self
        [ -z "$lab" ] || launch+=(-hosts "$hosts" -launcher ssh -launcher-exec "$lab/agent")
        ;;
    esac
    [ -z "$lab" ] || launch=("$root/scripts/hosts" exec "$lab" h0 "${launch[@]}")
}

# test_hosts LAB RANKS: the hosts with their slots, as mpirun wants them.
test_hosts() {
    awk -v ranks="$2" '/ h[0-9]/ { name[count++] = $2 }
        END { for (i = 0; i < count && i < ranks; i++)
            printf "%s%s:%d", i ? "," : "", name[i], (ranks + count - 1 - i) / count }' \
        "$1/hosts"
}

# survival MPIRUN: the options that let a job live on when a rank dies, where this Open MPI can; ADAM_MPI_SURVIVE=no
# leaves them out. Its heartbeat detector is not among them: with a thread of its own it crashes at some starts, without
# one it takes a rank that compiles for dead. The sentinel of each host finds ranks that hang (cluster.stopped).
survival() {
    local information=${1%/*}/ompi_info
    [ "${ADAM_MPI_SURVIVE:-yes}" = yes ] && [ -x "$information" ] || return 0
    "$information" 2>/dev/null | grep -q "FT MPI support: yes" || return 0
    # Open MPI warns of windows after a failure, in each start; what we do with them is in the tests.
    # Its OFI transport, which ob1 uses for one-sided transfers only, sleeps for a second in every start.
    echo "--with-ft ulfm"
    [ -n "${OMPI_MCA_btl:-}" ] || echo "--mca btl ^ofi"
}

# How Open MPI binds ranks. By default each gets one core, which all its threads would share; where a Slurm job has given
# each task cores, and they are there, the rank gets those.
binding() {
    local tasks=${SLURM_TASKS_PER_NODE:-1} cpus=${SLURM_CPUS_PER_TASK:-1}
    if [ "$cpus" -gt 1 ] && [ $((${tasks%%[!0-9]*} * cpus)) -le "$(physical_cores)" ]; then
        echo "--map-by slot:PE=$cpus --bind-to core"
    else
        echo "--bind-to none"
    fi
}

# Slurm may count the threads of a core as CPUs, Open MPI does not.
physical_cores() { lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l; }

# run_directory ARGUMENTS...: the one they name with --run, or a new one.
run_directory() {
    local run=runs/$(date +%Y%m%d-%H%M%S)
    while [ $# -gt 0 ]; do
        case $1 in
        --run) run=${2:-} ;;
        --run=*) run=${1#--run=} ;;
        esac
        shift
    done
    echo "$run"
}

# supervise RUN RESTARTS COMMAND...: runs a training job until its run directory says that it is complete. A job that
# fails is started again, so many times at the most; it goes on from what the run directory holds. Returns 0 when the
# training is complete, 3 when the job was stopped on request, else what the job returned (never 0; 128 and the number of
# a trapped signal that came in the moment the job ended).
# While it runs, the job's process is $job; once $warned is set, nothing is started again.
# Markers of an earlier job stay until this one has started and removes them; they are no sign of its success.
# A job that is started again has a higher ADAM_MPI_ATTEMPT, and takes the run directory over from the one before.
supervise() {
    local run=$1 left=$2 status done stopped
    shift 2
    export ADAM_MPI_SUPERVISOR ADAM_MPI_ATTEMPT=0
    ADAM_MPI_SUPERVISOR=$(uname -n)-$$-$(date +%s)-$RANDOM
    while true; do
        ADAM_MPI_ATTEMPT=$((ADAM_MPI_ATTEMPT + 1))
        done=$(identity "$run/DONE") stopped=$(identity "$run/STOPPED")
        "$@" &
        job=$!
        wait_for_job && status=0 || status=$?
        # mpirun can return 0 although its ranks were killed: only the marker tells.
        [ ! -e "$run/DONE" ] || [ "$(identity "$run/DONE")" = "$done" ] || return 0
        [ ! -e "$run/STOPPED" ] || [ "$(identity "$run/STOPPED")" = "$stopped" ] || return 3
        tell_lost_hosts "$run"
        # What was given cannot work, or somebody pressed Ctrl-C: no better the second time.
        case $status in 2 | 130 | 143) return $status ;; esac
        [ "$left" -gt 0 ] && [ -z "${warned:-}" ] || break
        left=$((left - 1))
        echo "The job failed ($status); it is started again, $left more times at the most." >&2
    done
    echo "$run has no DONE of this job: the training is not complete." >&2
    return $((status ? status : 1))
}

# identity FILE: what changes when a file is made anew or touched; nothing where there is none.
identity() { stat -c '%i %z' "$1" 2>/dev/null || true; }

# tell_lost_hosts RUN: names the ranks whose sentinel is gone with them: of a job that has ended, no other list of ranks
# is there after a moment.
tell_lost_hosts() {
    local moment list
    for moment in 1 2 3 4 5 6 7 8 9 10; do
        compgen -G "$1/log/watched-*.txt" >/dev/null || return 0
        sleep 0.2
    done
    for list in "$1"/log/watched-*.txt; do
        echo "adam_mpi: lost with their host: $(paste -sd ';' "$list" | sed 's/;/; /g')" >&2
    done
}

# A signal that is trapped ends `wait` before the job has ended.
wait_for_job() {
    local status again
    while true; do
        wait "$job" && status=0 || status=$?
        kill -0 "$job" 2>/dev/null && continue
        # The signal may have come as the job ended. Bash then still knows how it ended, or says 127, or (5.2) -1.
        wait "$job" 2>/dev/null && again=0 || again=$?
        case $again in 127 | -1) ;; *) status=$again ;; esac
        return $status
    done
}

# array_task FILE: the line of the file that this task of a Slurm array is for; there must be one.
array_task() {
    local line count
    count=$(wc -l <"$1") || fail "slurm/train.sh: $1 cannot be read; 'adam_mpi sweep' writes such a file."
    line=$(sed -n "${SLURM_ARRAY_TASK_ID:-0}{p;q}" "$1" 2>/dev/null) || line=''
    [ -n "$line" ] || fail "slurm/train.sh: $1 has $count lines, and no line ${SLURM_ARRAY_TASK_ID:-without an array};" \
        "submit it with sbatch --array=1-$count."
    echo "$line"
}

# remove_on_all_nodes FOLDER: of a Slurm job; what cannot be reached any more stays.
remove_on_all_nodes() {
    rm -rf "$1"
    [ "${SLURM_NNODES:-1}" -gt 1 ] || return 0
    timeout 20 srun --mpi=none --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 rm -rf "$1" \
        >/dev/null 2>&1 || true
}
