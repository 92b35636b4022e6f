"""`adam_mpi merge`: copy a snapshot into one plain HDF5 file, for programs that know only HDF5."""

import math
from pathlib import Path

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file, snapshot
from adam_mpi.checkpoint.hdf5_file import new_file, open_file
from adam_mpi.model.parameters import PIECE


def merge(path: Path, output: Path) -> str:
    """Copy every tensor of the snapshot `path`, or of the newest one of the run `path`, into `output`."""
    folder = path if (path / snapshot.MANIFEST).exists() else newest_snapshot(path)
    snapshot.check(folder)
    count = 0
    with open_file(folder / snapshot.MODEL, model_file.KIND) as source, new_file(output, model_file.KIND) as file:
        for key, value in source.attrs.items():
            file.attrs[key] = value

        def copy(name: str, item: object) -> None:
            nonlocal count
            if isinstance(item, h5py.Dataset):
                _copy(item, file, name)
                count += item.dtype == np.float32

        source.visititems(copy)
    return f"{output}: {count} tensors of {folder.name}"


def _copy(source: h5py.Dataset, file: h5py.File, name: str) -> None:
    """Copy a dataset a few rows at a time: a tensor may be larger than memory."""
    if not source.shape:
        file[name] = source[()]
        return
    copied = file.create_dataset(name, source.shape, source.dtype)
    step = max(1, PIECE // math.prod(source.shape[1:]))
    for first in range(0, len(source), step):
        copied[first : first + step] = source[first : first + step]


def newest_snapshot(run: Path) -> Path:
    """Return the newest snapshot of `run` that is whole; raise a UserError where there is none.

    The error of the newest one is part of that: it says why it cannot be read.
    """
    trouble = ""
    for folder in snapshot.list_snapshots(run / "snapshots")[::-1]:
        try:
            snapshot.check(folder)
            return folder
        except UserError as error:
            trouble = trouble or f" ({error})"
    raise UserError(f"{run}: no whole snapshot{trouble}; give the folder of a snapshot or of a run")
