"""The convolution of one image, for batches too small to fill the lanes with images: here a vector is eight columns.

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

from adam_mpi.model.engine import conv_weights, pool, tiles
from adam_mpi.model.engine.conv_step import Job, unpool
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.row_vectors import parts, runs, store, vectors
from adam_mpi.model.engine.source import BROADCAST, LOAD, Source


@dataclass(frozen=True)
class Spread:
    """Sizes of spread inputs and errors, for vectors of `wide` columns."""

    shape: Shape
    wide: int

    @property
    def phases(self) -> int:
        return min(self.shape.stride, self.shape.kernel)

    @property
    def reach(self) -> int:
        """Places between the first and the last value that an output reads of a phase."""
        return (self.shape.kernel - 1) // self.shape.stride

    @property
    def pitch(self) -> int:
        """Floats in one phase of a row of inputs."""
        return tiles.up(self.shape.columns, self.wide) + self.reach

    @property
    def back(self) -> int:
        """Floats in one phase of a row of input errors."""
        return tiles.up((self.shape.width - 1 + self.shape.left) // self.shape.stride + 1, self.wide)

    @property
    def error_pitch(self) -> int:
        """Floats in a row of errors: zeros, as many as outputs can read past, the errors, zeros."""
        return self.reach + max(self.back, tiles.up(self.shape.columns, self.wide))

    def places(self, phase: int) -> tuple[int, int]:
        """First and last + 1 of the places of a phase that are columns of the image."""
        shape = self.shape
        first = max(0, -((phase - shape.left) // shape.stride))
        return first, (shape.width - 1 + shape.left - phase) // shape.stride + 1


def step(job: Job, wide: int) -> Step:
    shape, name, spread = job.shape, job.name, Spread(job.shape, wide)
    lines = shape.channels * shape.height * spread.phases
    inputs = Buffer(f"{name}/spread", lines * spread.pitch)
    _emit_spread(job.source, f"{name}_spread", spread)
    _emit_forward(job.source, f"{name}_forward", spread, job)
    back, errors, winners = unpool(job)
    raw = job.buffer("before pooling", shape.maps * shape.rows * shape.columns) if winners else job.outputs
    forward = [Call(f"{name}_spread", ("memory", job.inputs, inputs))]
    forward.append(Call(f"{name}_forward", ("memory", "weights", inputs, raw)))
    if winners:
        planes = shape.maps, shape.rows, shape.columns
        pool.emit_forward(job.source, f"{name}_pool", planes, job.window, job.window, 1, job.relu)
        forward.append(Call(f"{name}_pool", ("memory", raw, job.outputs, winners)))
    padded = job.errors_buffer("errors with zeros", shape.maps * shape.rows * spread.error_pitch)
    _emit_surround(job.source, f"{name}_surround", spread)
    _emit_weights(job.source, f"{name}_weights", spread, job)
    back.append(Call(f"{name}_surround", ("memory", errors, padded)))
    to_weights, to_data = [Call(f"{name}_weights", ("memory", "gradient", padded, inputs))], []
    if job.input_errors:
        result = job.buffer("spread errors", lines * spread.back)
        _emit_data(job.source, f"{name}_data", spread, job)
        _emit_gather(job.source, f"{name}_gather", spread, job.masked)
        to_data.append(Call(f"{name}_data", ("memory", "weights", padded, result)))
        to_data.append(Call(f"{name}_gather", ("memory", result, job.inputs, job.input_errors)))
    return Step(True, forward, **job.backward(back, to_weights, to_data))


def _emit_spread(source: Source, name: str, spread: Spread) -> None:
    shape = spread.shape
    with source.kernel(f"{name}(memory, inputs, spread)", f"Columns by phase, zeros around them: {shape}."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            for phase in range(spread.phases):
                source(f"to = spread + (line * {spread.phases} + {phase}) * {spread.pitch}")
                source(f"column = inputs + line * {shape.width} + {phase - shape.left}")
                first, last = (min(place, spread.pitch) for place in spread.places(phase))
                _copy(source, spread.pitch, first, last, shape.stride)


def _emit_surround(source: Source, name: str, spread: Spread) -> None:
    shape = spread.shape
    with source.kernel(f"{name}(memory, errors, padded)", f"Zeros around rows of {shape.columns} errors."):
        with source.inside(f"for line in range({shape.maps * shape.rows}):"):
            source(f"to = padded + line * {spread.error_pitch}")
            source(f"column = errors + line * {shape.columns} - {spread.reach}")
            _copy(source, spread.error_pitch, spread.reach, spread.reach + shape.columns, 1)


def _copy(source: Source, size: int, first: int, last: int, stride: int) -> None:
    """Emit memory[to + place] = memory[column + place * stride] from first to last; zero elsewhere below `size`."""
    for start, stop, value in (
        (0, first, "zero()"),
        (first, last, f"load(memory, column + place * {stride})"),
        (last, size, "zero()"),
    ):
        if start < stop:
            with source.inside(f"for place in range({start}, {stop}):"):
                source(f"store(memory, to + place, {value})")


def _emit_forward(source: Source, name: str, spread: Spread, job: Job) -> None:
    shape, wide = spread.shape, spread.wide
    tile = tiles.choose(shape.maps, vectors(shape.columns, wide), job.registers)
    with source.kernel(f"{name}(memory, weights, inputs, outputs)", f"Forward: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.rows}):"):
            source(f"first = max(0, {shape.pad} - row * {shape.stride})")
            source(f"last = min({shape.kernel}, {shape.height + shape.pad} - row * {shape.stride})")
            for maps in tiles.each(source, "plane", tiles.runs(shape.maps, tile.planes)):
                for run in tiles.each(source, "vector", runs(shape.columns, wide, tile.columns)):
                    starts = [plane for plane in range(maps.width) for _ in range(run.width)]
                    source(f"sums = {source.make('wide_broadcasts', *starts)}(weights, {job.bias} + plane)")
                    _sum_forward(source, spread, job.weight, maps.width, run.width)
                    _store_forward(source, spread, maps.width, run, job.relu and job.window == 1)


def _sum_forward(source: Source, spread: Spread, weight: int, planes: int, width: int) -> None:
    shape, area = spread.shape, spread.shape.kernel**2
    with source.inside(f"for channel in range({shape.channels}):"), source.inside("for tap in range(first, last):"):
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + line * {spread.phases * spread.pitch} + vector * {spread.wide}")
        source(f"w = {weight} + (plane * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
        places = {tap: tap % shape.stride * spread.pitch + tap // shape.stride for tap in range(shape.kernel)}
        _multiply_add(source, planes, width, places, spread.wide, shape.channels * area)


def _multiply_add(
    source: Source, planes: int, width: int, places: dict[int, int], wide: int, plane_stride: int
) -> None:
    """Emit, for each tap and its place, each plane, each vector of `width`:

    sum += weights[w + plane * plane_stride + tap] * memory[v + place + vector * wide]
    """
    products = [
        (plane * width + vector, plane * plane_stride + tap, place + vector * wide)
        for (tap, place), plane, vector in product(places.items(), range(planes), range(width))
    ]
    step = source.make("wide_multiply_adds", planes * width, BROADCAST, *products)
    source(f"sums = {step}(sums, weights, w, memory, v)")


def _store_forward(source: Source, spread: Spread, planes: int, run: tiles.Run, relu: bool) -> None:
    shape, wide = spread.shape, spread.wide
    if relu:
        source(f"sums = {source.make('wide_positives', planes * run.width)}(sums)")
    source(f"to = outputs + (plane * {shape.rows} + row) * {shape.columns} + vector * {wide}")
    for plane in range(planes):
        for vector, part in enumerate(parts(run)):
            place = plane * shape.rows * shape.columns + vector * wide
            source(store("memory", f"to + {place}", f"sums[{plane * run.width + vector}]", part))


def _emit_weights(source: Source, name: str, spread: Spread, job: Job) -> None:
    shape, tile = spread.shape, conv_weights.choose(spread.shape, job.registers)
    with source.kernel(f"{name}(memory, gradient, errors, inputs)", f"Back to weights: {shape}, {tile}."):
        for maps in tiles.each(source, "map", tiles.runs(shape.maps, tile.maps)):
            for channels in tiles.each(source, "channel", tiles.runs(shape.channels, tile.channels)):
                with source.inside(f"for tap in range({shape.kernel}):"):
                    for start in range(0, shape.kernel, tile.taps):
                        taps = range(start, min(start + tile.taps, shape.kernel))
                        _sum_weights(source, spread, maps.width, channels.width, taps)
                        conv_weights.add(source, shape, job.weight, maps.width, channels.width, taps, "wide_")
        with source.inside(f"for map in range({shape.maps}):"):
            source("sum0 = wide_zero()")
            with source.inside(f"for row in range({shape.rows}):"):
                source(f"e = errors + (map * {shape.rows} + row) * {spread.error_pitch} + {spread.reach}")
                with source.inside(f"for place in range(e, e + {shape.columns}, {spread.wide}):"):
                    source("sum0 = wide_add(sum0, wide_load(memory, place))")
            source(f"gradient[{job.bias} + map] += wide_total(sum0)")


def _sum_weights(source: Source, spread: Spread, maps: int, channels: int, taps: range) -> None:
    shape, wide = spread.shape, spread.wide
    source(f"sums = {source.make('wide_zeros', maps * channels * len(taps))}()")
    conv_weights.rows_inside(source, shape)
    with source.inside("for row in range(first, last):"):
        source(f"e = errors + (map * {shape.rows} + row) * {spread.error_pitch} + {spread.reach}")
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + line * {spread.phases * spread.pitch}")
        with source.inside(f"for column in range(0, {shape.columns}, {wide}):"):
            products = [
                (
                    (m * channels + c) * len(taps) + tap - taps.start,
                    m * shape.rows * spread.error_pitch,
                    (c * shape.height * spread.phases + tap % shape.stride) * spread.pitch + tap // shape.stride,
                )
                for c, tap, m in product(range(channels), taps, range(maps))
            ]
            step = source.make("wide_multiply_adds", maps * channels * len(taps), LOAD, *products)
            source(f"sums = {step}(sums, memory, e + column, memory, v + column)")


def _emit_data(source: Source, name: str, spread: Spread, job: Job) -> None:
    shape, count = spread.shape, spread.back // spread.wide
    tile = tiles.choose(shape.channels, count, job.registers)
    with source.kernel(f"{name}(memory, weights, errors, result)", f"Back to data: {shape}, {tile}."):
        with source.inside(f"for row in range({shape.height}):"):
            source(f"first = max(0, (row + {shape.pad - shape.kernel + shape.stride}) // {shape.stride})")
            source(f"last = min({shape.rows}, (row + {shape.pad}) // {shape.stride} + 1)")
            for channels in tiles.each(source, "plane", tiles.runs(shape.channels, tile.planes)):
                for run in tiles.each(source, "vector", tiles.runs(count, tile.columns)):
                    for phase in range(spread.phases):
                        _phase_data(source, spread, job.weight, channels.width, run.width, phase)


def _phase_data(source: Source, spread: Spread, weight: int, planes: int, width: int, phase: int) -> None:
    shape, wide, area = spread.shape, spread.wide, spread.shape.kernel**2
    source(f"sums = {source.make('wide_zeros', planes * width)}()")
    with source.inside(f"for map in range({shape.maps}):"), source.inside("for line in range(first, last):"):
        source(f"v = errors + (map * {shape.rows} + line) * {spread.error_pitch} + {spread.reach} + vector * {wide}")
        source(f"tap = row + {shape.pad} - line * {shape.stride}")
        source(f"w = {weight} + (map * {shape.channels} + plane) * {area} + tap * {shape.kernel}")
        places = {tap: -(tap // shape.stride) for tap in range(phase, shape.kernel, shape.stride)}
        _multiply_add(source, planes, width, places, wide, area)
    line = spread.phases * spread.back
    source(f"to = result + (plane * {shape.height} + row) * {line} + {phase * spread.back} + vector * {wide}")
    offsets = [plane * shape.height * line + vector * wide for plane in range(planes) for vector in range(width)]
    source(f"{source.make('wide_stores', *offsets)}(memory, to, sums)")


def _emit_gather(source: Source, name: str, spread: Spread, masked: bool) -> None:
    shape = spread.shape
    with source.kernel(f"{name}(memory, result, inputs, input_errors)", f"Spread errors to {shape.width} columns."):
        with source.inside(f"for line in range({shape.channels * shape.height}):"):
            for phase in range(shape.stride):
                source(f"v = result + (line * {spread.phases} + {phase}) * {spread.back}")
                source(f"column = line * {shape.width} + {phase - shape.left}")
                # Columns that no kernel column meets have no error.
                value = "load(memory, v + place)" if phase < spread.phases else "zero()"
                if masked:
                    mask = f"load(memory, inputs + column + place * {shape.stride})"
                    value = f"greater({mask}, zero(), {value}, zero())"
                with source.inside("for place in range({}, {}):".format(*spread.places(phase))):
                    source(f"store(memory, input_errors + column + place * {shape.stride}, {value})")
