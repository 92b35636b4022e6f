"""Emit Winograd's F(2x2, 3x3): a 3x3 convolution of stride 1 as sixteen dense layers over tiles of 2x2 outputs.

    transformed weights U = G g G', once per pass                 emit_weights; 16 matrices (maps, channels)
    for each group of tiles:
        V = B' d B of the 4x4 inputs of each tile                 emit_values;  [part][tile][channel]
        for each of the 16 parts: M = U V                         dense_product, a tile is to it what a block is
        outputs = A' M A, then bias, relu, pooling                emit_outputs

Back to the data it is the same with errors for inputs and rotated kernels; back to the weights, the errors are
transformed by A, dense_weights sums up dU, and the gradient is G' dU G. 2.25 times fewer products than directly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from adam_mpi.model.engine import pool_and_norm, tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Span

PARTS = 16
B = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
A = ((1, 1, 1, 0), (0, 1, -1, -1))
A_TRANSPOSED = tuple(zip(*A, strict=True))
ROTATED = [4 * (3, 1, 2, 0)[part // 4] + (3, 1, 2, 0)[part % 4] for part in range(PARTS)]
"""The part of the kernel rotated by 180 degrees, for each part."""
GROUP = 16
"""Tiles of a group at the most."""


@dataclass(frozen=True)
class Side:
    """Planes that are padded and cut into tiles, and how many tiles there are."""

    planes: int
    height: int
    width: int
    pads: tuple[int, int, int]
    """Rows of zeros above and below, columns of zeros left, and right."""
    rows: int
    columns: int
    first: int = 0
    """The first of its tiles in a row, where it is a part of the planes."""
    within: tuple[int, int] = (0, 0)
    """The width of the planes then, and the column where the part begins in them."""

    def part(self, span: Span) -> "Side":
        """Return the tiles that make the columns `span` of the outputs."""
        a, b = span
        lines, left, _ = self.pads
        begin = a - left
        end = tiles.up(b, 2) + 2 - left
        first = max(0, begin)
        last = min(self.width, end)
        return replace(
            self,
            width=last - first,
            pads=(lines, first - begin, end - last),
            columns=-(-b // 2) - a // 2,
            first=a // 2,
            within=(self.width, first),
        )

    @property
    def padded(self) -> tuple[int, int]:
        """Return the height and width of a plane with its border, filled up to whole tiles."""
        lines, left, right = self.pads
        return tiles.up(self.height + 2 * lines, 2), tiles.up(self.width + left + right, 2)

    @property
    def group_rows(self) -> int:
        """Return the rows of tiles in a group: as many as divide all and make at most GROUP tiles."""
        fitting = [count for count in range(1, self.rows + 1) if self.rows % count == 0]
        return max((count for count in fitting if count * self.columns <= GROUP), default=1)

    @property
    def group(self) -> int:
        """Return the number of tiles in a group."""
        return self.group_rows * self.columns


def winograd2d_fits(shape: Shape, window: int) -> bool:
    """Return whether tiles of 2x2 cover inputs and outputs, and there are products enough to pay for the transforms.

    Only the columns of a strip may be odd: the last tile of a row is half a tile then.
    """
    even = shape.height % 2 == 0 and (window == 2 or shape.rows % 2 == 0)
    if shape.margins is None:
        even = even and shape.width % 2 == 0 and (window == 2 or shape.columns % 2 == 0)
    return shape.kernel == 3 and shape.stride == 1 and even and window <= 2 and min(shape.channels, shape.maps) >= 16


def across(source: Source, side: Side, width: int) -> Iterator[tuple[bool, bool]]:
    """Emit loops over the tiles of a group of `side`; yield which columns of a tile are inside a plane of `width`."""
    rows = side.group_rows
    first = side.first
    with source.inside(f"for line in range({rows}):"):
        cut = tiles.runs(first + side.columns, 1, lambda at, _: (2 * at < width, 2 * at + 1 < width), first)
        for run in tiles.each(source, "across", cut):
            source(f"row, column = 2 * (group * {rows} + line), 2 * across")
            source(f"tile = line * {side.columns} + across - {first}")
            yield run.pattern


def square(width: int, lanes: int, inside: tuple[bool, bool]) -> list[int | None]:
    """Return the offsets of a tile's 2x2 values in a plane of `width`, None where a column is not `inside`."""
    return [(i * width + j) * lanes if inside[j] else None for i in range(2) for j in range(2)]


