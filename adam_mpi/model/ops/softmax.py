"""Softmax along an axis, and the way back."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.graph import Value
from adam_mpi.model.ops.fields import hidden, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    """Return the probabilities along `axis`."""
    shifted = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


@register("softmax")
@dataclass(frozen=True)
class Softmax(Operator):
    """Turn numbers along an `axis`, the last one by default, into probabilities."""

    axis: int = whole(default=-1, minimum=-9)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        rank = len(inputs[0].shape)
        if not -rank <= self.axis < rank:
            raise ValueError(f"axis {self.axis} does not exist; there are {rank} axes")
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(SoftmaxBack(self.axis % len(inputs[0].shape)), outputs[0], errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [softmax(arrays[0], self.axis % (arrays[0].ndim - 1) + 1)]

    def emit(self, kernel: Any) -> None:
        with _each_line(kernel, self.axis) as (classes, step):
            emit_softmax(kernel, kernel.inputs[0], kernel.outputs[0], classes, "begin", step)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None if axis == inputs[0].axes[self.axis] else span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Softmax", inputs, outputs, axis=self.axis if self.axis < 0 else self.axis + 1)


@dataclass(frozen=True)
class SoftmaxBack(Operator):
    """Take errors (second input) back through a softmax whose probabilities are the first input."""

    axis: int = hidden(-1)
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        probabilities, errors = arrays
        axis = self.axis % (errors.ndim - 1) + 1
        return [probabilities * (errors - (errors * probabilities).sum(axis=axis, keepdims=True))]

    def emit(self, kernel: Any) -> None:
        probabilities, errors = kernel.inputs
        with _each_line(kernel, self.axis) as (classes, step):
            kernel("shared = zero()")
            with kernel.loop("k", classes):
                kernel(f"at = begin + k * {step}")
                kernel(f"shared = fma({probabilities.load('at')}, {errors.load('at')}, shared)")
            with kernel.loop("k", classes):
                kernel(f"at = begin + k * {step}")
                value = f"mul({probabilities.load('at')}, sub({errors.load('at')}, shared))"
                kernel(kernel.outputs[0].store("at", value))


@contextmanager
def _each_line(kernel: Any, axis: int) -> Iterator[tuple[int, int]]:
    """Emit loops over the lines along `axis`, which begin at `begin`; yield their length, and the step along them."""
    shape = kernel.inputs[0].value.shape
    axis %= len(shape)
    step = math.prod(shape[axis + 1 :])
    with kernel.loop("outer", math.prod(shape[:axis])), kernel.loop("inner", step):
        kernel(f"begin = outer * {shape[axis] * step} + inner")
        yield shape[axis], step


def emit_softmax(kernel: Any, scores: Any, result: Any, classes: int, begin: str, step: int = 1) -> None:
    """Emit softmax over `classes` numbers that lie `step` apart from `begin` on; `best` and `sums` remain."""
    kernel(f"best = {scores.load(begin)}")
    kernel("sums = zero()")
    with kernel.loop("k", classes, 1):
        kernel(f"best = maximum({scores.load(f'{begin} + k * {step}')}, best)")
    with kernel.loop("k", classes):
        kernel(f"value = exponential(sub({scores.load(f'{begin} + k * {step}')}, best))")
        kernel(result.store(f"{begin} + k * {step}", "value"))
        kernel("sums = add(sums, value)")
    # Divided, not multiplied by the inverse: stacks as graphs have the bits of the engine for stacks.
    with kernel.loop("k", classes):
        kernel(result.store(f"{begin} + k * {step}", f"div({result.load(f'{begin} + k * {step}')}, sums)"))
