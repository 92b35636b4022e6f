"""Emit direct convolutions: forward, back to the data, and back to the weights.

for each row of windows:
    for each tile of maps:
        for each row of the window:                           one row when nothing is pooled
            for each tile of columns:
                sums = bias
                for each channel, for each kernel row inside the image:
                    sums += weights * inputs                  convolution.multiply_add
                store them: as outputs, or in a buffer of rows to be pooled
        for each column of windows:
            pool the rows                                     pool.window

for each row of the inputs:
    for each tile of channels, for each tile of columns:
        sums = 0
        for each map, for each output row that read this one:
            sums += weights * errors                          convolution.multiply_add
        store them; where relu made the inputs, its zeros pass no error

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

from adam_mpi.model.engine import pool_and_norm, tiles
from adam_mpi.model.engine.convolution import ConvKernel, Shape, data_taps, forward_taps, multiply_add
from adam_mpi.model.engine.source import LOAD, Source
from adam_mpi.model.exchange import Span


@dataclass(frozen=True)
class ForwardKernel(ConvKernel):
    """A convolution in tiles of `tile`, followed by relu if `relu`, then max-pooling in windows of `window` pixels."""

    tile: tiles.Tile
    relu: bool = False
    window: int = 1
    span: Span | None = None
    """The columns to compute, whole windows of them; None: all."""

    @property
    def columns(self) -> Span:
        """Return the first and last + 1 of the columns that a forward convolution kernel computes."""
        return self.span or (0, self.shape.columns // self.window * self.window)


def pooled_rows_floats(shape: Shape, window: int, tile: tiles.Tile, lanes: int) -> int:
    """Return the floats of the buffer that holds the rows of a tile of maps until they are pooled."""
    return tile.planes * window * shape.columns * lanes


def emit_forward(source: Source, kernel: ForwardKernel) -> None:
    """Emit `kernel`; its arguments are offsets in memory of one block's inputs, outputs, winners and rows to pool."""
    shape = kernel.shape
    window = kernel.window
    arguments = "inputs, outputs" if window == 1 else "inputs, outputs, winners, unpooled"
    with source.kernel(f"{kernel.name}(memory, weights, {arguments})", f"Forward: {shape}, {kernel.tile}."):
        with source.inside(f"for top in range({shape.rows // window}):"):
            for maps in tiles.each(source, "plane", tiles.runs(shape.maps, kernel.tile.planes)):
                with source.inside(f"for step in range({window}):"):
                    source(f"row = top * {window} + step")
                    _forward_rows(source, kernel, maps.width)
                if window > 1:
                    emit_pool(source, kernel, maps.width)


def _forward_rows(source: Source, kernel: ForwardKernel, planes: int) -> None:
    shape = kernel.shape
    lanes = kernel.lanes
    window = kernel.window
    first, last = kernel.columns
    source(f"first = max(0, {shape.pad} - row * {shape.stride})")
    source(f"last = min({shape.kernel}, {shape.height + shape.pad} - row * {shape.stride})")
    cut = tiles.runs(last, kernel.tile.columns, lambda *at: forward_taps(shape, *at), first)
    for run in tiles.each(source, "column", cut):
        starts = [plane for plane in range(planes) for _ in range(run.width)]
        if kernel.bias is None:
            source(f"sums = {source.make('zeros', len(starts))}()")
        else:
            source(f"sums = {source.make('broadcasts', *starts)}(weights, {kernel.bias} + plane)")
        _sum_forward(source, kernel, planes, run)
        if kernel.relu and window == 1:
            source(f"sums = {source.make('positives', planes * run.width)}(sums)")
        line = f"outputs + (plane * {shape.rows} + row" if window == 1 else "unpooled + (step"
        source(f"to = {line}) * {shape.columns * lanes} + column * {lanes}")
        plane_pixels = (shape.rows if window == 1 else window) * shape.columns
        places = [(plane * plane_pixels + column) * lanes for plane in range(planes) for column in range(run.width)]
        source(f"{source.make('stores', *places)}(memory, to, sums)")


