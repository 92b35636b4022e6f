"""Emit products of matrices that belong to a sample: both factors differ by lane.

A tile of 4 x 4 sums takes eight loads for sixteen multiply-adds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand
from adam_mpi.model.engine.source import LOAD

TILE = 4


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory: the expression of its first number's offset, and how far apart rows and columns are."""

    begin: str
    row: int
    column: int

    @property
    def transposed(self) -> "Matrix":
        """Return the matrix with rows and columns exchanged."""
        return Matrix(self.begin, self.column, self.row)

    def at(self, row: str, column: str) -> str:
        """Return the expression of the offset of a number."""
        return f"{self.begin} + ({row}) * {self.row} + ({column}) * {self.column}"


def matrix(operand: Operand, begin: str, columns: int) -> Matrix:
    """Return the matrix whose first number is number `begin` of `operand`, which has rows of `columns` numbers."""
    return Matrix(operand.at(begin), columns * operand.lanes, operand.lanes)


def scratch_matrix(kernel: Kernel, name: str, columns: int) -> Matrix:
    """Return the matrix with rows of `columns` vectors that lies in the scratch memory `name`."""
    return Matrix(name, columns * kernel.lanes, kernel.lanes)


def each(kernel: Kernel, variable: str, total: int, limit: str = "") -> Iterator[int]:
    """Emit loops of `variable` over the tiles of range(total) that begin before `limit`; yield how wide they are."""
    for run in tiles.runs(total, TILE):
        stop = f"min({run.stop}, {limit})" if limit else str(run.stop)
        with kernel.inside(f"for {variable} in range({run.start}, {stop}, {run.width}):"):
            yield run.width


def emit_product(
    kernel: Kernel,
    shape: tuple[int, int],
    depth: int | str,
    first: Matrix,
    second: Matrix,
    result: Matrix,
    add: bool = False,
    row_limit: str = "",
    column_limit: str = "",
) -> None:
    """Emit result = first @ second, or add to it: `shape` of the result, `depth` products per sum.

    Tiles that begin at the limits or behind them are left out.
    """
    make = kernel.source.make
    for rows in each(kernel, "m", shape[0], row_limit):
        for columns in each(kernel, "n", shape[1], column_limit):
            places = [(a, b) for a in range(rows) for b in range(columns)]
            products = [(a * columns + b, a * first.row, b * second.column) for a, b in places]
            multiply_adds = make("multiply_adds", rows * columns, LOAD, *products)
            offsets = [a * result.row + b * result.column for a, b in places]
            store = make("add_stores" if add else "stores", *offsets)
            kernel(f"one = {first.at('m', '0')}")
            kernel(f"other = {second.at('0', 'n')}")
            kernel(f"sums_of_tile = {make('zeros', rows * columns)}()")
            with kernel.loop("k", depth):
                places_of_k = f"memory, one + k * {first.column}, memory, other + k * {second.row}"
                kernel(f"sums_of_tile = {multiply_adds}(sums_of_tile, {places_of_k})")
            kernel(f"{store}(memory, {result.at('m', 'n')}, sums_of_tile)")
