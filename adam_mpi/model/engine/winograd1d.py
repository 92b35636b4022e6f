"""Describe Winograd's F(4, kernel) along the rows of an image: four outputs from kernel + 3 products.

    U = G g of each kernel row, once per pass                     [point][map][channel][kernel row]
    V = B' d of the inputs of each tile of four columns           [point][channel][row][tile]
    for each point: M = sum over channels and kernel rows of U V  [point][map][row][tile]
    outputs = A' M, then bias, relu, pooling

are the forward kernels of `winograd1d_kernels.py`; directly it would be 4 * kernel products. Backward each step is the
transpose of one of these:

    E = A e of the errors of each tile                            [point][map][row][tile]
    for each point: dU = sum over images, rows and tiles of E V   and the gradient is G' dU
    for each point: D = sum over maps and kernel rows of U E      [point][channel][row][tile]
    input errors = B D; where tiles overlap they add up
"""

from dataclasses import dataclass

import numpy as np

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape

COLUMNS = 4
"""Outputs per tile."""
POINTS = (0, 1, -1, 2, -2, 0.5, -0.5)
"""Points at which polynomials are evaluated, besides infinity."""
MOST_PRODUCTS = 16384
"""Vectors of M up to which the transform pays: more do not stay in a second-level cache."""
LEAST_MAPS = 8
"""Maps from which on the transform of the inputs pays."""

Matrix = tuple[tuple[float, ...], ...]


def matrices(kernel: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return A', G and B' for a kernel of `kernel` columns.

    As in Toom and Cook's multiplication of polynomials: evaluate at the points, interpolate.
    """
    points = np.array(POINTS[: COLUMNS + kernel - 2])
    others = [np.delete(points, number) for number in range(len(points))]
    scales = [np.prod(point - rest) for point, rest in zip(points, others, strict=True)]
    kernels = points[:, None] ** np.arange(kernel) / np.array(scales)[:, None]
    outputs = points[:, None] ** np.arange(COLUMNS)
    inputs = [[*np.poly(rest)[::-1], 0.0] for rest in others] + [np.poly(points)[::-1]]
    return transposed(_with_infinity(outputs)), matrix_rows(_with_infinity(kernels)), matrix_rows(np.array(inputs))


def _with_infinity(values: np.ndarray) -> np.ndarray:
    """Return `values` with those at infinity, where a polynomial has the value of its highest coefficient."""
    return np.vstack([values, np.eye(values.shape[1])[-1:]])


def matrix_rows(matrix: np.ndarray) -> Matrix:
    """Return the rows of `matrix` as tuples of floats."""
    return tuple(tuple(float(number) for number in row) for row in matrix)


def transposed(matrix: np.ndarray | Matrix) -> Matrix:
    """Return the columns of `matrix` as tuples of floats."""
    return matrix_rows(np.array(matrix).T)


@dataclass(frozen=True)
class Winograd1D:
    """A convolution cut into tiles of four columns."""

    shape: Shape
    lanes: int

    @property
    def points(self) -> int:
        """Return the number of products of a tile and kernel row: one per point."""
        return COLUMNS + self.shape.kernel - 1

    @property
    def across(self) -> int:
        """Return the number of tiles in a row of the outputs."""
        return -(-self.shape.columns // COLUMNS)

    @property
    def tiles(self) -> int:
        """Return the number of tiles in all rows of the outputs."""
        return self.shape.rows * self.across

    @property
    def padded(self) -> int:
        """Return the rows of the inputs with their padding, which is transformed too."""
        return self.shape.height + 2 * self.shape.pad

    @property
    def value_floats(self) -> int:
        """Return the floats of V, the transformed inputs of one block."""
        return self.points * self.shape.channels * self.padded * self.across * self.lanes

    @property
    def product_floats(self) -> int:
        """Return the floats of M of one block, and of E."""
        return self.points * self.shape.maps * self.tiles * self.lanes

    @property
    def back_floats(self) -> int:
        """Return the floats of D, the transformed input errors of one block."""
        return self.points * self.shape.channels * self.shape.height * self.across * self.lanes

    def point_offsets(self, vectors: int) -> list[int]:
        """Return the offsets of a tile's points, when each point has `vectors` vectors."""
        return [point * vectors * self.lanes for point in range(self.points)]

    def column_offsets(self, present: tuple[bool, ...]) -> list[int | None]:
        """Return the offsets of neighboring columns, None for those that are not `present`."""
        return [column * self.lanes if there else None for column, there in enumerate(present)]


def present_tiles(winograd: Winograd1D, count: int, first: int, end: int) -> list[tiles.Run]:
    """Return runs of the tiles of a row.

    Their pattern says which of `count` columns from 4 * tile + first on are inside 0..end.
    """

    def inside(tile: int, _: int) -> tuple[bool, ...]:
        return tuple(0 <= COLUMNS * tile + first + column < end for column in range(count))

    return tiles.runs(winograd.across, 1, inside)


def winograd1d_fits(shape: Shape) -> bool:
    """Return whether there are points enough for the kernel, and columns and maps enough to pay for the transforms."""
    winograd = Winograd1D(shape, 1)
    known = shape.kernel == 5 and shape.stride == 1
    return known and shape.columns >= COLUMNS and shape.maps >= LEAST_MAPS and winograd.product_floats <= MOST_PRODUCTS
