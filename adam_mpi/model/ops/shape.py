"""Operators that only move numbers: reshape, flatten, transpose, concat, slice, split, and zero padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine.kernel import strides_of
from adam_mpi.model.graph import Shape, Value, shape_text
from adam_mpi.model.ops.fields import axes as axes_field
from adam_mpi.model.ops.fields import hidden, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


@register("reshape")
@dataclass(frozen=True)
class Reshape(Operator):
    """See the numbers of a sample in another `shape`; one size may be -1, which stands for what is left."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    shape: Shape = axes_field()
    names: tuple[str, ...] = hidden(())
    """Names of the axes."""
    alias: ClassVar[bool] = True

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        known = math.prod(size for size in self.shape if size != -1)
        shape = tuple(value.size // max(known, 1) if size == -1 else size for size in self.shape)
        if math.prod(shape) != value.size or self.shape.count(-1) > 1:
            raise ValueError(f"cannot be seen as {shape_text(self.shape)}")
        axes = value.axes if shape == value.shape else ()
        return [Value("", shape, value.dtype, self.names or axes, value.batched)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Reshape(inputs[0].shape), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        shape = self.shape
        return [arrays[0].reshape(len(arrays[0]), *shape)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Reshape", [inputs[0], export.constant(np.array([0, *self.shape], np.int64))], outputs)


@register("flatten")
@dataclass(frozen=True)
class Flatten(Operator):
    """See the numbers of a sample as one axis."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    alias: ClassVar[bool] = True

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", (inputs[0].size,), inputs[0].dtype)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Reshape(inputs[0].shape), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0].reshape(len(arrays[0]), -1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Flatten", inputs, outputs, axis=1)


@register("transpose")
@dataclass(frozen=True)
class Transpose(Operator):
    """Put the axes of a sample in the `order` given."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    order: tuple[int, ...] = axes_field()

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if sorted(self.order) != list(range(len(value.shape))):
            raise ValueError(f"order {list(self.order)} is no order of {len(value.shape)} axes")
        shape = tuple(value.shape[axis] for axis in self.order)
        return [Value("", shape, value.dtype, tuple(value.axes[axis] for axis in self.order))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Transpose(tuple(np.argsort(self.order).tolist())), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [arrays[0].transpose(0, *(axis + 1 for axis in self.order))]

    def emit(self, kernel: Any) -> None:
        strides = strides_of(kernel.inputs[0].value.shape)
        shape = kernel.outputs[0].value.shape
        kernel.move(shape, [strides[axis] for axis in self.order], strides_of(shape))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Transpose", inputs, outputs, perm=[0, *(axis + 1 for axis in self.order)])


def axis_of(value: Value, axis: int) -> int:
    """Return `axis` of a sample counted from 0; raise ValueError if there is none."""
    rank = len(value.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist; there are {rank} axes")
    return axis % rank


@register("concat")
@dataclass(frozen=True)
class Concat(Operator):
    """Join values along an `axis`, which is 0 for channels; all other sizes are equal."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    data_inputs: ClassVar[None] = None
    axis: int = whole(default=0, minimum=-9)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        first = inputs[0]
        axis = axis_of(first, self.axis)
        others = {value.shape[:axis] + value.shape[axis + 1 :] for value in inputs}
        if len(others) > 1 or len({len(value.shape) for value in inputs}) > 1:
            raise ValueError(f"shapes do not meet outside axis {axis}")
        width = sum(value.shape[axis] for value in inputs)
        return [Value("", first.shape[:axis] + (width,) + first.shape[axis + 1 :], first.dtype, first.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        axis = axis_of(inputs[0], self.axis)
        start = 0
        found = []
        for value in inputs:
            found.append(tape.add(Slice(start, start + value.shape[axis], axis), errors[0]))
            start += value.shape[axis]
        return found

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [np.concatenate(arrays, axis=self.axis if self.axis < 0 else self.axis + 1)]

    def emit(self, kernel: Any) -> None:
        whole = strides_of(kernel.outputs[0].value.shape)
        axis = axis_of(kernel.outputs[0].value, self.axis)
        first = 0
        for number, operand in enumerate(kernel.inputs):
            shape = operand.value.shape
            kernel.move(shape, strides_of(shape), whole, number=number, to=first * whole[axis])
            first += shape[axis]

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        joined = inputs[0].axes[axis_of(inputs[0], self.axis)]
        return [None if axis == joined else span for _ in inputs]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Concat", inputs, outputs, axis=self.axis if self.axis < 0 else self.axis + 1)


@register("slice")
@dataclass(frozen=True)
class Slice(Operator):
    """Take what lies from `start` up to, but not including, `stop` along an `axis`."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    start: int = whole(minimum=0)
    stop: int = whole(minimum=1)
    axis: int = whole(default=0, minimum=-9)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        axis = axis_of(value, self.axis)
        if not self.start < self.stop <= value.shape[axis]:
            raise ValueError(f"{self.start} to {self.stop} does not lie within the {value.shape[axis]} of axis {axis}")
        shape = value.shape[:axis] + (self.stop - self.start,) + value.shape[axis + 1 :]
        return [Value("", shape, value.dtype, value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        axis = axis_of(inputs[0], self.axis)
        return [tape.add(PadZeros(self.start, inputs[0].shape[axis] - self.stop, axis), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        axis = self.axis % (arrays[0].ndim - 1) + 1
        return [arrays[0][(slice(None),) * axis + (slice(self.start, self.stop),)]]

    def emit(self, kernel: Any) -> None:
        whole = strides_of(kernel.inputs[0].value.shape)
        shape = kernel.outputs[0].value.shape
        axis = axis_of(kernel.inputs[0].value, self.axis)
        kernel.move(shape, whole, strides_of(shape), start=self.start * whole[axis])

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        cut = inputs[0].axes[axis_of(inputs[0], self.axis)]
        return [(span[0] + self.start, span[1] + self.start) if axis == cut else span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        axis = self.axis if self.axis < 0 else self.axis + 1
        limits = [export.constant(np.array([number], np.int64)) for number in (self.start, self.stop, axis)]
        export.node("Slice", [inputs[0], *limits], outputs)


@register("pad")
@dataclass(frozen=True)
class PadZeros(Operator):
    """Put zeros `before` and `after` what lies along an `axis`."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    before: int = whole(minimum=0)
    after: int = whole(minimum=0)
    axis: int = whole(default=0, minimum=-9)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        axis = axis_of(value, self.axis)
        width = self.before + value.shape[axis] + self.after
        return [Value("", value.shape[:axis] + (width,) + value.shape[axis + 1 :], value.dtype, value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        axis = axis_of(inputs[0], self.axis)
        return [tape.add(Slice(self.before, self.before + inputs[0].shape[axis], axis), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        widths = [(0, 0)] * arrays[0].ndim
        widths[self.axis % (arrays[0].ndim - 1) + 1] = (self.before, self.after)
        return [np.pad(arrays[0], widths)]

    def emit(self, kernel: Any) -> None:
        whole = strides_of(kernel.outputs[0].value.shape)
        shape = kernel.inputs[0].value.shape
        axis = axis_of(kernel.inputs[0].value, self.axis)
        kernel.clear()
        kernel.move(shape, strides_of(shape), whole, to=self.before * whole[axis])

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        padded = inputs[0].axes[axis_of(inputs[0], self.axis)]
        return [None if axis == padded else span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        rank = export.rank(inputs[0])
        axis = self.axis % rank
        before = [self.before if place == axis else 0 for place in range(rank)]
        after = [self.after if place == axis else 0 for place in range(rank)]
        export.node("Pad", [inputs[0], export.constant(np.array([0, *before, 0, *after], np.int64))], outputs)
