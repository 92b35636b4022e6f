"""Emit the gradient of weights of convolutions of any geometry.

for each group, tile of output and input channels, kernel row:
    for each row of outputs whose kernel row lies inside the input, and each tile of columns:
        sums += errors * inputs                one sum per output channel, input channel and kernel column
    add up the lanes of each sum, add that to the gradient

Rows and columns are those of `column_kernels`.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.column_kernels import Convolution, Reached, convolution_of, row_of, tap_row
from adam_mpi.model.engine.kernel import Kernel, Operand
from adam_mpi.model.engine.source import LOAD


@dataclass(frozen=True)
class Sums:
    """A tile of the gradient of weights: output channels, input channels, and kernel columns."""

    maps: int
    depth: int
    taps: range

    @property
    def count(self) -> int:
        """Return how many sums it has."""
        return self.maps * self.depth * len(self.taps)


def _choose_sums(conv: Convolution, registers: int) -> Sums:
    """Return the tile with the fewest loads per multiply-add that fits `registers`."""
    columns = min(conv.windows.kernel[-1], registers - 3)
    if conv.depthwise:
        return Sums(max(1, min(conv.maps, registers // 2 // columns)), 1, range(columns))
    fitting = [
        Sums(maps, depth, range(columns))
        for maps in range(1, min(conv.maps, registers) + 1)
        for depth in range(1, min(conv.depth, registers) + 1)
        if maps * depth * columns + maps + 1 < registers or maps == depth == 1
    ]
    inputs = conv.depth * columns
    return min(fitting, key=lambda sums: tiles.cost(conv.maps, sums.maps, inputs, sums.depth * columns))


COLUMNS = 4
"""Columns whose products are added to the gradient of weights side by side, apart from borders."""


def emit_weights(kernel: Kernel, windows: Any, bias: bool) -> None:
    """Emit the gradient of weights, and of biases if `bias`: inputs are those of the convolution, and its errors."""
    inputs, errors = kernel.inputs
    conv = convolution_of(windows, inputs.value.shape, errors.value.shape, kernel.outputs[0].value.shape)
    if bias:
        emit_channel_sums(kernel, errors, kernel.outputs[1])
    best = _choose_sums(conv, kernel.registers)
    with kernel.loop("group", conv.groups):
        for maps in tiles.each(kernel.source, "m", tiles.runs(conv.maps, best.maps)):
            kernel(f"map = group * {conv.maps} + m")
            for depth in tiles.each(kernel.source, "c", tiles.runs(conv.depth, best.depth)):
                kernel(f"channel = {'m' if conv.depthwise else f'group * {conv.depth} + c'}")
                _weight_rows(kernel, conv, Sums(maps.width, depth.width, best.taps))


def _weight_rows(kernel: Kernel, conv: Convolution, best: Sums) -> None:
    """Emit the gradient of a tile of channels: all kernel rows, and tiles of kernel columns."""
    sizes = conv.windows.kernel
    names = [f"k{axis}" for axis in range(len(sizes) - 1)]
    with ExitStack() as stack:
        for name, size in zip(names, sizes, strict=False):
            stack.enter_context(kernel.loop(name, size))
        for first in range(0, sizes[-1], len(best.taps)):
            sums = Sums(best.maps, best.depth, range(first, min(first + len(best.taps), sizes[-1])))
            kernel(f"sums = {kernel.source.make('zeros', sums.count)}()")
            _sum_places(kernel, conv, sums)
            _add_totals(kernel, conv, sums, tap_row(names, sizes))


def _sum_places(kernel: Kernel, conv: Convolution, sums: Sums) -> None:
    """Emit the sums over all rows of outputs whose kernel row lies inside the input."""
    windows = conv.windows
    inputs, errors = kernel.inputs
    rows = [f"o{axis}" for axis in range(len(conv.outputs) - 1)]
    with ExitStack() as stack:
        for axis, row in enumerate(rows):
            stride = windows.stride[axis]
            kernel(f"shift{axis} = k{axis} * {windows.dilation[axis]} - {windows.pad[axis][0]}")
            low = f"max(0, ({stride - 1} - shift{axis}) // {stride})"
            high = f"min({conv.outputs[axis]}, ({conv.inputs[axis] + stride - 1} - shift{axis}) // {stride})"
            stack.enter_context(kernel.loop(row, high, low))
        seen = [f"{row} * {windows.stride[axis]} + shift{axis}" for axis, row in enumerate(rows)]
        cut = tiles.runs(conv.outputs[-1], COLUMNS, lambda *at: _reached(conv, sums, *at))
        for run in tiles.each(kernel.source, "column", cut):
            at = f"({row_of('map', rows, conv.outputs)}) * {conv.outputs[-1]} + column"
            kernel(f"e = {errors.at(at)}")
            at = f"({row_of('channel', seen, conv.inputs)}) * {conv.inputs[-1]} + column * {windows.stride[-1]}"
            kernel(f"v = {inputs.at(at)}")
            _add_products(kernel, conv, sums, run.pattern)


def _reached(conv: Convolution, sums: Sums, start: int, width: int) -> Reached:
    """Return what the kernel columns of `sums` meet."""
    return tuple(met for met in conv.forward_reached(start, width) if met[0] in sums.taps)


def _add_products(kernel: Kernel, conv: Convolution, sums: Sums, reached: Reached) -> None:
    """Emit sums += errors * inputs, for each tap that is reached."""
    outputs = math.prod(conv.outputs)
    inputs = math.prod(conv.inputs)
    products = [
        (
            (m * sums.depth + c) * len(sums.taps) + tap - sums.taps.start,
            (m * outputs + column) * kernel.lanes,
            ((m if conv.depthwise else c) * inputs + shift) * kernel.lanes,
        )
        for (tap, column, shift), c, m in product(
            sorted(reached, key=lambda met: met[1]), range(sums.depth), range(sums.maps)
        )
    ]
    if products:
        step = kernel.source.make("multiply_adds", sums.count, LOAD, *products)
        kernel(f"sums = {step}(sums, memory, e, memory, v)")


def _add_totals(kernel: Kernel, conv: Convolution, sums: Sums, row: str) -> None:
    """Emit gradient += sums, their lanes added up; `row` is the first tap of the kernel row."""
    weight = kernel.outputs[0]
    places = [
        (m * conv.depth + c) * conv.taps + tap for m, c, tap in product(range(sums.maps), range(sums.depth), sums.taps)
    ]
    at = weight.at(f"(map * {conv.depth} + c) * {conv.taps} + {row}")
    kernel(f"{kernel.source.make('add_totals', *places)}({weight.array}, {at}, sums)")


def emit_channel_sums(kernel: Kernel, errors: Operand, result: Operand) -> None:
    """Emit the sum of `errors` over samples and places, per channel: several channels side by side."""
    plane = math.prod(errors.value.shape[1:])
    for run in tiles.each(kernel.source, "m", tiles.runs(errors.value.shape[0], COLUMNS)):
        for number in range(run.width):
            kernel(f"s{number} = zero()")
        with kernel.loop("place", plane):
            for number in range(run.width):
                kernel(f"s{number} = add(s{number}, {errors.load(f'(m + {number}) * {plane} + place')})")
        for number in range(run.width):
            kernel(result.add(f"m + {number}", f"s{number}"))
