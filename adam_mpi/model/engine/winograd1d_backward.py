"""Winograd's transform along lines, backward: errors transformed, the gradient of the kernels, errors of the inputs."""

import numpy as np

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.source import BROADCAST, LOAD, Source
from adam_mpi.model.engine.winograd1d import COLUMNS, Winograd1D, matrices, present, rows, turned
from adam_mpi.model.engine.winograd1d_forward import weighted


def emit_errors(source: Source, name: str, lines: Winograd1D) -> None:
    shape, lanes = lines.shape, lines.lanes
    with source.kernel(f"{name}(memory, errors, transformed)", f"Errors of {shape.maps} planes transformed."):
        with source.inside(f"for line in range({shape.maps * shape.rows}):"):
            for run in tiles.each(source, "tile", present(lines, COLUMNS, 0, shape.columns)):
                source(f"v = errors + (line * {shape.columns} + tile * {COLUMNS}) * {lanes}")
                source(f"columns = {source.make('loads', *lines.places(run.pattern))}(memory, v)")
                source(f"points = {source.make('combine', *turned(matrices(shape.kernel)[0]))}(columns)")
                stores = source.make("stores", *lines.apart(shape.maps * lines.tiles))
                source(f"{stores}(memory, transformed + (line * {lines.across} + tile) * {lanes}, points)")


