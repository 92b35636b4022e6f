"""Emit the convolution of one image, for batches too small to fill the lanes with images: a vector is some columns.

Inputs are spread out first: column `place * stride + phase - left` lies at `place` of row `phase`, zeros around them,
so that the values which a kernel column meets lie side by side whatever stride and pad are. Errors get zeros too.

    forward:     spread the inputs
                 for each row, tile of maps, tile of vectors of columns:
                     sums = bias; for each channel, kernel row and column: sums += weight * inputs
    to weights:  for each tile of maps and channels, each kernel row:
                     sums = 0; for each output row, vector: sums += errors * inputs, one sum per kernel column
                     add up the lanes of each sum, add that to the gradient
    to data:     for each row, tile of channels, phase, tile of vectors:
                     sums = 0; for each map, kernel row and column: sums += weight * errors
                 gather the spread errors; where relu made the inputs, its zeros pass no error
"""

from dataclasses import dataclass
from itertools import product

from adam_mpi.model.engine import conv_kernels, pool_and_norm, tiles
from adam_mpi.model.engine.conv_kernels import Sums
from adam_mpi.model.engine.conv_step import ConvSpec, unpool
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.engine.source import BROADCAST, LOAD, Source


@dataclass(frozen=True)
class Spread:
    """Sizes of spread inputs and errors, for row vectors of `lanes` columns."""

    shape: Shape
    lanes: int

    @property
    def phases(self) -> int:
        """Return the number of phases that a row of inputs is spread over."""
        return min(self.shape.stride, self.shape.kernel)

    @property
    def reach(self) -> int:
        """Return the distance from the first to the last value that an output reads of a phase."""
        return (self.shape.kernel - 1) // self.shape.stride

    @property
    def pitch(self) -> int:
        """Return the floats of one phase of a row of spread inputs."""
        return tiles.up(self.shape.columns, self.lanes) + self.reach

    @property
    def back(self) -> int:
        """Return the floats of one phase of a row of spread input errors."""
        return tiles.up((self.shape.width - 1 + self.shape.left) // self.shape.stride + 1, self.lanes)

    @property
    def error_pitch(self) -> int:
        """Return the floats of a row of errors: the zeros that are read before them, the errors, zeros."""
        return self.reach + max(self.back, tiles.up(self.shape.columns, self.lanes))

    def places(self, phase: int) -> tuple[int, int]:
        """Return first and last + 1 of the places of `phase` that are columns of the image."""
        shape = self.shape
        first = max(0, -((phase - shape.left) // shape.stride))
        return first, (shape.width - 1 + shape.left - phase) // shape.stride + 1


def emit_per_image_conv_step(spec: ConvSpec, lanes: int) -> Step:
    """Emit the kernels of the convolution `spec` image by image, with vectors of `lanes` columns; return its step."""
    shape = spec.shape
    name = spec.name
    spread = Spread(shape, lanes)
    lines = shape.channels * shape.height * spread.phases
    inputs = Buffer(f"{name}/spread", lines * spread.pitch)
    _emit_spread_inputs(spec.source, f"{name}_spread", spread)
    _emit_conv_forward(spec, spread)
    back, errors, winners = unpool(spec)
    forward = _forward_calls(spec, inputs, winners)
    padded = spec.errors_buffer("errors with zeros", shape.maps * shape.rows * spread.error_pitch)
    _emit_surround(spec.source, f"{name}_surround", spread)
    _emit_conv_weights(spec, spread)
    back.append(Call(f"{name}_surround", ("memory", errors, padded)))
    to_weights = [Call(f"{name}_weights", ("memory", "gradient", padded, inputs))]
    to_data = []
    if spec.input_errors:
        result = spec.buffer("spread errors", lines * spread.back)
        _emit_conv_data(spec, spread)
        _emit_gather(spec, spread)
        to_data.append(Call(f"{name}_data", ("memory", "weights", padded, result)))
        to_data.append(Call(f"{name}_gather", ("memory", result, spec.inputs, spec.input_errors)))
    return Step(True, forward, **spec.backward(back, to_weights, to_data))


def _forward_calls(spec: ConvSpec, inputs: Buffer, winners: Buffer | None) -> list[Call]:
    """Return the calls forward, and emit the pooling if there is one; `inputs` are spread."""
    shape = spec.shape
    name = spec.name
    planes = (shape.maps, shape.rows, shape.columns)
    raw = spec.buffer("before pooling", shape.maps * shape.rows * shape.columns) if winners else spec.outputs
    calls = [
        Call(f"{name}_spread", ("memory", spec.inputs, inputs)),
        Call(f"{name}_forward", ("memory", "weights", inputs, raw)),
    ]
    if winners:
        windows = pool_and_norm.Windows(planes, spec.window, spec.window, lanes=1)
        pool_and_norm.emit_max_pool_forward(spec.source, f"{name}_pool", windows, spec.relu)
        calls.append(Call(f"{name}_pool", ("memory", raw, spec.outputs, winners)))
    return calls


def _emit_spread_inputs(source: Source, name: str, spread: Spread) -> None:
    shape = spread.shape
    with source.kernel(f"{name}(memory, inputs, spread)", f"Columns by phase, zeros around them: {shape}."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            for phase in range(spread.phases):
                source(f"to = spread + (line * {spread.phases} + {phase}) * {spread.pitch}")
                source(f"column = inputs + line * {shape.width} + {phase - shape.left}")
                first, last = (min(place, spread.pitch) for place in spread.places(phase))
                _emit_strided_copy(source, spread.pitch, first, last, shape.stride)


def _emit_surround(source: Source, name: str, spread: Spread) -> None:
    shape = spread.shape
    with source.kernel(f"{name}(memory, errors, padded)", f"Zeros around rows of {shape.columns} errors."):
        with source.inside(f"for line in range({shape.maps * shape.rows}):"):
            source(f"to = padded + line * {spread.error_pitch}")
            source(f"column = errors + line * {shape.columns} - {spread.reach}")
            _emit_strided_copy(source, spread.error_pitch, spread.reach, spread.reach + shape.columns, 1)


def _emit_strided_copy(source: Source, size: int, first: int, last: int, stride: int) -> None:
    """Emit memory[to + place] = memory[column + place * stride] from first to last; zero elsewhere below `size`."""
    for start, stop, value in (
        (0, first, "zero()"),
        (first, last, f"load(memory, column + place * {stride})"),
        (last, size, "zero()"),
    ):
        if start < stop:
            with source.inside(f"for place in range({start}, {stop}):"):
                source(f"store(memory, to + place, {value})")


def _emit_conv_forward(spec: ConvSpec, spread: Spread) -> None:
    """Emit the kernel that computes the outputs from spread inputs."""
    source = spec.source
    shape = spread.shape
    tile = tiles.choose(shape.maps, tiles.row_vectors(shape.columns, spread.lanes), spec.registers)
    head = f"{spec.name}_forward(memory, weights, inputs, outputs)"
    with source.kernel(head, f"Forward: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.rows}):"):
            source(f"first = max(0, {shape.pad} - row * {shape.stride})")
            source(f"last = min({shape.kernel}, {shape.height + shape.pad} - row * {shape.stride})")
            for maps in tiles.each(source, "plane", tiles.runs(shape.maps, tile.planes)):
                cut = tiles.row_runs(shape.columns, spread.lanes, tile.columns)
                for run in tiles.each(source, "vector", cut):
                    starts = [plane for plane in range(maps.width) for _ in range(run.width)]
                    if spec.bias is None:
                        source(f"sums = {source.make('row_zeros', len(starts))}()")
                    else:
                        source(f"sums = {source.make('row_broadcasts', *starts)}(weights, {spec.bias} + plane)")
                    _sum_forward(spec, spread, tiles.Tile(maps.width, run.width))
                    _store_forward(spec, spread, maps.width, run)


def _sum_forward(spec: ConvSpec, spread: Spread, tile: tiles.Tile) -> None:
    source = spec.source
    shape = spread.shape
    area = shape.kernel**2
    with source.inside(f"for channel in range({shape.channels}):"), source.inside("for tap in range(first, last):"):
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + line * {spread.phases * spread.pitch} + vector * {spread.lanes}")
        source(f"w = {spec.weight} + (plane * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
        places = {tap: tap % shape.stride * spread.pitch + tap // shape.stride for tap in range(shape.kernel)}
        _multiply_add(source, tile, places, spread.lanes, shape.channels * area)


def _multiply_add(source: Source, tile: tiles.Tile, places: dict[int, int], lanes: int, plane_stride: int) -> None:
    """Emit, for each tap and its place, each plane, each vector of the tile:

    sum += weights[w + plane * plane_stride + tap] * memory[v + place + vector * lanes]
    """
    products = [
        (plane * tile.columns + vector, plane * plane_stride + tap, place + vector * lanes)
        for (tap, place), plane, vector in product(places.items(), range(tile.planes), range(tile.columns))
    ]
    step = source.make("row_multiply_adds", tile.planes * tile.columns, BROADCAST, *products)
    source(f"sums = {step}(sums, weights, w, memory, v)")


def _store_forward(spec: ConvSpec, spread: Spread, planes: int, run: tiles.Run) -> None:
    source = spec.source
    shape = spread.shape
    lanes = spread.lanes
    if spec.relu and spec.window == 1:
        source(f"sums = {source.make('row_positives', planes * run.width)}(sums)")
    source(f"to = outputs + (plane * {shape.rows} + row) * {shape.columns} + vector * {lanes}")
    for plane in range(planes):
        for vector, part in enumerate(tiles.row_parts(run)):
            place = plane * shape.rows * shape.columns + vector * lanes
            source(tiles.store_row("memory", f"to + {place}", f"sums[{plane * run.width + vector}]", part))


def _emit_conv_weights(spec: ConvSpec, spread: Spread) -> None:
    """Emit the kernel that adds to the gradient, from errors with zeros around them and spread inputs."""
    source = spec.source
    shape = spread.shape
    tile = conv_kernels.choose_weights_tile(shape, spec.registers)
    head = f"{spec.name}_weights(memory, gradient, errors, inputs)"
    with source.kernel(head, f"Back to weights: {shape}, {tile}."):
        for maps in tiles.each(source, "map", tiles.runs(shape.maps, tile.maps)):
            for channels in tiles.each(source, "channel", tiles.runs(shape.channels, tile.channels)):
                with source.inside(f"for tap in range({shape.kernel}):"):
                    for start in range(0, shape.kernel, tile.taps):
                        taps = range(start, min(start + tile.taps, shape.kernel))
                        sums = Sums(maps.width, channels.width, taps)
                        _sum_weights(source, spread, sums)
                        conv_kernels.add_sums(source, shape, spec.weight, sums, "row_")
        _emit_conv_bias(source, spread, spec.bias)


def _emit_conv_bias(source: Source, spread: Spread, bias: int | None) -> None:
    """Emit the gradient of the bias, if there is one."""
    if bias is None:
        return
    shape = spread.shape
    with source.inside(f"for map in range({shape.maps}):"):
        source("sum0 = row_zero()")
        with source.inside(f"for row in range({shape.rows}):"):
            source(f"e = errors + (map * {shape.rows} + row) * {spread.error_pitch} + {spread.reach}")
            with source.inside(f"for place in range(e, e + {shape.columns}, {spread.lanes}):"):
                source("sum0 = row_add(sum0, row_load(memory, place))")
        source(f"gradient[{bias} + map] += row_total(sum0)")


def _sum_weights(source: Source, spread: Spread, sums: Sums) -> None:
    shape = spread.shape
    source(f"sums = {source.make('row_zeros', sums.count)}()")
    conv_kernels.rows_inside(source, shape)
    with source.inside("for row in range(first, last):"):
        source(f"e = errors + (map * {shape.rows} + row) * {spread.error_pitch} + {spread.reach}")
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + line * {spread.phases * spread.pitch}")
        with source.inside(f"for column in range(0, {shape.columns}, {spread.lanes}):"):
            products = [
                (
                    (m * sums.channels + c) * len(sums.taps) + tap - sums.taps.start,
                    m * shape.rows * spread.error_pitch,
                    (c * shape.height * spread.phases + tap % shape.stride) * spread.pitch + tap // shape.stride,
                )
                for c, tap, m in product(range(sums.channels), sums.taps, range(sums.maps))
            ]
            step = source.make("row_multiply_adds", sums.count, LOAD, *products)
            source(f"sums = {step}(sums, memory, e + column, memory, v + column)")


def _emit_conv_data(spec: ConvSpec, spread: Spread) -> None:
    """Emit the kernel that computes the errors of the inputs, spread as the inputs are."""
    source = spec.source
    shape = spread.shape
    count = spread.back // spread.lanes
    tile = tiles.choose(shape.channels, count, spec.registers)
    head = f"{spec.name}_data(memory, weights, errors, result)"
    with source.kernel(head, f"Back to data: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.height}):"):
            source(f"first = max(0, (row + {shape.pad - shape.kernel + shape.stride}) // {shape.stride})")
            source(f"last = min({shape.rows}, (row + {shape.pad}) // {shape.stride} + 1)")
            for channels in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "vector", tiles.runs(count, tile.columns)):
                    for phase in range(spread.phases):
                        _phase_data(spec, spread, tiles.Tile(channels.width, run.width), phase)


def _phase_data(spec: ConvSpec, spread: Spread, tile: tiles.Tile, phase: int) -> None:
    source = spec.source
    shape = spread.shape
    lanes = spread.lanes
    area = shape.kernel**2
    source(f"sums = {source.make('row_zeros', tile.planes * tile.columns)}()")
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        source(f"v = errors + (map * {shape.rows} + line) * {spread.error_pitch} + {spread.reach} + vector * {lanes}")
        source(f"tap = row + {shape.pad} - line * {shape.stride}")
        source(f"w = {spec.weight} + (map * {shape.channels} + plane) * {area} + tap * {shape.kernel}")
        places = {tap: -(tap // shape.stride) for tap in range(phase, shape.kernel, shape.stride)}
        _multiply_add(source, tile, places, lanes, area)
    line = spread.phases * spread.back
    source(f"to = result + (plane * {shape.height} + row) * {line} + {phase * spread.back} + vector * {lanes}")
    every = product(range(tile.planes), range(tile.columns))
    offsets = [plane * shape.height * line + vector * lanes for plane, vector in every]
    source(f"{source.make('row_stores', *offsets)}(memory, to, sums)")


def _emit_gather(spec: ConvSpec, spread: Spread) -> None:
    """Emit the kernel that puts spread errors of the inputs into their columns."""
    source = spec.source
    shape = spread.shape
    head = f"{spec.name}_gather(memory, result, inputs, input_errors)"
    with source.kernel(head, f"Spread errors to {shape.width} columns."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            for phase in range(shape.stride):
                source(f"v = result + (line * {spread.phases} + {phase}) * {spread.back}")
                source(f"column = line * {shape.width} + {phase - shape.left}")
                # Columns that no kernel column meets have no error.
                value = "load(memory, v + place)" if phase < spread.phases else "zero()"
                if spec.masked:
                    mask = f"load(memory, inputs + column + place * {shape.stride})"
                    value = f"greater({mask}, zero(), {value}, zero())"
                with source.inside("for place in range({}, {}):".format(*spread.places(phase))):
                    source(f"store(memory, input_errors + column + place * {shape.stride}, {value})")
