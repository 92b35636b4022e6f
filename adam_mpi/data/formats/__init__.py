"""The formats of data sets, one module each, which open a file or folder as sources of images by index.

A format has `open_parts(path)`, which returns the sources of "train" and, where there is one, of "test".
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats import arrays, cifar, folder, hdf5, idx, named
from adam_mpi.data.formats.source import Source

KNOWN = "a folder of idx, CIFAR binary or npy files, or of images class/name.png|jpg; an npz or HDF5 file"


def open_parts(path: Path, size: int = 0) -> dict[str, Source]:
    """Open the parts of the data set at `path`, whose format is recognized by its content; `size` is `data.size`.

    Raises UserError for a path that holds no known format.
    """
    if not path.exists():
        raise UserError(f"data set {path}: does not exist; give {KNOWN}")
    try:
        return _format(path, size)(path)
    except OSError as error:
        raise UserError(f"data set {path}: cannot be read ({error})") from None


def open_named(path: Path, inputs: Sequence[Any], targets: Sequence[Any]) -> dict[str, Source]:
    """Open the parts of a data set of named arrays; `inputs` and `targets` are those of the configuration."""
    if not path.exists():
        raise UserError(f"data set {path}: does not exist")
    try:
        return named.open_parts(path, inputs, targets)
    except OSError as error:
        raise UserError(f"data set {path}: cannot be read ({error})") from None


def _format(path: Path, size: int) -> Callable[[Path], dict[str, Source]]:
    """Return the function that opens the data format of `path`."""
    if not path.is_dir():
        return _opener_of_file(path)
    names = {file.name for file in path.iterdir()}
    if names & set(idx.NAMES):
        return idx.open_parts
    if names & set(cifar.NAMES):
        return cifar.open_parts
    if any(name.endswith(".npy") for name in names):
        return arrays.open_folder
    if names & set(cifar.PICKLED):
        raise UserError(f"data set {path}: pickled CIFAR batches are never read; get the binary version (*.bin)")
    return partial(folder.open_parts, size=size)


def _opener_of_file(path: Path) -> Callable[[Path], dict[str, Source]]:
    """Return the function that opens a data set in a single file, recognized by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, opener in (
        (b"\x89HDF\r\n\x1a\n", hdf5.open_parts),
        (b"PK\x03\x04", arrays.open_npz),
        (b"\x93NUMPY", lambda path: arrays.open_folder(path.parent)),
    ):
        if start.startswith(magic):
            return opener
    raise UserError(f"data set {path}: begins with {start.hex() or 'nothing'}, no format known here; give {KNOWN}")
