"""The example of the library: it learns, on every MPI."""

import re
import subprocess

from launch import LAUNCH, ROOT, clean_environment


def test_the_loss_of_the_click_example_falls(mpi, tmp_path):
    command = ["bash", "-c", LAUNCH, ROOT / "scripts/lib.sh", mpi.mpirun, "3", mpi.python, ROOT / "scripts/clicks.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"log-loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and 0.69 < losses[0] < 0.70
    assert losses[-1] < 0.56 and losses == sorted(losses, reverse=True)
