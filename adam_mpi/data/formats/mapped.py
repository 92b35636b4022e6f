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
    memory = _map(path, offset + math.prod(sizes) * dtype.itemsize)
    array = np.frombuffer(memory, dtype, math.prod(sizes), offset).reshape(sizes)

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = array[indices]
        _give_back(memory)
        return taken

    return rows


def map_chunks(path: Path, dtype: np.dtype, sizes: tuple[int, ...], starts: np.ndarray, length: int) -> Rows:
    """The same for an array in chunks of `length` rows that begin at `starts` in the file."""
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    memory = _map(path, int(starts.max(initial=0)) + length * row_bytes)
    content = np.frombuffer(memory, np.uint8)

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = np.empty((len(indices), row_bytes), np.uint8)
        for row, first in zip(taken, starts[indices // length] + indices % length * row_bytes, strict=True):
            row[:] = content[first : first + row_bytes]
        _give_back(memory)
        return taken.view(dtype).reshape(len(indices), *sizes[1:])

    return rows


def _map(path: Path, wanted: int) -> mmap.mmap:
    with open(path, "rb") as file:
        held = file.seek(0, 2)
        if held < wanted:
            raise UserError(f"{path}: cut short or damaged: its header announces {wanted} bytes, not {held}")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _give_back(memory: mmap.mmap) -> None:
    # The pages stay in the system's cache, but no longer count as this process's memory.
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


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
