"""HDF5 files with images and labels per part, read chunk by chunk; `adam_mpi pack` writes such files."""

import math
from pathlib import Path

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.array_names import name_parts
from adam_mpi.data.formats.arrays import Held
from adam_mpi.data.formats.source import (
    MOST_COMPRESSION,
    Rows,
    Source,
    array_source,
    rows_at,
    rows_in_chunks,
)

NUMBERS = "iufb"
"""Kinds of types that are numbers."""


def open_parts(path: Path) -> dict[str, Source]:
    """Open the parts in an HDF5 file; raise UserError when it is damaged."""
    file = _open_hdf5(path)
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    classes = int(file.attrs["classes"]) if "classes" in file.attrs else None
    return {
        part: _source_of_datasets(path, file[images], file[labels], classes)
        for part, (images, labels) in name_parts(path, names).items()
    }


def open_arrays(path: Path) -> dict[str, Held]:
    """Return the datasets in an HDF5 file by name; raise UserError when it is damaged."""
    file = _open_hdf5(path)
    found: dict[str, Held] = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            if item.dtype.kind in NUMBERS:
                _check_stored_size(path, item)
            rows = _direct_rows(path, item) or _selected_rows(item)
            found[name] = Held(f"{path}:{item.name}", item.shape, item.dtype, rows)

    file.visititems(note)
    return found


def _open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file of a data set; raise UserError when it is damaged."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path}: cut short or damaged ({error})") from None


def _source_of_datasets(path: Path, images: h5py.Dataset, labels: h5py.Dataset, classes: int | None) -> Source:
    """Return the source of two HDF5 datasets, after their sizes have been checked."""
    for dataset in (images, labels):
        _check_stored_size(path, dataset)

    rows = _direct_rows(path, images) or _selected_rows(images)
    return array_source(f"{path}:{images.name}", images.shape, images.dtype, labels[:], rows=rows, classes=classes)


def _direct_rows(path: Path, images: h5py.Dataset) -> Rows | None:
    """Return a function that reads rows of an HDF5 dataset past the library, which is slow for single rows.

    Return None for images that are not stored as they are: compressed, shuffled, or in chunks of part of an image.
    """
    if images.compression or images.shuffle or images.fletcher32 or images.scaleoffset or images.file.userblock_size:
        return None
    if images.chunks is None and images.id.get_offset() is not None:
        return rows_at(path, images.dtype, images.shape, images.id.get_offset())
    if images.chunks is None or images.chunks[1:] != images.shape[1:] or not hasattr(images.id, "chunk_iter"):
        return None
    starts = np.empty(images.id.get_num_chunks(), np.int64)

    def note(chunk: h5py.h5d.StoreInfo) -> None:
        starts[chunk.chunk_offset[0] // images.chunks[0]] = chunk.byte_offset

    images.id.chunk_iter(note)
    return rows_in_chunks(path, images.dtype, images.shape, starts, images.chunks[0])


def _selected_rows(images: h5py.Dataset) -> Rows:
    """Return a function that reads rows through the HDF5 library, chunk by chunk."""
    step = images.chunks[0] if images.chunks else 1

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = np.empty((len(indices), *images.shape[1:]), images.dtype)
        # One read for all that lies in one chunk; h5py's own selection of single rows is many times slower.
        for group in np.split(np.arange(len(indices)), np.flatnonzero(np.diff(indices // step)) + 1):
            first, last = indices[group[[0, -1]]] if group.size else (0, -1)
            taken[group] = images[first : last + 1][indices[group] - first]
        return taken

    return rows


def _check_stored_size(path: Path, dataset: h5py.Dataset) -> None:
    """Raise UserError, before memory is allocated, when an HDF5 dataset announces more than it has stored."""
    if dataset.dtype.kind not in NUMBERS:
        raise UserError(f"{path}:{dataset.name}: holds {dataset.dtype}; it must hold numbers")
    announced = math.prod(dataset.shape) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size()
    most = stored * (MOST_COMPRESSION if dataset.compression else 1)
    if announced > most or stored > path.stat().st_size:
        raise UserError(f"{path}:{dataset.name}: incomplete: {announced} bytes announced, {stored} are in the file")
