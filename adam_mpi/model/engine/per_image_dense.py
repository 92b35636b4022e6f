"""Fully-connected layers image by image, for batches too small to fill the lanes: here a vector is eight features.

forward:     for each tile of units: sums = 0; for each vector: sums += weights * values
             output = bias + the lanes of a sum, added up
to data:     for each tile of vectors: sums = 0; for each unit: sums += weights * error
             where relu made the inputs, its zeros pass no error
to weights:  for each unit, for each vector: gradient += error * values, or = where the gradient is fresh
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from adam_mpi.model.engine import row_vectors as wide
from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.source import Source

UNITS = 8
"""Rows of weights that are read side by side."""


@dataclass(frozen=True)
class Layer:
    """`weights`: the array they are in; `weight`, `bias`: places in the flat vector; `wide`: lanes of a vector."""

    weights: str
    units: int
    features: int
    weight: int
    bias: int
    wide: int


def step(
    source: Source,
    name: str,
    layer: Layer,
    relu: bool,
    masked: bool,
    registers: int,
    inputs: Buffer,
    outputs: Buffer,
    errors: Buffer,
    input_errors: Buffer | None,
    apart: bool,
) -> Step:
    """`relu`: the outputs are its; `masked`: the inputs are; `input_errors`: None when nobody needs them.

    `apart`: as of a convolution.
    """
    _emit_forward(source, f"{name}_forward", layer, relu)
    _emit_weights(source, f"{name}_weights", layer)
    made = Step(False, [Call(f"{name}_forward", ("memory", layer.weights, inputs, outputs, "blocks"))])
    if input_errors:
        _emit_data(source, f"{name}_data", layer, masked, registers)
        arguments = ("memory", layer.weights, inputs, errors, input_errors, "blocks")
        made.backward.append(Call(f"{name}_data", arguments))
    to_weights = made.later if apart else made.backward
    to_weights.append(Call(f"{name}_weights", ("memory", "gradient", inputs, errors, "blocks", "fresh")))
    return made


@contextmanager
def _each_image(source: Source, layer: Layer, outputs: str) -> Iterator[None]:
    with source.inside("for image in range(blocks):"):
        source(f"v = inputs + image * {layer.features}")
        source(f"to = {outputs} + image * {layer.units}")
        yield


def _emit_forward(source: Source, name: str, layer: Layer, relu: bool) -> None:
    with source.kernel(f"{name}(memory, weights, inputs, outputs, blocks)", f"Forward: {layer}."):
        with _each_image(source, layer, "outputs"):
            for units in tiles.each(source, "unit", tiles.runs(layer.units, UNITS)):
                for unit in range(units.width):
                    source(f"sum{unit} = wide_zero()")
                for run in tiles.each(source, "vector", wide.runs(layer.features, layer.wide, 1)):
                    source(f"w = {layer.weight} + unit * {layer.features} + vector * {layer.wide}")
                    source(f"value = {wide.load('memory', f'v + vector * {layer.wide}', run.pattern)}")
                    for unit in range(units.width):
                        weights = wide.load("weights", f"w + {unit * layer.features}", run.pattern)
                        source(f"sum{unit} = wide_fma(value, {weights}, sum{unit})")
                for unit in range(units.width):
                    source(f"result = add(load(weights, {layer.bias + unit} + unit), splat(wide_total(sum{unit})))")
                    source(f"store(memory, to + unit + {unit}, {'maximum(zero(), result)' if relu else 'result'})")


def _emit_data(source: Source, name: str, layer: Layer, masked: bool, registers: int) -> None:
    head = f"{name}(memory, weights, inputs, errors, input_errors, blocks)"
    with source.kernel(head, f"Back to data: {layer}."), _each_image(source, layer, "errors"):
        source(f"back = input_errors + image * {layer.features}")
        for run in tiles.each(source, "vector", wide.runs(layer.features, layer.wide, registers - 4)):
            for vector in range(run.width):
                source(f"sum{vector} = wide_zero()")
            with source.inside(f"for unit in range({layer.units}):"):
                source("error = wide_broadcast(memory, to + unit)")
                source(f"w = {layer.weight} + unit * {layer.features} + vector * {layer.wide}")
                for vector, part in enumerate(wide.parts(run)):
                    weights = wide.load("weights", f"w + {vector * layer.wide}", part)
                    source(f"sum{vector} = wide_fma(error, {weights}, sum{vector})")
            for vector, part in enumerate(wide.parts(run)):
                source(f"feature = (vector + {vector}) * {layer.wide}")
                value, mask = f"sum{vector}", wide.load("memory", "v + feature", part)
                value = f"wide_greater({mask}, wide_zero(), {value}, wide_zero())" if masked else value
                source(wide.store("memory", "back + feature", value, part))


def _emit_weights(source: Source, name: str, layer: Layer) -> None:
    head = f"{name}(memory, gradient, inputs, errors, blocks, fresh)"
    with source.kernel(head, f"Back to weights: {layer}."), _each_image(source, layer, "errors"):
        with source.inside(f"for unit in range({layer.units}):"):
            source("error = wide_broadcast(memory, to + unit)")
            with source.inside("if fresh and image == 0:"):
                _product(source, layer, "wide_mul(error, {value})")
            with source.inside("else:"):
                _product(source, layer, "wide_fma(error, {value}, {old})")
            source(f"gradient[{layer.bias} + unit] += memory[to + unit]")


def _product(source: Source, layer: Layer, product: str) -> None:
    for run in tiles.each(source, "vector", wide.runs(layer.features, layer.wide, 1)):
        source(f"w = {layer.weight} + unit * {layer.features} + vector * {layer.wide}")
        value = wide.load("memory", f"v + vector * {layer.wide}", run.pattern)
        made = product.format(value=value, old=wide.load("gradient", "w", run.pattern))
        source(wide.store("gradient", "w", made, run.pattern))
