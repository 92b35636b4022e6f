"""The shell side: what scripts/test counts, and what scripts/lib.sh chooses."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import psutil
import pytest
from launch import ROOT


def tally(folder: Path, **ranks: str) -> tuple[str, str]:
    """What scripts/tally.py prints and complains about, for these lines of each rank."""
    for rank, lines in ranks.items():
        (folder / f"{rank.replace('_', '-')}.results").write_text(lines.replace(", ", "\n") + "\n")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tally.py", folder], capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr.strip()


def test_a_test_counts_once_with_the_worst_that_any_rank_says(tmp_path: Path) -> None:
    first = "begin a, passed a, begin b, passed b, begin c, skipped c"
    second = "begin a, passed a, begin b, failed b, begin c, skipped c"
    assert tally(tmp_path, rank_0=first, rank_1=second) == ("1 1 1", "")


def test_a_rank_that_did_not_end_is_a_failure_with_a_name(tmp_path: Path) -> None:
    assert tally(tmp_path, rank_0="begin a, passed a", rank_1="begin a") == ("0 1 0", "rank-1 did not end a")


def test_what_a_failure_cut_short_is_not_counted(tmp_path: Path) -> None:
    assert tally(tmp_path, rank_0="begin a, passed a, begin b", rank_1="begin a, failed a") == ("0 1 0", "")


def test_a_failed_teardown_counts(tmp_path: Path) -> None:
    assert tally(tmp_path, rank_0="begin a, passed a, failed a") == ("0 1 0", "")


def shell(command: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command after sourcing scripts/lib.sh, outside any Slurm job."""
    inherited = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_ID"}
    script = f'. "$0"; {command}'
    return subprocess.run(
        ["bash", "-c", script, ROOT / "scripts" / "lib.sh", *map(str, arguments)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "environment", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", {}, ["--bind-to none", "--mca osc ^ucx", "--host localhost:11"]),
        ("mpirun (Open MPI) 5.0.11", {"SLURM_JOB_ID": "7"}, ["--bind-to none"]),
        ("HYDRA build details:", {}, []),
    ],
)
def test_the_options_follow_the_mpi(tmp_path: Path, version: str, environment: dict, options: list[str]) -> None:
    mpirun = program(tmp_path / "mpirun", f"echo '{version}'")
    line = shell('mpi_launch "$1" 3; echo "${launch[*]}"', mpirun, **environment).stdout.strip()
    assert line.startswith(f"{mpirun} -n 3")
    assert all(option in line for option in options)
    assert ("--host" in line) == ("--host localhost:11" in options)
    assert ("--" in line) == bool(options)


@pytest.mark.parametrize(
    ("support", "wanted", "survives"), [("yes", "yes", True), ("yes", "no", False), ("no", "yes", False)]
)
def test_an_open_mpi_that_can_is_told_to_survive(tmp_path: Path, support, wanted, survives) -> None:
    mpirun = program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    program(tmp_path / "ompi_info", f"echo ' FT MPI support: {support}'")
    done = shell('mpi_launch "$1" 3; echo "${launch[*]}"', mpirun, ADAM_MPI_SURVIVE=wanted)
    assert ("--with-ft ulfm" in done.stdout) == survives


def test_ranks_are_spread_over_test_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 h0\n10.77.0.2 h1\n10.77.0.3 h2\n")
    spread = [shell('test_hosts "$1" "$2"', tmp_path, ranks).stdout for ranks in (8, 2)]
    assert spread == ["h0:3,h1:3,h2:2", "h0:1,h1:1"]


