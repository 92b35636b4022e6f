"""Sums and means over axes, sums over what was broadcast, and the way back from both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.graph import Shape, Value
from adam_mpi.model.ops.fields import axes as axes_field
from adam_mpi.model.ops.fields import flag, hidden
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.shape import Reshape


@dataclass(frozen=True)
class SumTo(Operator):
    """Sum over the axes that `shape` has not, or has as 1, and over samples if the result is not `batched`."""

    shape: Shape = hidden(())
    axes: tuple[str, ...] = hidden(())
    batched: bool = hidden(True)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self.shape, axes=self.axes, batched=self.batched)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        if not self.batched:
            self.missing("gradient rule for sums over samples")
        return [tape.add(Expand(inputs[0].shape, inputs[0].axes), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        lead = 1 if self.batched else 0
        missing = array.ndim - len(self.shape) - lead
        ones = [lead + missing + place for place, size in enumerate(self.shape) if size == 1]
        summed = array.sum(axis=(*range(lead, lead + missing), *ones))
        return [summed.reshape(array.shape[:lead] + self.shape)]

    def emit(self, kernel: Any) -> None:
        kernel.sum_to(self.shape, self.batched)


@dataclass(frozen=True)
class Expand(Operator):
    """Repeat along the axes where the input has size 1, up to `shape`, and multiply by `scale`."""

    shape: Shape = hidden(())
    axes: tuple[str, ...] = hidden(())
    scale: float = hidden(1.0)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        if np.broadcast_shapes(inputs[0].shape, self.shape) != self.shape:
            raise ValueError(f"cannot be expanded to {self.shape}")
        return [Value("", self.shape, axes=self.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        summed = tape.add(SumTo(inputs[0].shape, inputs[0].axes), errors[0])
        return [summed if self.scale == 1 else tape.add(Expand(summed.shape, summed.axes, self.scale), summed)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        lacking = len(self.shape) + 1 - array.ndim
        aligned = array.reshape(array.shape[:1] + (1,) * lacking + array.shape[1:])
        return [np.broadcast_to(aligned * array.dtype.type(self.scale), array.shape[:1] + self.shape)]

    def emit(self, kernel: Any) -> None:
        kernel.expand(self.scale)


@dataclass(frozen=True)
class Reduction(Operator):
    """Reduce over `axes`, counted from 0 without samples (negative: from the end; none: all); `keep` them as size 1."""

    axes: tuple[int, ...] = axes_field(())
    keep: bool = flag(False)

    def reduced(self, shape: Shape) -> tuple[int, ...]:
        """Return the axes of `shape` that disappear, in ascending order; raise ValueError for one that it lacks."""
        rank = len(shape)
        for axis in self.axes:
            if not -rank <= axis < rank:
                raise ValueError(f"axis {axis} does not exist; there are {rank} axes")
        return tuple(sorted({axis % rank for axis in self.axes})) or tuple(range(rank))

    def kept_shape(self, shape: Shape) -> Shape:
        """Return `shape` with the reduced axes as size 1."""
        gone = self.reduced(shape)
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if self.keep:
            return [Value("", self.kept_shape(value.shape), axes=value.axes)]
        left = [axis for axis in range(len(value.shape)) if axis not in self.reduced(value.shape)]
        return [Value("", tuple(value.shape[a] for a in left), axes=tuple(value.axes[a] for a in left))]

    def scale(self, shape: Shape) -> float:
        """Return what the sum over inputs of `shape` is multiplied by."""
        return 1.0

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value = inputs[0]
        error = errors[0] if self.keep else tape.add(Reshape(self.kept_shape(value.shape)), errors[0])
        return [tape.add(Expand(value.shape, value.axes, self.scale(value.shape)), error)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        gone = tuple(axis + 1 for axis in self.reduced(array.shape[1:]))
        summed = array.sum(axis=gone, keepdims=self.keep)
        return [summed * array.dtype.type(self.scale(array.shape[1:]))]

    def emit(self, kernel: Any) -> None:
        shape = kernel.inputs[0].value.shape
        kernel.sum_to(self.kept_shape(shape), True, self.scale(shape))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        value = inputs[0]
        there = axis in value.axes and value.axes.index(axis) not in self.reduced(value.shape)
        return [span if there else None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        gone = [axis + 1 for axis in self.reduced((1,) * export.rank(inputs[0]))]
        if self.kind == "sum":
            export.node("ReduceSum", [inputs[0], export.constant(np.array(gone))], outputs, keepdims=int(self.keep))
        else:
            export.node("ReduceMean", inputs, outputs, axes=gone, keepdims=int(self.keep))


@register("sum")
@dataclass(frozen=True)
class Sum(Reduction):
    """Sum over axes."""


@register("mean")
@dataclass(frozen=True)
class Mean(Reduction):
    """Average over axes."""

    def scale(self, shape: Shape) -> float:
        return 1 / math.prod(shape[axis] for axis in self.reduced(shape))
