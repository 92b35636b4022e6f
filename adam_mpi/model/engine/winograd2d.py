"""Winograd's F(2x2, 3x3): a 3x3 convolution of stride 1 as sixteen fully-connected layers over tiles of 2x2 outputs.

    transformed weights U = G g G', once per pass                 emit_weights; 16 matrices (maps, channels)
    for each group of tiles:
        V = B' d B of the 4x4 inputs of each tile                 emit_values;  [part][tile][channel]
        for each of the 16 parts: M = U V                         dense_product, a tile is to it what a block is
        outputs = A' M A, then bias, relu, pooling                emit_outputs

Back to the data it is the same with errors for inputs and parts turned round; back to the weights, the errors are
transformed by A, dense_weights sums up dU, and the gradient is G' dU G.  2.25 times fewer products than directly.
"""

from collections.abc import Iterator

from adam_mpi.model.engine import pool, tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.source import Source

PARTS = 16
B = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
A = ((1, 1, 1, 0), (0, 1, -1, -1))
A_TURNED = tuple(zip(*A, strict=True))
TURNED = [4 * (3, 1, 2, 0)[part // 4] + (3, 1, 2, 0)[part % 4] for part in range(PARTS)]
"""The part of the kernel turned by 180 degrees, for each part."""
GROUP = 16


def fits(shape: Shape, window: int) -> bool:
    """Whether tiles of 2x2 cover inputs and outputs, and there is enough to multiply to pay for the transforms.

    Only the columns of a strip may be odd: the last tile of a row is half a tile then.
    """
    even = shape.height % 2 == 0 and (window == 2 or shape.rows % 2 == 0)
    if shape.margins is None:
        even = even and shape.width % 2 == 0 and (window == 2 or shape.columns % 2 == 0)
    return shape.kernel == 3 and shape.stride == 1 and even and window <= 2 and min(shape.channels, shape.maps) >= 16


def group_rows(rows: int, columns: int) -> int:
    """Rows of tiles in a group: as many as divide all and make no more than GROUP tiles."""
    fitting = [count for count in range(1, rows + 1) if rows % count == 0 and count * columns <= GROUP]
    return max(fitting, default=1)


def across(source: Source, rows: int, columns: int, width: int, first: int = 0) -> Iterator[tuple[bool, bool]]:
    """Emit loops over the tiles of a group of rows x columns, from tile column `first` on; yields which columns of a
    tile are inside the plane."""
    with source.inside(f"for line in range({rows}):"):
        cut = tiles.runs(first + columns, 1, lambda at, _: (2 * at < width, 2 * at + 1 < width), first)
        for run in tiles.each(source, "across", cut):
            source(f"row, column = 2 * (group * {rows} + line), 2 * across")
            source(f"tile = line * {columns} + across - {first}")
            yield run.pattern


def square(width: int, lanes: int, inside: tuple[bool, bool]) -> list[int | None]:
    """Offsets of a tile's 2x2 values in a plane, None where there is none."""
    return [(i * width + j) * lanes if inside[j] else None for i in range(2) for j in range(2)]


def emit_weights(source: Source, name: str, shape: Shape, weight: int) -> None:
    """U[part][map][channel] of all kernels."""
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
                outer, middle = f"g{i}_0 + g{i}_2", f"g{i}_1"
                values = f"g{i}_0", f"half * ({outer} + {middle})", f"half * ({outer} - {middle})", f"g{i}_2"
                for j, value in enumerate(values):
                    source(f"memory[transformed + {(4 * i + j) * count} + pair] = {value}")


def emit_gradient(source: Source, name: str, shape: Shape, weight: int) -> None:
    """Add G' dU G to the gradient, and leave dU zero for the next pass."""
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


def emit_clear(source: Source, name: str, floats: int) -> None:
    with source.kernel(f"{name}(memory, place)", "Zero."):
        with source.inside(f"for i in range({floats}):"):
            source("memory[place + i] = 0")


def emit_pad(
    source: Source,
    name: str,
    planes: int,
    size: tuple[int, int],
    padded: tuple[int, int],
    top: int,
    left: int,
    lanes: int,
    within: tuple[int, int],
) -> None:
    """Copy planes of `size` into `padded` ones with `top` lines of zeros above, `left` columns before, zeros behind.

    `within`: in rows of so many columns, from this one on.
    """
    (rows, columns), (height, width) = size, padded
    with source.kernel(f"{name}(memory, values, padded)", f"{planes} x {rows} x {columns} -> {height} x {width}."):
        with source.inside(f"for line in range({planes * height}):"):
            source(f"plane, row = line // {height}, line % {height} - {top}")
            source(f"to = padded + line * {width * lanes}")
            with source.inside(f"if row < 0 or row >= {rows}:"):
                with source.inside(f"for place in range(0, {width * lanes}, {lanes}):"):
                    source("store(memory, to + place, zero())")
            with source.inside("else:"):
                source(f"v = values + ((plane * {rows} + row) * {within[0]} + {within[1]}) * {lanes}")
                for column in (*range(left), *range(left + columns, width)):
                    source(f"store(memory, to + {column * lanes}, zero())")
                with source.inside(f"for place in range(0, {columns * lanes}, {lanes}):"):
                    source(f"store(memory, to + {left * lanes} + place, load(memory, v + place))")


def emit_values(
    source: Source, name: str, planes: int, height: int, width: int, rows: int, columns: int, lanes: int
) -> None:
    """V of a group of rows x columns tiles, of padded planes of height x width."""
    count = rows * columns
    with source.kernel(f"{name}(memory, padded, values, group)", f"{count} tiles of {planes} planes transformed."):
        with source.inside(f"for tile in range({count}):"):
            source(f"row, column = 2 * (group * {rows} + tile // {columns}), 2 * (tile % {columns})")
            with source.inside(f"for plane in range({planes}):"):
                source(f"v = padded + ((plane * {height} + row) * {width} + column) * {lanes}")
                given = [(i * width + j) * lanes for i in range(4) for j in range(4)]
                source(f"square = {source.make('loads', *given)}(memory, v)")
                source(f"parts = {source.make('sandwich', *B)}(square)")
                _store_parts(source, planes, count, lanes)


def emit_errors(source: Source, name: str, shape: Shape, rows: int, columns: int, lanes: int) -> None:
    """A e A' of the 2x2 errors of each tile of a group; [part][tile][map]."""
    count = rows * columns
    with source.kernel(f"{name}(memory, errors, values, group)", f"{count} tiles of errors transformed."):
        for inside in across(source, rows, columns, shape.columns):
            with source.inside(f"for plane in range({shape.maps}):"):
                source(f"v = errors + ((plane * {shape.rows} + row) * {shape.columns} + column) * {lanes}")
                source(f"square = {source.make('loads', *square(shape.columns, lanes, inside))}(memory, v)")
                source(f"parts = {source.make('sandwich', *A_TURNED)}(square)")
                _store_parts(source, shape.maps, count, lanes)


def _store_parts(source: Source, planes: int, count: int, lanes: int) -> None:
    source(f"to = values + (tile * {planes} + plane) * {lanes}")
    places = [part * count * planes * lanes for part in range(PARTS)]
    source(f"{source.make('stores', *places)}(memory, to, parts)")


def emit_outputs(
    source: Source,
    name: str,
    planes: int,
    size: tuple[int, int],
    rows: int,
    columns: int,
    lanes: int,
    bias: int | None = None,
    relu: bool = False,
    masked: bool = False,
    pooled: bool = False,
    first: int = 0,
) -> None:
    """A' M A of a group, into planes of `size`; `extra` is where winners go, or the mask that relu left."""
    count = rows * columns
    head = f"{name}(memory, weights, products, outputs, extra, group)"
    with source.kernel(head, f"{count} tiles of {planes} planes transformed back."):
        with source.inside(f"for plane in range({planes}):"):
            for inside in across(source, rows, columns, size[1], first):
                source(f"v = products + (tile * {planes} + plane) * {lanes}")
                given = [part * count * planes * lanes for part in range(PARTS)]
                source(f"parts = {source.make('loads', *given)}(memory, v)")
                source(f"square = {source.make('sandwich', *A)}(parts)")
                if bias is not None:
                    source(f"start = broadcast(weights, {bias} + plane)")
                if pooled:
                    _pooled(source, size, relu, lanes)
                else:
                    _plain(source, size, square(size[1], lanes, inside), bias is not None, relu, masked, lanes)


def _pooled(source: Source, size: tuple[int, int], relu: bool, lanes: int) -> None:
    pool.choose(source, [f"square[{number}]" for number in range(4)])
    source("best = add(best, start)")
    if relu:
        pool.through_relu(source)
    source(f"to = ((plane * {size[0] // 2} + row // 2) * {size[1] // 2} + column // 2) * {lanes}")
    source("store(memory, outputs + to, best)")
    source("store(memory, extra + to, winner)")


def _plain(
    source: Source, size: tuple[int, int], places: list[int | None], biased: bool, relu: bool, masked: bool, lanes: int
) -> None:
    source(f"to = ((plane * {size[0]} + row) * {size[1]} + column) * {lanes}")
    if biased:
        source("square = " + ", ".join(f"add(square[{number}], start)" for number in range(4)))
    if relu:
        source(f"square = {source.make('positives', 4)}(square)")
    if masked:
        source(f"square = {source.make('masks', *places)}(square, memory, extra + to)")
    source(f"{source.make('stores', *places)}(memory, outputs + to, square)")
