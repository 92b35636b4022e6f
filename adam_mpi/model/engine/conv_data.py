"""Convolution back to the data: the errors of its inputs from the errors of its outputs.

for each row of the inputs:
    for each tile of channels, for each tile of columns:
        sums = 0
        for each map, for each output row that read this one:
            sums += weights * errors                          convolution.multiply_add
        store them; where relu made the inputs, its zeros pass no error
"""

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape, data_taps, multiply_add
from adam_mpi.model.engine.source import Source


def emit(
    source: Source, name: str, shape: Shape, weight: int, lanes: int, tile: tiles.Tile, relu: bool = False
) -> None:
    """`relu` says that the inputs come out of one. Arguments: places in the memory of one block's arrays."""
    # Output columns of one kernel column lie a stride apart: a tile begins where the pattern does.
    width = tiles.up(tile.columns, shape.stride)
    runs = tiles.runs(shape.width, width, lambda *at: data_taps(shape, *at))
    with source.kernel(f"{name}(memory, weights, errors, inputs, input_errors)", f"Back to data: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.height}):"):
            # Output row o reads this row with kernel row `row + pad - o * stride`.
            source(f"first = max(0, (row + {shape.pad - shape.kernel + shape.stride}) // {shape.stride})")
            source(f"last = min({shape.rows}, (row + {shape.pad}) // {shape.stride} + 1)")
            for channels in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "column", runs):
                    _sum(source, shape, weight, lanes, channels.width, run)
                    _store(source, shape, lanes, channels.width, run.width, relu)


def _sum(source: Source, shape: Shape, weight: int, lanes: int, planes: int, run: tiles.Run) -> None:
    source(f"sums = {source.make('zeros', planes * run.width)}()")
    area = shape.kernel * shape.kernel
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        source(f"v = errors + ((map * {shape.rows} + line) * {shape.columns} + column // {shape.stride}) * {lanes}")
        source(f"tap = row + {shape.pad} - line * {shape.stride}")
        source(f"w = {weight} + (map * {shape.channels} + plane) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, area, lanes)


def _store(source: Source, shape: Shape, lanes: int, planes: int, width: int, relu: bool) -> None:
    source(f"to = ((plane * {shape.height} + row) * {shape.width} + column) * {lanes}")
    area = shape.height * shape.width
    places = [(plane * area + column) * lanes for plane in range(planes) for column in range(width)]
    if relu:
        source(f"sums = {source.make('masks', *places)}(sums, memory, inputs + to)")
    source(f"{source.make('stores', *places)}(memory, input_errors + to, sums)")