def sum_maps(shape: Shape, registers: int) -> int:
    """Maps of a tile of sums, each with all rows of a kernel."""
    return max(1, min(shape.maps, (registers - 2) // (shape.kernel + 1)))


def packed(lines: Winograd1D, maps: int) -> int:
    """Floats of a tile's sums, in whole vectors."""
    return tiles.up(maps * lines.shape.kernel, lines.lanes)


def sum_floats(lines: Winograd1D, maps: int) -> int:
    """Of all sums: [point][tile of maps][channel][map of the tile][kernel row]."""
    return lines.points * _point_floats(lines, maps)


def _point_floats(lines: Winograd1D, maps: int) -> int:
    return -(-lines.shape.maps // maps) * lines.shape.channels * packed(lines, maps)


def emit_sums(source: Source, name: str, lines: Winograd1D, maps: int) -> None:
    """Add the sums over a block, lanes added up too, to dU."""
    shape, lanes, kernel = lines.shape, lines.lanes, lines.shape.kernel
    with source.kernel(f"{name}(memory, errors, values, sums)", f"Gradient of U, {maps} maps at a time."):
        with source.inside(f"for point in range({lines.points}):"):
            for run in tiles.each(source, "map", tiles.runs(shape.maps, maps)):
                products = [
                    (map * kernel + tap, map * lines.tiles * lanes, tap * lines.across * lanes)
                    for tap in range(kernel)
                    for map in range(run.width)
                ]
                step = source.make("multiply_adds", run.width * kernel, LOAD, *products)
                with source.inside(f"for channel in range({shape.channels}):"):
                    source(f"tile = {source.make('zeros', run.width * kernel)}()")
                    source(f"e = errors + (point * {shape.maps} + map) * {lines.tiles * lanes}")
                    source(f"v = values + (point * {shape.channels} + channel) * {lines.padded * lines.across * lanes}")
                    with source.inside(f"for place in range(0, {lines.tiles * lanes}, {lanes}):"):
                        source(f"tile = {step}(tile, memory, e + place, memory, v + place)")
                    source(f"to = (map // {maps} * {shape.channels} + channel) * {packed(lines, maps)}")
                    source(f"to += point * {_point_floats(lines, maps)}")
                    source(f"{source.make('add_packed', run.width * kernel)}(memory, sums + to, tile)")


def emit_gradient(source: Source, name: str, lines: Winograd1D, weight: int, maps: int) -> None:
    """Add G' dU to the gradient; `maps`: of a tile of sums."""
    shape, kernel = lines.shape, lines.shape.kernel
    with source.kernel(f"{name}(memory, gradient, sums)", "Gradient of the kernels from that of U."):
        with source.inside(f"for pair in range({shape.maps * shape.channels}):"):
            source(f"map, channel = pair // {shape.channels}, pair % {shape.channels}")
            source(f"s = sums + (map // {maps} * {shape.channels} + channel) * {packed(lines, maps)}")
            source(f"s += map % {maps} * {kernel}")
            with source.inside(f"for tap in range({kernel}):"):
                for point in range(lines.points):
                    source(f"u{point} = memory[s + tap + {point * _point_floats(lines, maps)}]")
                for column, row in enumerate(turned(matrices(kernel)[1])):
                    source(f"gradient[{weight + column} + (pair * {kernel} + tap) * {kernel}] += {weighted(row, 'u')}")


def emit_back(source: Source, name: str, lines: Winograd1D, tile: tiles.Tile) -> None:
    shape, kernel = lines.shape, lines.shape.kernel
    head = f"{name}(memory, kernels, errors, products)"
    with source.kernel(head, f"{lines.points} times the products back to data of {shape}, {tile}."):
        with source.inside(f"for point in range({lines.points}):"), source.inside(f"for row in range({shape.height}):"):
            # Output row o reads this row with kernel row `row + pad - o`.
            source(f"first, last = max(0, row + {shape.pad - kernel + 1}), min({shape.rows}, row + {shape.pad + 1})")
            for planes in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "column", tiles.runs(lines.across, tile.columns)):
                    _product(source, lines, planes.width, run.width)


def _product(source: Source, lines: Winograd1D, planes: int, width: int) -> None:
    shape, lanes, kernel = lines.shape, lines.lanes, lines.shape.kernel
    pairs = [(plane, column) for plane in range(planes) for column in range(width)]
    products = [(number, plane * kernel, column * lanes) for number, (plane, column) in enumerate(pairs)]
    source(f"sums = {source.make('zeros', len(pairs))}()")
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        source(f"plane_of = point * {shape.maps} + map")
        source(f"v = errors + ((plane_of * {shape.rows} + line) * {lines.across} + column) * {lanes}")
        source(f"w = kernels + (plane_of * {shape.channels} + plane) * {kernel} + row + {shape.pad} - line")
        source(f"sums = {source.make('multiply_adds', len(pairs), BROADCAST, *products)}(sums, memory, w, memory, v)")
    stores = source.make("stores", *((plane * shape.height * lines.across + column) * lanes for plane, column in pairs))
    source(f"to = ((point * {shape.channels} + plane) * {shape.height} + row) * {lines.across} + column")
    source(f"{stores}(memory, products + to * {lanes}, sums)")


def emit_spread(source: Source, name: str, lines: Winograd1D, masked: bool) -> None:
    """A tile reaches `kernel - 1` columns into the next, which takes them over as `carried`."""
    shape, lanes, reach = lines.shape, lines.lanes, lines.shape.kernel - 1
    loads = source.make("loads", *lines.apart(shape.channels * shape.height * lines.across))
    matrix = rows(np.hstack([np.eye(lines.points, reach), np.array(matrices(shape.kernel)[2]).T]))
    with source.kernel(f"{name}(memory, products, inputs, input_errors)", "Errors of the inputs from their tiles."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            source(f"carried = {source.make('zeros', reach)}()")
            source(f"to = (line * {shape.width} - {shape.left}) * {lanes}")
            for run in tiles.each(source, "tile", present(lines, COLUMNS, -shape.left, shape.width)):
                source(f"points = carried + {loads}(memory, products + (line * {lines.across} + tile) * {lanes})")
                source(f"columns = {source.make('combine', *matrix[:COLUMNS])}(points)")
                source(f"carried = {source.make('combine', *matrix[COLUMNS:])}(points)")
                _store(source, f"to + tile * {COLUMNS * lanes}", "columns", lines.places(run.pattern), masked)
            end = COLUMNS * lines.across
            rest = tuple(end + column - shape.left < shape.width for column in range(reach))
            _store(source, f"to + {end * lanes}", "carried", lines.places(rest), masked)


def _store(source: Source, to: str, columns: str, places: list[int | None], masked: bool) -> None:
    """Where relu made the inputs, its zeros pass no error."""
    if masked:
        columns = f"{source.make('masks', *places)}({columns}, memory, inputs + {to})"
    source(f"{source.make('stores', *places)}(memory, input_errors + {to}, {columns})")
