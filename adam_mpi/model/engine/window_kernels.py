"""Emit loops over windows, for pooling, and dense layers on the last axis."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand, strides_of

WIDEST = 8
"""Units whose sums are kept at once."""


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
