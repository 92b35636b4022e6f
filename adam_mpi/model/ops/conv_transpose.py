"""Transposed convolution over one, two or three axes: what takes errors back through a convolution."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.engine import column_kernels, column_weights
from adam_mpi.model.graph import Parameter, Shape, Value, shape_text
from adam_mpi.model.initialization import ZEROS
from adam_mpi.model.ops.conv import Convolve, ConvWeights
from adam_mpi.model.ops.fields import flag, per_axis, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.windows import Geometry, geometry, to_data


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
        column_kernels.emit_data(kernel, self.geometry(kernel.inputs[0].value), self.bias)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        value = inputs[0]
        place = value.axes.index(axis) - 1
        if place < 0:
            return [None] * len(inputs)
        windows = self.geometry(value)
        stride = windows.stride[place]
        before = windows.pad[place][0]
        low = -(-(span[0] + before - windows.reach()[place] + 1) // stride)
        high = (span[1] - 1 + before) // stride + 1
        return [(max(low, 0), min(high, value.shape[place + 1])), *[None] * (len(inputs) - 1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        value = export.value(inputs[0])
        windows = self.geometry(value)
        export.node(
            "ConvTranspose",
            inputs,
            outputs,
            kernel_shape=list(windows.kernel),
            strides=list(windows.stride),
            pads=[edges[0] for edges in windows.pad] + [edges[1] for edges in windows.pad],
            dilations=list(windows.dilation),
            group=windows.groups,
            output_padding=list(per_axis(self.more, len(windows.kernel), "more")),
        )


@dataclass(frozen=True)
class ChannelSums(Operator):
    """Sum over samples and places: the gradient of a bias per channel."""

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape[:1], batched=False)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0].sum(axis=(0, *range(2, arrays[0].ndim)))]

    def emit(self, kernel: Any) -> None:
        column_weights.emit_channel_sums(kernel, kernel.inputs[0], kernel.outputs[0])
