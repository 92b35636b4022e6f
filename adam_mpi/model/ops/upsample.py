"""Nearest and linear upsampling by whole factors over one to three axes, and the ways back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine.kernel import strides_of
from adam_mpi.model.graph import Shape, Value
from adam_mpi.model.ops.fields import choice, hidden, per_axis, whole
from adam_mpi.model.ops.operator import Composite, Operator, Run, Span, register


@register("upsample")
@dataclass(frozen=True)
class Upsample(Composite):
    """Make places `factor` times as many along each axis, by repetition or by (bi)linear interpolation.

    Places are taken as areas: the middle of the first input lies in the middle of the places that it becomes.
    """

    factor: int | Shape = whole(default=2, several=True)
    mode: str = choice("nearest", "bilinear", default="nearest")

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        rank = len(value.shape) - 1
        if not 1 <= rank <= 3:
            raise ValueError("upsampling takes a channel axis and one to three spatial ones")
        factors = per_axis(self.factor, rank, "factor")
        if self.mode == "nearest" or max(factors) == 1:
            return [tape.add(Repeat(factors), value)]
        for axis, factor in enumerate(factors, 1):
            if factor > 1:
                value = tape.add(Interpolate(factor, axis), value)
        return [value]


@dataclass(frozen=True)
class Repeat(Operator):
    """Repeat each place `factors` times along each axis behind that of channels."""

    factors: Shape = hidden(())

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        sizes = (size * factor for size, factor in zip(value.shape[1:], self.factors, strict=True))
        return [Value("", (value.shape[0], *sizes), axes=value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(SumBlocks(self.factors), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        made = arrays[0]
        for axis, factor in enumerate(self.factors, 2):
            made = np.repeat(made, factor, axis=axis)
        return [made]

    def emit(self, kernel: Any) -> None:
        source = kernel.inputs[0].value.shape
        steps = strides_of(kernel.outputs[0].value.shape)
        with kernel.nest(source, [strides_of(source), _stretched(steps, self.factors)]) as (small, large):
            kernel(f"value = {kernel.inputs[0].load(small)}")
            for shift in _shifts(steps, self.factors):
                kernel(kernel.outputs[0].store(f"{large} + {shift}", "value"))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        place = inputs[0].axes.index(axis) - 1
        factor = 1 if place < 0 else self.factors[place]
        return [(span[0] // factor, -(-span[1] // factor))]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        scales = export.constant(np.array([1, 1, *self.factors], np.float32))
        modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        export.node("Resize", [inputs[0], "", scales], outputs, **modes)


@dataclass(frozen=True)
class SumBlocks(Operator):
    """Sum blocks of `factors` places: the way back of repeating them."""

    factors: Shape = hidden(())

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        sizes = (size // factor for size, factor in zip(value.shape[1:], self.factors, strict=True))
        return [Value("", (value.shape[0], *sizes), axes=value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Repeat(self.factors), errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        made = arrays[0]
        shape = [
            part for size, factor in zip(made.shape[2:], self.factors, strict=True) for part in (size // factor, factor)
        ]
        blocks = made.reshape(*made.shape[:2], *shape)
        return [blocks.sum(axis=tuple(range(3, blocks.ndim, 2)))]

    def emit(self, kernel: Any) -> None:
        target = kernel.outputs[0].value.shape
        steps = strides_of(kernel.inputs[0].value.shape)
        with kernel.nest(target, [_stretched(steps, self.factors), strides_of(target)]) as (large, small):
            kernel("value = zero()")
            for shift in _shifts(steps, self.factors):
                kernel(f"value = add(value, {kernel.inputs[0].load(f'{large} + {shift}')})")
            kernel(kernel.outputs[0].store(small, "value"))


def _stretched(steps: Sequence[int], factors: Shape) -> list[int]:
    """Return how far apart neighboring blocks lie along each axis."""
    return [steps[0], *(step * factor for step, factor in zip(steps[1:], factors, strict=True))]


def _shifts(steps: Sequence[int], factors: Shape) -> list[int]:
    """Return how far each place of a block lies behind the first one."""
    blocks = product(*(range(factor) for factor in factors))
    return [sum(place * step for place, step in zip(places, steps[1:], strict=True)) for places in blocks]


@dataclass(frozen=True)
class Interpolate(Operator):
    """Interpolate linearly along one `axis`, `factor` places for each; `back`: take errors the other way."""

    factor: int = hidden(2)
    axis: int = hidden(1)
    back: bool = hidden(False)
    data_inputs: ClassVar[int | None] = 1

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        size = value.shape[self.axis]
        made = size // self.factor if self.back else size * self.factor
        return [Value("", (*value.shape[: self.axis], made, *value.shape[self.axis + 1 :]), axes=value.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(Interpolate(self.factor, self.axis, not self.back), errors[0])]

    def points(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each place that is made of `size`, its two neighbors and the share of the second one."""
        middle = np.maximum((np.arange(size * self.factor) + 0.5) / self.factor - 0.5, 0)
        low = np.floor(middle).astype(int)
        return low, np.minimum(low + 1, size - 1), middle - low

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = np.moveaxis(arrays[0], self.axis + 1, -1)
        size = array.shape[-1] // (self.factor if self.back else 1)
        low, high, share = self.points(size)
        matrix = np.zeros((size, size * self.factor), array.dtype)
        np.add.at(matrix, (low, np.arange(len(low))), 1 - share)
        np.add.at(matrix, (high, np.arange(len(low))), share)
        return [np.moveaxis(array @ (matrix.T if self.back else matrix), -1, self.axis + 1)]

    def emit(self, kernel: Any) -> None:
        source, target = kernel.inputs[0], kernel.outputs[0]
        small, large = (target, source) if self.back else (source, target)
        shape = small.value.shape
        low, high, share = (kernel.constants(numbers) for numbers in self.points(shape[self.axis]))
        inner = math.prod(shape[self.axis + 1 :])
        if self.back:
            kernel.clear()
        with kernel.loop("outer", math.prod(shape[: self.axis])), kernel.loop("place", shape[self.axis] * self.factor):
            kernel(f"below = (outer * {shape[self.axis]} + int({low}[place])) * {inner}")
            kernel(f"above = (outer * {shape[self.axis]} + int({high}[place])) * {inner}")
            kernel(f"share = splat({share}[place])")
            kernel(f"at = (outer * {shape[self.axis] * self.factor} + place) * {inner}")
            with kernel.loop("i", inner):
                self._emit_place(kernel, source, target)

    def _emit_place(self, kernel: Any, source: Any, target: Any) -> None:
        """Emit what one place takes from its neighbors, or gives back to them."""
        if self.back:
            kernel(f"error = {source.load('at + i')}")
            kernel("upper = mul(share, error)")
            kernel(target.add("below + i", "sub(error, upper)"))
            kernel(target.add("above + i", "upper"))
        else:
            kernel(f"value = {source.load('below + i')}")
            kernel(f"value = fma(share, sub({source.load('above + i')}, value), value)")
            kernel(target.store("at + i", "value"))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        if inputs[0].axes.index(axis) != self.axis:
            return [span]
        low, high, _ = self.points(inputs[0].shape[self.axis])
        return [(int(low[span[0]]), int(high[span[1] - 1]) + 1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        scales = np.ones(export.rank(inputs[0]) + 1, np.float32)
        scales[self.axis + 1] = self.factor
        modes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
        export.node("Resize", [inputs[0], "", export.constant(scales)], outputs, **modes)
