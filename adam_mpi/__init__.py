"""Project Adam's distributed training system as one MPI program: train, load and predict, or use its parameter server.

Public names are imported when they are first used, because importing the package must not start MPI.

Examples
--------
>>> import adam_mpi
>>> adam_mpi.__all__
['Handle', 'ParameterServer', 'Trained', 'UserError', '__version__', 'load', 'significant', 'train']
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adam_mpi.api import train
    from adam_mpi.base.errors import UserError
    from adam_mpi.inference.trained import Trained, load
    from adam_mpi.parameter_server.client import significant
    from adam_mpi.parameter_server.handles import Handle
    from adam_mpi.parameter_server.server import ParameterServer

    __version__: str

__all__ = ["Handle", "ParameterServer", "Trained", "UserError", "__version__", "load", "significant", "train"]

# Trainer threads are the parallelism of a rank, so BLAS must not start threads of its own. It reads this on its import.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# numba caches what it compiles beside the source or at home, unless a folder is set before its import.
if "ADAM_MPI_CACHE" in os.environ:
    os.environ.setdefault("NUMBA_CACHE_DIR", os.path.join(os.environ["ADAM_MPI_CACHE"], "numba"))

_MODULES = {
    "Handle": "adam_mpi.parameter_server.handles",
    "ParameterServer": "adam_mpi.parameter_server.server",
    "Trained": "adam_mpi.inference.trained",
    "UserError": "adam_mpi.base.errors",
    "load": "adam_mpi.inference.trained",
    "significant": "adam_mpi.parameter_server.client",
    "train": "adam_mpi.api",
}


if not TYPE_CHECKING:  # A checker would take every name for an attribute of the module.

    def __getattr__(name: str) -> object:
        """Import the public name `name` from its module."""
        if name == "__version__":
            return _version()
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the module, with those that are imported on first use."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    """Return the version in the package's metadata, or "unknown" in a source tree that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("adam-mpi")
    except metadata.PackageNotFoundError:
        return "unknown"
