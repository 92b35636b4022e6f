"""The idx format of MNIST: arrays of bytes behind a short header, gzipped or not."""

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import MOST_COMPRESSION, Rows, Source, rows_at

UNSIGNED_BYTE = 0x08
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
NAMES = [name + ending for part in FILES.values() for name in part for ending in ("", ".gz")]


def open_parts(folder: Path) -> dict[str, Source]:
    """Open the parts in a folder of idx files."""
    return {part: _open_part(folder, part) for part in FILES}


def find_idx_file(folder: Path, stem: str) -> Path:
    """Return the path of an idx file, plain or gzipped."""
    plain = folder / stem
    return plain if plain.is_file() else folder / f"{stem}.gz"


def _open_part(folder: Path, part: str) -> Source:
    """Return the source of `part` in idx files; images that are gzipped are kept in memory."""
    images_path, labels_path = (find_idx_file(folder, stem) for stem in FILES[part])
    sizes = shape(images_path)
    labels = read_idx_file(labels_path)
    if len(sizes) != 3 or 0 in sizes:
        raise UserError(f"{images_path}: holds an array of sizes {sizes}, not images (count, height, width)")
    if labels.shape != sizes[:1]:
        raise UserError(f"{labels_path}: holds labels {labels.shape} for {sizes[0]} images in {images_path.name}")
    gzipped = images_path.suffix == ".gz"
    rows = _gzipped_rows(images_path) if gzipped else _plain_rows(images_path)
    return Source(
        name=lambda index: f"{labels_path}, image {index}",
        shape=(1, sizes[1], sizes[2]),
        dtype=np.dtype(np.uint8),
        labels=labels.astype(np.int64),
        rows=lambda indices: rows(indices)[:, None],
        in_memory=gzipped,
    )


def _plain_rows(path: Path) -> Rows:
    """Return a function that reads rows where they lie in a plain idx file."""
    sizes = _checked_shape(path)
    return rows_at(path, np.dtype(np.uint8), sizes, 4 + 4 * len(sizes))


def _gzipped_rows(path: Path) -> Rows:
    """Return a function that reads a gzipped idx file as a whole when it is first called."""
    array: list[np.ndarray] = []

    def rows(indices: np.ndarray) -> np.ndarray:
        if not array:
            array.append(read_idx_file(path))
        return array[0][indices]

    return rows


def shape(path: Path) -> tuple[int, ...]:
    """Return the sizes announced in the header of an idx file; nothing else is read."""
    try:
        with _open_idx_file(path) as file:
            return _read_header(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch it again") from None


def read_idx_file(path: Path) -> np.ndarray:
    """Return the array of bytes in an idx file, after its header has been checked against its size."""
    sizes = _checked_shape(path)
    header_bytes = 4 + 4 * len(sizes)
    announced = header_bytes + math.prod(sizes)
    try:
        with _open_idx_file(path) as file:
            # One byte more than announced: gzip verifies its checksum only at the end.
            content = file.read(announced + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cut short or damaged ({error}); fetch it again") from None
    if len(content) != announced:
        raise UserError(f"{path}: damaged: its header announces {announced} bytes, it holds others; fetch it again")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(sizes)


def _checked_shape(path: Path) -> tuple[int, ...]:
    """Return the sizes announced in an idx header; raise UserError when the file has another length."""
    sizes = shape(path)
    announced = 4 + 4 * len(sizes) + math.prod(sizes)
    held = _uncompressed_bytes(path)
    if announced != held or announced > MOST_COMPRESSION * path.stat().st_size:
        raise UserError(f"{path}: cut short or damaged: its header announces {announced} bytes, not {held}")
    return sizes


def _open_idx_file(path: Path) -> BinaryIO:
    """Open an idx file, plain or gzipped."""
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _read_header(path: Path, file: BinaryIO) -> tuple[int, ...]:
    """Read the sizes from an idx header: two zero bytes, type, number of dimensions, four big-endian bytes each."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or not 1 <= magic[3] <= 4:
        raise UserError(f"{path}: not an idx file: it begins with {magic.hex() or 'nothing'}, not 0000 and a type")
    if magic[2] != UNSIGNED_BYTE:
        raise UserError(f"{path}: its elements have type 0x{magic[2]:02x}; only 0x08, unsigned bytes, is read")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise UserError(f"{path}: cut short or damaged: it ends inside its header")
    return tuple(int(size) for size in np.frombuffer(sizes, ">u4"))


def _uncompressed_bytes(path: Path) -> int:
    """Return the length of an idx file, or of the content of a gzipped one as it announces it."""
    if path.suffix != ".gz":
        return path.stat().st_size
    # gzip ends with the size modulo 2**32; arrays past 4 GiB are read from plain files only.
    with open(path, "rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")
