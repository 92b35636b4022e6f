"""Emit a convolution back to the weights: their gradient, summed over the images of one block, added to `gradient`.

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
from adam_mpi.model.engine.convolution import ConvKernel, Shape
from adam_mpi.model.engine.source import LOAD, Source

BIASES = 4
"""Maps whose errors are added up side by side."""


@dataclass(frozen=True)
class Tile:
    """The sums a kernel keeps in registers: one per map, channel and kernel column (`taps`)."""

    maps: int
    channels: int
    taps: int


@dataclass(frozen=True)
class Sums:
    """The sums of one tile, at the edges of the ranges maybe fewer than `Tile` says, for the kernel columns `taps`."""

    maps: int
    channels: int
    taps: range

    @property
    def count(self) -> int:
        """How many sums there are."""
        return self.maps * self.channels * len(self.taps)


def choose(shape: Shape, registers: int) -> Tile:
    """Return the tile with the fewest loads per multiply-add whose sums and factors fit `registers`."""
    kernel_columns = min(shape.kernel, registers - 3)
    fitting = [
        Tile(maps, channels, kernel_columns)
        for maps in range(1, min(shape.maps, registers) + 1)
        for channels in range(1, (min(shape.channels, registers) if kernel_columns == shape.kernel else 1) + 1)
        if maps * channels * kernel_columns + maps + 1 < registers or maps == channels == 1
    ]
    inputs = shape.channels * shape.kernel
    return min(fitting, key=lambda tile: tiles.cost(shape.maps, tile.maps, inputs, tile.channels * tile.taps))


def emit(source: Source, kernel: ConvKernel, tile: Tile) -> None:
    """Emit `kernel` in tiles of `tile`; its arguments are offsets in memory of one block's errors and inputs."""
    shape = kernel.shape
    with source.kernel(f"{kernel.name}(memory, gradient, errors, inputs)", f"Back to weights: {shape}, {tile}."):
        for maps in tiles.each(source, "map", tiles.runs(shape.maps, tile.maps)):
            for channels in tiles.each(source, "channel", tiles.runs(shape.channels, tile.channels)):
                with source.inside(f"for tap in range({shape.kernel}):"):
                    for taps in tiles.runs(shape.kernel, tile.taps):
                        for start in range(taps.start, taps.stop, taps.width):
                            sums = Sums(maps.width, channels.width, range(start, start + taps.width))
                            _tile(source, kernel, sums)
                            add(source, shape, kernel.weight, sums)
        emit_bias(source, shape, kernel.bias, kernel.lanes)


def _tile(source: Source, kernel: ConvKernel, sums: Sums) -> None:
    shape = kernel.shape
    lanes = kernel.lanes
    source(f"sums = {source.make('zeros', sums.count)}()")
    rows_inside(source, shape)
    with source.inside("for row in range(first, last):"):
        cut = tiles.runs(shape.columns, 1, lambda at, _: _reached(shape, at, sums.taps))
        for run in tiles.each(source, "column", cut):
            source(f"e = errors + ((map * {shape.rows} + row) * {shape.columns} + column) * {lanes}")
            line = f"channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}"
            source(f"v = inputs + (({line}) * {shape.width} + column * {shape.stride}) * {lanes}")
            _multiply_add(source, kernel, sums, run.pattern)


def rows_inside(source: Source, shape: Shape) -> None:
    """Emit `first` and `last` of the output rows whose input row `row * stride + tap - pad` is inside."""
    source(f"first = max(0, ({shape.pad + shape.stride - 1} - tap) // {shape.stride})")
    source(f"last = min({shape.rows}, ({shape.height + shape.pad - 1} - tap) // {shape.stride} + 1)")


def _reached(shape: Shape, column: int, taps: range) -> tuple[int, ...]:
    """Return the kernel columns of `taps` that are inside the image at output column `column`."""
    return tuple(tap for tap in taps if 0 <= column * shape.stride + tap - shape.left < shape.width)


def _multiply_add(source: Source, kernel: ConvKernel, sums: Sums, reached: tuple[int, ...]) -> None:
    if not reached:
        source("pass")
        return
    shape = kernel.shape
    products = [
        (
            (m * sums.channels + c) * len(sums.taps) + tap - sums.taps.start,
            m * shape.rows * shape.columns * kernel.lanes,
            (c * shape.height * shape.width + tap - shape.left) * kernel.lanes,
        )
        for c, tap, m in product(range(sums.channels), reached, range(sums.maps))
    ]
    step = source.make("multiply_adds", sums.count, LOAD, *products)
    source(f"sums = {step}(sums, memory, e, memory, v)")


def add(source: Source, shape: Shape, weight: int, sums: Sums, prefix: str = "") -> None:
    """Emit gradient += sums, their lanes added up; `prefix` begins the names of the kit's functions."""
    area = shape.kernel * shape.kernel
    source(f"w = {weight} + (map * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
    every = product(range(sums.maps), range(sums.channels), sums.taps)
    places = [(m * shape.channels + c) * area + tap for m, c, tap in every]
    source(f"{source.make(f'{prefix}add_totals', *places)}(gradient, w, sums)")


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
