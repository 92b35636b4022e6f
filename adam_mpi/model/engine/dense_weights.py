"""Fully-connected layer back to the weights: their gradient, summed over all images and added to `gradient`.

transpose:  turned[image][feature] = inputs[feature][image], so that a vector holds features, not images
for each group of vectors of features:                        their turned features stay in the cache
    for each tile of units, for each tile of vectors:
        sums = 0
        for each image: sums += error of unit and image * turned features
        gradient += sums                                      or = sums, if the gradient is fresh
for each unit: the bias's gradient is the sum of its errors
"""

from collections.abc import Iterator
from contextlib import contextmanager

from adam_mpi.model.engine import cpu, row_vectors, tiles
from adam_mpi.model.engine.memory import ALIGNMENT
from adam_mpi.model.engine.source import BROADCAST, Source

CACHE_FLOATS = 8192


def turned_row(features: int, lanes: int) -> int:
    """Floats from one image's features to the next's, an odd number of cache lines: rows whose length is a power of two
    would all fall into the same few sets of the cache.
    """
    return tiles.up(features, 2 * ALIGNMENT) + ALIGNMENT


def turned_floats(features: int, lanes: int) -> int:
    """Of one block's transposed inputs."""
    return turned_row(features, lanes) * lanes


def group(images: int) -> int:
    """Vectors of features whose turned values take half of a small first-level cache."""
    return max(1, CACHE_FLOATS // (2 * images * cpu.lanes()))


def emit_turn(source: Source, name: str, features: int, lanes: int) -> None:
    """Transpose squares of `lanes` features and images in registers: exchange halves, quarters, ..."""
    row = turned_row(features, lanes)
    with source.kernel(f"{name}(memory, inputs, turned, blocks)", f"{features} features, image by image."):
        with source.inside("for block in range(blocks):"):
            for run in tiles.each(source, "feature", tiles.runs(features, lanes)):
                source(f"v = inputs + (block * {features} + feature) * {lanes}")
                given = [i * lanes if i < run.width else None for i in range(lanes)]
                source(f"values = {source.make('loads', *given)}(memory, v)")
                source(f"values = {source.make('transpose', lanes)}(values)")
                source(f"to = turned + block * {row * lanes} + feature")
                source(f"{source.make('stores', *range(0, lanes * row, row))}(memory, to, values)")


def emit(
    source: Source,
    name: str,
    units: int,
    features: int,
    lanes: int,
    tile: tiles.Tile,
    group: int,
    bias: int | None = None,
) -> None:
    """`bias`: its place in the gradient; `tile`: units x vectors; `group`: vectors that stay in the cache."""
    row = turned_row(features, lanes)
    head = f"{name}(memory, gradient, weight, errors, turned, blocks, fresh)"
    with source.kernel(head, f"{units} x {features}, {tile}."):
        for run in row_vectors.runs(features, lanes, tile.columns):
            step = tiles.up(group, run.width)
            with source.inside(f"for group in range({run.start}, {run.stop}, {step}):"):
                source(f"end = min(group + {step}, {run.stop})")
                for chosen in tiles.each(source, "unit", tiles.runs(units, tile.planes)):
                    with source.inside(f"for vector in range(group, end, {run.width}):"):
                        fetch = source.make("prefetches", True, *range(0, chosen.width * features, features))
                        source(f"{fetch}(gradient, weight + unit * {features} + vector * {lanes})")
                        _tile(source, units, row, lanes, chosen.width, run.width)
                        _add(source, features, lanes, chosen.width, run)
        if bias is None:
            return
        with each_error(source, units, lanes):
            source(f"gradient[{bias} + unit] += error")


@contextmanager
def each_error(source: Source, units: int, lanes: int) -> Iterator[None]:
    """Emit a loop over the units, with `error` the sum of a unit's errors."""
    with source.inside(f"for unit in range({units}):"):
        source("sum0 = zero()")
        with source.inside("for block in range(blocks):"):
            source(f"sum0 = add(sum0, load(memory, errors + (block * {units} + unit) * {lanes}))")
        source("error = total(sum0)")
        yield


def _tile(source: Source, units: int, row: int, lanes: int, chosen: int, vectors: int) -> None:
    source(f"sums = {source.make('zeros', chosen * vectors)}()")
    products = [
        (unit * vectors + vector, unit * lanes, vector * lanes) for unit in range(chosen) for vector in range(vectors)
    ]
    with source.inside("for block in range(blocks):"), source.inside(f"for image in range({lanes}):"):
        source(f"v = turned + (block * {lanes} + image) * {row} + vector * {lanes}")
        source(f"e = errors + (block * {units} + unit) * {lanes} + image")
        step = source.make("multiply_adds", chosen * vectors, BROADCAST, *products)
        source(f"sums = {step}(sums, memory, e, memory, v)")


def _add(source: Source, features: int, lanes: int, chosen: int, run: tiles.Run) -> None:
    """The last vector of a row may be a part of one."""
    pairs = [(unit, vector) for unit in range(chosen) for vector in range(run.width)]
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
