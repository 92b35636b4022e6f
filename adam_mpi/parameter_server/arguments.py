"""What a push or a pull of the library names, checked before anything is changed or sent. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError

GAP, MOST_PIECES = 4096, 64
"""Parameters that one read takes along rather than being cut, and pieces that one read of a run is cut into."""


def floats(values: Any, what: str) -> np.ndarray:
    """Return `values` as float32; raise UserError if that would round them, or if they have more than one dimension."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise UserError(f"{what} of shape {given.shape}: must have one dimension; give values.ravel() if you mean that")
    if not np.can_cast(given.dtype, np.float32):
        cast = "give values.astype(np.float32) if you mean that"
        raise UserError(f"{what} of type {given.dtype}: would be rounded to float32; {cast}")
    return np.ascontiguousarray(given, np.float32)


def range_of(first: int, count: int, size: int) -> tuple[int, int]:
    """Return the range if it lies inside of `size` parameters; raise UserError if it does not."""
    if count < 0:
        raise UserError(f"count = {count}: must be 0 or more")
    if first < 0 or first + count > size:
        raise UserError(f"parameters {first} to {first + count - 1}: there are {size}, numbered from 0")
    return int(first), int(count)


def places(indices: Any, size: int, values: int | None = None) -> np.ndarray:
    """Return indices as int64, each of which is below `size`, as many as there are `values`; else raise UserError."""
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        what = f"indices of type {given.dtype} and shape {given.shape}"
        raise UserError(f"{what}: must be whole numbers in one dimension")
    if values is not None and given.size != values:
        raise UserError(f"{values} values with {given.size} indices: must be as many")
    if given.size and (int(given.min()) < 0 or int(given.max()) >= size):
        wrong = int(given[(given < 0) | (given >= size)][0])
        raise UserError(f"indices: there is no parameter {wrong}; there are {size}, numbered from 0")
    return given.astype(np.int64)


def summed(chosen: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices in increasing order, each once, with the sums of their values."""
    if not chosen.size:
        return chosen, values
    order = np.argsort(chosen, kind="stable")
    chosen, values = chosen[order], values[order]
    firsts = np.flatnonzero(np.diff(chosen, prepend=-1))
    return (chosen, values) if firsts.size == chosen.size else (chosen[firsts], np.add.reduceat(values, firsts))


def pieces(chosen: np.ndarray) -> list[slice]:
    """Cut increasing indices into runs that are each read in one go: few enough, so that no read is worse than all."""
    cuts = np.flatnonzero(np.diff(chosen) > GAP) + 1
    if cuts.size >= MOST_PIECES:
        return [slice(0, chosen.size)]
    edges: Sequence[int] = [0, *cuts.tolist(), chosen.size]
    return [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]