def test_the_sites_mpirun_is_not_one_of_a_virtual_environment(tmp_path: Path) -> None:
    ours = program(tmp_path / "environment/bin/mpirun", "")
    (tmp_path / "environment/pyvenv.cfg").touch()
    site = program(tmp_path / "a site/bin/mpirun", "")
    path = f"{ours.parent}:{site.parent}:{os.environ['PATH']}"
    assert shell("site_mpirun", PATH=path).stdout.strip() == str(site)


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        program(tmp_path / name, '[ "$1" = --version ] && echo Python 3.9.2 || exit 1')
    done = shell("find_python", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "3.11 or newer; found Python 3.9.2" in done.stderr


JOB = 'echo ran >>"$1/runs"; set -- "$1" $(wc -l <"$1/runs"); '


@pytest.mark.parametrize(
    ("job", "restarts", "runs", "code"),
    [
        ('touch "$1/DONE"', 3, 1, 0),
        # mpirun may say 0 for ranks that were killed, and another code for a training that is complete.
        ("exit 0", 2, 3, 1),
        ('touch "$1/DONE"; exit 9', 2, 1, 0),
        ('[ $2 = 3 ] && touch "$1/DONE"; exit 7', 5, 3, 0),
        ("exit 7", 0, 1, 7),
        ("exit 2", 5, 1, 2),
        ('touch "$1/STOPPED"', 5, 1, 3),
    ],
)
def test_a_supervisor_believes_the_marker_and_starts_again_what_failed(tmp_path, job, restarts, runs, code) -> None:
    (tmp_path / "DONE").touch()
    done = shell(f'supervise "$1" "$2" sh -c {shlex.quote(JOB + job)} job "$1"', tmp_path, restarts)
    assert (done.returncode, len((tmp_path / "runs").read_text().split())) == (code, runs), done.stderr
    assert ("has no DONE" in done.stderr) == (code in (1, 7))


@pytest.mark.parametrize(("marker", "job", "code"), [("DONE", "exit 2", 2), ("STOPPED", "exit 130", 130)])
def test_a_job_that_does_not_start_leaves_the_markers_of_the_last_one(tmp_path: Path, marker, job, code) -> None:
    (tmp_path / marker).write_text("of the last job")
    done = shell(f'supervise "$1" 3 sh -c "{job}"', tmp_path)
    assert (done.returncode, (tmp_path / marker).read_text()) == (code, "of the last job")


def test_a_job_that_finds_its_run_done_says_so_by_its_marker(tmp_path: Path) -> None:
    (tmp_path / "DONE").touch()
    assert shell('supervise "$1" 0 touch "$1/DONE"', tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("2", None),
        ("3", "has 2 lines, and no line 3; submit it with sbatch --array=1-2."),
        ("0", "has 2 lines, and no line 0; submit it with sbatch --array=1-2."),
        (None, "has 2 lines, and no line without an array; submit it with sbatch --array=1-2."),
    ],
)
def test_a_task_of_an_array_has_a_line_of_its_own_or_is_refused(tmp_path: Path, task: str | None, said) -> None:
    (tmp_path / "jobs.txt").write_text("--set train.epochs=1\n--set train.epochs=2\n")
    environment = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    done = shell('arguments=$(array_task "$1") || exit 2; echo "$arguments"', tmp_path / "jobs.txt", **environment)
    if said is None:
        assert (done.returncode, done.stdout) == (0, "--set train.epochs=2\n")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"slurm/train.sh: {tmp_path}/jobs.txt {said}\n"


def test_the_header_for_slurm_has_no_number_of_tasks() -> None:
    """It would win over --ntasks-per-node."""
    lines = (ROOT / "slurm" / "train.sh").read_text().splitlines()
    assert not [line for line in lines if line.startswith("#SBATCH") and "--ntasks" in line]


