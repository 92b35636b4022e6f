"""Choose tiles: how many sums a kernel keeps in registers, and how ranges and rows are cut into them. Pure.

Where a row ends inside the last vector, the rest of that vector is not touched. Kernels with one image per block use
the functions of `vector.row_kit`, whose names begin with `row_`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from adam_mpi.model.engine.source import Source

LATENCY = 8
"""Multiply-adds under way at once on a core with two units of four cycles each; fewer sums would wait."""


@dataclass(frozen=True)
class Tile:
    """`planes` (maps, channels or units) times `columns` (pixels or blocks) sums at a time."""

    planes: int
    columns: int


@dataclass(frozen=True)
class Run:
    """Equal tiles one after the other: from `start` to `stop`, `width` each."""

    start: int
    stop: int
    width: int
    pattern: Any = None


def runs(
    total: int, width: int, pattern: Callable[[int, int], Any] = lambda start, width: None, first: int = 0
) -> list[Run]:
    """Cut range(first, total) into tiles of `width` and a rest; neighbors of equal `pattern(start, width)` join."""
    found: list[Run] = []
    for start in range(first, total, width):
        size = min(width, total - start)
        run = Run(start, start + size, size, pattern(start, size))
        if found and (found[-1].width, found[-1].pattern) == (run.width, run.pattern):
            run = Run(found.pop().start, run.stop, run.width, run.pattern)
        found.append(run)
    return found


def each(source: Source, name: str, cut: list[Run]) -> Iterator[Run]:
    """Emit a loop over the tiles of each run, with `name` the start of a tile; the caller writes the body meanwhile."""
    for run in cut:
        with source.inside(f"for {name} in range({run.start}, {run.stop}, {run.width}):"):
            yield run


def up(number: int, step: int) -> int:
    """Return the next multiple of `step` from `number` on."""
    return -(-number // step) * step


def _cut(total: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return (how many, how wide) of whole tiles, and of the rest."""
    return (total // width, width), (int(total % width > 0), total % width)


def cost(total: int, width: int, other_total: int, other_width: int, overhead: float = 0.0) -> float:
    """Return the relative cycles of total x other_total sums in tiles of width x other_width.

    A step of a tile of a x b takes a + b loads and a * b multiply-adds; a core does two of each per cycle.
    `overhead`, of the loop around a step, is counted in multiply-adds.
    """
    cycles = 0.0
    for count, a in _cut(total, width):
        for other_count, b in _cut(other_total, other_width):
            cycles += count * other_count * (overhead + max(a * b, LATENCY, 1.2 * (a + b)))
    return cycles


def choose(planes: int, columns: int, registers: int, slide: int = 1, step: int = 1, overhead: float = 0.0) -> Tile:
    """Return the cheapest tile; the arguments are those of `ranked`."""
    return ranked(planes, columns, registers, slide=slide, step=step, overhead=overhead)[0]


def ranked(
    planes: int, columns: int, registers: int, slide: int = 1, step: int = 1, overhead: float = 0.0
) -> list[Tile]:
    """Return the tiles whose sums, values and factor fit `registers`, cheapest first.

    Values slide by `slide` along a row; the columns of a tile are a multiple of `step`.
    """
    fitting = [
        Tile(a, b)
        for a in range(1, min(planes, registers) + 1)
        for b in range(step, max(step, min(up(columns, step), registers)) + 1, step)
        if a * b + b + slide < registers or (a, b) == (1, step)
    ]

    def effort(tile: Tile) -> tuple[float, float, int]:
        # Within a few percent the tile that leaves no rest wins: there is less to compile.
        cycles = cost(planes, tile.planes, columns, tile.columns, overhead)
        rests = (planes % tile.planes > 0) + (columns % tile.columns > 0)
        return cycles * (1 + 0.03 * rests), cycles, tile.columns

    return sorted(fitting, key=effort)


def row_vectors(total: int, lanes: int) -> int:
    """Return how many vectors a row of `total` numbers takes."""
    return up(total, lanes) // lanes


def row_runs(total: int, lanes: int, width: int) -> list[Run]:
    """Cut a row of `total` numbers into tiles of `width` vectors.

    The pattern of the run with the last vector is how many lanes that vector has, 0 if it has all.
    """
    count = row_vectors(total, lanes)
    rest = total % lanes
    return runs(count, width, lambda start, size: rest if start + size == count else 0)


def row_parts(run: Run) -> list[int]:
    """Return how many lanes each vector of a tile of `run` has; 0: all."""
    return [0] * (run.width - 1) + [run.pattern]


def load_row(array: str, place: str, part: int) -> str:
    """Return the expression that loads a vector, or its first `part` lanes if `part` is not 0."""
    return f"row_load_part({array}, {place}, {part})" if part else f"row_load({array}, {place})"


def store_row(array: str, place: str, value: str, part: int) -> str:
    """Return the statement that stores a vector, or its first `part` lanes if `part` is not 0."""
    return f"row_store_part({array}, {place}, {value}, {part})" if part else f"row_store({array}, {place}, {value})"
