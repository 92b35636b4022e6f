"""Emit dense layers image by image, for batches too small to fill the lanes with images: a vector is a part of a row.

forward:     for each tile of units: sums = 0; for each vector: sums += weights * values
             output = bias + the lanes of a sum, added up
to data:     for each tile of vectors: sums = 0; for each unit: sums += weights * error
             where relu made the inputs, its zeros pass no error
to weights:  for each unit, for each vector: gradient += error * values, or = where the gradient is fresh
"""

from collections.abc import Iterator
from contextlib import contextmanager

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.dense_weights import DenseBuffers, DenseSpec
from adam_mpi.model.engine.schedule import Call, Step
from adam_mpi.model.engine.source import Source

UNITS = 8
"""Rows of weights that are read side by side."""


def emit_per_image_dense_step(source: Source, layer: DenseSpec, buffers: DenseBuffers, errors_first: bool) -> Step:
    """Emit the kernels of a dense layer image by image and return its step; `errors_first` as of `ConvSpec`."""
    name = layer.name
    inputs = buffers.inputs
    _emit_dense_forward(source, layer)
    _emit_dense_weights(source, layer)
    made = Step(False, [Call(f"{name}_forward", ("memory", layer.weights, inputs, buffers.outputs, "blocks"))])
    if buffers.input_errors:
        _emit_dense_data(source, layer)
        arguments = ("memory", layer.weights, inputs, buffers.errors, buffers.input_errors, "blocks")
        made.backward.append(Call(f"{name}_data", arguments))
    to_weights = made.later if errors_first else made.backward
    to_weights.append(Call(f"{name}_weights", ("memory", "gradient", inputs, buffers.errors, "blocks", "fresh")))
    return made


@contextmanager
def _each_image(source: Source, layer: DenseSpec, outputs: str) -> Iterator[None]:
    with source.inside("for image in range(blocks):"):
        source(f"v = inputs + image * {layer.features}")
        source(f"to = {outputs} + image * {layer.units}")
        yield


def _emit_dense_forward(source: Source, layer: DenseSpec) -> None:
    lanes = layer.row_lanes
    with source.kernel(f"{layer.name}_forward(memory, weights, inputs, outputs, blocks)", f"Forward: {layer}."):
        with _each_image(source, layer, "outputs"):
            for units in tiles.each(source, "unit", tiles.runs(layer.units, UNITS)):
                for unit in range(units.width):
                    source(f"sum{unit} = row_zero()")
                for run in tiles.each(source, "vector", tiles.row_runs(layer.features, lanes, 1)):
                    source(f"w = {layer.weight} + unit * {layer.features} + vector * {lanes}")
                    source(f"value = {tiles.load_row('memory', f'v + vector * {lanes}', run.pattern)}")
                    for unit in range(units.width):
                        weights = tiles.load_row("weights", f"w + {unit * layer.features}", run.pattern)
                        source(f"sum{unit} = row_fma(value, {weights}, sum{unit})")
                for unit in range(units.width):
                    total = f"splat(row_total(sum{unit}))"
                    source(f"result = add(load(weights, {layer.bias + unit} + unit), {total})")
                    value = "maximum(zero(), result)" if layer.relu else "result"
                    source(f"store(memory, to + unit + {unit}, {value})")


def _emit_dense_data(source: Source, layer: DenseSpec) -> None:
    lanes = layer.row_lanes
    head = f"{layer.name}_data(memory, weights, inputs, errors, input_errors, blocks)"
    with source.kernel(head, f"Back to data: {layer}."), _each_image(source, layer, "errors"):
        source(f"back = input_errors + image * {layer.features}")
        for run in tiles.each(source, "vector", tiles.row_runs(layer.features, lanes, layer.registers - 4)):
            for vector in range(run.width):
                source(f"sum{vector} = row_zero()")
            with source.inside(f"for unit in range({layer.units}):"):
                source("error = row_broadcast(memory, to + unit)")
                source(f"w = {layer.weight} + unit * {layer.features} + vector * {lanes}")
                for vector, part in enumerate(tiles.row_parts(run)):
                    weights = tiles.load_row("weights", f"w + {vector * lanes}", part)
                    source(f"sum{vector} = row_fma(error, {weights}, sum{vector})")
            for vector, part in enumerate(tiles.row_parts(run)):
                source(f"feature = (vector + {vector}) * {lanes}")
                value = f"sum{vector}"
                if layer.masked:
                    mask = tiles.load_row("memory", "v + feature", part)
                    value = f"row_greater({mask}, row_zero(), {value}, row_zero())"
                source(tiles.store_row("memory", "back + feature", value, part))


def _emit_dense_weights(source: Source, layer: DenseSpec) -> None:
    head = f"{layer.name}_weights(memory, gradient, inputs, errors, blocks, fresh)"
    with source.kernel(head, f"Back to weights: {layer}."), _each_image(source, layer, "errors"):
        with source.inside(f"for unit in range({layer.units}):"):
            source("error = row_broadcast(memory, to + unit)")
            with source.inside("if fresh and image == 0:"):
                _product(source, layer, "row_mul(error, {value})")
            with source.inside("else:"):
                _product(source, layer, "row_fma(error, {value}, {old})")
            source(f"gradient[{layer.bias} + unit] += memory[to + unit]")


def _product(source: Source, layer: DenseSpec, product: str) -> None:
    """Emit gradient = `product` for all vectors of a row; it is a format of `value` and of the `old` gradient."""
    for run in tiles.each(source, "vector", tiles.row_runs(layer.features, layer.row_lanes, 1)):
        source(f"w = {layer.weight} + unit * {layer.features} + vector * {layer.row_lanes}")
        value = tiles.load_row("memory", f"v + vector * {layer.row_lanes}", run.pattern)
        made = product.format(value=value, old=tiles.load_row("gradient", "w", run.pattern))
        source(tiles.store_row("gradient", "w", made, run.pattern))
