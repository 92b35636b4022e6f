"""The idx format of MNIST: arrays of bytes behind a short header, gzipped or not."""

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from adam_mpi.errors import UserError

UNSIGNED_BYTE = 0x08


def shape(path: Path) -> tuple[int, ...]:
    """The sizes announced in the header; nothing else is read."""
    try:
        with _open(path) as file:
            return _header(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch it again") from None


def read(path: Path) -> np.ndarray:
    """The array of bytes in the file, after its header has been checked against its size."""
    sizes = shape(path)
    header_bytes = 4 + 4 * len(sizes)
    announced, held = header_bytes + math.prod(sizes), _uncompressed_bytes(path)
    if announced != held:
        raise UserError(f"{path}: cut short or damaged: its header announces {announced} bytes, not {held}")

    try:
        with _open(path) as file:
            # One byte more than is wanted: gzip checks its checksum only at the end.
            content = file.read(announced + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cut short or damaged ({error}); fetch it again") from None
    if len(content) != announced:
        raise UserError(f"{path}: damaged: its header announces {announced} bytes, it holds others; fetch it again")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(sizes)


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _header(path: Path, file: BinaryIO) -> tuple[int, ...]:
    """Two zero bytes, the type, the number of dimensions, and each size as four bytes, big end first."""
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
    if path.suffix != ".gz":
        return path.stat().st_size
    # gzip ends with the size modulo 2**32; arrays past 4 GiB are read from plain files only.
    with open(path, "rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")
