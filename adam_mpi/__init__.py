"""Project Adam's distributed training system as one MPI program."""

import os

# Each trainer thread is its own parallelism: BLAS must not start threads of its own. Read when numpy is first imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def __getattr__(name: str) -> object:
    # Imported on demand: naming the package must not start MPI.
    if name == "ParameterServer":
        from adam_mpi.library import ParameterServer

        return ParameterServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
