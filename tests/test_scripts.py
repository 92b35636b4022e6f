"""The shell side: what scripts/test counts, and what scripts/lib.sh chooses."""

import os
import subprocess
import sys
from pathlib import Path

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
        env=inherited | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "environment", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", {}, ["--bind-to none", "--mca osc ^ucx", "--host localhost:3"]),
        ("mpirun (Open MPI) 5.0.11", {"SLURM_JOB_ID": "7"}, ["--bind-to none"]),
        ("HYDRA build details:", {}, []),
    ],
)
def test_the_options_follow_the_mpi(tmp_path: Path, version: str, environment: dict, options: list[str]) -> None:
    mpirun = program(tmp_path / "mpirun", f"echo '{version}'")
    line = shell('mpi_launch "$1" 3; echo "${launch[*]}"', mpirun, **environment).stdout.strip()
    assert line.startswith(f"{mpirun} -n 3")
    assert all(option in line for option in options)
    assert ("--host" in line) == ("--host localhost:3" in options)
    assert ("--" in line) == bool(options)


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
