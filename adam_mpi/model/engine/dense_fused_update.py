"""Emit the fused update of a large dense layer: its gradient over all images of a round, and the step it leads to.

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

from adam_mpi.model.engine import row_vectors, tiles
from adam_mpi.model.engine.dense_weights import DenseKernel, each_error, transposed_pitch
from adam_mpi.model.engine.source import BROADCAST, Source


def emit(source: Source, kernel: DenseKernel) -> None:
    """Emit `kernel`, which updates weights and contribution; its argument `panel` has room for all images."""
    units = kernel.units
    features = kernel.features
    lanes = kernel.lanes
    head = (
        f"{kernel.name}(memory, weights, contribution, weight, errors, transposed, panel, blocks, factor, unit_value)"
    )
    with source.kernel(head, f"{units} x {features}, {kernel.tile}."):
        for run in tiles.each(source, "vector", row_vectors.runs(features, lanes, kernel.tile.columns)):
            _pack(source, kernel, run.width)
            for chosen in tiles.each(source, "unit", tiles.runs(units, kernel.tile.planes)):
                places = [u * features + v * lanes for u in range(chosen.width) for v in range(run.width)]
                source(f"to = weight + unit * {features} + vector * {lanes}")
                for array in ("weights", "contribution"):
                    source(f"{source.make('prefetches', True, *places)}({array}, to)")
                _sum(source, kernel, chosen.width, run.width)
                _update(source, places, run, lanes)
        with each_error(source, units, lanes):
            source(f"contribution[{kernel.bias} + unit] += unit_value * error")
            source(f"weights[{kernel.bias} + unit] -= factor * error")


def _pack(source: Source, kernel: DenseKernel, vectors: int) -> None:
    lanes = kernel.lanes
    offsets = range(0, vectors * lanes, lanes)
    with source.inside(f"for image in range(blocks * {lanes}):"):
        source(f"v = transposed + image * {transposed_pitch(kernel.features)} + vector * {lanes}")
        source(f"values = {source.make('loads', *offsets)}(memory, v)")
        source(f"{source.make('stores', *offsets)}(memory, panel + image * {vectors * lanes}, values)")


def _sum(source: Source, kernel: DenseKernel, chosen: int, vectors: int) -> None:
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
