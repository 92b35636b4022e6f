"""Read rows of an array from where they lie in a file, without the file in memory.

Rows are read by position, not mapped: mapped pages count as memory of this process, and a mapped file that is cut
short kills it.
"""

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError

Rows = Callable[[np.ndarray], np.ndarray]


def rows_at(path: Path, dtype: np.dtype, sizes: tuple[int, ...], offset: int) -> Rows:
    """Return a function from indices to rows of an array at `offset`; raise UserError when the file is too short."""
    return rows_in_chunks(path, dtype, sizes, np.array([offset]), sizes[0])


def rows_in_chunks(path: Path, dtype: np.dtype, sizes: tuple[int, ...], starts: np.ndarray, length: int) -> Rows:
    """Return the same for an array in chunks of `length` rows that begin at `starts` in the file."""
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    wanted = int(starts.max(initial=0)) + length * row_bytes
    held = path.stat().st_size
    if held < wanted:
        raise UserError(f"{path}: cut short or damaged: its header announces {wanted} bytes, not {held}")
    file = open(path, "rb", buffering=0)

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = np.empty((len(indices), row_bytes), np.uint8)
        places = starts[indices // max(length, 1)] + indices % max(length, 1) * row_bytes
        # Adjacent rows are read together.
        edges = [0, *(np.flatnonzero(np.diff(places) != row_bytes) + 1).tolist(), len(indices)]
        for first, last in itertools.pairwise(edges):
            _fill(path, file.fileno(), taken[first:last].reshape(-1), int(places[first]) if last else 0)
        return taken.view(dtype).reshape(len(indices), *sizes[1:])

    return rows


def _fill(path: Path, file: int, memory: np.ndarray, offset: int) -> None:
    """Read from `offset` on until `memory` is full; raise UserError at the end of the file."""
    done = 0
    while done < memory.size:
        more = _read_into(file, memory[done:], offset + done)
        if not more:
            raise UserError(f"{path}: cut short while it was read; do not change a data set that is in use")
        done += more


def _read_into(file: int, memory: np.ndarray, offset: int) -> int:
    """Read once from `offset` on into `memory`; return the bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [memory.data], offset)
    content = os.pread(file, memory.size, offset)
    memory[: len(content)] = np.frombuffer(content, np.uint8)
    return len(content)


def join(pieces: list[tuple[int, Rows]]) -> Rows:
    """Return a function that reads the rows of several files as if they were one; `pieces` are (length, rows)."""
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
