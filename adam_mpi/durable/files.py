"""HDF5 files of ours: opened without locks, marked with their format, whole under their name or not there at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from adam_mpi.errors import UserError

PIECE = 4 << 20
FORMAT = 2
"""Of snapshots, stores and files of weights: docs/FORMAT.md says what is in them."""


@contextmanager
def new_file(path: Path, kind: str) -> Iterator[h5py.File]:
    """An HDF5 file under a temporary name, renamed when everything has been written and is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # The oldest layout has no mark for "open for writing", which a killed writer would leave behind. Locks are not
    # needed, as each file has one writer and no reader before it is renamed; on NFS and Lustre they may not work.
    with h5py.File(part, "w", libver="earliest", locking=False) as file:
        file.attrs["format"], file.attrs["kind"] = FORMAT, kind
        yield file
    sync(part)
    part.replace(path)
    sync(path.parent)


def lay_out(file: h5py.File, name: str, kind: h5t.TypeID, shape: tuple[int, ...]) -> None:
    """A dataset with its space in the file and nothing in it: `put` writes there."""
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    h5d.create(file.id, name.encode(), kind, h5s.create_simple(shape), layout)


def put(descriptor: int, values: np.ndarray, offset: int) -> None:
    """Write at a place in a file; several times as fast as through HDF5."""
    view = np.atleast_1d(values).view(np.uint8).data
    while view:
        written = os.pwrite(descriptor, view[:PIECE], offset)
        view, offset = view[written:], offset + written


def sync(path: Path) -> None:
    """Until it is on disk, be it a file or a directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path, kind: str) -> h5py.File:
    """A file of ours, for reading; anything else is refused by name."""
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    found, version = file.attrs.get("kind"), file.attrs.get("format")
    if version == FORMAT and found == kind:
        return file
    file.close()
    if version != FORMAT:
        raise UserError(f"{path}: format {version}, this version reads {FORMAT}; use the version that wrote it")
    raise UserError(f"{path}: a file of kind {found}; expected {kind}")
