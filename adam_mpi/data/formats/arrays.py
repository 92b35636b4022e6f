"""NumPy's files: an npz, or a folder of npy. Compressed arrays are kept in memory; nothing is unpickled."""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.array_names import name_parts
from adam_mpi.data.formats.source import MOST_COMPRESSION, Rows, Source, array_source, rows_at

LOCAL_HEADER = 30
"""Bytes of a zip member's own header, before its name."""


@dataclass(frozen=True)
class Held:
    """An array in a file: what its header says, and its rows."""

    name: str
    sizes: tuple[int, ...]
    dtype: np.dtype
    rows: Rows
    in_memory: bool = False

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements of an array in an npy or npz file."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def all(self) -> np.ndarray:
        """Return all rows of an array in a file."""
        return self.rows(np.arange(self.sizes[0] if self.sizes else 0))


def open_folder(path: Path) -> dict[str, Source]:
    """Open the parts in a folder of npy files."""
    return _parts_by_name(path, open_arrays(path))


def open_arrays(path: Path) -> dict[str, Held]:
    """Return the arrays in a folder of npy files, by the names of the files."""
    return {file.stem: _open_npy(file) for file in path.glob("*.npy")}


def open_npz(path: Path) -> dict[str, Source]:
    """Open the parts in an npz file; raise UserError when it is damaged."""
    try:
        return _parts_by_name(path, members(path))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: cut short or damaged ({error})") from None


def members(path: Path) -> dict[str, Held]:
    """Return the arrays of an npz file by name; only their headers are read, and checked against their sizes."""
    with zipfile.ZipFile(path) as archive:
        found = {Path(member.filename).stem: member for member in archive.infolist()}
        return {stem: _open_member(path, archive, member) for stem, member in found.items()}


def _parts_by_name(path: Path, held: dict[str, Held]) -> dict[str, Source]:
    """Return the sources of the parts in npy or npz files, which are found by the names of the arrays."""
    return {
        part: array_source(
            held[images].name,
            held[images].sizes,
            held[images].dtype,
            held[labels].all(),
            held[images].rows,
            in_memory=held[images].in_memory,
        )
        for part, (images, labels) in name_parts(path, held).items()
    }


def _open_npy(path: Path) -> Held:
    """Open the array in an npy file."""
    with open(path, "rb") as file:
        sizes, dtype, start = _read_npy_header(str(path), file)
    return Held(str(path), sizes, dtype, rows_at(path, dtype, sizes, start))


def _open_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Held:
    """Open an array of an npz; a compressed one is read as a whole when first needed."""
    name = f"{path}:{member.filename}"
    with archive.open(member) as file:
        sizes, dtype, start = _read_npy_header(name, file)
    announced = start + math.prod(sizes) * dtype.itemsize
    possible = member.compress_size * (1 if member.compress_type == zipfile.ZIP_STORED else MOST_COMPRESSION)
    if announced != member.file_size or announced > possible:
        raise UserError(f"{name}: cut short or damaged: its header announces {announced} bytes, not {member.file_size}")
    if member.compress_type == zipfile.ZIP_STORED:
        return Held(name, sizes, dtype, rows_at(path, dtype, sizes, _data_offset(path, member) + start))
    array: list[np.ndarray] = []

    def rows(indices: np.ndarray) -> np.ndarray:
        if not array:
            with zipfile.ZipFile(path) as again, again.open(member) as file:
                array.append(np.frombuffer(file.read(), dtype, math.prod(sizes), start).reshape(sizes))
        return array[0][indices]

    return Held(name, sizes, dtype, rows, in_memory=True)


def _read_npy_header(name: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return sizes and type of an npy file, and where its elements begin."""
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        sizes, by_columns, dtype = read[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{name}: not an npy array ({error})") from None
    if dtype.hasobject:
        raise UserError(f"{name}: holds Python objects, which are never unpickled; save numbers")
    if by_columns and len(sizes) > 1:
        raise UserError(f"{name}: saved in Fortran order; save np.ascontiguousarray of it")
    return sizes or (1,), dtype, file.tell()


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the content of `member` begins in the npz file."""
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        header = file.read(LOCAL_HEADER)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return member.header_offset + LOCAL_HEADER + name + extra