def _sum_forward(source: Source, kernel: ForwardKernel, planes: int, run: tiles.Run) -> None:
    shape = kernel.shape
    area = shape.kernel * shape.kernel
    with source.inside(f"for channel in range({shape.channels}):"), source.inside("for tap in range(first, last):"):
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + (line * {shape.width} + column * {shape.stride}) * {kernel.lanes}")
        source(f"w = {kernel.weight} + (plane * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, shape.channels * area, kernel.lanes)


def emit_pool(source: Source, kernel: ForwardKernel, planes: int) -> None:
    """Emit the max-pooling of the rows of `planes` maps, from the buffer of rows into the outputs."""
    shape = kernel.shape
    lanes = kernel.lanes
    window = kernel.window
    across = shape.columns // window
    first, last = (edge // window for edge in kernel.columns)
    with source.inside(f"for column in range({first}, {last}):"):
        with source.inside(f"for line in range({planes}):"):
            source(f"v = unpooled + (line * {window * shape.columns} + column * {window}) * {lanes}")
            pool_and_norm.emit_pool_window(source, window, shape.columns, lanes, kernel.relu)
            source(f"to = (((plane + line) * {shape.rows // window} + top) * {across} + column) * {lanes}")
            source("store(memory, outputs + to, best)")
            source("store(memory, winners + to, winner)")


def emit_data(source: Source, kernel: ConvKernel, tile: tiles.Tile, masked: bool = False) -> None:
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
                    _sum_data(source, kernel, channels.width, run)
                    _store_data(source, kernel, channels.width, run.width, masked)


def _sum_data(source: Source, kernel: ConvKernel, planes: int, run: tiles.Run) -> None:
    shape = kernel.shape
    source(f"sums = {source.make('zeros', planes * run.width)}()")
    area = shape.kernel * shape.kernel
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        column = f"column // {shape.stride}"
        source(f"v = errors + ((map * {shape.rows} + line) * {shape.columns} + {column}) * {kernel.lanes}")
        source(f"tap = row + {shape.pad} - line * {shape.stride}")
        source(f"w = {kernel.weight} + (map * {shape.channels} + plane) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, area, kernel.lanes)


def _store_data(source: Source, kernel: ConvKernel, planes: int, width: int, masked: bool) -> None:
    shape = kernel.shape
    lanes = kernel.lanes
    source(f"to = ((plane * {shape.height} + row) * {shape.width} + column) * {lanes}")
    area = shape.height * shape.width
    places = [(plane * area + column) * lanes for plane in range(planes) for column in range(width)]
    if masked:
        source(f"sums = {source.make('masks', *places)}(sums, memory, inputs + to)")
    source(f"{source.make('stores', *places)}(memory, input_errors + to, sums)")


BIASES = 4
"""Maps whose errors are added up side by side."""


@dataclass(frozen=True)
class WeightsTile:
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
        """Return the number of sums that a gradient kernel keeps in registers."""
        return self.maps * self.channels * len(self.taps)


def choose_weights_tile(shape: Shape, registers: int) -> WeightsTile:
    """Return the tile with the fewest loads per multiply-add whose sums and factors fit `registers`."""
    kernel_columns = min(shape.kernel, registers - 3)
    fitting = [
        WeightsTile(maps, channels, kernel_columns)
        for maps in range(1, min(shape.maps, registers) + 1)
        for channels in range(1, (min(shape.channels, registers) if kernel_columns == shape.kernel else 1) + 1)
        if maps * channels * kernel_columns + maps + 1 < registers or maps == channels == 1
    ]
    inputs = shape.channels * shape.kernel
    return min(fitting, key=lambda tile: tiles.cost(shape.maps, tile.maps, inputs, tile.channels * tile.taps))


def emit_weights(source: Source, kernel: ConvKernel, tile: WeightsTile) -> None:
    """Emit `kernel` in tiles of `tile`; its arguments are offsets in memory of one block's errors and inputs."""
    shape = kernel.shape
    with source.kernel(f"{kernel.name}(memory, gradient, errors, inputs)", f"Back to weights: {shape}, {tile}."):
        for maps in tiles.each(source, "map", tiles.runs(shape.maps, tile.maps)):
            for channels in tiles.each(source, "channel", tiles.runs(shape.channels, tile.channels)):
                with source.inside(f"for tap in range({shape.kernel}):"):
                    for taps in tiles.runs(shape.kernel, tile.taps):
                        for start in range(taps.start, taps.stop, taps.width):
                            sums = Sums(maps.width, channels.width, range(start, start + taps.width))
                            _weights_tile(source, kernel, sums)
                            add_sums(source, shape, kernel.weight, sums)
        emit_bias(source, shape, kernel.bias, kernel.lanes)


def _weights_tile(source: Source, kernel: ConvKernel, sums: Sums) -> None:
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


def add_sums(source: Source, shape: Shape, weight: int, sums: Sums, prefix: str = "") -> None:
    """Emit gradient += sums, their lanes added up; `prefix` begins the names of the kit's functions."""
    area = shape.kernel * shape.kernel
    source(f"w = {weight} + (map * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
    every = product(range(sums.maps), range(sums.channels), sums.taps)
    places = [(m * shape.channels + c) * area + tap for m, c, tap in every]
    source(f"{source.make(f'{prefix}add_totals', *places)}(gradient, w, sums)")


def emit_bias(source: Source, shape: Shape, bias: int | None, lanes: int) -> None:
    """Emit the gradient of the bias, if there is one: several maps side by side, as additions wait for each other."""
    if bias is None:
        return
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
