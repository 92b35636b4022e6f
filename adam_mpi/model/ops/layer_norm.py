"""Layer norm and group norm: runs of a sample's own numbers get mean 0 and deviation 1, in two passes over each run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.engine.group_statistics import emit_moments
from adam_mpi.model.engine.kernel import Kernel
from adam_mpi.model.graph import Parameter, Shape, Value
from adam_mpi.model.initialization import ONES, ZEROS
from adam_mpi.model.ops.fields import hidden, number, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


@dataclass(frozen=True)
class Runs:
    """Say how a sample is cut: `count` runs of `channels` with `places` numbers each.

    Each channel has a factor and a bias; runs have the same ones if `shared`.
    """

    count: int
    channels: int
    places: int
    shared: bool

    @property
    def size(self) -> int:
        """Return how many numbers a run has."""
        return self.channels * self.places

    @property
    def factors(self) -> int:
        """Return how many factors there are."""
        return self.channels if self.shared else self.count * self.channels

    @property
    def factor(self) -> str:
        """Return the expression of the index of the factor of `channel` in `run`."""
        return "channel" if self.shared else f"run * {self.channels} + channel"

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Return values as (samples, runs, channels, places)."""
        return array.reshape(len(array), self.count, self.channels, self.places)

    def spread(self, factors: np.ndarray) -> np.ndarray:
        """Return factors in a shape that meets the one of `cut`."""
        return factors.reshape(1, 1 if self.shared else self.count, self.channels, 1)


@dataclass(frozen=True)
class NormOfRuns(Operator):
    """Normalize runs of numbers; further outputs are the mean of each run, and what differences are multiplied by."""

    epsilon: float = number(0, default=1e-5)

    def runs(self, shape: Shape) -> Runs:
        """Return how values of `shape` are cut; raise ValueError if they cannot be."""
        self.missing("runs")

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        count = self.runs(inputs[0].shape).factors
        return (Parameter("weight", (count,), ONES, "bias"), Parameter("bias", (count,), ZEROS, "bias"))

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        of_runs = Value("", (self.runs(value.shape).count,))
        return [Value("", value.shape, axes=value.axes), of_runs, of_runs]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value, weight, _ = inputs
        back = NormOfRunsBack(self.runs(value.shape))
        return tape.apply(back, [value, weight, outputs[1], outputs[2], errors[0]])

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array, weight, bias = arrays
        runs = self.runs(array.shape[1:])
        given = runs.cut(array)
        mean = given.mean(axis=(2, 3), keepdims=True)
        factor = 1 / np.sqrt(given.var(axis=(2, 3), keepdims=True) + array.dtype.type(self.epsilon))
        made = (given - mean) * factor * runs.spread(weight) + runs.spread(bias)
        return [made.reshape(array.shape), mean[:, :, 0, 0], factor[:, :, 0, 0]]

    def emit(self, kernel: Any) -> None:
        values, weight, bias = kernel.inputs
        runs = self.runs(values.value.shape)
        with kernel.loop("run", runs.count):
            kernel(f"begin = run * {runs.size}")
            emit_moments(kernel, values, "begin", runs.size)
            kernel(f"factor = div(splat(1.0), root(add(variance, splat({self.epsilon!r}))))")
            kernel(kernel.outputs[1].store("run", "mean"))
            kernel(kernel.outputs[2].store("run", "factor"))
            with kernel.loop("channel", runs.channels):
                kernel(f"own = mul(factor, {weight.load(runs.factor)})")
                kernel(f"shift = {bias.load(runs.factor)}")
                with kernel.loop("place", runs.places):
                    kernel(f"index = begin + channel * {runs.places} + place")
                    kernel(kernel.outputs[0].store("index", f"fma(sub({values.load('index')}, mean), own, shift)"))


@register("layer_norm")
@dataclass(frozen=True)
class LayerNorm(NormOfRuns):
    """Normalize along the last axis to mean 0 and deviation 1, then multiply by a weight and add a bias per number."""

    def runs(self, shape: Shape) -> Runs:
        if not shape:
            raise ValueError("layer norm takes at least one axis")
        return Runs(int(np.prod(shape[:-1])), shape[-1], 1, True)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None if axis == inputs[0].axes[-1] else span, None, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        # Made of parts: LayerNormalization came to ONNX later than the set of operators that is exported.
        off = export.node("Sub", [inputs[0], export.node("ReduceMean", [inputs[0]], axes=[-1], keepdims=1)])
        variance = export.node("ReduceMean", [export.node("Mul", [off, off])], axes=[-1], keepdims=1)
        epsilon = export.constant(np.array(self.epsilon, np.float32))
        deviation = export.node("Sqrt", [export.node("Add", [variance, epsilon])])
        weighed = export.node("Mul", [export.node("Div", [off, deviation]), inputs[1]])
        export.node("Add", [weighed, inputs[2]], outputs[:1])


