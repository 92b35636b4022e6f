"""Rows of an array in a file, through a memory map that gives its pages back: a large file stays out of memory."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adam_mpi.errors import UserError

Rows = Callable[[np.ndarray], np.ndarray]


def map_rows(path: Path, dtype: np.dtype, sizes: tuple[int, ...], offset: int) -> Rows:
    """A function from indices to rows, after the file has been found long enough."""
    wanted = offset + math.prod(sizes) * dtype.itemsize
    with open(path, "rb") as file:
        held = file.seek(0, 2)
        if held < wanted:
            raise UserError(f"{path}: cut short or damaged: its header announces {wanted} bytes, not {held}")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(memory, dtype, math.prod(sizes), offset).reshape(sizes)

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = array[indices]
        if hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)
        return taken

    return rows


def join(pieces: list[tuple[int, Rows]]) -> Rows:
    """The rows of several files as if they were one; given are their lengths and functions."""
    edges = np.cumsum([0] + [length for length, _ in pieces])

    def rows(indices: np.ndarray) -> np.ndarray:
        cuts = np.searchsorted(indices, edges)
        return np.concatenate(
            [
                take(indices[a:b] - edge)
                for (_, take), edge, a, b in zip(pieces, edges[:-1], cuts[:-1], cuts[1:], strict=True)
            ]
        )

    return rows
