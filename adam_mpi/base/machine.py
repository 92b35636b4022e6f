"""This machine: what kernels depend on (vector registers, caches), and the provenance of a result."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

PACKAGES = ("adam-mpi", "mpi4py", "numpy", "numba", "scipy", "h5py")


def provenance(hosts: list[str], seed: int) -> dict[str, Any]:
    """Return the provenance of a result: the machine, the `hosts` and the `seed` of the job that made it."""
    from mpi4py import MPI

    mpi = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\x00 ")
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"hosts": sorted(set(hosts)), "mpi": mpi, "command": command, "seed": seed} | host_provenance()


def host_provenance() -> dict[str, Any]:
    """Return the host's part of the provenance of a result: processor, versions, and all else that needs no MPI."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str:
    """Return the version of the installed `package` for the provenance of a result."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    """Return the model name of the processor for the provenance."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Return the commit of this source tree for the provenance."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu_features() -> dict[str, bool]:
    """Return the features of this CPU as LLVM names them; empty where LLVM does not know them."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


def lanes() -> int:
    """Return the images in a block of this machine, as many as a vector register has float32: 16, 8 or 4."""
    have = cpu_features()
    if have.get("avx512f"):
        return 16
    return 8 if have.get("avx2") else 4


def registers() -> int:
    """Return the number of vector registers of this machine: 32 with AVX-512 and NEON, else 16."""
    many = cpu_features().get("avx512f") or platform.machine().lower() in ("aarch64", "arm64")
    return 32 if many else 16


def x86() -> bool:
    """Return whether this machine has an x86 CPU of 64 bits."""
    return platform.machine().lower() in ("x86_64", "amd64")


def caches() -> dict[str, int]:
    """Return the bytes of this machine's data caches by level ("L2"); empty where the system does not report them."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K"):
            found[f"L{level}"] = 1024 * int(size[:-1])
    return found


def cpu_name() -> str:
    """Return a name of the CPU that differs wherever compiled code does."""
    wanted = sorted(feature for feature, there in cpu_features().items() if there)
    return " ".join([llvm.get_default_triple(), llvm.get_host_cpu_name(), *wanted])