def clean_output(*command: str) -> subprocess.Popen:
    words = [sys.executable, ROOT / "scripts" / "clean_output", *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_zero_bytes_are_left_out_and_all_else_comes_at_once() -> None:
    """What has no line's end is not held back: the command waits until somebody has read it."""
    script = r"trap 'exit 7' TERM; printf 'out\0\n'; printf 'a\0b' >&2; while :; do sleep 0.01; done"
    job = clean_output("sh", "-c", script)
    assert job.stderr.read(2) == b"ab"
    job.terminate()
    assert (job.communicate(timeout=60), job.returncode) == ((b"out\0\n", b""), 7)


RULE = b"-" * 74 + b"\n"
WARNING = (
    RULE + b"WARNING: The selected 'osc' module 'rdma' is not tested for post-failure\n"
    b"operation, yet you have requested support for fault tolerance.\n\nfailure scenarios: {}\n" + RULE
)
REPEATED = b"[h:1] 3 more processes have sent help message help-mpi-ft.txt / module:untested:failundef\n"
OTHER_HELP = RULE + b"mpirun noticed that process rank 2 exited on signal 9.\n" + RULE


@pytest.mark.parametrize(
    ("stream", "kept"),
    [
        (b"before\n" + WARNING + b"after\n", b"before\nafter\n"),
        (WARNING + b"a\n" + WARNING + REPEATED + b"b", b"a\nb"),
        (b"x\n" + OTHER_HELP + b"y\n", b"x\n" + OTHER_HELP + b"y\n"),
        (b"[h:1] another line\n--\n---", b"[h:1] another line\n--\n---"),
        (RULE, RULE),
    ],
)
def test_the_warning_of_open_mpi_is_removed_however_the_stream_is_cut(stream: bytes, kept: bytes) -> None:
    loader = SourceFileLoader("clean_output", str(ROOT / "scripts" / "clean_output"))
    module = module_from_spec(spec_from_loader("clean_output", loader))
    loader.exec_module(module)
    for size in (1, 2, 7, 80, 1000):
        cleaner = module.Filter()
        written = b"".join(cleaner.feed(stream[start : start + size]) for start in range(0, len(stream), size))
        assert written + cleaner.end() == kept, size


@pytest.mark.parametrize("options", [(), ("--restarts", "0", "--run", "here")])
def test_a_job_of_scripts_train_says_no_zero_bytes(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With an mpirun that says what Open MPI's help messages have in them."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    speaks = program(tmp_path / "mpirun", r"printf 'told\0 of it\n' >&2")
    with (tmp_path / "scripts" / "lib.sh").open("a") as file:
        file.write(f"set_up() {{ :; }}\nmpi_launch() {{ launch=({speaks}); }}\n")
    done = subprocess.run(["bash", "scripts/train", *options], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.stderr.startswith(b"told of it\n") and b"\0" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["sh", "-c", "kill -KILL $$"], 137, b""),
        (["sh", "-c", "seq 100000 >&2; exit 3"], 3, b"".join(b"%d\n" % number for number in range(1, 100001))),
        (["/nowhere/mpirun"], 127, b"/nowhere/mpirun: No such file or directory\n"),
        # Somebody who lives longer has the pipe.
        (["sh", "-c", "sleep 100 & echo $! ; echo told >&2"], 0, b"told\n"),
    ],
)
def test_what_a_command_ends_with_is_passed_on(command: list[str], code: int, said: bytes) -> None:
    job = clean_output(*command)
    assert (job.stderr.read(), job.wait(60)) == (said, code)
    if left := job.stdout.readline():
        os.kill(int(left), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_what_is_killed_takes_its_command_along() -> None:
    job = clean_output("sh", "-c", "echo $$; exec sleep 1000")
    command = psutil.Process(int(job.stdout.readline()))
    job.kill()
    psutil.wait_procs([command], timeout=60)
    assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE


def test_one_interrupt_of_a_terminals_group_reaches_the_command_once(tmp_path: Path) -> None:
    count = "trap 'echo INT' INT; trap exit TERM; echo ready; while :; do sleep 0.01; done"
    words = [sys.executable, ROOT / "scripts" / "clean_output", "sh", "-c", count]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert job.stdout.readline() == b"ready\n"
    os.killpg(job.pid, signal.SIGINT)
    assert job.stdout.readline() == b"INT\n"
    job.terminate()
    assert job.communicate(timeout=60)[0] == b""


def test_a_supervisor_tells_its_jobs_apart_from_those_of_others(tmp_path: Path) -> None:
    """So that each takes the run directory over from the one before, and from nobody else."""
    job = 'echo "$ADAM_MPI_SUPERVISOR $ADAM_MPI_ATTEMPT" >>"$1/told"; exit 7'
    shell(f'for i in 1 2; do supervise "$1" 1 sh -c {shlex.quote(job)} job "$1"; done', tmp_path)
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [attempt for _, attempt in told] == ["1", "2", "1", "2"]
    assert told[0][0] == told[1][0] != told[2][0] == told[3][0]


def test_a_warned_job_is_not_started_again(tmp_path: Path) -> None:
    job = "echo ran >>$1/runs; kill -USR1 $$; while [ ! -e $1/warned ]; do sleep 0.01; done; exit 5"
    done = shell(f'trap "warned=yes; touch $1/warned" USR1; supervise "$1" 3 sh -c "{job}"', tmp_path)
    assert done.returncode == 5 and (tmp_path / "runs").read_text() == "ran\n", done.stderr


def test_a_warning_as_the_job_ends_never_hides_how(tmp_path: Path) -> None:
    again = 'supervise "$1" 3 sh -c "kill -USR1 $$; exit 5" 2>/dev/null || echo $?'
    done = shell(f'trap "warned=yes" USR1; for i in $(seq 100); do {again}; done', tmp_path)
    assert len(done.stdout.split()) == 100 and set(done.stdout.split()) <= {"5", str(128 + signal.SIGUSR1)}


def test_a_supervisor_names_who_was_lost_with_a_host(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "watched-h1-7.txt").write_text("rank 2, server on h1\nrank 3, worker on h1\n")
    done = shell('supervise "$1" 0 true', tmp_path)
    assert "adam_mpi: lost with their host: rank 2, server on h1; rank 3, worker on h1\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "run"),
    [(("a.toml", "--run", "x y", "--set", "a.b=1"), "x y"), (("--run=z",), "z"), ((), None)],
)
def test_the_run_directory_is_the_one_that_is_named(arguments, run) -> None:
    found = shell('run_directory "$@"', *arguments).stdout.strip()
    assert found == run or (run is None and found.startswith("runs/20"))


@pytest.mark.parametrize(
    ("tasks", "cpus", "options"),
    [("2(x3)", "4", "--map-by slot:PE=4 --bind-to core"), ("4", "4", "--bind-to none"), ("8", "1", "--bind-to none")],
)
def test_ranks_are_bound_to_the_cores_that_slurm_gives_them(tmp_path: Path, tasks, cpus, options) -> None:
    lines = "\\n".join(["# CORE,SOCKET", *(f"{core % 4},{core // 4}" for core in (*range(8), *range(8)))])
    program(tmp_path / "lscpu", f"printf '{lines}\\n'")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = shell("binding", PATH=path, SLURM_TASKS_PER_NODE=tasks, SLURM_CPUS_PER_TASK=cpus)
    assert done.stdout.strip() == options


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_what_says_how_it_is_run_can_be_run(path):
    """As the documents call it: by its name."""
    if path.is_file() and path.read_bytes().startswith(b"#!"):
        assert os.access(path, os.X_OK)
