"""Emit a convolution back to the data: the errors of its inputs from the errors of its outputs.

for each row of the inputs:
    for each tile of channels, for each tile of columns:
        sums = 0
        for each map, for each output row that read this one:
            sums += weights * errors                          convolution.multiply_add
        store them; where relu made the inputs, its zeros pass no error
"""

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import ConvKernel, data_taps, multiply_add
from adam_mpi.model.engine.source import Source


def emit(source: Source, kernel: ConvKernel, tile: tiles.Tile, masked: bool = False) -> None:
    """Emit `kernel` in tiles of `tile`; `masked` says that a relu made the inputs.

    The kernel's arguments are offsets in memory of one block's arrays.
    """
    shape = kernel.shape
    # Output columns of one kernel column lie a stride apart: a tile begins where the pattern does.
    width = tiles.up(tile.columns, shape.stride)
    runs = tiles.runs(shape.width, width, lambda *at: data_taps(shape, *at))
    head = f"{kernel.name}(memory, weights, errors, inputs, input_errors)"
    with source.kernel(head, f"Back to data: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.height}):"):
            # Output row o reads this row with kernel row `row + pad - o * stride`.
            source(f"first = max(0, (row + {shape.pad - shape.kernel + shape.stride}) // {shape.stride})")
            source(f"last = min({shape.rows}, (row + {shape.pad}) // {shape.stride} + 1)")
            for channels in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "column", runs):
                    _sum(source, kernel, channels.width, run)
                    _store(source, kernel, channels.width, run.width, masked)


def _sum(source: Source, kernel: ConvKernel, planes: int, run: tiles.Run) -> None:
    shape = kernel.shape
    source(f"sums = {source.make('zeros', planes * run.width)}()")
    area = shape.kernel * shape.kernel
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        column = f"column // {shape.stride}"
        source(f"v = errors + ((map * {shape.rows} + line) * {shape.columns} + {column}) * {kernel.lanes}")
        source(f"tap = row + {shape.pad} - line * {shape.stride}")
        source(f"w = {kernel.weight} + (map * {shape.channels} + plane) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, area, kernel.lanes)


def _store(source: Source, kernel: ConvKernel, planes: int, width: int, masked: bool) -> None:
    shape = kernel.shape
    lanes = kernel.lanes
    source(f"to = ((plane * {shape.height} + row) * {shape.width} + column) * {lanes}")
    area = shape.height * shape.width
    places = [(plane * area + column) * lanes for plane in range(planes) for column in range(width)]
    if masked:
        source(f"sums = {source.make('masks', *places)}(sums, memory, inputs + to)")
    source(f"{source.make('stores', *places)}(memory, input_errors + to, sums)")
