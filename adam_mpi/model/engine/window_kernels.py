"""Emit convolutions of any geometry: one to three axes, stride, pad, dilation, groups.

forward:  for each tile of outputs channels and each place: for each input channel of the group and tap inside the
          input: sums += weight * input
data:     for each tile of input channels and each place: for each output channel of the group and tap that sees the
          place: sums += weight * error
weights:  for each tile of output and input channels and each tap: for each place whose tap lies inside the input:
          sums += error * input; their totals are added to the gradient
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand, strides_of

WIDEST = 8
"""Channels whose sums are kept at once."""


def _tile(total: int, widest: int) -> int:
    """Return the largest tile of up to `widest` that divides `total`."""
    return max(width for width in range(1, widest + 1) if total % width == 0)


@contextmanager
def _places(kernel: Kernel, name: str, shape: tuple[int, ...]) -> Iterator[list[str]]:
    """Emit loops over places of `shape`; yield their variables."""
    with ExitStack() as stack:
        for axis, size in enumerate(shape):
            stack.enter_context(kernel.loop(f"{name}{axis}", size))
        yield [f"{name}{axis}" for axis in range(len(shape))]


def _at(channel: str, places: list[str], shape: tuple[int, ...]) -> str:
    """Return the index of (channel, *places) in a value whose places have `shape`."""
    steps = strides_of(shape)
    terms = [f"({channel}) * {math.prod(shape)}", *(f"({p}) * {s}" for p, s in zip(places, steps, strict=True))]
    return " + ".join(terms)


class Window:
    """The window of one place while its kernel is emitted."""

    def __init__(self, kernel: Kernel, windows: Any, shape: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.windows = windows
        self.shape = shape
        places = [f"o{axis}" for axis in range(len(outputs))]
        self.place = _at("channel", places, outputs)
        """Index of the place that the window makes."""
        self.number = " + ".join(f"{place} * {step}" for place, step in zip(places, strides_of(outputs), strict=True))
        """Number of the place in its channel."""

    @contextmanager
    def taps(self) -> Iterator[tuple[str, str]]:
        """Emit loops over the taps inside the input; yield the index of what a tap sees, and the tap's number."""
        with _taps(self.kernel, self.windows) as taps:
            seen = [f"base{a} + {tap} * {self.windows.dilation[a]}" for a, tap in enumerate(taps)]
            steps = strides_of(self.windows.kernel)
            number = " + ".join(f"{tap} * {step}" for tap, step in zip(taps, steps, strict=True))
            yield _at("channel", seen, self.shape), f"np.float32({number})"


@contextmanager
def each_window(kernel: Kernel, windows: Any, inputs: Operand, outputs: Operand) -> Iterator[Window]:
    """Emit loops over channels and places of `outputs`, whose windows lie in `inputs`; yield the window."""
    made = Window(kernel, windows, inputs.value.shape[1:], outputs.value.shape[1:])
    with kernel.loop("channel", outputs.value.shape[0]), _places(kernel, "o", outputs.value.shape[1:]) as places:
        _tap_limits(kernel, windows, made.shape, places)
        yield made


