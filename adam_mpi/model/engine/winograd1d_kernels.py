"""Emit Winograd's transform along rows: forward, back to the weights, and back to the data."""

import numpy as np

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.conv_kernels import ForwardKernel, emit_pool
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.source import BROADCAST, LOAD, Source
from adam_mpi.model.engine.winograd1d import COLUMNS, Winograd1D, matrices, matrix_rows, present_tiles, transposed


def weighted_terms(row: tuple[float, ...], name: str) -> str:
    """Return the expression of the sum of name0, name1, ... with the factors of `row`."""
    return " + ".join(f"np.float32({factor!r}) * {name}{number}" for number, factor in enumerate(row) if factor)


def emit_winograd1d_kernels(source: Source, name: str, winograd: Winograd1D, weight: int) -> None:
    """Emit the kernel `name` that computes U of each row of each convolution kernel, one number after the other."""
    shape = winograd.shape
    count = shape.maps * shape.channels * shape.kernel
    with source.kernel(f"{name}(memory, weights, kernels)", "Kernels transformed, once for all images."):
        with source.inside(f"for line in range({count}):"):
            for column in range(shape.kernel):
                source(f"w{column} = weights[{weight + column} + line * {shape.kernel}]")
            for point, row in enumerate(matrices(shape.kernel)[1]):
                source(f"memory[kernels + {point * count} + line] = {weighted_terms(row, 'w')}")


def emit_winograd1d_values(source: Source, name: str, winograd: Winograd1D) -> None:
    """Emit the kernel `name` that computes V of all rows; those of the padding are zero."""
    shape = winograd.shape
    lanes = winograd.lanes
    stores = source.make("stores", *winograd.point_offsets(shape.channels * winograd.padded * winograd.across))
    with source.kernel(f"{name}(memory, inputs, values)", f"Inputs transformed, {winograd.across} tiles a line."):
        with source.inside(f"for line in range({shape.channels * winograd.padded}):"):
            source(f"plane, row = line // {winograd.padded}, line % {winograd.padded} - {shape.pad}")
            source(f"to = values + line * {winograd.across * lanes}")
            if shape.pad:
                with source.inside(f"if row < 0 or row >= {shape.height}:"):
                    with source.inside(f"for tile in range({winograd.across}):"):
                        source(f"{stores}(memory, to + tile * {lanes}, {source.make('zeros', winograd.points)}())")
                    source("continue")
            for run in tiles.each(source, "tile", present_tiles(winograd, winograd.points, -shape.left, shape.width)):
                source(f"column = (plane * {shape.height} + row) * {shape.width} + tile * {COLUMNS} - {shape.left}")
                loads = source.make("loads", *winograd.column_offsets(run.pattern))
                source(f"columns = {loads}(memory, inputs + column * {lanes})")
                source(f"points = {source.make('combine', *matrices(shape.kernel)[2])}(columns)")
                source(f"{stores}(memory, to + tile * {lanes}, points)")


def emit_winograd1d_products(source: Source, name: str, winograd: Winograd1D, tile: tiles.Tile) -> None:
    """Emit the kernel `name` that computes M.

    A kernel row further is a row of tiles further, so all rows of a plane are one row to it.
    """
    head = f"{name}(memory, kernels, values, products)"
    with source.kernel(head, f"{winograd.points} times the products of {winograd.shape}, {tile}."):
        with source.inside(f"for point in range({winograd.points}):"):
            for maps in tiles.each(source, "map", tiles.runs(winograd.shape.maps, tile.planes)):
                for run in tiles.each(source, "place", tiles.runs(winograd.tiles, tile.columns)):
                    _forward_product(source, winograd, maps.width, run.width)