@register("group_norm")
@dataclass(frozen=True)
class GroupNorm(NormOfRuns):
    """Normalize each of `groups` groups of neighboring channels, then apply a weight and a bias per channel."""

    groups: int = whole(default=8)

    def runs(self, shape: Shape) -> Runs:
        if not shape or shape[0] % self.groups:
            raise ValueError(f"{shape[0] if shape else 0} channels do not divide into {self.groups} groups")
        return Runs(self.groups, shape[0] // self.groups, int(np.prod(shape[1:])), False)

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None, None, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        shape = export.value(inputs[0]).shape
        runs = export.node("Reshape", [inputs[0], export.constant(np.array([0, self.groups, -1], np.int64))])
        ones = export.constant(np.ones(self.groups, np.float32))
        zeros = export.constant(np.zeros(self.groups, np.float32))
        normal = export.node("InstanceNormalization", [runs, ones, zeros], epsilon=float(self.epsilon))
        whole_again = export.node("Reshape", [normal, export.constant(np.array([0, *shape], np.int64))])
        per_channel = export.constant(np.array([shape[0], *[1] * (len(shape) - 1)], np.int64))
        weight, bias = (export.node("Reshape", [name, per_channel]) for name in inputs[1:])
        export.node("Add", [export.node("Mul", [whole_again, weight]), bias], outputs[:1])


@dataclass(frozen=True)
class NormOfRunsBack(Operator):
    """Return the errors of values, weights and biases; inputs: values, weights, means, factors, errors."""

    runs: Runs = hidden()
    data_inputs = 5

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        parameter = Value("", (self.runs.factors,), batched=False)
        return [Value("", inputs[0].shape, axes=inputs[0].axes), parameter, parameter]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        runs = self.runs
        array, weight, means, factors, errors = arrays
        normal = (runs.cut(array) - means[:, :, None, None]) * factors[:, :, None, None]
        error = runs.cut(errors)
        products = (error * normal).sum(axis=(0, 3))
        sums = error.sum(axis=(0, 3))
        if runs.shared:
            products = products.sum(axis=0)
            sums = sums.sum(axis=0)
        weighed = error * runs.spread(weight)
        along = (weighed * normal).mean(axis=(2, 3), keepdims=True)
        back = (weighed - weighed.mean(axis=(2, 3), keepdims=True) - normal * along) * factors[:, :, None, None]
        return [back.reshape(array.shape), products.reshape(-1), sums.reshape(-1)]

    def emit(self, kernel: Any) -> None:
        lanes = kernel.lanes
        count = self.runs.factors
        sums = kernel.scratch("sums", 2 * count * lanes)
        with kernel.loop("i", 2 * count):
            kernel(f"store(memory, {sums} + i * {lanes}, zero())")
        with kernel.loop("run", self.runs.count):
            kernel(f"begin = run * {self.runs.size}")
            kernel(f"mean = {kernel.inputs[2].load('run')}")
            kernel(f"factor = {kernel.inputs[3].load('run')}")
            self._emit_sums(kernel, sums)
            self._emit_errors(kernel)
        with kernel.loop("i", count):
            kernel(kernel.outputs[1].add("i", f"load(memory, {sums} + i * {lanes})"))
            kernel(kernel.outputs[2].add("i", f"load(memory, {sums} + (i + {count}) * {lanes})"))

    def _emit_sums(self, kernel: Kernel, sums: str) -> None:
        """Emit the sums of errors, and of their products with normalized values: per channel, and of the run."""
        values, weight, _, _, errors = kernel.inputs
        runs = self.runs
        kernel("all_errors = zero()")
        kernel("all_products = zero()")
        with kernel.loop("channel", runs.channels):
            kernel("error_sum = zero()")
            kernel("product_sum = zero()")
            with kernel.loop("place", runs.places):
                kernel(f"index = begin + channel * {runs.places} + place")
                kernel(f"error = {errors.load('index')}")
                kernel("error_sum = add(error_sum, error)")
                kernel(f"product_sum = fma(error, sub({values.load('index')}, mean), product_sum)")
            kernel("product_sum = mul(product_sum, factor)")
            kernel(f"at = {sums} + ({runs.factor}) * {kernel.lanes}")
            kernel("store(memory, at, add(load(memory, at), product_sum))")
            kernel(f"at = at + {runs.factors * kernel.lanes}")
            kernel("store(memory, at, add(load(memory, at), error_sum))")
            kernel(f"own = {weight.load(runs.factor)}")
            kernel("all_errors = fma(own, error_sum, all_errors)")
            kernel("all_products = fma(own, product_sum, all_products)")

    def _emit_errors(self, kernel: Kernel) -> None:
        """Emit the errors of a run's values from the sums over the run."""
        values, weight, _, _, errors = kernel.inputs
        runs = self.runs
        kernel(f"all_errors = mul(mul(all_errors, factor), splat({1 / runs.size!r}))")
        kernel(f"all_products = mul(mul(all_products, mul(factor, factor)), splat({1 / runs.size!r}))")
        with kernel.loop("channel", runs.channels):
            kernel(f"own = mul(factor, {weight.load(runs.factor)})")
            with kernel.loop("place", runs.places):
                kernel(f"index = begin + channel * {runs.places} + place")
                kernel(f"common = fma(sub({values.load('index')}, mean), all_products, all_errors)")
                kernel(kernel.outputs[0].store("index", f"sub(mul(own, {errors.load('index')}), common)"))
