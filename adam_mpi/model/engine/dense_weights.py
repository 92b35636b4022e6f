"""Emit a dense layer back to the weights: the gradient added up, or fused with the update that it leads to.

transpose:  transposed[image][feature] = inputs[feature][image], so that a vector holds features, not images
for each group of vectors of features:                        their transposed features stay in the cache
    for each tile of units, for each tile of vectors:
        sums = 0
        for each image: sums += error of unit and image * transposed features
        gradient += sums                                      or = sums, if the gradient is fresh
for each unit: the bias's gradient is the sum of its errors

    for each tile of vectors of features:
        panel[image][vector] = transposed features                one image after the other; it stays in the cache
        for each tile of units:
            fetch what will be written
            sums = 0
            for each image: sums += error of unit and image * panel
            contribution += unit value * sums; weights -= factor * sums
    for each unit: its bias in the same way, with the sum of its errors

The gradient itself is never in memory: to write it after every batch, and to read it again, took as much time as the
products where two threads share a memory bus.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from adam_mpi.base import machine
from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.schedule import ALIGNMENT, Buffer
from adam_mpi.model.engine.source import BROADCAST, Source

CACHE_FLOATS = 8192


@dataclass(frozen=True)
class DenseSpec:
    """A dense layer to emit; `weight` and `bias` are offsets in the flat vector, `row_lanes` lanes of a row vector."""

    name: str
    weights: str
    """The array that the weights are read from."""
    units: int
    features: int
    weight: int
    bias: int
    row_lanes: int
    registers: int
    relu: bool
    """Whether relu follows."""
    masked: bool
    """Whether a relu made the inputs, so that their errors have to be masked."""


@dataclass(frozen=True)
class DenseBuffers:
    """The buffers that a dense layer works on."""

    inputs: Buffer
    outputs: Buffer
    errors: Buffer
    input_errors: Buffer | None
    """None when no layer before this one learns."""


@dataclass(frozen=True)
class DenseKernel:
    """A kernel over the weights of a dense layer, in tiles of units x vectors of features.

    `bias` is the bias's offset in the flat vector of parameters; None: there is none.
    """

    name: str
    units: int
    features: int
    lanes: int
    tile: tiles.Tile
    bias: int | None = None


def choose(units: int, features: int, lanes: int, registers: int) -> tiles.Tile:
    """Return the cheapest tile of units x vectors of features."""
    return tiles.choose(units, -(-features // lanes), registers, overhead=1.0)


def transposed_pitch(features: int) -> int:
    """Return the floats from one image's features to the next's.

    It is an odd number of cache lines: rows whose length is a power of two would all fall into the same few sets of the
    cache.
    """
    return tiles.up(features, 2 * ALIGNMENT) + ALIGNMENT


def transposed_floats(features: int, lanes: int) -> int:
    """Return the floats of one block's transposed inputs."""
    return transposed_pitch(features) * lanes


