"""Dense layers on the last axis, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.engine import dense_lowering, window_kernels
from adam_mpi.model.graph import Graph, Node, Parameter, Shape, Value
from adam_mpi.model.initialization import ZEROS
from adam_mpi.model.ops.fields import flag, hidden, whole
from adam_mpi.model.ops.masks import RELU, only_mask
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.shape import Flatten


@register("dense")
@dataclass(frozen=True)
class Dense(Operator):
    """Multiply the last axis by a matrix with `units` rows and add a bias.

    Front ends flatten values that have channels and places before it.
    """

    units: int = whole()
    bias: bool = flag(True)

    def adapted(self, tape: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        flat = value.axes[:1] != ("channel",) or len(value.shape) == 1
        return inputs if flat else [tape.add(Flatten(), value)]

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        if not inputs[0].shape:
            raise ValueError("a dense layer takes at least one axis")
        bias = (Parameter("bias", (self.units,), ZEROS, "bias"),) if self.bias else ()
        return (Parameter("weight", (self.units, inputs[0].shape[-1])), *bias)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        return [Value("", (*value.shape[:-1], self.units), axes=value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value, weight = inputs[:2]
        to_weights = tape.apply(DenseWeights(weight.shape, self.bias), [value, errors[0]])
        return [tape.add(DenseData(value.axes), errors[0], weight), *to_weights]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        made = arrays[0] @ arrays[1].T
        return [made + arrays[2]] if self.bias else [made]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_dense(kernel, self.bias)

    def lower(self, lowering: Any, node: Node) -> None:
        graph = lowering.graph
        offset = parameters_at(graph, node.inputs[1:])
        if offset is None or len(node.outputs[0].shape) != 1:
            lowering.call_kernel(node)
            return
        following = graph.only_consumer(node.outputs[0].name)
        relu = following if following is not None and following.op == RELU else None
        if relu is not None:
            lowering.claimed.add(relu.name)
        values = (graph.values[node.inputs[0]], (relu or node).outputs[0])
        dense_lowering.add_forward(lowering, node.name, offset, values, bias=self.bias, relu=relu is not None)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        last = axis == inputs[0].axes[-1]
        return [None if last else span, *[span if last else None] * (len(inputs) - 1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        if len(export.value(inputs[0]).shape) == 1:
            export.node("Gemm", inputs, outputs, transB=1)
            return
        transposed = export.node("Transpose", [inputs[1]], perm=[1, 0])
        product = export.node("MatMul", [inputs[0], transposed], None if self.bias else outputs)
        if self.bias:
            export.node("Add", [product, inputs[2]], outputs)


@dataclass(frozen=True)
class DenseData(Operator):
    """Take errors (first input) back to the inputs of a dense layer with weights (second input)."""

    axes: tuple[str, ...] = hidden(())
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        errors, weight = inputs
        return [Value("", (*errors.shape[:-1], weight.shape[1]), axes=self.axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0] @ arrays[1]]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_dense_data(kernel)

    def lower(self, lowering: Any, node: Node) -> None:
        graph = lowering.graph
        offset = graph.offsets.get(node.inputs[1])
        errors = graph.values[node.inputs[0]]
        if offset is None or len(errors.shape) != 1:
            lowering.call_kernel(node)
            return
        mask = only_mask(graph, node.outputs[0].name)
        if mask is not None:
            lowering.claimed.add(mask[0].name)
        output = (mask[0] if mask else node).outputs[0]
        values = (errors, output)
        training = lowering.training_only(node)
        dense_lowering.add_data(lowering, node.name, offset, values, mask=mask and mask[1], training=training)


@dataclass(frozen=True)
class DenseWeights(Operator):
    """Sum the gradient of weights, and of biases, over samples; inputs are those of the layer and its errors."""

    weight: Shape = hidden()
    bias: bool = hidden(True)
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        bias = [Value("", self.weight[:1], batched=False)] if self.bias else []
        return [Value("", self.weight, batched=False), *bias]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        value, error = (array.reshape(-1, array.shape[-1]) for array in arrays)
        return [error.T @ value, error.sum(axis=0)] if self.bias else [error.T @ value]

    def emit(self, kernel: Any) -> None:
        window_kernels.emit_dense_weights(kernel, self.bias)

    def lower(self, lowering: Any, node: Node) -> None:
        graph = lowering.graph
        found = {value: parameter for parameter, value in graph.gradients}
        offset = parameters_at(graph, [found.get(value.name, "") for value in node.outputs])
        values = (graph.values[node.inputs[0]], graph.values[node.inputs[1]])
        places = [lowering.places.get(value.name) for value in node.outputs]
        if offset is None or len(values[1].shape) != 1 or not all(isinstance(place, str) for place in places):
            lowering.call_kernel(node)
            return
        dense_lowering.add_weights(lowering, node.name, offset, values, self.bias)


def parameters_at(graph: Graph, names: Sequence[str]) -> int | None:
    """Return where the parameters `names` begin in the flat vector, if they follow each other there."""
    start = graph.offsets.get(names[0])
    place = start
    for name in names:
        if place is None or graph.offsets.get(name) != place:
            return None
        place += graph.values[name].size
    return start