def _forward_product(source: Source, winograd: Winograd1D, maps: int, width: int) -> None:
    shape = winograd.shape
    lanes = winograd.lanes
    kernel = shape.kernel
    pairs = [(map, column) for map in range(maps) for column in range(width)]
    products = [
        (number, map * shape.channels * kernel + tap, (column + tap * winograd.across) * lanes)
        for tap in range(kernel)
        for number, (map, column) in enumerate(pairs)
    ]
    source(f"sums = {source.make('zeros', len(pairs))}()")
    source(f"plane = point * {shape.maps} + map")
    with source.inside(f"for channel in range({shape.channels}):"):
        source(f"w = kernels + (plane * {shape.channels} + channel) * {kernel}")
        source(f"line = (point * {shape.channels} + channel) * {winograd.padded * winograd.across}")
        step = source.make("multiply_adds", len(pairs), BROADCAST, *products)
        source(f"sums = {step}(sums, memory, w, memory, values + (line + place) * {lanes})")
    stores = source.make("stores", *((map * winograd.tiles + column) * lanes for map, column in pairs))
    source(f"{stores}(memory, products + (plane * {winograd.tiles} + place) * {lanes}, sums)")


def emit_winograd1d_outputs(source: Source, winograd: Winograd1D, kernel: ForwardKernel) -> None:
    """Emit `kernel`, which computes the outputs from M; rows that are pooled go to a buffer first."""
    shape = winograd.shape
    window = kernel.window
    arguments = "products, outputs" if window == 1 else "products, outputs, winners, unpooled"
    with source.kernel(f"{kernel.name}(memory, weights, {arguments})", f"{shape.maps} planes transformed back."):
        with source.inside(f"for plane in range({shape.maps}):"):
            source("start = zero()" if kernel.bias is None else f"start = broadcast(weights, {kernel.bias} + plane)")
            with source.inside(f"for top in range({shape.rows // window}):"):
                with source.inside(f"for step in range({window}):"):
                    source(f"line = plane * {shape.rows} + top * {window} + step")
                    target = "outputs + line" if window == 1 else "unpooled + step"
                    _output(source, winograd, kernel.relu and window == 1, target)
                if window > 1:
                    emit_pool(source, kernel, planes=1)


def _output(source: Source, winograd: Winograd1D, relu: bool, target: str) -> None:
    shape = winograd.shape
    lanes = winograd.lanes
    for run in tiles.each(source, "tile", present_tiles(winograd, COLUMNS, 0, shape.columns)):
        loads = source.make("loads", *winograd.point_offsets(shape.maps * winograd.tiles))
        source(f"points = {loads}(memory, products + (line * {winograd.across} + tile) * {lanes})")
        source(f"columns = {source.make('combine', *matrices(shape.kernel)[0])}(points)")
        source("columns = " + ", ".join(f"add(columns[{column}], start)" for column in range(COLUMNS)))
        if relu:
            source(f"columns = {source.make('positives', COLUMNS)}(columns)")
        source(f"to = {target} * {shape.columns * lanes} + tile * {COLUMNS * lanes}")
        source(f"{source.make('stores', *winograd.column_offsets(run.pattern))}(memory, to, columns)")


def emit_winograd1d_errors(source: Source, name: str, winograd: Winograd1D) -> None:
    """Emit the kernel `name` that computes E of all rows."""
    shape = winograd.shape
    lanes = winograd.lanes
    with source.kernel(f"{name}(memory, errors, transformed)", f"Errors of {shape.maps} planes transformed."):
        with source.inside(f"for line in range({shape.maps * shape.rows}):"):
            for run in tiles.each(source, "tile", present_tiles(winograd, COLUMNS, 0, shape.columns)):
                source(f"v = errors + (line * {shape.columns} + tile * {COLUMNS}) * {lanes}")
                source(f"columns = {source.make('loads', *winograd.column_offsets(run.pattern))}(memory, v)")
                source(f"points = {source.make('combine', *transposed(matrices(shape.kernel)[0]))}(columns)")
                stores = source.make("stores", *winograd.point_offsets(shape.maps * winograd.tiles))
                source(f"{stores}(memory, transformed + (line * {winograd.across} + tile) * {lanes}, points)")