def group(images: int) -> int:
    """Return how many vectors of features, transposed, take half of a small first-level cache."""
    return max(1, CACHE_FLOATS // (2 * images * machine.lanes()))


def emit_transpose(source: Source, name: str, features: int, lanes: int) -> None:
    """Emit the kernel `name`, which transposes squares of `lanes` features and images in registers."""
    pitch = transposed_pitch(features)
    with source.kernel(f"{name}(memory, inputs, transposed, blocks)", f"{features} features, image by image."):
        with source.inside("for block in range(blocks):"):
            for run in tiles.each(source, "feature", tiles.runs(features, lanes)):
                source(f"v = inputs + (block * {features} + feature) * {lanes}")
                given = [i * lanes if i < run.width else None for i in range(lanes)]
                source(f"values = {source.make('loads', *given)}(memory, v)")
                source(f"values = {source.make('transpose', lanes)}(values)")
                source(f"to = transposed + block * {pitch * lanes} + feature")
                source(f"{source.make('stores', *range(0, lanes * pitch, pitch))}(memory, to, values)")


def emit_gradient(source: Source, kernel: DenseKernel, group: int) -> None:
    """Emit `kernel`, which adds to the gradient; `group` vectors of features stay in the cache."""
    features = kernel.features
    lanes = kernel.lanes
    tile = kernel.tile
    head = f"{kernel.name}(memory, gradient, weight, errors, transposed, blocks, fresh)"
    with source.kernel(head, f"{kernel.units} x {features}, {tile}."):
        for run in tiles.row_runs(features, lanes, tile.columns):
            step = tiles.up(group, run.width)
            with source.inside(f"for group in range({run.start}, {run.stop}, {step}):"):
                source(f"end = min(group + {step}, {run.stop})")
                for units in tiles.each(source, "unit", tiles.runs(kernel.units, tile.planes)):
                    with source.inside(f"for vector in range(group, end, {run.width}):"):
                        fetch = source.make("prefetches", True, *range(0, units.width * features, features))
                        source(f"{fetch}(gradient, weight + unit * {features} + vector * {lanes})")
                        _tile(source, kernel, units.width, run.width)
                        _add(source, kernel, units.width, run)
        if kernel.bias is None:
            return
        with each_error(source, kernel.units, lanes):
            source(f"gradient[{kernel.bias} + unit] += error")


@contextmanager
def each_error(source: Source, units: int, lanes: int) -> Iterator[None]:
    """Emit a loop over the units, with `error` the sum of a unit's errors."""
    with source.inside(f"for unit in range({units}):"):
        source("sum0 = zero()")
        with source.inside("for block in range(blocks):"):
            source(f"sum0 = add(sum0, load(memory, errors + (block * {units} + unit) * {lanes}))")
        source("error = total(sum0)")
        yield


def _tile(source: Source, kernel: DenseKernel, units: int, vectors: int) -> None:
    lanes = kernel.lanes
    source(f"sums = {source.make('zeros', units * vectors)}()")
    products = [
        (unit * vectors + vector, unit * lanes, vector * lanes) for unit in range(units) for vector in range(vectors)
    ]
    with source.inside("for block in range(blocks):"), source.inside(f"for image in range({lanes}):"):
        image = f"(block * {lanes} + image)"
        source(f"v = transposed + {image} * {transposed_pitch(kernel.features)} + vector * {lanes}")
        source(f"e = errors + (block * {kernel.units} + unit) * {lanes} + image")
        step = source.make("multiply_adds", units * vectors, BROADCAST, *products)
        source(f"sums = {step}(sums, memory, e, memory, v)")


def _add(source: Source, kernel: DenseKernel, units: int, run: tiles.Run) -> None:
    """Emit the addition to the gradient; the last vector of a row may be a part of one."""
    features = kernel.features
    lanes = kernel.lanes
    pairs = [(unit, vector) for unit in range(units) for vector in range(run.width)]
    source(f"to = weight + unit * {features} + vector * {lanes}")
    if not run.pattern:
        places = [unit * features + vector * lanes for unit, vector in pairs]
        with source.inside("if fresh:"):
            source(f"{source.make('stores', *places)}(gradient, to, sums)")
        with source.inside("else:"):
            source(f"{source.make('add_stores', *places)}(gradient, to, sums)")
        return
    for number, (unit, vector) in enumerate(pairs):
        place = f"to + {unit * features + vector * lanes}"
        count = run.pattern if vector == run.width - 1 else lanes
        source(f"old = zero() if fresh else load_part(gradient, {place}, {count})")
        source(f"store_part(gradient, {place}, add(old, sums[{number}]), {count})")


def emit_fused_update(source: Source, kernel: DenseKernel) -> None:
    """Emit `kernel`, which updates weights and contribution; its argument `panel` has room for all images."""
    units = kernel.units
    features = kernel.features
    lanes = kernel.lanes
    head = (
        f"{kernel.name}(memory, weights, contribution, weight, errors, transposed, panel, blocks, factor, unit_value)"
    )
    with source.kernel(head, f"{units} x {features}, {kernel.tile}."):
        for run in tiles.each(source, "vector", tiles.row_runs(features, lanes, kernel.tile.columns)):
            _pack_errors(source, kernel, run.width)
            for chosen in tiles.each(source, "unit", tiles.runs(units, kernel.tile.planes)):
                places = [u * features + v * lanes for u in range(chosen.width) for v in range(run.width)]
                source(f"to = weight + unit * {features} + vector * {lanes}")
                for array in ("weights", "contribution"):
                    source(f"{source.make('prefetches', True, *places)}({array}, to)")
                _sum_update(source, kernel, chosen.width, run.width)
                _update(source, places, run, lanes)
        with each_error(source, units, lanes):
            source(f"contribution[{kernel.bias} + unit] += unit_value * error")
            source(f"weights[{kernel.bias} + unit] -= factor * error")


def _pack_errors(source: Source, kernel: DenseKernel, vectors: int) -> None:
    lanes = kernel.lanes
    offsets = range(0, vectors * lanes, lanes)
    with source.inside(f"for image in range(blocks * {lanes}):"):
        source(f"v = transposed + image * {transposed_pitch(kernel.features)} + vector * {lanes}")
        source(f"values = {source.make('loads', *offsets)}(memory, v)")
        source(f"{source.make('stores', *offsets)}(memory, panel + image * {vectors * lanes}, values)")


def _sum_update(source: Source, kernel: DenseKernel, chosen: int, vectors: int) -> None:
    lanes = kernel.lanes
    products = [(u * vectors + v, u * lanes, v * lanes) for u in range(chosen) for v in range(vectors)]
    step = source.make("multiply_adds", len(products), BROADCAST, *products)
    source(f"sums = {source.make('zeros', len(products))}()")
    with source.inside("for block in range(blocks):"), source.inside(f"for image in range({lanes}):"):
        source(f"e = errors + (block * {kernel.units} + unit) * {lanes} + image")
        source(f"sums = {step}(sums, memory, e, memory, panel + (block * {lanes} + image) * {vectors * lanes})")


def _update(source: Source, places: list[int], run: tiles.Run, lanes: int) -> None:
    """Emit the update of contribution and weights; the last vector of a row may be a part of one."""
    for array, factor in (("contribution", "unit_value"), ("weights", "-factor")):
        if not run.pattern:
            source(f"{source.make('add_scaled', *places)}({array}, to, sums, {factor})")
            continue
        for number, place in enumerate(places):
            part = run.pattern if number % run.width == run.width - 1 else lanes
            source(f"old = load_part({array}, to + {place}, {part})")
            source(f"store_part({array}, to + {place}, fma(splat({factor}), sums[{number}], old), {part})")
