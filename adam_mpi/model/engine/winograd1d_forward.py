"""Emit Winograd's transform along rows, forward: kernels and inputs transformed, their products, outputs."""

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.conv_forward import ForwardKernel, emit_pool
from adam_mpi.model.engine.source import BROADCAST, Source
from adam_mpi.model.engine.winograd1d import COLUMNS, Winograd1D, matrices, present


def weighted(row: tuple[float, ...], name: str) -> str:
    """Return the expression of the sum of name0, name1, ... with the factors of `row`."""
    return " + ".join(f"np.float32({factor!r}) * {name}{number}" for number, factor in enumerate(row) if factor)


def emit_kernels(source: Source, name: str, winograd: Winograd1D, weight: int) -> None:
    """Emit the kernel `name` that computes U of each row of each convolution kernel, one number after the other."""
    shape = winograd.shape
    count = shape.maps * shape.channels * shape.kernel
    with source.kernel(f"{name}(memory, weights, kernels)", "Kernels transformed, once for all images."):
        with source.inside(f"for line in range({count}):"):
            for column in range(shape.kernel):
                source(f"w{column} = weights[{weight + column} + line * {shape.kernel}]")
            for point, row in enumerate(matrices(shape.kernel)[1]):
                source(f"memory[kernels + {point * count} + line] = {weighted(row, 'w')}")


def emit_values(source: Source, name: str, winograd: Winograd1D) -> None:
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
            for run in tiles.each(source, "tile", present(winograd, winograd.points, -shape.left, shape.width)):
                source(f"column = (plane * {shape.height} + row) * {shape.width} + tile * {COLUMNS} - {shape.left}")
                loads = source.make("loads", *winograd.column_offsets(run.pattern))
                source(f"columns = {loads}(memory, inputs + column * {lanes})")
                source(f"points = {source.make('combine', *matrices(shape.kernel)[2])}(columns)")
                source(f"{stores}(memory, to + tile * {lanes}, points)")


def emit_products(source: Source, name: str, winograd: Winograd1D, tile: tiles.Tile) -> None:
    """Emit the kernel `name` that computes M.

    A kernel row further is a row of tiles further, so all rows of a plane are one row to it.
    """
    head = f"{name}(memory, kernels, values, products)"
    with source.kernel(head, f"{winograd.points} times the products of {winograd.shape}, {tile}."):
        with source.inside(f"for point in range({winograd.points}):"):
            for maps in tiles.each(source, "map", tiles.runs(winograd.shape.maps, tile.planes)):
                for run in tiles.each(source, "place", tiles.runs(winograd.tiles, tile.columns)):
                    _product(source, winograd, maps.width, run.width)


def _product(source: Source, winograd: Winograd1D, maps: int, width: int) -> None:
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


def emit_outputs(source: Source, winograd: Winograd1D, kernel: ForwardKernel) -> None:
    """Emit `kernel`, which computes the outputs from M; rows that are pooled go to a buffer first."""
    shape = winograd.shape
    window = kernel.window
    arguments = "products, outputs" if window == 1 else "products, outputs, winners, unpooled"
    with source.kernel(f"{kernel.name}(memory, weights, {arguments})", f"{shape.maps} planes transformed back."):
        with source.inside(f"for plane in range({shape.maps}):"):
            source(f"start = broadcast(weights, {kernel.bias} + plane)")
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
    for run in tiles.each(source, "tile", present(winograd, COLUMNS, 0, shape.columns)):
        loads = source.make("loads", *winograd.point_offsets(shape.maps * winograd.tiles))
        source(f"points = {loads}(memory, products + (line * {winograd.across} + tile) * {lanes})")
        source(f"columns = {source.make('combine', *matrices(shape.kernel)[0])}(points)")
        source("columns = " + ", ".join(f"add(columns[{column}], start)" for column in range(COLUMNS)))
        if relu:
            source(f"columns = {source.make('positives', COLUMNS)}(columns)")
        source(f"to = {target} * {shape.columns * lanes} + tile * {COLUMNS * lanes}")
        source(f"{source.make('stores', *winograd.column_offsets(run.pattern))}(memory, to, columns)")
