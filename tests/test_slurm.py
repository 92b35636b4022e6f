"""slurm/train.sh as a job of a real Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import ROOT, clean_environment, given

SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=SYSTEM_PATH)]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start Slurm's daemons"),
    pytest.mark.timeout(240),
]

SMALL = given(
    'model.layers=[{kind="dense",units=10}]', "kernels.engine=reference", "data.images=600", "observe.interval=0.1"
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its like talk to a Slurm of our own."""
    lab = tmp_path_factory.mktemp("lab")
    script = ROOT / "scripts" / "slurm_lab"
    subprocess.run([script, "up", lab], check=True, timeout=100)
    yield clean_environment() | {"SLURM_CONF": str(lab / "slurm.conf")}
    subprocess.run([script, "down", lab], check=True, timeout=100)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project's root as a job sees it, with a `runs` folder of its own."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("adam_mpi", "scripts", "slurm", "setup.cfg", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(sys.prefix)
    return root


def submit(slurm: dict[str, str], project: Path, *arguments: str, options: tuple[str, ...]) -> str:
    """Submits the job, with a small network on few images; returns its id."""
    command = ["sbatch", "--parsable", "--output=job.out", *options, "slurm/train.sh", *SMALL, *arguments]
    done = subprocess.run(command, cwd=project, env=slurm, timeout=60, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def output(project: Path) -> str:
    return (project / "job.out").read_text() if (project / "job.out").exists() else ""


def until(happened: Callable[[], object], what: str, project: Path, seconds: float = 100) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit, f"{what} did not come in {seconds:g} s:\n{output(project)}"
        time.sleep(0.1)


def state(slurm: dict[str, str], job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True, check=True)
    return re.findall(r"JobState=(\w+)", shown.stdout)[0]


def ended(slurm: dict[str, str], job: str) -> bool:
    """There are more states on the way than one would think: a job is SIGNALING for a moment, too."""
    return state(slurm, job) in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


def test_a_job_on_two_nodes_trains_to_its_end(slurm: dict[str, str], project: Path) -> None:
    job = submit(slurm, project, *given("train.epochs=1"), options=("--nodes=2", "--ntasks-per-node=2"))
    until(lambda: ended(slurm, job), "its end", project)
    assert state(slurm, job) == "COMPLETED", output(project)
    run = project / "runs" / f"job-{job}"
    assert (run / "DONE").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["provenance"]["hosts"]) == 2 and summary["ranks"]["total"] == 4


def test_a_warned_job_is_queued_again_and_goes_on_to_its_end(slurm: dict[str, str], project: Path) -> None:
    slow = 'inject.faults=["delay role=worker at=compute seconds=0.1"]'
    job = submit(slurm, project, *given("train.epochs=2", "layout.servers=1", slow), options=("--ntasks=3",))
    run = project / "runs" / f"job-{job}"
    until(lambda: (run / "metrics.jsonl").exists(), "the first images", project)
    # What Slurm does itself some time before the job's time is up.
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, timeout=20, check=True)
    until(lambda: ended(slurm, job), "its end", project)
    said = output(project)
    assert state(slurm, job) == "COMPLETED" and (run / "DONE").exists(), said
    assert "stopped by the file STOP" in said and "queued again" in said and "resuming from s" in said, said


def test_a_job_that_fails_is_started_again_and_then_counts_as_failed(slurm: dict[str, str], project: Path) -> None:
    fault = given('inject.faults=["kill rank=1 at=start"]')
    job = submit(slurm | {"ADAM_MPI_RESTARTS": "1"}, project, *fault, options=("--ntasks=2",))
    until(lambda: ended(slurm, job), "its end", project)
    said = output(project)
    assert state(slurm, job) == "FAILED" and said.count("rank 1, worker") == 2, said
    assert said.count("started again") == 1 and "has no DONE" in said


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_job_whose_time_is_up_is_warned_by_slurm_and_goes_on_to_its_end(slurm: dict[str, str], project: Path) -> None:
    # Slurm looks at its jobs every 30 s, and so warns 10 to 40 s before the end of the minute: this takes longer.
    slow = 'inject.faults=["delay role=worker at=compute seconds=0.2"]'
    limit = ("--ntasks=3", "--time=1", "--signal=B:USR1@10")
    job = submit(slurm, project, *given("train.epochs=16", "layout.servers=1", slow), options=limit)
    run = project / "runs" / f"job-{job}"
    until(lambda: ended(slurm, job), "its end", project, 300)
    said = output(project)
    assert state(slurm, job) == "COMPLETED" and (run / "DONE").exists(), said
    assert "stopped by the file STOP" in said and "queued again" in said and "resuming from snapshot" in said, said
    assert json.loads((run / "summary.json").read_text())["epochs"] == 16


def test_a_sweep_is_an_array(slurm: dict[str, str], project: Path) -> None:
    sweep = ["sweep", "--over", "consistency.staleness=0,inf", "-n", "2", "-o", "both", "--launch", "false", *SMALL]
    command = [sys.executable, "-m", "adam_mpi", *sweep, *given("train.epochs=1")]
    said = subprocess.run(command, cwd=project, env=slurm, timeout=60, capture_output=True, text=True).stdout
    line = re.findall(r"as a Slurm array: sbatch (.*)", said)[0].split()
    options = ["sbatch", "--parsable", "--output=job.out", *line]
    submitted = subprocess.run(options, cwd=project, env=slurm, timeout=60, check=True, capture_output=True, text=True)
    job = submitted.stdout.strip()
    runs = [project / "both" / f"consistency.staleness={value}_seed=1" for value in ("0", "inf")]
    until(lambda: all((run / "DONE").exists() for run in runs), "the end of both", project)
    until(lambda: state(slurm, job) == "COMPLETED", "its end", project)
    beyond = ["sbatch", "--wait", "--parsable", "--output=beyond.out", "--array=3", *line[1:]]
    assert subprocess.run(beyond, cwd=project, env=slurm, timeout=60, capture_output=True).returncode != 0
    assert "has 2 lines, and no line 3; submit it with sbatch --array=1-2." in (project / "beyond.out").read_text()
    table = subprocess.run([*command, "--table"], cwd=project, env=slurm, timeout=60, capture_output=True, text=True)
    assert table.returncode == 0 and "consistency.staleness=inf" in table.stdout, table.stdout + table.stderr
