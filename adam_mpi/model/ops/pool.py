"""Max and average pooling over one to three axes, global average pooling, and the ways back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.engine.window_kernels import each_window
from adam_mpi.model.graph import Shape, Value
from adam_mpi.model.ops.fields import flag, hidden, whole
from adam_mpi.model.ops.operator import Composite, Operator, Run, Span, register
from adam_mpi.model.ops.reduce import Expand
from adam_mpi.model.ops.shape import Reshape
from adam_mpi.model.ops.windows import Geometry, everywhere, geometry, unpadded


@dataclass(frozen=True)
class Pool(Operator):
    """Pool windows of `size`, `stride` apart (default: side by side); an incomplete last window is left out.

    `pad` is of values that never win, or that an average does not count.
    """

    size: int | Shape = whole(several=True)
    stride: int | Shape | None = whole(default=None, several=True)
    pad: int | Shape = whole(0, default=0, several=True)

    def geometry(self, value: Value) -> Geometry:
        """Return the windows over the spatial axes of the input `value`."""
        rank = len(value.shape) - 1
        if not 1 <= rank <= 3:
            raise ValueError("pooling takes a channel axis and one to three spatial ones")
        return geometry(rank, self.size, self.size if self.stride is None else self.stride, self.pad)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        return [Value("", (value.shape[0], *self.geometry(value).windows(value.shape[1:])), axes=value.axes)]

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        value = inputs[0]
        place = value.axes.index(axis) - 1
        if place < 0:
            return [span]
        windows = self.geometry(value)
        low = span[0] * windows.stride[place] - windows.pad[place][0]
        high = (span[1] - 1) * windows.stride[place] - windows.pad[place][0] + windows.kernel[place]
        return [(max(low, 0), min(high, value.shape[place + 1]))]

    def export(self, name: str, export: Any, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add the ONNX node `name` of these windows, with further `attributes`."""
        windows = self.geometry(export.value(inputs[0]))
        export.node(
            name,
            inputs,
            outputs[:1],
            kernel_shape=list(windows.kernel),
            strides=list(windows.stride),
            pads=[edges[0] for edges in windows.pad] + [edges[1] for edges in windows.pad],
            **attributes,
        )