def emit_winograd2d_weights(source: Source, name: str, shape: Shape, weight: int) -> None:
    """Emit the kernel `name` that computes U[part][map][channel] of all kernels."""
    count = shape.maps * shape.channels
    with source.kernel(f"{name}(memory, weights, transformed)", "Kernels transformed, once for all images."):
        source("half = np.float32(0.5)")
        with source.inside(f"for pair in range({count}):"):
            source(f"w = {weight} + pair * 9")
            for j in range(3):
                source(f"a{j}, b{j}, c{j} = weights[w + {j}], weights[w + {3 + j}], weights[w + {6 + j}]")
                source(f"g0_{j}, g3_{j} = a{j}, c{j}")
                source(f"g1_{j}, g2_{j} = half * (a{j} + b{j} + c{j}), half * (a{j} - b{j} + c{j})")
            for i in range(4):
                outer = f"g{i}_0 + g{i}_2"
                middle = f"g{i}_1"
                values = f"g{i}_0", f"half * ({outer} + {middle})", f"half * ({outer} - {middle})", f"g{i}_2"
                for j, value in enumerate(values):
                    source(f"memory[transformed + {(4 * i + j) * count} + pair] = {value}")


def emit_winograd2d_gradient(source: Source, name: str, shape: Shape, weight: int) -> None:
    """Emit the kernel `name` that adds G' dU G to the gradient."""
    count = shape.maps * shape.channels
    with source.kernel(f"{name}(memory, gradient, transformed)", "Gradient of the kernels from that of U."):
        source("half = np.float32(0.5)")
        with source.inside(f"for pair in range({count}):"):
            source(f"w, u = {weight} + pair * 9, transformed + pair")
            for i in range(4):
                for j in range(4):
                    source(f"u{i}_{j} = memory[u + {(4 * i + j) * count}]")
                source(f"g{i}_0 = u{i}_0 + half * (u{i}_1 + u{i}_2)")
                source(f"g{i}_1 = half * (u{i}_1 - u{i}_2)")
                source(f"g{i}_2 = u{i}_3 + half * (u{i}_1 + u{i}_2)")
            for j in range(3):
                source(f"gradient[w + {j}] += g0_{j} + half * (g1_{j} + g2_{j})")
                source(f"gradient[w + {3 + j}] += half * (g1_{j} - g2_{j})")
                source(f"gradient[w + {6 + j}] += g3_{j} + half * (g1_{j} + g2_{j})")


def emit_winograd2d_clear(source: Source, name: str, floats: int) -> None:
    """Emit the kernel `name` that makes `floats` floats zero."""
    with source.kernel(f"{name}(memory, place)", "Zero."):
        with source.inside(f"for i in range({floats}):"):
            source("memory[place + i] = 0")


def emit_winograd2d_pad(source: Source, name: str, side: Side, lanes: int) -> None:
    """Emit the kernel `name` that copies the planes of `side` into padded ones, with zeros around them."""
    planes = side.planes
    rows = side.height
    columns = side.width
    height, width = side.padded
    top, left, _ = side.pads
    whole, begin = side.within if side.within[0] else (side.width, 0)
    with source.kernel(f"{name}(memory, values, padded)", f"{planes} x {rows} x {columns} -> {height} x {width}."):
        with source.inside(f"for line in range({planes * height}):"):
            source(f"plane, row = line // {height}, line % {height} - {top}")
            source(f"to = padded + line * {width * lanes}")
            with source.inside(f"if row < 0 or row >= {rows}:"):
                with source.inside(f"for place in range(0, {width * lanes}, {lanes}):"):
                    source("store(memory, to + place, zero())")
            with source.inside("else:"):
                source(f"v = values + ((plane * {rows} + row) * {whole} + {begin}) * {lanes}")
                for column in (*range(left), *range(left + columns, width)):
                    source(f"store(memory, to + {column * lanes}, zero())")
                with source.inside(f"for place in range(0, {columns * lanes}, {lanes}):"):
                    source(f"store(memory, to + {left * lanes} + place, load(memory, v + place))")


