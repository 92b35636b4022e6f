"""Project Adam's distributed training system as one MPI program."""

import importlib
import os

# Each trainer thread is its own parallelism: BLAS must not start threads of its own. Read when numpy is first imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# numba keeps what it compiles beside the source or at home, unless it is told of a folder before it is imported.
if "ADAM_MPI_CACHE" in os.environ:
    os.environ.setdefault("NUMBA_CACHE_DIR", os.path.join(os.environ["ADAM_MPI_CACHE"], "numba"))

# Imported on demand: naming the package must not start MPI.
OFFERED = {
    "ParameterServer": "adam_mpi.parameter_server.server",
    "Trained": "adam_mpi.inference.trained",
    "UserError": "adam_mpi.base.errors",
    "load": "adam_mpi.inference.trained",
    "train": "adam_mpi.api",
}


def __getattr__(name: str) -> object:
    if name in OFFERED:
        return getattr(importlib.import_module(OFFERED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
