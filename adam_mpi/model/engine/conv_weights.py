"""Convolution back to the weights: their gradient, summed over the images of one block and added to `gradient`.

for each tile of maps, for each tile of channels, for each kernel row, for each tile of kernel columns:
    sums = 0
    for each output row whose input row is inside the image:
        for each column:
            sums += errors * inputs                           one sum per map, channel and kernel column
    add up the lanes of each sum, add that to the gradient
for each map: the bias in the same way
"""

from dataclasses import dataclass
from itertools import product

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.source import LOAD, Source

BIASES = 4
"""Maps whose errors are added up side by side."""


@dataclass(frozen=True)
class Tile:
    """So many sums at a time."""

    maps: int
    channels: int
    taps: int


def choose(shape: Shape, registers: int) -> Tile:
    """The tile with the fewest loads per multiply-add whose sums and factors fit the registers."""
    kernel_columns = min(shape.kernel, registers - 3)
    fitting = [
        Tile(maps, channels, kernel_columns)
        for maps in range(1, min(shape.maps, registers) + 1)
        for channels in range(1, (min(shape.channels, registers) if kernel_columns == shape.kernel else 1) + 1)
        if maps * channels * kernel_columns + maps + 1 < registers or maps == channels == 1
    ]
    inputs = shape.channels * shape.kernel
    return min(fitting, key=lambda tile: tiles.cost(shape.maps, tile.maps, inputs, tile.channels * tile.taps))


def emit(source: Source, name: str, shape: Shape, weight: int, bias: int, lanes: int, tile: Tile) -> None:
    """`weight`, `bias`: places in the gradient. Arguments: places in the memory of one block's arrays."""
    with source.kernel(f"{name}(memory, gradient, errors, inputs)", f"Back to weights: {shape}, {tile}."):
        for maps in tiles.each(source, "map", tiles.runs(shape.maps, tile.maps)):
            for channels in tiles.each(source, "channel", tiles.runs(shape.channels, tile.channels)):
                with source.inside(f"for tap in range({shape.kernel}):"):
                    for taps in tiles.runs(shape.kernel, tile.taps):
                        for start in range(taps.start, taps.stop, taps.width):
                            _tile(source, shape, lanes, maps.width, channels.width, range(start, start + taps.width))
                            add(source, shape, weight, maps.width, channels.width, range(start, start + taps.width))
        emit_bias(source, shape, bias, lanes)


def _tile(source: Source, shape: Shape, lanes: int, maps: int, channels: int, taps: range) -> None:
    source(f"sums = {source.make('zeros', maps * channels * len(taps))}()")
    rows_inside(source, shape)
    with source.inside("for row in range(first, last):"):
        for run in tiles.each(source, "column", tiles.runs(shape.columns, 1, lambda at, _: _reached(shape, at, taps))):
            source(f"e = errors + ((map * {shape.rows} + row) * {shape.columns} + column) * {lanes}")
            line = f"channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}"
            source(f"v = inputs + (({line}) * {shape.width} + column * {shape.stride}) * {lanes}")
            _multiply_add(source, shape, lanes, maps, channels, taps, run.pattern)


def rows_inside(source: Source, shape: Shape) -> None:
    """Emit `first` and `last` of the output rows whose input row `row * stride + tap - pad` is inside."""
    source(f"first = max(0, ({shape.pad + shape.stride - 1} - tap) // {shape.stride})")
    source(f"last = min({shape.rows}, ({shape.height + shape.pad - 1} - tap) // {shape.stride} + 1)")


def _reached(shape: Shape, column: int, taps: range) -> tuple[int, ...]:
    """The kernel columns that are inside the image at this column."""
    return tuple(tap for tap in taps if 0 <= column * shape.stride + tap - shape.left < shape.width)


def _multiply_add(
    source: Source, shape: Shape, lanes: int, maps: int, channels: int, taps: range, reached: tuple[int, ...]
) -> None:
    if not reached:
        source("pass")
        return
    products = [
        (
            (m * channels + c) * len(taps) + tap - taps.start,
            m * shape.rows * shape.columns * lanes,
            (c * shape.height * shape.width + tap - shape.left) * lanes,
        )
        for c, tap, m in product(range(channels), reached, range(maps))
    ]
    step = source.make("multiply_adds", maps * channels * len(taps), LOAD, *products)
    source(f"sums = {step}(sums, memory, e, memory, v)")


def add(source: Source, shape: Shape, weight: int, maps: int, channels: int, taps: range, kit: str = "") -> None:
    """Emit gradient += sums, their lanes added up; `kit` begins the names of the functions."""
    area = shape.kernel * shape.kernel
    source(f"w = {weight} + (map * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
    places = [(m * shape.channels + c) * area + tap for m, c, tap in product(range(maps), range(channels), taps)]
    source(f"{source.make(f'{kit}add_totals', *places)}(gradient, w, sums)")


def emit_bias(source: Source, shape: Shape, bias: int, lanes: int) -> None:
    """Emit the gradient of the bias: several maps side by side, as additions wait for each other."""
    area = shape.rows * shape.columns * lanes
    for run in tiles.each(source, "map", tiles.runs(shape.maps, BIASES)):
        for map in range(run.width):
            source(f"sum{map} = zero()")
        source(f"e = errors + map * {area}")
        with source.inside(f"for place in range(e, e + {area}, {lanes}):"):
            for map in range(run.width):
                source(f"sum{map} = add(sum{map}, load(memory, place + {map * area}))")
        for map in range(run.width):
            source(f"gradient[{bias + map} + map] += total(sum{map})")