def emit_forward(kernel: Kernel, windows: Any, bias: bool) -> None:
    """Emit the convolution of inputs[0] with the weights inputs[1], and biases inputs[2] if `bias`."""
    inputs, weight = kernel.inputs[:2]
    output = kernel.outputs[0]
    maps, depth = weight.value.shape[:2]
    tile = _tile(maps // windows.groups, WIDEST)
    size = depth * math.prod(windows.kernel)
    with kernel.inside(f"for map in range(0, {maps}, {tile}):"):
        kernel(f"channel = map // {maps // windows.groups} * {depth}")
        with _places(kernel, "o", output.value.shape[1:]) as places:
            _tap_limits(kernel, windows, inputs.value.shape[1:], places)
            for number in range(tile):
                kernel(f"s{number} = {kernel.inputs[2].load(f'map + {number}') if bias else 'zero()'}")
            with kernel.loop("c", depth), _taps(kernel, windows) as taps:
                seen = [f"base{a} + {tap} * {d}" for a, (tap, d) in enumerate(zip(taps, windows.dilation, strict=True))]
                kernel(f"value = {inputs.load(_at('channel + c', seen, inputs.value.shape[1:]))}")
                kernel(f"at = map * {size} + {_at('c', taps, windows.kernel)}")
                for number in range(tile):
                    kernel(f"s{number} = fma({weight.load(f'at + {number * size}')}, value, s{number})")
            for number in range(tile):
                kernel(output.store(_at(f"map + {number}", places, output.value.shape[1:]), f"s{number}"))


def _tap_limits(kernel: Kernel, windows: Any, shape: tuple[int, ...], places: list[str]) -> None:
    """Emit, per axis, where a window begins in the input, and its first and last tap inside it."""
    for axis, place in enumerate(places):
        step = windows.dilation[axis]
        kernel(f"base{axis} = {place} * {windows.stride[axis]} - {windows.pad[axis][0]}")
        kernel(f"low{axis} = max(0, ({step - 1} - base{axis}) // {step})")
        kernel(f"high{axis} = min({windows.kernel[axis]}, ({shape[axis] + step - 1} - base{axis}) // {step})")


@contextmanager
def _taps(kernel: Kernel, windows: Any) -> Iterator[list[str]]:
    """Emit loops over the taps within the limits."""
    with ExitStack() as stack:
        for axis in range(len(windows.kernel)):
            stack.enter_context(kernel.loop(f"k{axis}", f"high{axis}", f"low{axis}"))
        yield [f"k{axis}" for axis in range(len(windows.kernel))]


def emit_data(kernel: Kernel, windows: Any, bias: bool = False) -> None:
    """Emit the errors of inputs: inputs[0] are errors of outputs, inputs[1] weights, and inputs[2] biases to add."""
    errors, weight = kernel.inputs[:2]
    output = kernel.outputs[0]
    maps, depth = weight.value.shape[:2]
    tile = _tile(depth, WIDEST)
    taps = math.prod(windows.kernel)
    with kernel.inside(f"for channel in range(0, {depth * windows.groups}, {tile}):"):
        kernel(f"map = channel // {depth} * {maps // windows.groups}")
        with _places(kernel, "i", output.value.shape[1:]) as places:
            for number in range(tile):
                kernel(f"s{number} = {kernel.inputs[2].load(f'channel + {number}') if bias else 'zero()'}")
            with _taps_that_see(kernel, windows, errors.value.shape[1:], places) as (seen, tap):
                with kernel.loop("m", maps // windows.groups):
                    kernel(f"value = {errors.load(_at('map + m', seen, errors.value.shape[1:]))}")
                    kernel(f"at = ((map + m) * {depth} + channel % {depth}) * {taps} + {tap}")
                    for number in range(tile):
                        kernel(f"s{number} = fma({weight.load(f'at + {number * taps}')}, value, s{number})")
            for number in range(tile):
                kernel(output.store(_at(f"channel + {number}", places, output.value.shape[1:]), f"s{number}"))


@contextmanager
def _taps_that_see(
    kernel: Kernel, windows: Any, shape: tuple[int, ...], places: list[str]
) -> Iterator[tuple[list[str], str]]:
    """Emit loops over the taps that see the place; yield the place of the output, of `shape`, and the tap's index."""
    with ExitStack() as stack:
        for axis, place in enumerate(places):
            stride = windows.stride[axis]
            stack.enter_context(kernel.loop(f"k{axis}", windows.kernel[axis]))
            kernel(f"far{axis} = {place} + {windows.pad[axis][0]} - k{axis} * {windows.dilation[axis]}")
            whole = f" and far{axis} % {stride} == 0" if stride > 1 else ""
            stack.enter_context(kernel.inside(f"if 0 <= far{axis} <= {(shape[axis] - 1) * stride}{whole}:"))
        steps = strides_of(windows.kernel)
        tap = " + ".join(f"k{axis} * {step}" for axis, step in enumerate(steps))
        yield [f"far{axis} // {windows.stride[axis]}" for axis in range(len(places))], tap


def emit_weights(kernel: Kernel, windows: Any, bias: bool) -> None:
    """Emit the gradient of weights, and of biases if `bias`: inputs are those of the convolution, and its errors."""
    inputs, errors = kernel.inputs
    weight = kernel.outputs[0]
    maps, depth = weight.value.shape[:2]
    map_tile = _tile(maps // windows.groups, 4)
    tile = _tile(depth, 4)
    if bias:
        emit_channel_sums(kernel, errors, kernel.outputs[1])
    with kernel.inside(f"for map in range(0, {maps}, {map_tile}):"):
        kernel(f"channel = map // {maps // windows.groups} * {depth}")
        with kernel.inside(f"for c in range(0, {depth}, {tile}):"), ExitStack() as stack:
            for axis, size in enumerate(windows.kernel):
                stack.enter_context(kernel.loop(f"k{axis}", size))
            _weight_sums(kernel, windows, (map_tile, tile), inputs, errors)
            taps = math.prod(windows.kernel)
            tap = " + ".join(f"k{axis} * {step}" for axis, step in enumerate(strides_of(windows.kernel)))
            for a in range(map_tile):
                for b in range(tile):
                    index = f"((map + {a}) * {depth} + c + {b}) * {taps} + {tap}"
                    kernel(weight.add(index, f"s{a}_{b}"))


def _weight_sums(kernel: Kernel, windows: Any, tile: tuple[int, int], inputs: Operand, errors: Operand) -> None:
    """Emit the sums of one tap over all places whose tap lies inside the input."""
    shape = inputs.value.shape[1:]
    outputs = errors.value.shape[1:]
    for a in range(tile[0]):
        for b in range(tile[1]):
            kernel(f"s{a}_{b} = zero()")
    with ExitStack() as stack:
        for axis, size in enumerate(outputs):
            stride = windows.stride[axis]
            kernel(f"shift{axis} = k{axis} * {windows.dilation[axis]} - {windows.pad[axis][0]}")
            low = f"max(0, ({stride - 1} - shift{axis}) // {stride})"
            high = f"min({size}, ({shape[axis] + stride - 1} - shift{axis}) // {stride})"
            stack.enter_context(kernel.loop(f"o{axis}", high, low))
        places = [f"o{axis}" for axis in range(len(outputs))]
        seen = [f"o{axis} * {windows.stride[axis]} + shift{axis}" for axis in range(len(outputs))]
        kernel(f"seen = {_at('channel + c', seen, shape)}")
        kernel(f"at = {_at('map', places, outputs)}")
        for b in range(tile[1]):
            kernel(f"v{b} = {inputs.load(f'seen + {b * math.prod(shape)}')}")
        for a in range(tile[0]):
            kernel(f"e = {errors.load(f'at + {a * math.prod(outputs)}')}")
            for b in range(tile[1]):
                kernel(f"s{a}_{b} = fma(e, v{b}, s{a}_{b})")


def emit_channel_sums(kernel: Kernel, errors: Operand, result: Operand) -> None:
    """Emit the sum of `errors` over samples and places, per channel."""
    plane = math.prod(errors.value.shape[1:])
    with kernel.loop("m", errors.value.shape[0]):
        kernel("s = zero()")
        with kernel.loop("place", plane):
            kernel(f"s = add(s, {errors.load(f'm * {plane} + place')})")
        kernel(result.add("m", "s"))


def emit_dense(kernel: Kernel, bias: bool) -> None:
    """Emit inputs[0] times the transposed matrix inputs[1], row by row of all but the last axis."""
    inputs, weight = kernel.inputs[:2]
    units, features = weight.value.shape
    with kernel.loop("row", inputs.value.size // features):
        for run in tiles.each(kernel.source, "unit", tiles.runs(units, WIDEST)):
            for number in range(run.width):
                kernel(f"s{number} = {kernel.inputs[2].load(f'unit + {number}') if bias else 'zero()'}")
            with kernel.loop("feature", features):
                kernel(f"value = {inputs.load(f'row * {features} + feature')}")
                for number in range(run.width):
                    factor = weight.load(f"(unit + {number}) * {features} + feature")
                    kernel(f"s{number} = fma({factor}, value, s{number})")
            for number in range(run.width):
                kernel(kernel.outputs[0].store(f"row * {units} + unit + {number}", f"s{number}"))


def emit_dense_data(kernel: Kernel) -> None:
    """Emit inputs[0], errors, times the matrix inputs[1]."""
    errors, weight = kernel.inputs
    units, features = weight.value.shape
    with kernel.loop("row", errors.value.size // units):
        for run in tiles.each(kernel.source, "feature", tiles.runs(features, WIDEST)):
            for number in range(run.width):
                kernel(f"s{number} = zero()")
            with kernel.loop("unit", units):
                kernel(f"value = {errors.load(f'row * {units} + unit')}")
                for number in range(run.width):
                    factor = weight.load(f"unit * {features} + feature + {number}")
                    kernel(f"s{number} = fma({factor}, value, s{number})")
            for number in range(run.width):
                kernel(kernel.outputs[0].store(f"row * {features} + feature + {number}", f"s{number}"))


def emit_dense_weights(kernel: Kernel, bias: bool) -> None:
    """Emit the gradient of the matrix, and of biases if `bias`: inputs are those of the layer, and its errors."""
    inputs, errors = kernel.inputs
    units, features = kernel.outputs[0].value.shape
    rows = inputs.value.size // features
    if bias:
        with kernel.loop("unit", units):
            kernel("s = zero()")
            with kernel.loop("row", rows):
                kernel(f"s = add(s, {errors.load(f'row * {units} + unit')})")
            kernel(kernel.outputs[1].add("unit", "s"))
    for run in tiles.each(kernel.source, "unit", tiles.runs(units, 4)):
        for across in tiles.each(kernel.source, "feature", tiles.runs(features, 4)):
            for a in range(run.width):
                for b in range(across.width):
                    kernel(f"s{a}_{b} = zero()")
            with kernel.loop("row", rows):
                for b in range(across.width):
                    kernel(f"v{b} = {inputs.load(f'row * {features} + feature + {b}')}")
                for a in range(run.width):
                    kernel(f"e = {errors.load(f'row * {units} + unit + {a}')}")
                    for b in range(across.width):
                        kernel(f"s{a}_{b} = fma(e, v{b}, s{a}_{b})")
            for a in range(run.width):
                for b in range(across.width):
                    kernel(kernel.outputs[0].add(f"(unit + {a}) * {features} + feature + {b}", f"s{a}_{b}"))
