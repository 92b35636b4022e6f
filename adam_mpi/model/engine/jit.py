"""Compile emitted source, once per machine into a cache folder, or run it uncompiled.

numba caches what it compiles beside the file that the source is in, so the source is written to a file whose name is a
hash of everything the result depends on.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import llvmlite
import numba

from adam_mpi.base import machine, native
from adam_mpi.base.errors import UserError

HEADER = '''"""Emitted by adam_mpi.model.engine; {note}."""

import numpy as np

from adam_mpi.model.engine.{kit} import kit, row_kit
from adam_mpi.model.kernels.activations_and_loss import SPREAD, mix

globals().update(kit({lanes}))
'''
SIGNATURE = (
    "(int64, boolean, boolean, boolean, int64, float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], "
    "{pixels}[::1], int64[::1], uint64[::1], float32[::1], int64)"
)


def folder() -> Path:
    """Return the cache folder: ADAM_MPI_CACHE, or one in the user's own cache folder.

    Raises UserError where it cannot be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get("ADAM_MPI_CACHE") or Path(home) / "adam_mpi")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot be written")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; set ADAM_MPI_CACHE to a folder for compiled kernels") from None
    return path


@cache
def run(text: str, lanes: int, pixels: str = "uint8") -> Callable:
    """Return the compiled function `run` of a program that loads values of the type `pixels`."""
    return _compiled(text, lanes, "run", SIGNATURE.format(pixels=pixels))


@cache
def graph_run(text: str, lanes: int, signature: str) -> Callable:
    """Return the compiled function `run` of the program of a graph."""
    return _compiled(text, lanes, "run", signature)


@cache
def apply_fused(text: str, lanes: int) -> Callable:
    """Return the compiled function of a program that applies fused updates, if it has large layers."""
    return _compiled(text, lanes, "apply_fused", "(float32[::1], float32[::1], float32[::1], int64, float32, float32)")


def timed(text: str, lanes: int) -> Callable:
    """Return the compiled function `timed` that the tuner measures."""
    return _compiled(text, lanes, "timed", "(float32[::1], float32[::1], float32[::1], int64)")


def _compiled(text: str, lanes: int, function: str, signature: str) -> Callable:
    """Return the compiled `function` of the source `text`, from the cache if it was compiled before."""
    source = HEADER.format(kit="vector", lanes=lanes, note=f"{lanes} lanes") + text
    name = f"kernels_{key(source)}"
    _show(name, source)
    path = folder() / f"{name}.py"
    # An existing file stays as it is, or numba would compile it again.
    if not path.exists():
        write(path, source)
    # Ranks of one node compile once: the others wait here, then find it in numba's cache.
    with lock(path.with_suffix(".lock")):
        made = getattr(_module(name, path), function)
        made.compile(signature)
    return made


def uncompiled(text: str, lanes: int, function: str = "run") -> Callable:
    """Return a function of a program uncompiled, with numpy for vectors."""
    from adam_mpi.model.kernels import activations_and_loss

    source = HEADER.format(kit="numpy_vectors", lanes=lanes, note="uncompiled") + text
    space: dict = {}
    exec(compile(source, "<emitted>", "exec"), space)
    space["mix"] = activations_and_loss.mix.py_func
    return space[function]


def key(source: str) -> str:
    """Return a hash of `source`, the vector kit it uses, the CPU and the compiler."""
    own = [Path(__file__).with_name(name) for name in ("vector.py", "vector_bundle.py", "vector_functions.py")]
    kit = b"".join(path.read_bytes() for path in (*own, Path(native.__file__)))
    parts = (
        source.encode(),
        kit,
        machine.cpu_name().encode(),
        numba.__version__.encode(),
        llvmlite.__version__.encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def write(path: Path, text: str) -> None:
    """Write a file of the kernel cache as a whole or not at all, even if other processes write it too."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`; other processes of this node wait for it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _show(name: str, source: str) -> None:
    """Write the source to the folder that ADAM_MPI_SHOW_KERNELS names, if it is set, for reading."""
    shown = os.environ.get("ADAM_MPI_SHOW_KERNELS")
    if shown:
        Path(shown).mkdir(parents=True, exist_ok=True)
        (Path(shown) / f"{name}.py").write_text(source)