def emit_winograd2d_values(source: Source, name: str, side: Side, lanes: int) -> None:
    """Emit the kernel `name` that computes V of a group of tiles of the padded planes."""
    count = side.group
    planes = side.planes
    columns = side.columns
    height, width = side.padded
    with source.kernel(f"{name}(memory, padded, values, group)", f"{count} tiles of {planes} planes transformed."):
        with source.inside(f"for tile in range({count}):"):
            source(f"row, column = 2 * (group * {side.group_rows} + tile // {columns}), 2 * (tile % {columns})")
            with source.inside(f"for plane in range({planes}):"):
                source(f"v = padded + ((plane * {height} + row) * {width} + column) * {lanes}")
                given = [(i * width + j) * lanes for i in range(4) for j in range(4)]
                source(f"square = {source.make('loads', *given)}(memory, v)")
                source(f"parts = {source.make('sandwich', *B)}(square)")
                _store_parts(source, planes, count, lanes)


def emit_winograd2d_errors(source: Source, name: str, shape: Shape, side: Side, lanes: int) -> None:
    """Emit the kernel `name` that computes A e A' of the 2x2 errors of each tile of a group; [part][tile][map]."""
    count = side.group
    with source.kernel(f"{name}(memory, errors, values, group)", f"{count} tiles of errors transformed."):
        for inside in across(source, side, shape.columns):
            with source.inside(f"for plane in range({shape.maps}):"):
                source(f"v = errors + ((plane * {shape.rows} + row) * {shape.columns} + column) * {lanes}")
                source(f"square = {source.make('loads', *square(shape.columns, lanes, inside))}(memory, v)")
                source(f"parts = {source.make('sandwich', *A_TRANSPOSED)}(square)")
                _store_parts(source, shape.maps, count, lanes)


def _store_parts(source: Source, planes: int, count: int, lanes: int) -> None:
    source(f"to = values + (tile * {planes} + plane) * {lanes}")
    places = [part * count * planes * lanes for part in range(PARTS)]
    source(f"{source.make('stores', *places)}(memory, to, parts)")


@dataclass(frozen=True)
class Outputs:
    """The planes, `height` x `width` each, that the products of the tiles of `side` are transformed back into."""

    side: Side
    planes: int
    height: int
    width: int
    lanes: int
    bias: int | None = None
    """The bias's offset in the flat vector of parameters; None: there is none."""
    relu: bool = False
    masked: bool = False
    """Whether errors pass only where `extra`, an output of relu, is above zero."""
    pooled: bool = False
    """Whether each tile is max-pooled into one value; `extra` takes the winners."""


def emit_winograd2d_outputs(source: Source, name: str, made: Outputs) -> None:
    """Emit the kernel `name` that computes A' M A of a group, and what follows it."""
    count = made.side.group
    planes = made.planes
    lanes = made.lanes
    head = f"{name}(memory, weights, products, outputs, extra, group)"
    with source.kernel(head, f"{count} tiles of {planes} planes transformed back."):
        with source.inside(f"for plane in range({planes}):"):
            for inside in across(source, made.side, made.width):
                source(f"v = products + (tile * {planes} + plane) * {lanes}")
                given = [part * count * planes * lanes for part in range(PARTS)]
                source(f"parts = {source.make('loads', *given)}(memory, v)")
                source(f"square = {source.make('sandwich', *A)}(parts)")
                if made.bias is not None:
                    source(f"start = broadcast(weights, {made.bias} + plane)")
                if made.pooled:
                    _store_pooled(source, made)
                else:
                    _store(source, made, square(made.width, lanes, inside))


def _store_pooled(source: Source, made: Outputs) -> None:
    pool_and_norm.emit_pool_winner(source, [f"square[{number}]" for number in range(4)])
    source("best = add(best, start)")
    if made.relu:
        pool_and_norm.emit_pool_through_relu(source)
    source(f"to = ((plane * {made.height // 2} + row // 2) * {made.width // 2} + column // 2) * {made.lanes}")
    source("store(memory, outputs + to, best)")
    source("store(memory, extra + to, winner)")


def _store(source: Source, made: Outputs, places: list[int | None]) -> None:
    source(f"to = ((plane * {made.height} + row) * {made.width} + column) * {made.lanes}")
    if made.bias is not None:
        source("square = " + ", ".join(f"add(square[{number}], start)" for number in range(4)))
    if made.relu:
        source(f"square = {source.make('positives', 4)}(square)")
    if made.masked:
        source(f"square = {source.make('masks', *places)}(square, memory, extra + to)")
    source(f"{source.make('stores', *places)}(memory, outputs + to, square)")
