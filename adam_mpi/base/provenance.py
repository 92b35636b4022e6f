"""The provenance of a result: machine, versions, commit and command."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("adam-mpi", "mpi4py", "numpy", "numba", "scipy", "h5py")


def provenance(hosts: list[str], seed: int) -> dict[str, Any]:
    """Return the provenance of a job on `hosts` with `seed`."""
    from mpi4py import MPI

    mpi = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\x00 ")
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"hosts": sorted(set(hosts)), "mpi": mpi, "command": command, "seed": seed} | machine()


def machine() -> dict[str, Any]:
    """Return the part of the provenance that needs no MPI."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
