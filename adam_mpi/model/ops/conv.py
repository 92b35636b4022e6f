"""Convolution over one, two or three axes, its gradients, and transposed convolution.

`ConvData` takes errors back to the inputs of a convolution, and is what a transposed convolution computes;
`ConvWeights` sums the gradient of the weights over samples and positions.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from adam_mpi.model.engine import window_kernels
from adam_mpi.model.graph import Parameter, Shape, Value, shape_text
from adam_mpi.model.initialization import ZEROS
from adam_mpi.model.ops.fields import flag, hidden, pads, per_axis, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Geometry:
    """Describe the windows of a convolution, one number per spatial axis each; `pad` is (before, after)."""

    kernel: Shape
    stride: Shape
    pad: Pads
    dilation: Shape
    groups: int = 1

    def reach(self) -> Shape:
        """Return how many inputs a window spans along each axis."""
        return tuple((size - 1) * step + 1 for size, step in zip(self.kernel, self.dilation, strict=True))

    def windows(self, shape: Shape) -> Shape:
        """Return how many windows fit along each axis of `shape`; raise ValueError if a window does not fit at all."""
        found = []
        for axis, (size, reach) in enumerate(zip(shape, self.reach(), strict=True)):
            padded = size + sum(self.pad[axis])
            if reach > padded:
                raise ValueError(f"a window of {reach} does not fit into {size} with pad {sum(self.pad[axis])}")
            found.append((padded - reach) // self.stride[axis] + 1)
        return tuple(found)

    def taps(self, outputs: Shape) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each place in the kernel with what it sees, for all `outputs`, of the padded inputs."""
        for place in product(*(range(size) for size in self.kernel)):
            first = [number * step for number, step in zip(place, self.dilation, strict=True)]
            yield (
                place,
                tuple(
                    slice(begin, begin + (count - 1) * stride + 1, stride)
                    for begin, count, stride in zip(first, outputs, self.stride, strict=True)
                ),
            )


def geometry(
    rank: int,
    kernel: int | Shape,
    stride: int | Shape = 1,
    pad: int | Shape = 0,
    dilation: int | Shape = 1,
    groups: int = 1,
) -> Geometry:
    """Return the windows over `rank` axes; raise ValueError for a list of the wrong length, or too wide a pad."""
    sizes = per_axis(kernel, rank, "kernel")
    dilations = per_axis(dilation, rank, "dilation")
    made = Geometry(sizes, per_axis(stride, rank, "stride"), pads(pad, rank), dilations, groups)
    if any(max(edges) >= reach for edges, reach in zip(made.pad, made.reach(), strict=True)):
        raise ValueError(
            f"a pad as wide as the window of {shape_text(made.reach())} would make outputs that see nothing"
        )
    return made


