"""Our HDF5 files: opened without locks, marked with their format, and complete once they have their final name."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import sync_to_disk
from adam_mpi.checkpoint.disk_task import report_progress

WRITE_BYTES = 8 << 20
"""Bytes of one write; progress is reported after each."""
BLOCK = 4096
"""Alignment, in the file and in memory, of what is written past the page cache."""
FORMAT = 5
"""Version of snapshots, stores and files of weights; docs/reference/files.md describes them and lists what changed."""
LAST_READERS = {3: "450b6f2", 4: "bb9d377"}
"""Format -> the last commit that reads it."""


@contextmanager
def new_file(path: Path, kind: str) -> Iterator[h5py.File]:
    """Yield an HDF5 file under a temporary name; rename it to `path` when everything is written and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # The oldest layout has no mark for "open for writing", which a killed writer would leave behind. Locks are not
    # needed, as each file has one writer and no reader before it is renamed; on NFS and Lustre they may not work.
    aligned = {"alignment_threshold": BLOCK, "alignment_interval": BLOCK}
    with h5py.File(part, "w", libver="earliest", locking=False, **aligned) as file:
        file.attrs["format"] = FORMAT
        file.attrs["kind"] = kind
        yield file
    sync_to_disk(part)
    part.replace(path)
    sync_to_disk(path.parent)


def create_unfilled(file: h5py.File, name: str, kind: h5t.TypeID, shape: tuple[int, ...]) -> None:
    """Create the HDF5 dataset `name` with its space in the file and no values; `write_at` fills it later."""
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    h5d.create(file.id, name.encode(), kind, h5s.create_simple(shape), layout)


def write_at(descriptor: int, values: np.ndarray, offset: int) -> None:
    """Write the bytes of `values` at `offset` of an HDF5 file; several times as fast as through the library."""
    view = np.atleast_1d(values).view(np.uint8).data
    while view:
        written = os.pwrite(descriptor, view[:WRITE_BYTES], offset)
        report_progress()
        view = view[written:]
        offset += written


def aligned_memory(size: int) -> np.ndarray:
    """Return `size` bytes of memory for direct writes of a file, beginning at a multiple of BLOCK."""
    memory = np.empty(size + BLOCK, np.uint8)
    first = -memory.ctypes.data % BLOCK
    return memory[first : first + size]


def write_past_cache(path: Path, values: np.ndarray, offset: int) -> None:
    """Write `values` at `offset` of an HDF5 file: whole blocks directly to the disk where possible.

    What nobody reads soon then neither takes memory nor evicts other pages.
    """
    view = values.view(np.uint8)
    direct = 0
    if values.ctypes.data % BLOCK == offset % BLOCK == 0:
        direct = _write_direct(path, view[: view.size // BLOCK * BLOCK], offset)
    with path.open("rb+") as file:
        write_at(file.fileno(), view[direct:], offset + direct)


def _write_direct(path: Path, view: np.ndarray, offset: int) -> int:
    """Write `view` into an HDF5 file with O_DIRECT; return the bytes written, 0 where it is not offered."""
    try:
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return 0
    try:
        write_at(descriptor, view, offset)
        return view.size
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise
    finally:
        os.close(descriptor)


def open_file(path: Path, kind: str) -> h5py.File:
    """Open one of our HDF5 files of this `kind` for reading; raise a UserError that names `path` for anything else."""
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    found = file.attrs.get("kind")
    if file.attrs.get("format") == FORMAT and found == kind:
        return file
    version = file.attrs.get("format")
    file.close()
    check_format(path, version)
    raise UserError(f"{path}: a file of kind {found}; expected {kind}")


def check_format(path: Path, version: object) -> None:
    """Raise a UserError that names the HDF5 file `path` unless `version` is the format that this version reads."""
    if version == FORMAT:
        return
    known = int(version) if isinstance(version, int | np.integer) else None
    cure = "use the version that wrote it"
    if known in LAST_READERS:
        cure = f"commit {LAST_READERS[known]} is the last whose `adam_mpi merge` reads format {known}"
    raise UserError(f"{path}: format {version}; this version reads format {FORMAT}; {cure}")
