"""Local response norm: each channel is divided by a power of its neighbors' squares at the same place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.model.graph import Value
from adam_mpi.model.ops.fields import hidden, number, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


@register("lrn")
@dataclass(frozen=True)
class LocalResponseNorm(Operator):
    """Divide by (offset + scale / size * sum of squares of `size` channels) ** power; the second output is that sum.

    The window of a channel begins size // 2 channels before it.
    """

    size: int = whole(default=5)
    offset: float = number(0, default=2.0)
    scale: float = number(0, default=1e-4)
    power: float = number(0, default=0.75)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if not value.shape:
            raise ValueError("there is no axis of channels")
        return [Value("", value.shape, axes=value.axes)] * 2

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(LocalResponseNormBack(self), inputs[0], outputs[0], outputs[1], errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        squares = _windows(array * array, self.size // 2, self.size)
        scales = (self.offset + self.scale / self.size * squares).astype(array.dtype)
        return [array * scales ** array.dtype.type(-self.power), scales]

    def emit(self, kernel: Any) -> None:
        values = kernel.inputs[0]
        plane = values.value.size // values.value.shape[0]
        with _each_place(kernel, self.size // 2, self.size):
            kernel("squares = zero()")
            with kernel.loop("other", "last", "low"):
                kernel(f"value = {values.load(f'other * {plane} + place')}")
                kernel("squares = fma(value, value, squares)")
            kernel(f"scale = fma(splat({self.scale / self.size!r}), squares, splat({float(self.offset)!r}))")
            kernel(kernel.outputs[1].store("at", "scale"))
            kernel(kernel.outputs[0].store("at", f"mul({values.load('at')}, {self.raised('scale')})"))

    def raised(self, scale: str) -> str:
        """Return the expression of a scale to the negative power."""
        return f"exponential(mul(splat({-float(self.power)!r}), logarithm({scale})))"

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None if axis == inputs[0].axes[0] else span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        if self.size % 2 == 0:
            raise UserError(f"{outputs[0]}: ONNX puts a window of {self.size} channels elsewhere; take an odd size")
        numbers = {"alpha": float(self.scale), "beta": float(self.power), "bias": float(self.offset)}
        export.node("LRN", inputs, outputs[:1], size=self.size, **numbers)


@dataclass(frozen=True)
class LocalResponseNormBack(Operator):
    """Return the errors of values; inputs: values, outputs and scales of the norm, and errors of the outputs."""

    norm: LocalResponseNorm = hidden()
    data_inputs = 4

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    @property
    def factor(self) -> float:
        """Return what a value's part in the scales of its neighbors is multiplied by."""
        return -2 * self.norm.scale / self.norm.size * self.norm.power

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array, outputs, scales, errors = arrays
        before = self.norm.size - 1 - self.norm.size // 2
        shared = _windows(errors * outputs / scales, before, self.norm.size)
        own = errors * scales ** array.dtype.type(-self.norm.power)
        return [own + array.dtype.type(self.factor) * array * shared]

    def emit(self, kernel: Any) -> None:
        values, outputs, scales, errors = kernel.inputs
        plane = values.value.size // values.value.shape[0]
        with _each_place(kernel, self.norm.size - 1 - self.norm.size // 2, self.norm.size):
            kernel("shared = zero()")
            with kernel.loop("other", "last", "low"):
                kernel(f"to = other * {plane} + place")
                part = f"mul({errors.load('to')}, {outputs.load('to')})"
                kernel(f"shared = add(shared, div({part}, {scales.load('to')}))")
            kernel(f"own = mul({errors.load('at')}, {self.norm.raised(scales.load('at'))})")
            taken = f"mul(splat({self.factor!r}), {values.load('at')})"
            kernel(kernel.outputs[0].store("at", f"fma({taken}, shared, own)"))


def _windows(array: np.ndarray, before: int, size: int) -> np.ndarray:
    """Return the sum over windows of `size` channels that begin `before` each channel."""
    channels = array.shape[1]
    sums = [array[:, max(0, c - before) : c - before + size].sum(axis=1) for c in range(channels)]
    return np.stack(sums, axis=1)


@contextmanager
def _each_place(kernel: Any, before: int, size: int) -> Iterator[None]:
    """Emit loops over channels and places; `low` and `last` limit the channel's window, `at` is the place's index."""
    value = kernel.inputs[0].value
    channels = value.shape[0]
    plane = value.size // channels
    with kernel.loop("channel", channels):
        kernel(f"low = max(0, channel - {before})")
        kernel(f"last = min({channels}, channel - {before} + {size})")
        with kernel.loop("place", plane):
            kernel(f"at = channel * {plane} + place")
            yield