def sum_maps(shape: Shape, registers: int) -> int:
    """Return the maps of a tile of sums, each with all rows of a kernel."""
    return max(1, min(shape.maps, (registers - 2) // (shape.kernel + 1)))


def packed(winograd: Winograd1D, maps: int) -> int:
    """Return the floats of the sums of a tile of `maps` maps, in whole vectors."""
    return tiles.up(maps * winograd.shape.kernel, winograd.lanes)


def sum_floats(winograd: Winograd1D, maps: int) -> int:
    """Return the floats of all sums: [point][tile of maps][channel][map of the tile][kernel row]."""
    return winograd.points * _point_floats(winograd, maps)


def _point_floats(winograd: Winograd1D, maps: int) -> int:
    return -(-winograd.shape.maps // maps) * winograd.shape.channels * packed(winograd, maps)


def emit_winograd1d_sums(source: Source, name: str, winograd: Winograd1D, maps: int) -> None:
    """Emit the kernel `name` that adds the sums over a block, lanes added up too, to dU; `maps` maps at a time."""
    shape = winograd.shape
    lanes = winograd.lanes
    kernel = shape.kernel
    with source.kernel(f"{name}(memory, errors, values, sums)", f"Gradient of U, {maps} maps at a time."):
        with source.inside(f"for point in range({winograd.points}):"):
            for run in tiles.each(source, "map", tiles.runs(shape.maps, maps)):
                products = [
                    (map * kernel + tap, map * winograd.tiles * lanes, tap * winograd.across * lanes)
                    for tap in range(kernel)
                    for map in range(run.width)
                ]
                step = source.make("multiply_adds", run.width * kernel, LOAD, *products)
                with source.inside(f"for channel in range({shape.channels}):"):
                    source(f"tile = {source.make('zeros', run.width * kernel)}()")
                    source(f"e = errors + (point * {shape.maps} + map) * {winograd.tiles * lanes}")
                    plane = winograd.padded * winograd.across * lanes
                    source(f"v = values + (point * {shape.channels} + channel) * {plane}")
                    with source.inside(f"for place in range(0, {winograd.tiles * lanes}, {lanes}):"):
                        source(f"tile = {step}(tile, memory, e + place, memory, v + place)")
                    source(f"to = (map // {maps} * {shape.channels} + channel) * {packed(winograd, maps)}")
                    source(f"to += point * {_point_floats(winograd, maps)}")
                    source(f"{source.make('add_packed', run.width * kernel)}(memory, sums + to, tile)")


def emit_winograd1d_gradient(source: Source, name: str, winograd: Winograd1D, weight: int, maps: int) -> None:
    """Emit the kernel `name` that adds G' dU to the gradient; `maps` are those of a tile of sums."""
    shape = winograd.shape
    kernel = shape.kernel
    with source.kernel(f"{name}(memory, gradient, sums)", "Gradient of the kernels from that of U."):
        with source.inside(f"for pair in range({shape.maps * shape.channels}):"):
            source(f"map, channel = pair // {shape.channels}, pair % {shape.channels}")
            source(f"s = sums + (map // {maps} * {shape.channels} + channel) * {packed(winograd, maps)}")
            source(f"s += map % {maps} * {kernel}")
            with source.inside(f"for tap in range({kernel}):"):
                for point in range(winograd.points):
                    source(f"u{point} = memory[s + tap + {point * _point_floats(winograd, maps)}]")
                for column, row in enumerate(transposed(matrices(kernel)[1])):
                    source(
                        f"gradient[{weight + column} + (pair * {kernel} + tap) * {kernel}] "
                        f"+= {weighted_terms(row, 'u')}"
                    )


def emit_winograd1d_back(source: Source, name: str, winograd: Winograd1D, tile: tiles.Tile) -> None:
    """Emit the kernel `name` that computes D in tiles of `tile`."""
    shape = winograd.shape
    kernel = shape.kernel
    head = f"{name}(memory, kernels, errors, products)"
    with source.kernel(head, f"{winograd.points} times the products back to data of {shape}, {tile}."):
        with (
            source.inside(f"for point in range({winograd.points}):"),
            source.inside(f"for row in range({shape.height}):"),
        ):
            # Output row o reads this row with kernel row `row + pad - o`.
            source(f"first, last = max(0, row + {shape.pad - kernel + 1}), min({shape.rows}, row + {shape.pad + 1})")
            for planes in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "column", tiles.runs(winograd.across, tile.columns)):
                    _back_product(source, winograd, planes.width, run.width)


def _back_product(source: Source, winograd: Winograd1D, planes: int, width: int) -> None:
    shape = winograd.shape
    lanes = winograd.lanes
    kernel = shape.kernel
    pairs = [(plane, column) for plane in range(planes) for column in range(width)]
    products = [(number, plane * kernel, column * lanes) for number, (plane, column) in enumerate(pairs)]
    source(f"sums = {source.make('zeros', len(pairs))}()")
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        source(f"plane_of = point * {shape.maps} + map")
        source(f"v = errors + ((plane_of * {shape.rows} + line) * {winograd.across} + column) * {lanes}")
        source(f"w = kernels + (plane_of * {shape.channels} + plane) * {kernel} + row + {shape.pad} - line")
        source(f"sums = {source.make('multiply_adds', len(pairs), BROADCAST, *products)}(sums, memory, w, memory, v)")
    stores = source.make(
        "stores", *((plane * shape.height * winograd.across + column) * lanes for plane, column in pairs)
    )
    source(f"to = ((point * {shape.channels} + plane) * {shape.height} + row) * {winograd.across} + column")
    source(f"{stores}(memory, products + to * {lanes}, sums)")


def emit_winograd1d_spread(source: Source, name: str, winograd: Winograd1D, masked: bool) -> None:
    """Emit the kernel `name` that computes the errors of the inputs from D.

    A tile reaches `kernel - 1` columns into the next, which takes them over as `carried`. `masked`: a relu made the
    inputs.
    """
    shape = winograd.shape
    lanes = winograd.lanes
    reach = shape.kernel - 1
    loads = source.make("loads", *winograd.point_offsets(shape.channels * shape.height * winograd.across))
    matrix = matrix_rows(np.hstack([np.eye(winograd.points, reach), np.array(matrices(shape.kernel)[2]).T]))
    with source.kernel(f"{name}(memory, products, inputs, input_errors)", "Errors of the inputs from their tiles."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            source(f"carried = {source.make('zeros', reach)}()")
            source(f"to = (line * {shape.width} - {shape.left}) * {lanes}")
            for run in tiles.each(source, "tile", present_tiles(winograd, COLUMNS, -shape.left, shape.width)):
                source(f"points = carried + {loads}(memory, products + (line * {winograd.across} + tile) * {lanes})")
                source(f"columns = {source.make('combine', *matrix[:COLUMNS])}(points)")
                source(f"carried = {source.make('combine', *matrix[COLUMNS:])}(points)")
                _store_inputs(
                    source, f"to + tile * {COLUMNS * lanes}", "columns", winograd.column_offsets(run.pattern), masked
                )
            end = COLUMNS * winograd.across
            rest = tuple(end + column - shape.left < shape.width for column in range(reach))
            _store_inputs(source, f"to + {end * lanes}", "carried", winograd.column_offsets(rest), masked)


def _store_inputs(source: Source, to: str, columns: str, places: list[int | None], masked: bool) -> None:
    """Emit the stores of `columns`; if `masked`, zeros of relu pass no error."""
    if masked:
        columns = f"{source.make('masks', *places)}({columns}, memory, inputs + {to})"
    source(f"{source.make('stores', *places)}(memory, input_errors + {to}, {columns})")