@register("max_pool")
@dataclass(frozen=True)
class MaxPool(Pool):
    """Take the largest of each window; the second output is the number, within the window, of the first largest.

    With `relu`, no window that has nothing above zero has a winner: its number is -1, and the result zero.
    """

    relu: bool = hidden(False)

    def side_by_side(self, value: Value) -> int:
        """Return the size of square windows that lie side by side over images, without a pad; 0 for other windows."""
        windows = self.geometry(value)
        alike = len(windows.kernel) == 2 and len({*windows.kernel, *windows.stride}) == 1
        return windows.kernel[0] if alike and not any(map(any, windows.pad)) else 0

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = super().outputs(inputs)[0]
        return [value, value]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value = inputs[0]
        return [tape.add(Unpool(self.geometry(value), value.shape, value.axes), errors[0], outputs[1])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        windows = self.geometry(Value("", array.shape[1:]))
        padded = np.pad(array, [(0, 0), (0, 0), *windows.pad], constant_values=-np.inf)
        counts = windows.windows(array.shape[2:])
        seen = [padded[everywhere(part)] for _, part in windows.taps(counts)]
        stacked = np.stack(seen)
        winners = stacked.argmax(axis=0)
        best = np.take_along_axis(stacked, winners[None], axis=0)[0]
        if self.relu:
            winners = np.where(best > 0, winners, -1)
            best = np.maximum(best, 0)
        return [best, winners.astype(array.dtype)]

    def emit(self, kernel: Any) -> None:
        with each_window(kernel, self.geometry(kernel.inputs[0].value), kernel.inputs[0], kernel.outputs[0]) as window:
            kernel("best = splat(-np.inf)")
            kernel("winner = zero()")
            with window.taps() as (index, number):
                kernel(f"value = {kernel.inputs[0].load(index)}")
                kernel(f"winner = greater(value, best, splat({number}), winner)")
                kernel("best = maximum(value, best)")
            if self.relu:
                kernel("winner = greater(best, zero(), winner, splat(-1.0))")
                kernel("best = maximum(zero(), best)")
            kernel(kernel.outputs[0].store(window.place, "best"))
            kernel(kernel.outputs[1].store(window.place, "winner"))

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.export("MaxPool", export, inputs, outputs)


@dataclass(frozen=True)
class Unpool(Operator):
    """Give each error (first input) to the winner of its window (second input); overlapping windows add up."""

    windows: Geometry = hidden()
    shape: Shape = hidden()
    axes: tuple[str, ...] = hidden(())
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self.shape, axes=self.axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        errors, winners = arrays
        windows = self.windows
        made = np.zeros((len(errors), *self.shape), errors.dtype)
        padded = np.pad(made, [(0, 0), (0, 0), *windows.pad])
        for number, (_, seen) in enumerate(windows.taps(errors.shape[2:])):
            padded[everywhere(seen)] += np.where(winners == number, errors, 0)
        return [unpadded(windows, padded, self.shape)]

    def emit(self, kernel: Any) -> None:
        kernel.clear()
        errors, winners = kernel.inputs
        with each_window(kernel, self.windows, kernel.outputs[0], errors) as window:
            kernel(f"error = {errors.load(window.place)}")
            kernel(f"winner = {winners.load(window.place)}")
            with window.taps() as (index, number):
                kernel(kernel.outputs[0].add(index, f"equal(winner, splat({number}), error, zero())"))


@register("avg_pool")
@dataclass(frozen=True)
class AvgPool(Pool):
    """Average each window; with `count_pad` the zeros of the pad count too."""

    count_pad: bool = flag(False)

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value = inputs[0]
        back = Spread(self.geometry(value), value.shape, value.axes, self.count_pad)
        return [tape.add(back, errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        windows = self.geometry(Value("", array.shape[1:]))
        counts = windows.windows(array.shape[2:])
        padded = np.pad(array, [(0, 0), (0, 0), *windows.pad])
        made = sum(padded[everywhere(seen)] for _, seen in windows.taps(counts))
        return [np.asarray(made) * _shares(windows, array.shape[2:], self.count_pad).astype(array.dtype)]

    def emit(self, kernel: Any) -> None:
        windows = self.geometry(kernel.inputs[0].value)
        shares = kernel.constants(_shares(windows, kernel.inputs[0].value.shape[1:], self.count_pad))
        with each_window(kernel, windows, kernel.inputs[0], kernel.outputs[0]) as window:
            kernel("mean = zero()")
            with window.taps() as (index, _):
                kernel(f"mean = add(mean, {kernel.inputs[0].load(index)})")
            kernel(kernel.outputs[0].store(window.place, f"mul(mean, splat({shares}[{window.number}]))"))

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.export("AveragePool", export, inputs, outputs, count_include_pad=int(self.count_pad))


@dataclass(frozen=True)
class Spread(Operator):
    """Give an equal part of each error to all of its window: the way back of average pooling."""

    windows: Geometry = hidden()
    shape: Shape = hidden()
    axes: tuple[str, ...] = hidden(())
    count_pad: bool = hidden(False)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self.shape, axes=self.axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        errors = arrays[0]
        windows = self.windows
        shares = errors * _shares(windows, self.shape[1:], self.count_pad).astype(errors.dtype)
        made = np.zeros((len(errors), *self.shape), errors.dtype)
        padded = np.pad(made, [(0, 0), (0, 0), *windows.pad])
        for _, seen in windows.taps(errors.shape[2:]):
            padded[everywhere(seen)] += shares
        return [unpadded(windows, padded, self.shape)]

    def emit(self, kernel: Any) -> None:
        kernel.clear()
        shares = kernel.constants(_shares(self.windows, self.shape[1:], self.count_pad))
        with each_window(kernel, self.windows, kernel.outputs[0], kernel.inputs[0]) as window:
            kernel(f"share = mul({kernel.inputs[0].load(window.place)}, splat({shares}[{window.number}]))")
            with window.taps() as (index, _):
                kernel(kernel.outputs[0].add(index, "share"))


@register("global_avg_pool")
@dataclass(frozen=True)
class GlobalAvgPool(Operator):
    """Average each channel over all places."""

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        if len(inputs[0].shape) < 2:
            raise ValueError("there are no places to average over")
        return [Value("", inputs[0].shape[:1], axes=inputs[0].axes[:1])]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value = inputs[0]
        error = tape.add(Reshape((value.shape[0], *(1,) * (len(value.shape) - 1))), errors[0])
        return [tape.add(Expand(value.shape, value.axes, 1 / math.prod(value.shape[1:])), error)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0].mean(axis=tuple(range(2, arrays[0].ndim)), dtype=arrays[0].dtype)]

    def emit(self, kernel: Any) -> None:
        shape = kernel.inputs[0].value.shape
        kernel.sum_to((shape[0], *(1,) * (len(shape) - 1)), True, 1 / math.prod(shape[1:]))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span if axis == inputs[0].axes[0] else None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Flatten", [export.node("GlobalAveragePool", inputs)], outputs, axis=1)


@register("global_max_pool")
@dataclass(frozen=True)
class GlobalMaxPool(Composite):
    """Take the largest of each channel."""

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if len(value.shape) < 2:
            raise ValueError("there are no places to take the largest of")
        flat = tape.add(Reshape((value.shape[0], math.prod(value.shape[1:]))), value)
        return [tape.add(Reshape(value.shape[:1]), tape.add(MaxPool(flat.shape[1]), flat))]


def _shares(windows: Geometry, shape: Shape, count_pad: bool) -> np.ndarray:
    """Return what each window's sum is multiplied by."""
    ones = np.ones(shape)
    padded = np.pad(ones, windows.pad, constant_values=float(count_pad))
    return 1 / np.sum([padded[seen] for _, seen in windows.taps(windows.windows(shape))], axis=0)