@register("conv")
@dataclass(frozen=True)
class Conv(Operator):
    """Convolve: `channels` outputs per place; the other fields are one number, or one per spatial axis."""

    channels: int = whole()
    kernel: int | Shape = whole(several=True)
    stride: int | Shape = whole(default=1, several=True)
    pad: int | Shape = whole(0, default=0, several=True)
    dilation: int | Shape = whole(default=1, several=True)
    groups: int = whole(default=1)
    bias: bool = flag(True)

    def geometry(self, value: Value) -> Geometry:
        """Return the windows over the spatial axes of the input `value`; raise ValueError if they do not fit it."""
        rank = len(value.shape) - 1
        if not 1 <= rank <= 3:
            raise ValueError("a convolution takes a channel axis and one to three spatial ones")
        if value.shape[0] % self.groups or self.channels % self.groups:
            raise ValueError(f"{value.shape[0]} and {self.channels} channels do not divide into {self.groups} groups")
        return geometry(rank, self.kernel, self.stride, self.pad, self.dilation, self.groups)

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        windows = self.geometry(inputs[0])
        shape = (self.channels, inputs[0].shape[0] // self.groups, *windows.kernel)
        bias = (Parameter("bias", (self.channels,), ZEROS, "bias"),) if self.bias else ()
        return (Parameter("weight", shape), *bias)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        return [Value("", (self.channels, *self.geometry(value).windows(value.shape[1:])), axes=value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value, weight = inputs[:2]
        windows = self.geometry(value)
        to_weights = tape.apply(ConvWeights(windows, weight.shape, self.bias), [value, errors[0]])
        to_data = tape.add(ConvData(windows, value.shape, value.axes), errors[0], weight)
        return [to_data, *to_weights]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        windows = self.geometry(Value("", arrays[0].shape[1:]))
        made = forward(windows, arrays[0], arrays[1])
        if self.bias:
            made += arrays[2].reshape(-1, *(1,) * (made.ndim - 2))
        return [made]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_forward(kernel, self.geometry(kernel.inputs[0].value), self.bias)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        value = inputs[0]
        place = value.axes.index(axis) - 1
        if place < 0:
            return [None] * len(inputs)
        windows = self.geometry(value)
        low = span[0] * windows.stride[place] - windows.pad[place][0]
        high = (span[1] - 1) * windows.stride[place] - windows.pad[place][0] + windows.reach()[place]
        return [(max(low, 0), min(high, value.shape[place + 1])), *[None] * (len(inputs) - 1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        windows = self.geometry(export.value(inputs[0]))
        export.node(
            "Conv",
            inputs,
            outputs,
            kernel_shape=list(windows.kernel),
            strides=list(windows.stride),
            pads=[edges[0] for edges in windows.pad] + [edges[1] for edges in windows.pad],
            dilations=list(windows.dilation),
            group=windows.groups,
        )


@dataclass(frozen=True)
class ConvData(Operator):
    """Take errors (first input) back to the inputs of a convolution with weights (second input)."""

    windows: Geometry = hidden()
    shape: Shape = hidden()
    axes: tuple[str, ...] = hidden(())
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self.shape, axes=self.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        weight = inputs[1]
        to_weights = tape.add(ConvWeights(self.windows, weight.shape, False), errors[0], inputs[0])
        return [tape.add(Convolve(self.windows), errors[0], weight), to_weights]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [to_data(self.windows, arrays[0], arrays[1], self.shape)]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_data(kernel, self.windows)


@dataclass(frozen=True)
class Convolve(Operator):
    """Convolve the first input with the weights that are the second one, without bias."""

    windows: Geometry = hidden()
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value, weight = inputs
        return [Value("", (weight.shape[0], *self.windows.windows(value.shape[1:])), axes=value.axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [forward(self.windows, arrays[0], arrays[1])]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_forward(kernel, self.windows, bias=False)


@dataclass(frozen=True)
class ConvWeights(Operator):
    """Sum the gradient of weights, and of biases, over samples; inputs are those of the convolution and its errors."""

    windows: Geometry = hidden()
    weight: Shape = hidden()
    bias: bool = hidden(True)
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        bias = [Value("", (self.weight[0],), batched=False)] if self.bias else []
        return [Value("", self.weight, batched=False), *bias]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        value, error = arrays
        gradient = to_weights(self.windows, value, error, self.weight)
        return [gradient, error.sum(axis=(0, *range(2, error.ndim)))] if self.bias else [gradient]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_weights(kernel, self.windows, self.bias)


@register("conv_transpose")
@dataclass(frozen=True)
class ConvTranspose(Operator):
    """Convolve the transposed way, as upsampling with learned weights; `more` adds places behind each axis's end."""

    channels: int = whole()
    kernel: int | Shape = whole(several=True)
    stride: int | Shape = whole(default=1, several=True)
    pad: int | Shape = whole(0, default=0, several=True)
    more: int | Shape = whole(0, default=0, several=True)
    dilation: int | Shape = whole(default=1, several=True)
    groups: int = whole(default=1)
    bias: bool = flag(True)

    def geometry(self, value: Value) -> Geometry:
        """Return the windows of the convolution whose way back this is."""
        rank = len(value.shape) - 1
        if not 1 <= rank <= 3:
            raise ValueError("a convolution takes a channel axis and one to three spatial ones")
        if value.shape[0] % self.groups or self.channels % self.groups:
            raise ValueError(f"{value.shape[0]} and {self.channels} channels do not divide into {self.groups} groups")
        return geometry(rank, self.kernel, self.stride, self.pad, self.dilation, self.groups)

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        windows = self.geometry(inputs[0])
        shape = (inputs[0].shape[0], self.channels // self.groups, *windows.kernel)
        bias = (Parameter("bias", (self.channels,), ZEROS, "bias"),) if self.bias else ()
        return (Parameter("weight", shape), *bias)

    def _shape(self, value: Value) -> Shape:
        windows = self.geometry(value)
        more = per_axis(self.more, len(value.shape) - 1, "more")
        sizes = [
            (count - 1) * stride + reach - sum(edges) + extra
            for count, stride, reach, edges, extra in zip(
                value.shape[1:], windows.stride, windows.reach(), windows.pad, more, strict=True
            )
        ]
        if min(sizes) < 1 or any(extra >= stride for extra, stride in zip(more, windows.stride, strict=True)):
            raise ValueError(f"a pad or `more` too large makes outputs of {shape_text(sizes)}")
        return (self.channels, *sizes)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self._shape(inputs[0]), axes=inputs[0].axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value, weight = inputs[:2]
        windows = self.geometry(value)
        to_weights = tape.add(ConvWeights(windows, weight.shape, False), errors[0], value)
        bias = [tape.add(ChannelSums(), errors[0])] if self.bias else []
        return [tape.add(Convolve(windows), errors[0], weight), to_weights, *bias]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        value = Value("", arrays[0].shape[1:])
        made = to_data(self.geometry(value), arrays[0], arrays[1], self._shape(value))
        if self.bias:
            made += arrays[2].reshape(-1, *(1,) * (made.ndim - 2))
        return [made]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_data(kernel, self.geometry(kernel.inputs[0].value), self.bias)


@dataclass(frozen=True)
class ChannelSums(Operator):
    """Sum over samples and places: the gradient of a bias per channel."""

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape[:1], batched=False)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0].sum(axis=(0, *range(2, arrays[0].ndim)))]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_channel_sums(kernel, kernel.inputs[0], kernel.outputs[0])


def everywhere(places: Iterable[Any]) -> tuple[Any, ...]:
    """Return the index of `places` in all channels of all samples."""
    return (slice(None), slice(None), *places)


def _grouped(array: np.ndarray, groups: int) -> np.ndarray:
    """Return (samples, channels, *places) as (samples, groups, channels per group, places)."""
    return array.reshape(len(array), groups, array.shape[1] // groups, -1)


def _padded(windows: Geometry, array: np.ndarray) -> np.ndarray:
    return np.pad(array, [(0, 0), (0, 0), *windows.pad])


def _tap(weight: np.ndarray, place: tuple[int, ...], groups: int) -> np.ndarray:
    """Return the matrices of one place in the kernel: (groups, outputs per group, inputs per group)."""
    return weight[everywhere(place)].reshape(groups, -1, weight.shape[1])


def forward(windows: Geometry, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the convolution of `inputs` with `weight`."""
    outputs = windows.windows(inputs.shape[2:])
    padded = _padded(windows, inputs)
    groups = windows.groups
    made = np.zeros((len(inputs), groups, len(weight) // groups, math.prod(outputs)), inputs.dtype)
    for place, seen in windows.taps(outputs):
        made += _tap(weight, place, groups) @ _grouped(padded[everywhere(seen)], groups)
    return made.reshape(len(inputs), len(weight), *outputs)


def to_data(windows: Geometry, errors: np.ndarray, weight: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the errors of inputs of `shape`."""
    padded = _padded(windows, np.zeros((len(errors), *shape), errors.dtype))
    grouped = _grouped(errors, windows.groups)
    for place, seen in windows.taps(errors.shape[2:]):
        part = _tap(weight, place, windows.groups).transpose(0, 2, 1) @ grouped
        padded[everywhere(seen)] += part.reshape(len(errors), shape[0], *errors.shape[2:])
    inside = (slice(before, before + size) for (before, _), size in zip(windows.pad, shape[1:], strict=True))
    return np.ascontiguousarray(padded[everywhere(inside)])


def to_weights(windows: Geometry, inputs: np.ndarray, errors: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the gradient of weights of `shape`, summed over samples."""
    padded = _padded(windows, inputs)
    grouped = _grouped(errors, windows.groups)
    gradient = np.zeros(shape, inputs.dtype)
    for place, seen in windows.taps(errors.shape[2:]):
        values = _grouped(padded[everywhere(seen)], windows.groups)
        part = np.einsum("ngmp,ngcp->gmc", grouped, values, optimize=True)
        gradient[everywhere(place)] = part.reshape(shape[:2])
    return gradient
