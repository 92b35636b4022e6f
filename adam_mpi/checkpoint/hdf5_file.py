"""HDF5 files of ours: opened without locks, marked with their format, whole under their name or not there at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.disk_task import advance

PIECE, BLOCK = 8 << 20, 4096
FORMAT = 3
"""Of snapshots, stores and files of weights: docs/reference/files.md says what is in them."""


@contextmanager
def new_file(path: Path, kind: str) -> Iterator[h5py.File]:
    """An HDF5 file under a temporary name, renamed when everything has been written and is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # The oldest layout has no mark for "open for writing", which a killed writer would leave behind. Locks are not
    # needed, as each file has one writer and no reader before it is renamed; on NFS and Lustre they may not work.
    aligned = {"alignment_threshold": BLOCK, "alignment_interval": BLOCK}
    with h5py.File(part, "w", libver="earliest", locking=False, **aligned) as file:
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
        advance()
        view, offset = view[written:], offset + written


def blocks(size: int) -> np.ndarray:
    """Memory for so many bytes that begins where a block does."""
    memory = np.empty(size + BLOCK, np.uint8)
    first = -memory.ctypes.data % BLOCK
    return memory[first : first + size]


def put_past_cache(path: Path, values: np.ndarray, offset: int) -> None:
    """Write whole blocks straight to the disk where the file system can, and the rest as usual.

    What nobody reads soon then neither takes memory nor pushes anything out of it.
    """
    view, straight = values.view(np.uint8), 0
    if values.ctypes.data % BLOCK == offset % BLOCK == 0:
        straight = _put_straight(path, view[: view.size // BLOCK * BLOCK], offset)
    with path.open("rb+") as file:
        put(file.fileno(), view[straight:], offset + straight)


def _put_straight(path: Path, view: np.ndarray, offset: int) -> int:
    """How many bytes have been written; none where the file system does not offer it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return 0
    try:
        put(descriptor, view, offset)
        return view.size
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise
    finally:
        os.close(descriptor)


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
