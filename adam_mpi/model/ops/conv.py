"""Convolution over one, two or three axes, and its gradients.

`ConvData` takes errors back to the inputs of a convolution; `ConvWeights` sums the gradient of the weights over samples
and positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adam_mpi.model.engine import column_kernels, column_weights, conv_lowering
from adam_mpi.model.engine.convolution import Shape as Shape2D
from adam_mpi.model.graph import Graph, Node, Parameter, Shape, Value
from adam_mpi.model.initialization import ZEROS
from adam_mpi.model.ops.fields import flag, hidden, whole
from adam_mpi.model.ops.masks import RELU, masked_by
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.pool import MaxPool, Unpool
from adam_mpi.model.ops.windows import Geometry, forward, geometry, to_data, to_weights


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
        column_kernels.emit_forward(kernel, self.geometry(kernel.inputs[0].value), self.bias)

    def lower(self, lowering: Any, node: Node) -> None:
        fused = fused_conv(lowering.graph, node)
        if fused is None:
            lowering.call_kernel(node)
            return
        conv, claimed = fused
        lowering.claimed |= claimed
        conv_lowering.add(lowering, conv)

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
        column_kernels.emit_data(kernel, self.windows)


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
        column_kernels.emit_forward(kernel, self.windows, bias=False)


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
        column_weights.emit_weights(kernel, self.windows, self.bias)


def fused_conv(graph: Graph, node: Node) -> tuple[conv_lowering.FusedConv, set[str]] | None:
    """Return the convolution `node` with what fuses with it, and the nodes that it computes besides.

    None for one that the fast kernels do not compute: they take square windows over images, in one group.
    """
    assert isinstance(node.op, Conv)
    inputs = graph.values[node.inputs[0]]
    shape = _square(node.op, inputs)
    size = math.prod(graph.values[node.inputs[1]].shape)
    offset = graph.offsets.get(node.inputs[1])
    if shape is None or offset is None or (node.op.bias and graph.offsets.get(node.inputs[2]) != offset + size):
        return None
    conv = conv_lowering.FusedConv(
        name=node.name, shape=shape, offset=offset, bias=node.op.bias, inputs=inputs, outputs=node.outputs[0]
    )
    conv, claimed = _with_outputs(graph, conv)
    return _with_backward(graph, conv, node, claimed)


def _square(op: Conv, inputs: Value) -> Shape2D | None:
    """Return the shape of a convolution with square windows over images, in one group; None of others."""
    windows = op.geometry(inputs)
    alike = [windows.kernel, windows.stride, windows.dilation, tuple(edge for edges in windows.pad for edge in edges)]
    if len(windows.kernel) != 2 or windows.groups > 1 or any(len(set(sizes)) > 1 for sizes in alike):
        return None
    if windows.dilation[0] > 1:
        return None
    channels, height, width = inputs.shape
    return Shape2D(
        channels=channels,
        height=height,
        width=width,
        maps=op.channels,
        kernel=windows.kernel[0],
        stride=windows.stride[0],
        pad=windows.pad[0][0],
    )


def _with_outputs(graph: Graph, conv: conv_lowering.FusedConv) -> tuple[conv_lowering.FusedConv, set[str]]:
    """Return `conv` with the relu and the pooling behind it, and their nodes."""
    claimed: set[str] = set()
    following = graph.only_consumer(conv.outputs.name)
    if following is not None and following.op == RELU:
        conv = replace(conv, outputs=following.outputs[0], relu=True)
        claimed.add(following.name)
        return conv, claimed
    if following is not None and isinstance(following.op, MaxPool):
        window = following.op.side_by_side(conv.outputs)
        back = [node for node in graph.consumers(following.outputs[1].name) if not isinstance(node.op, Unpool)]
        if window > 1 and not back:
            conv = replace(conv, outputs=following.outputs[0], relu=following.op.relu, window=window)
            claimed.add(following.name)
    return conv, claimed


def _with_backward(
    graph: Graph, conv: conv_lowering.FusedConv, node: Node, claimed: set[str]
) -> tuple[conv_lowering.FusedConv, set[str]] | None:
    """Return `conv` with its way back, and all nodes that it computes besides; None if its way back does not fit."""
    found = [graph.producers[value] for parameter, value in graph.gradients if parameter == node.inputs[1]]
    weights = next((n for n in found if isinstance(n.op, ConvWeights) and n.inputs[0] == node.inputs[0]), None)
    if weights is None:
        return None if found else (conv, claimed)
    summed = {value for _, value in graph.gradients}
    if len(found) > 1 or any(value.name not in summed for value in weights.outputs):
        return None
    errors = weights.inputs[1]
    data = next((n for n in graph.consumers(errors) if n.inputs == (errors, node.inputs[1])), None)
    claimed = {*claimed, weights.name, *([data.name] if data else [])}
    if conv.window > 1:
        unpool = graph.producers[errors]
        own = {weights.name, *([data.name] if data else [])}
        if not isinstance(unpool.op, Unpool) or {n.name for n in graph.consumers(errors)} != own:
            return None
        claimed.add(unpool.name)
        errors = unpool.inputs[0]
    conv = replace(conv, errors=graph.values[errors], backward_at=weights.name)
    if data is None:
        return conv, claimed
    mask = masked_by(graph, data.outputs[0].name, node.inputs[0])
    output = (mask or data).outputs[0]
    return replace(conv, input_errors=output, masked=mask is not None), {*claimed, *([mask.name] if mask else [])}
