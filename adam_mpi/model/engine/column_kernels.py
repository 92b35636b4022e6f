"""Emit convolutions of any geometry in tiles of channels times columns; columns are places along the last axis.

forward:  for each group, tile of outputs channels, row of outputs, tile of columns:
              for each input channel of the group and kernel row inside the input:
                  sums += weights * inputs
data:     for each group, tile of input channels, row of inputs, tile of columns:
              for each output channel of the group and kernel row that sees the row:
                  sums += weights * errors
"Row" stands for all axes but the last. Columns at a border are tiles of their own, whose taps are those inside: nothing
is padded. A depthwise convolution has one channel per group: its tiles are of several groups.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, strides_of
from adam_mpi.model.engine.source import BROADCAST

Shape = tuple[int, ...]
Reached = tuple[tuple[int, int, int], ...]
"""(kernel column, column of the tile, how far what it meets lies behind the first one), by kernel column."""


@dataclass(frozen=True)
class Convolution:
    """A convolution: `windows` says how, `inputs` and `outputs` are spatial shapes.

    A group has `maps` outputs and `depth` inputs; if it is `depthwise`, `groups` is one, and has one input per output.
    """

    windows: Any
    inputs: Shape
    outputs: Shape
    groups: int
    maps: int
    depth: int
    depthwise: bool

    @property
    def taps(self) -> int:
        """Return how many taps a window has."""
        return math.prod(self.windows.kernel)

    def forward_reached(self, start: int, width: int) -> Reached:
        """Return what `width` output columns from `start` on meet: input columns, counted from start * stride."""
        stride, pad, step, size = self._last()
        return tuple(
            (tap, column, column * stride + tap * step - pad)
            for tap in range(size)
            for column in range(width)
            if 0 <= (start + column) * stride + tap * step - pad < self.inputs[-1]
        )

    def data_reached(self, start: int, width: int) -> Reached:
        """Return what `width` input columns from `start` on meet: output columns, counted from start // stride."""
        stride, pad, step, size = self._last()
        found = []
        for tap in range(size):
            for column in range(width):
                place, rest = divmod(start + column + pad - tap * step, stride)
                if rest == 0 and 0 <= place < self.outputs[-1]:
                    found.append((tap, column, place - start // stride))
        return tuple(found)

    def _last(self) -> tuple[int, int, int, int]:
        """Return stride, pad, dilation and size of the kernel along the last axis."""
        windows = self.windows
        return windows.stride[-1], windows.pad[-1][0], windows.dilation[-1], windows.kernel[-1]


def convolution_of(windows: Any, inputs: Shape, outputs: Shape, weight: Shape) -> Convolution:
    """Return the convolution from `inputs` to `outputs`, (channels, *places), with weights of a shape."""
    maps = weight[0] // windows.groups
    depthwise = maps == weight[1] == 1
    return Convolution(
        windows=windows,
        inputs=inputs[1:],
        outputs=outputs[1:],
        groups=1 if depthwise else windows.groups,
        maps=weight[0] if depthwise else maps,
        depth=weight[1],
        depthwise=depthwise,
    )


def _tile(conv: Convolution, planes: int, columns: int, registers: int, slide: int = 1, step: int = 1) -> tiles.Tile:
    """Return the tile of sums; values of a depthwise convolution serve one sum, and need no register for long."""
    if not conv.depthwise:
        return tiles.choose(planes, columns, registers, slide=slide, step=step)
    room = max(registers // 2 - 2, 1)
    width = min(columns, max(room // step * step, step))
    return tiles.Tile(max(1, min(planes, room // width)), width)


@contextmanager
def _rows(kernel: Kernel, name: str, shape: Shape) -> Iterator[list[str]]:
    """Emit loops over all axes of `shape` but the last; yield their variables."""
    names = [f"{name}{axis}" for axis in range(len(shape) - 1)]
    with ExitStack() as stack:
        for variable, size in zip(names, shape, strict=False):
            stack.enter_context(kernel.loop(variable, size))
        yield names


def row_of(channel: str, rows: Sequence[str], shape: Shape) -> str:
    """Return the number of a row, (channel, *rows) of values whose places have `shape`."""
    outer = shape[:-1]
    terms = [f"({row}) * {step}" for row, step in zip(rows, strides_of(outer), strict=True)]
    return " + ".join([f"({channel}) * {math.prod(outer)}", *terms])


def tap_row(rows: Sequence[str], sizes: Shape) -> str:
    """Return the first tap of a kernel row."""
    return " + ".join(f"{row} * {step}" for row, step in zip(rows, strides_of(sizes), strict=False)) or "0"


def emit_forward(kernel: Kernel, windows: Any, bias: bool) -> None:
    """Emit the convolution of inputs[0] with the weights inputs[1], and biases inputs[2] if `bias`."""
    inputs, weight = kernel.inputs[:2]
    conv = convolution_of(windows, inputs.value.shape, kernel.outputs[0].value.shape, weight.value.shape)
    tile = _tile(conv, conv.maps, conv.outputs[-1], kernel.registers, slide=windows.stride[-1])
    cut = tiles.runs(conv.outputs[-1], tile.columns, conv.forward_reached)
    with kernel.loop("group", conv.groups):
        for planes in tiles.each(kernel.source, "plane", tiles.runs(conv.maps, tile.planes)):
            kernel(f"map = group * {conv.maps} + plane")
            with _rows(kernel, "o", conv.outputs) as rows:
                _limits(kernel, conv, rows)
                for run in tiles.each(kernel.source, "column", cut):
                    _begin(kernel, planes.width, run.width, "map" if bias else "")
                    _forward_sums(kernel, conv, planes.width, run)
                    _store(kernel, conv.outputs, row_of("map", rows, conv.outputs), planes.width, run.width)


def _limits(kernel: Kernel, conv: Convolution, rows: Sequence[str]) -> None:
    """Emit, per axis but the last, where a window begins in the input, and its first and last tap inside it."""
    for axis, row in enumerate(rows):
        step = conv.windows.dilation[axis]
        kernel(f"base{axis} = {row} * {conv.windows.stride[axis]} - {conv.windows.pad[axis][0]}")
        kernel(f"low{axis} = max(0, ({step - 1} - base{axis}) // {step})")
        kernel(
            f"high{axis} = min({conv.windows.kernel[axis]}, ({conv.inputs[axis] + step - 1} - base{axis}) // {step})"
        )


def _begin(kernel: Kernel, planes: int, columns: int, bias: str) -> None:
    """Emit the sums of a tile as zeros, or as the biases from channel `bias` on."""
    if not bias:
        kernel(f"sums = {kernel.source.make('zeros', planes * columns)}()")
        return
    operand = kernel.inputs[2]
    starts = [plane for plane in range(planes) for _ in range(columns)]
    kernel(f"sums = {kernel.source.make('broadcasts', *starts)}({operand.array}, {operand.at(bias)})")


def _forward_sums(kernel: Kernel, conv: Convolution, planes: int, run: tiles.Run) -> None:
    inputs, weight = kernel.inputs[:2]
    names = [f"k{axis}" for axis in range(len(conv.outputs) - 1)]
    with kernel.loop("c", conv.depth), ExitStack() as stack:
        for axis, name in enumerate(names):
            stack.enter_context(kernel.loop(name, f"high{axis}", f"low{axis}"))
        seen = [f"base{axis} + {name} * {conv.windows.dilation[axis]}" for axis, name in enumerate(names)]
        row = row_of("plane" if conv.depthwise else f"group * {conv.depth} + c", seen, conv.inputs)
        column = f"column * {conv.windows.stride[-1]}"
        kernel(f"v = {inputs.at(f'({row}) * {conv.inputs[-1]} + {column}')}")
        kernel(f"w = {weight.at(f'(map * {conv.depth} + c) * {conv.taps} + {tap_row(names, conv.windows.kernel)}')}")
        _multiply_add(kernel, run, planes, conv.depth * conv.taps, conv.depthwise * math.prod(conv.inputs))


def _multiply_add(kernel: Kernel, run: tiles.Run, planes: int, apart: int, values_apart: int) -> None:
    """Emit sums += weights[w + plane * apart + kernel column] * memory[v + shift], for each tap that is reached.

    `values_apart`: how many values the planes lie apart; 0 if all see the same ones.
    """
    by_tap: dict[int, list[tuple[int, int]]] = {}
    for tap, column, shift in run.pattern:
        by_tap.setdefault(tap, []).append((column, shift))
    products = [
        (plane * run.width + column, plane * apart + tap, (shift + plane * values_apart) * kernel.lanes)
        for tap, met in by_tap.items()
        for plane, (column, shift) in product(range(planes), met)
    ]
    if products:
        step = kernel.source.make("multiply_adds", planes * run.width, BROADCAST, *products)
        kernel(f"sums = {step}(sums, {kernel.inputs[1].array}, w, memory, v)")


def _store(kernel: Kernel, shape: Shape, row: str, planes: int, columns: int) -> None:
    """Emit the store of a tile into outputs[0], whose places have `shape`, from `row` and `column` on."""
    places = [
        (plane * math.prod(shape) + column) * kernel.lanes for plane, column in product(range(planes), range(columns))
    ]
    at = kernel.outputs[0].at(f"({row}) * {shape[-1]} + column")
    kernel(f"{kernel.source.make('stores', *places)}(memory, {at}, sums)")


def emit_data(kernel: Kernel, windows: Any, bias: bool = False) -> None:
    """Emit the errors of inputs: inputs[0] are errors of outputs, inputs[1] weights, and inputs[2] biases to add."""
    errors, weight = kernel.inputs[:2]
    conv = convolution_of(windows, kernel.outputs[0].value.shape, errors.value.shape, weight.value.shape)
    # Output columns of one kernel column lie a stride apart: a tile begins where the pattern does.
    stride = windows.stride[-1]
    channels = conv.maps if conv.depthwise else conv.depth
    tile = _tile(conv, channels, conv.inputs[-1], kernel.registers, step=stride)
    cut = tiles.runs(conv.inputs[-1], tiles.up(tile.columns, stride), conv.data_reached)
    with kernel.loop("group", conv.groups):
        for planes in tiles.each(kernel.source, "plane", tiles.runs(channels, tile.planes)):
            kernel(f"channel = group * {conv.depth} + plane")
            with _rows(kernel, "i", conv.inputs) as rows:
                for run in tiles.each(kernel.source, "column", cut):
                    _begin(kernel, planes.width, run.width, "channel" if bias else "")
                    _data_sums(kernel, conv, planes.width, run, rows)
                    _store(kernel, conv.inputs, row_of("channel", rows, conv.inputs), planes.width, run.width)


def _data_sums(kernel: Kernel, conv: Convolution, planes: int, run: tiles.Run, rows: Sequence[str]) -> None:
    errors, weight = kernel.inputs[:2]
    windows = conv.windows
    names = [f"k{axis}" for axis in range(len(rows))]
    with ExitStack() as stack:
        for axis, (row, name) in enumerate(zip(rows, names, strict=True)):
            stride = windows.stride[axis]
            stack.enter_context(kernel.loop(name, windows.kernel[axis]))
            kernel(f"far{axis} = {row} + {windows.pad[axis][0]} - {name} * {windows.dilation[axis]}")
            whole = f" and far{axis} % {stride} == 0" if stride > 1 else ""
            limit = (conv.outputs[axis] - 1) * stride
            stack.enter_context(kernel.inside(f"if 0 <= far{axis} <= {limit}{whole}:"))
        stack.enter_context(kernel.loop("m", 1 if conv.depthwise else conv.maps))
        kernel(f"map = {'plane' if conv.depthwise else f'group * {conv.maps} + m'}")
        seen = [f"far{axis} // {windows.stride[axis]}" for axis in range(len(rows))]
        at = f"({row_of('map', seen, conv.outputs)}) * {conv.outputs[-1]} + column // {windows.stride[-1]}"
        kernel(f"v = {errors.at(at)}")
        first = f"(map * {conv.depth} + {0 if conv.depthwise else 'plane'}) * {conv.taps}"
        kernel(f"w = {weight.at(f'{first} + {tap_row(names, windows.kernel)}')}")
        _multiply_add(kernel, run, planes, conv.taps, conv.depthwise * math.prod(conv.outputs))
