"""Emit products of matrices that belong to a sample: both factors differ by lane.

A tile of 4 x 4 sums takes eight loads for sixteen multiply-adds. `first(row, k)` and `second(k, column)` are functions
that return the expression of a number of a factor as a vector.
"""

from collections.abc import Callable, Iterator

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand

TILE = 4
Factor = Callable[[str, str], str]


def matrix(operand: Operand, begin: str, row_step: int, column_step: int) -> Factor:
    """Return the factor whose first number is `begin` of `operand`, with the distance of its rows and columns."""
    return lambda row, column: operand.load(f"{begin} + ({row}) * {row_step} + ({column}) * {column_step}")


def scratch_matrix(kernel: Kernel, name: str, row_step: int, column_step: int) -> Factor:
    """Return the factor that lies in the scratch memory `name`, with the distance of its rows and columns."""
    lanes = kernel.lanes
    return lambda row, column: f"load(memory, {name} + (({row}) * {row_step} + ({column}) * {column_step}) * {lanes})"


def each(kernel: Kernel, variable: str, total: int, limit: str = "") -> Iterator[int]:
    """Emit loops of `variable` over the tiles of range(total) that begin before `limit`; yield how wide they are."""
    for run in tiles.runs(total, TILE):
        stop = f"min({run.stop}, {limit})" if limit else str(run.stop)
        with kernel.inside(f"for {variable} in range({run.start}, {stop}, {run.width}):"):
            yield run.width


def emit_tile(
    kernel: Kernel, tile: tuple[int, int], depth: int | str, first: Factor, second: Factor, at: tuple[str, str]
) -> None:
    """Emit the sums `s0_0`, `s0_1`, ... of a tile that begins `at` (row, column): sums over `depth` products."""
    rows, columns = tile
    for a in range(rows):
        for b in range(columns):
            kernel(f"s{a}_{b} = zero()")
    with kernel.loop("k", depth):
        for b in range(columns):
            kernel(f"v{b} = {second('k', f'{at[1]} + {b}')}")
        for a in range(rows):
            kernel(f"u = {first(f'{at[0]} + {a}', 'k')}")
            for b in range(columns):
                kernel(f"s{a}_{b} = fma(u, v{b}, s{a}_{b})")


def emit_product(
    kernel: Kernel,
    shape: tuple[int, int],
    depth: int | str,
    first: Factor,
    second: Factor,
    store: Callable[[str, str, str], str],
    limit: str = "",
) -> None:
    """Emit the product of `shape`, up to row `limit`; `store(row, column, sum)` returns the statement that keeps it."""
    for rows in each(kernel, "m", shape[0], limit):
        for columns in each(kernel, "n", shape[1]):
            emit_tile(kernel, (rows, columns), depth, first, second, ("m", "n"))
            for a in range(rows):
                for b in range(columns):
                    kernel(store(f"m + {a}", f"n + {b}", f"s{a}_{b}"))
