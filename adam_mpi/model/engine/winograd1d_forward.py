"""Winograd's transform along lines, forward: kernels and inputs transformed, their products, outputs."""

from adam_mpi.model.engine import conv_forward, tiles
from adam_mpi.model.engine.source import BROADCAST, Source
from adam_mpi.model.engine.winograd1d import COLUMNS, Winograd1D, matrices, present


def weighted(row: tuple[float, ...], name: str) -> str:
    """The sum of numbers name0, name1, ... with these factors."""
    return " + ".join(f"np.float32({factor!r}) * {name}{number}" for number, factor in enumerate(row) if factor)


def emit_kernels(source: Source, name: str, lines: Winograd1D, weight: int) -> None:
    """U of each row of each kernel, as a number after the other."""
    shape = lines.shape
    count = shape.maps * shape.channels * shape.kernel
    with source.kernel(f"{name}(memory, weights, kernels)", "Kernels transformed, once for all images."):
        with source.inside(f"for line in range({count}):"):
            for column in range(shape.kernel):
                source(f"w{column} = weights[{weight + column} + line * {shape.kernel}]")
            for point, row in enumerate(matrices(shape.kernel)[1]):
                source(f"memory[kernels + {point * count} + line] = {weighted(row, 'w')}")


def emit_values(source: Source, name: str, lines: Winograd1D) -> None:
    """V of all lines; those of the padding are zero."""
    shape, lanes = lines.shape, lines.lanes
    stores = source.make("stores", *lines.apart(shape.channels * lines.padded * lines.across))
    with source.kernel(f"{name}(memory, inputs, values)", f"Inputs transformed, {lines.across} tiles a line."):
        with source.inside(f"for line in range({shape.channels * lines.padded}):"):
            source(f"plane, row = line // {lines.padded}, line % {lines.padded} - {shape.pad}")
            source(f"to = values + line * {lines.across * lanes}")
            if shape.pad:
                with source.inside(f"if row < 0 or row >= {shape.height}:"):
                    with source.inside(f"for tile in range({lines.across}):"):
                        source(f"{stores}(memory, to + tile * {lanes}, {source.make('zeros', lines.points)}())")
                    source("continue")
            for run in tiles.each(source, "tile", present(lines, lines.points, -shape.left, shape.width)):
                source(f"column = (plane * {shape.height} + row) * {shape.width} + tile * {COLUMNS} - {shape.left}")
                loads = source.make("loads", *lines.places(run.pattern))
                source(f"columns = {loads}(memory, inputs + column * {lanes})")
                source(f"points = {source.make('combine', *matrices(shape.kernel)[2])}(columns)")
                source(f"{stores}(memory, to + tile * {lanes}, points)")


def emit_products(source: Source, name: str, lines: Winograd1D, tile: tiles.Tile) -> None:
    """M: a kernel row further is a row of tiles further, so all rows of a plane are one line to it."""
    head = f"{name}(memory, kernels, values, products)"
    with source.kernel(head, f"{lines.points} times the products of {lines.shape}, {tile}."):
        with source.inside(f"for point in range({lines.points}):"):
            for maps in tiles.each(source, "map", tiles.runs(lines.shape.maps, tile.planes)):
                for run in tiles.each(source, "place", tiles.runs(lines.tiles, tile.columns)):
                    _product(source, lines, maps.width, run.width)


def _product(source: Source, lines: Winograd1D, maps: int, width: int) -> None:
    shape, lanes, kernel = lines.shape, lines.lanes, lines.shape.kernel
    pairs = [(map, column) for map in range(maps) for column in range(width)]
    products = [
        (number, map * shape.channels * kernel + tap, (column + tap * lines.across) * lanes)
        for tap in range(kernel)
        for number, (map, column) in enumerate(pairs)
    ]
    source(f"sums = {source.make('zeros', len(pairs))}()")
    source(f"plane = point * {shape.maps} + map")
    with source.inside(f"for channel in range({shape.channels}):"):
        source(f"w = kernels + (plane * {shape.channels} + channel) * {kernel}")
        source(f"line = (point * {shape.channels} + channel) * {lines.padded * lines.across}")
        step = source.make("multiply_adds", len(pairs), BROADCAST, *products)
        source(f"sums = {step}(sums, memory, w, memory, values + (line + place) * {lanes})")
    stores = source.make("stores", *((map * lines.tiles + column) * lanes for map, column in pairs))
    source(f"{stores}(memory, products + (plane * {lines.tiles} + place) * {lanes}, sums)")


def emit_outputs(source: Source, name: str, lines: Winograd1D, bias: int, relu: bool, window: int) -> None:
    """A plane's rows go to the outputs or, where they are pooled, to a strip first."""
    shape = lines.shape
    arguments = "products, outputs" if window == 1 else "products, outputs, winners, strip"
    with source.kernel(f"{name}(memory, weights, {arguments})", f"{shape.maps} planes transformed back."):
        with source.inside(f"for plane in range({shape.maps}):"):
            source(f"start = broadcast(weights, {bias} + plane)")
            with source.inside(f"for top in range({shape.rows // window}):"):
                with source.inside(f"for step in range({window}):"):
                    source(f"line = plane * {shape.rows} + top * {window} + step")
                    _output(source, lines, relu and window == 1, "outputs + line" if window == 1 else "strip + step")
                if window > 1:
                    conv_forward.pool_strip(source, shape, lines.lanes, 1, relu, window)


def _output(source: Source, lines: Winograd1D, relu: bool, target: str) -> None:
    shape, lanes = lines.shape, lines.lanes
    for run in tiles.each(source, "tile", present(lines, COLUMNS, 0, shape.columns)):
        loads = source.make("loads", *lines.apart(shape.maps * lines.tiles))
        source(f"points = {loads}(memory, products + (line * {lines.across} + tile) * {lanes})")
        source(f"columns = {source.make('combine', *matrices(shape.kernel)[0])}(points)")
        source("columns = " + ", ".join(f"add(columns[{column}], start)" for column in range(COLUMNS)))
        if relu:
            source(f"columns = {source.make('positives', COLUMNS)}(columns)")
        source(f"to = {target} * {shape.columns * lanes} + tile * {COLUMNS * lanes}")
        source(f"{source.make('stores', *lines.places(run.pattern))}(memory, to, columns)")
