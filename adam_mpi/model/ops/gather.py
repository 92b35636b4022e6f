"""Rows by number, and sums of rows by number: each is the way back of the other.

A graph network gathers the values of atoms at the ends of bonds, and sums what bonds carry into their atoms. Numbers
below zero stand for no row: they gather zeros, and are not summed, so that samples with fewer rows are filled up. A
number that is too large makes the result NaN, which diagnostics report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.fields import whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


def _check_types(inputs: Sequence[Value]) -> None:
    """Raise ValueError unless the inputs are values with at least one axis, and whole numbers."""
    value, index = inputs
    if value.dtype != "float" or index.dtype != "integer":
        raise ValueError(f"takes values and then integers, not {value.dtype} and {index.dtype}")
    if not value.shape:
        raise ValueError("there are no rows to take")


@register("gather")
@dataclass(frozen=True)
class Gather(Operator):
    """Take the rows of the first input, along its first axis, that the integers of the second input number."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    data_inputs: ClassVar[int | None] = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        _check_types(inputs)
        value, index = inputs
        return [Value("", (*index.shape, *value.shape[1:]))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value, index = inputs
        return [tape.add(SegmentSum(value.shape[0]), errors[0], index), None]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        values, index = arrays
        samples = np.arange(len(values)).reshape(-1, *(1,) * (index.ndim - 1))
        made = values[samples, np.clip(index, 0, values.shape[1] - 1)]
        made[index < 0] = 0
        made[index >= values.shape[1]] = np.nan
        return [made]

    def emit(self, kernel: Any) -> None:
        values, index = kernel.inputs
        rows, *rest = values.value.shape
        width = math.prod(rest)
        with kernel.loop("place", index.value.size), kernel.each_lane():
            kernel(f"row = int({index.scalar('place')})")
            kernel(f"at = min(max(row, 0), {rows - 1}) * {width}")
            with kernel.loop("i", width):
                kernel(f"value = {values.scalar('at + i')}")
                kernel("value = np.float32(0) if row < 0 else value")
                kernel(f"value = np.float32(np.nan) if row >= {rows} else value")
                kernel(f"{kernel.outputs[0].scalar(f'place * {width} + i')} = value")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        # An appended row of zeros is what -1 numbers.
        value = export.value(inputs[0])
        pads = np.array([0] * (len(value.shape) + 2) + [1] + [0] * (len(value.shape) - 1), np.int64)
        padded = export.node("Pad", [inputs[0], export.constant(pads)])
        rank = len(export.value(inputs[1]).shape)
        index = export.node("Unsqueeze", [inputs[1], export.constant(np.array([rank + 1], np.int64))])
        export.node("GatherND", [padded, index], outputs, batch_dims=1)


@register("segment_sum")
@dataclass(frozen=True)
class SegmentSum(Operator):
    """Sum the rows of the first input into as many `segments`, by the integers of the second input: one per row."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    data_inputs: ClassVar[int | None] = 2
    segments: int = whole()

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        _check_types(inputs)
        value, index = inputs
        rank = len(index.shape)
        if value.shape[:rank] != index.shape:
            raise ValueError(f"{shape_text(value.shape)} has no row for each of {shape_text(index.shape)} numbers")
        return [Value("", (self.segments, *value.shape[rank:]))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Gather(), errors[0], inputs[1]), None]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        values, index = arrays
        made = np.zeros((len(values), self.segments, *values.shape[index.ndim :]), values.dtype)
        wrong = index >= self.segments
        samples, *places = np.nonzero((index >= 0) & ~wrong)
        np.add.at(made, (samples, index[samples, *places]), values[samples, *places])
        made[wrong.reshape(len(index), -1).any(axis=1)] = np.nan
        return [made]

    def emit(self, kernel: Any) -> None:
        values, index = kernel.inputs
        result = kernel.outputs[0]
        width = values.value.size // index.value.size
        kernel.clear()
        with kernel.loop("place", index.value.size), kernel.each_lane():
            kernel(f"row = int({index.scalar('place')})")
            with kernel.inside(f"if 0 <= row < {self.segments}:"), kernel.loop("i", width):
                kernel(f"{result.scalar(f'row * {width} + i')} += {values.scalar(f'place * {width} + i')}")
            with kernel.inside(f"if row >= {self.segments}:"), kernel.loop("i", result.value.size):
                kernel(f"{result.scalar('i')} = np.nan")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        # One row per segment, with ones at its rows; a last segment, cut off again, has the rows that count nowhere.
        result = export.value(outputs[0])
        rows = export.value(inputs[1]).size
        width = result.size // self.segments
        index = _reshaped(export, inputs[1], (rows,))
        depth = export.constant(np.array(self.segments + 1, np.int64))
        values = export.constant(np.array([0, 1], np.float32))
        ones = export.node("OneHot", [index, depth, values], axis=1)
        summed = export.node("MatMul", [ones, _reshaped(export, inputs[0], (rows, width))])
        parts = [export.constant(np.array([number], np.int64)) for number in (0, self.segments, 1)]
        kept = export.node("Slice", [summed, *parts])
        export.node("Reshape", [kept, export.constant(np.array([0, *result.shape], np.int64))], outputs)


def _reshaped(export: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return the name of value `name` seen in a `shape` per sample."""
    return export.node("Reshape", [name, export.constant(np.array([0, *shape], np.int64))])
