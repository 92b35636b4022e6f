"""slurm/train.sh as a job of a real Slurm."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import ROOT, clean_environment

SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=SYSTEM_PATH)]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start Slurm's daemons"),
    pytest.mark.timeout(240),
]


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


def sbatch(slurm: dict[str, str], project: Path, *arguments: str) -> tuple[int, str]:
    """Runs the job to its end; its exit code and its output."""
    command = ["sbatch", "--wait", "--ntasks=4", "--output=job.out", "slurm/train.sh", *arguments]
    code = subprocess.run(command, cwd=project, env=slurm, timeout=200, check=False).returncode
    return code, (project / "job.out").read_text()


def test_a_job_trains_to_its_end(slurm: dict[str, str], project: Path) -> None:
    code, output = sbatch(slurm, project, "--set", "train.epochs=1", "--set", "data.images=512")
    assert code == 0, output
    (run,) = (project / "runs").iterdir()
    assert run.name.startswith("job-")
    assert (run / "DONE").exists(), output


def test_a_job_that_cannot_train_fails(slurm: dict[str, str], project: Path) -> None:
    code, output = sbatch(slurm, project, "--set", "train.epoks=1")
    assert code != 0
    assert "train.epoks" in output
