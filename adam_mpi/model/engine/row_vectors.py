"""Cut rows of numbers into vectors along a row: vectors of columns or features instead of images.

Where a row ends inside the last vector, the rest of that vector is not touched. Kernels with one image per block use
the functions of `vector.row_kit`, whose names begin with `row_`.
"""

from adam_mpi.model.engine import tiles


def vectors(total: int, lanes: int) -> int:
    """Return how many vectors a row of `total` numbers takes."""
    return tiles.up(total, lanes) // lanes


def runs(total: int, lanes: int, width: int) -> list[tiles.Run]:
    """Cut a row of `total` numbers into tiles of `width` vectors.

    The pattern of the run with the last vector is how many lanes that vector has, 0 if it has all.
    """
    count = vectors(total, lanes)
    rest = total % lanes
    return tiles.runs(count, width, lambda start, size: rest if start + size == count else 0)


def parts(run: tiles.Run) -> list[int]:
    """Return how many lanes each vector of a tile of `run` has; 0: all."""
    return [0] * (run.width - 1) + [run.pattern]


def load(array: str, place: str, part: int) -> str:
    """Return the expression that loads a vector, or its first `part` lanes if `part` is not 0."""
    return f"row_load_part({array}, {place}, {part})" if part else f"row_load({array}, {place})"


def store(array: str, place: str, value: str, part: int) -> str:
    """Return the statement that stores a vector, or its first `part` lanes if `part` is not 0."""
    return f"row_store_part({array}, {place}, {value}, {part})" if part else f"row_store({array}, {place}, {value})"
