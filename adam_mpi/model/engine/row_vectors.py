"""Vectors along an image: where a row of numbers ends inside the last vector, that vector's rest is not touched."""

from adam_mpi.model.engine import tiles


def vectors(total: int, wide: int) -> int:
    return tiles.up(total, wide) // wide


def runs(total: int, wide: int, width: int) -> list[tiles.Run]:
    """Tiles of `width` vectors; the pattern of the one with the last vector is how many lanes that has, if not all."""
    count, rest = vectors(total, wide), total % wide
    return tiles.runs(count, width, lambda start, size: rest if start + size == count else 0)


def parts(run: tiles.Run) -> list[int]:
    """How many lanes each vector of a tile has; 0: all."""
    return [0] * (run.width - 1) + [run.pattern]


def load(array: str, place: str, part: int) -> str:
    return f"wide_load_part({array}, {place}, {part})" if part else f"wide_load({array}, {place})"


def store(array: str, place: str, value: str, part: int) -> str:
    return f"wide_store_part({array}, {place}, {value}, {part})" if part else f"wide_store({array}, {place}, {value})"
