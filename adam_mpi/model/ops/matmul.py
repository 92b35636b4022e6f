"""Matrix products of values: both factors belong to the sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine import sample_product
from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.fields import flag
from adam_mpi.model.ops.operator import Operator, Run, Span, register


@register("matmul")
@dataclass(frozen=True)
class MatMul(Operator):
    """Multiply the matrices in the last two axes of two values; the axes before them are equal.

    `transpose_first` and `transpose_second` take a factor with its last two axes exchanged.
    """

    data_inputs: ClassVar[int] = 2
    transpose_first: bool = flag(False)
    transpose_second: bool = flag(False)

    def sizes(self, first: Value, second: Value) -> tuple[int, int, int]:
        """Return rows, columns and products per sum; raise ValueError for factors that do not meet."""
        if min(len(first.shape), len(second.shape)) < 2:
            raise ValueError("a matrix product takes at least two axes of each factor")
        rows, depth = first.shape[-2:][:: -1 if self.transpose_first else 1]
        other, columns = second.shape[-2:][:: -1 if self.transpose_second else 1]
        if first.shape[:-2] != second.shape[:-2] or depth != other:
            given = f"{shape_text(first.shape)} and {shape_text(second.shape)}"
            raise ValueError(f"{given} do not meet: {depth} columns and {other} rows after transposing")
        return rows, columns, depth

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        first, second = inputs
        rows, columns, _ = self.sizes(first, second)
        names = (first.axes[-1 if self.transpose_first else -2], second.axes[-2 if self.transpose_second else -1])
        return [Value("", (*first.shape[:-2], rows, columns), axes=(*first.axes[:-2], *names))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        first, second = inputs
        error = errors[0]
        if self.transpose_first:
            to_first = tape.add(MatMul(self.transpose_second, True), second, error)
        else:
            to_first = tape.add(MatMul(False, not self.transpose_second), error, second)
        if self.transpose_second:
            return [to_first, tape.add(MatMul(True, self.transpose_first), error, first)]
        return [to_first, tape.add(MatMul(not self.transpose_first, False), first, error)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        first, second = arrays
        first = first.swapaxes(-1, -2) if self.transpose_first else first
        return [first @ (second.swapaxes(-1, -2) if self.transpose_second else second)]

    def emit(self, kernel: Any) -> None:
        first, second = kernel.inputs
        rows, columns, depth = self.sizes(first.value, second.value)
        with kernel.loop("number", math.prod(first.value.shape[:-2])):
            left = sample_product.matrix(first, f"number * {rows * depth}", first.value.shape[-1])
            right = sample_product.matrix(second, f"number * {depth * columns}", second.value.shape[-1])
            sample_product.emit_product(
                kernel,
                shape=(rows, columns),
                depth=depth,
                first=left.transposed if self.transpose_first else left,
                second=right.transposed if self.transpose_second else right,
                result=sample_product.matrix(kernel.outputs[0], f"number * {rows * columns}", columns),
            )

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        made = self.outputs(inputs)[0].axes.index(axis) - len(inputs[0].shape)
        return [span if made != -1 else None, span if made != -2 else None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        names = []
        for name, transposed in zip(inputs, (self.transpose_first, self.transpose_second), strict=True):
            rank = len(export.value(name).shape)
            order = [*range(rank - 1), rank, rank - 1]
            names.append(export.node("Transpose", [name], perm=order) if transposed else name)
        export.node("MatMul", names, outputs)
