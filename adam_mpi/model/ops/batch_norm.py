"""Batch norm: statistics over fixed groups of samples, the same however samples are cut into passes and blocks.

In training each group of `images` neighboring samples has its own statistics, which every sample of the group is given
as numbers of its own: the rest is done sample by sample. A group's moments are joined from those of its blocks
(Welford's way for groups). Evaluation takes the running statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine.group_statistics import (
    GroupState,
    each_channel,
    each_group,
    each_place,
    emit_combined,
    emit_join,
)
from adam_mpi.model.engine.kernel import Kernel
from adam_mpi.model.graph import Parameter, Value
from adam_mpi.model.initialization import ONES, ZEROS
from adam_mpi.model.ops.fields import hidden, number, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register


@register("batch_norm")
@dataclass(frozen=True)
class BatchNorm(Operator):
    """Normalize each channel over groups of `images` samples and all places, then apply a weight and a bias.

    Further outputs, for each sample: mean and variance of its group, and what makes that variance unbiased.
    """

    images: int = whole(default=64)
    epsilon: float = number(0, default=1e-5)
    whole_batch: ClassVar[bool] = True

    def together(self) -> int:
        return self.images

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        if not inputs[0].shape:
            raise ValueError("there is no axis of channels")
        shape = inputs[0].shape[:1]
        return (
            Parameter("weight", shape, ONES, "bias"),
            Parameter("bias", shape, ZEROS, "bias"),
            Parameter("mean", shape, ZEROS, "statistic"),
            Parameter("variance", shape, ONES, "statistic"),
        )

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        statistic = Value("", value.shape[:1])
        return [Value("", value.shape, axes=value.axes), statistic, statistic, Value("", (1,))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        back = BatchNormBack(self.images, self.epsilon)
        made = tape.apply(back, [*inputs[:2], *outputs[1:3], errors[0]])
        return [*made[:3], *tape.apply(Observed(), outputs[1:])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array, weight, bias, mean, variance = arrays
        means = np.broadcast_to(mean, array.shape[:2]).copy()
        variances = np.broadcast_to(variance, array.shape[:2]).copy()
        corrections = np.ones((len(array), 1), array.dtype)
        for part in groups(len(array), self.images) if run.training else ():
            own = array[part].reshape(*array[part].shape[:2], -1)
            means[part] = own.mean(axis=(0, 2))
            variances[part] = own.var(axis=(0, 2))
            numbers = own.shape[0] * own.shape[2]
            corrections[part] = numbers / max(numbers - 1, 1)
        factors = weight / np.sqrt(variances + array.dtype.type(self.epsilon))
        made = (array - _wide(means, array)) * _wide(factors, array) + _wide(bias[None], array)
        return [made, means, variances, corrections]

    def emit(self, kernel: Any) -> None:
        with kernel.inside("if training:"):
            self._emit_statistics(kernel)
        with kernel.inside("else:"), kernel.each_block():
            with kernel.loop("channel", kernel.inputs[1].value.size):
                kernel(kernel.outputs[1].store("channel", kernel.inputs[3].load("channel")))
                kernel(kernel.outputs[2].store("channel", kernel.inputs[4].load("channel")))
            kernel(kernel.outputs[3].store(0, "splat(1.0)"))
        values = kernel.inputs[0]
        with kernel.each_block(), each_channel(kernel):
            kernel(f"mean = {kernel.outputs[1].load('channel')}")
            kernel(f"factor = {_factor(kernel.outputs[2].load('channel'), self.epsilon)}")
            kernel(f"factor = mul(factor, {kernel.inputs[1].load('channel')})")
            kernel(f"shift = {kernel.inputs[2].load('channel')}")
            with each_place(kernel):
                kernel(kernel.outputs[0].store("index", f"fma(sub({values.load('index')}, mean), factor, shift)"))

    def _emit_statistics(self, kernel: Kernel) -> None:
        """Emit the statistics of all groups, given to each of their samples."""
        channels = kernel.inputs[1].value.size
        state = GroupState(kernel, channels, 2)
        with each_group(kernel, self.images):
            state.emit_clear()
            with state.each_block_of_group():
                emit_join(kernel, state)
            with kernel.loop("channel", channels):
                emit_combined(kernel, state)
            with state.each_block_of_group():
                with kernel.loop("channel", channels):
                    for number in range(2):
                        state.emit_given(kernel.outputs[number + 1], "channel", state.load(number))
                plane = kernel.inputs[0].value.size // channels
                kernel(f"numbers = (stop - start) * {plane}")
                kernel("correction = splat(np.float32(numbers) / np.float32(max(numbers - 1, 1)))")
                state.emit_given(kernel.outputs[3], 0, "correction")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span if axis == inputs[0].axes[0] else None] * len(inputs)

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("BatchNormalization", inputs, outputs[:1], epsilon=float(self.epsilon))


@dataclass(frozen=True)
class BatchNormBack(Operator):
    """Return the errors of values, weights and biases; inputs: values, weights, means, variances, errors.

    Further outputs, for each sample: the means over its group of errors, and of their products with normal values.
    """

    images: int = hidden()
    epsilon: float = hidden()
    whole_batch: ClassVar[bool] = True
    data_inputs = 5

    def together(self) -> int:
        return self.images

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        parameter = Value("", value.shape[:1], batched=False)
        statistic = Value("", value.shape[:1])
        return [Value("", value.shape, axes=value.axes), parameter, parameter, statistic, statistic]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array, weight, means, variances, errors = arrays
        factors = 1 / np.sqrt(variances + array.dtype.type(self.epsilon))
        normal = (array - _wide(means, array)) * _wide(factors, array)
        products = errors * normal
        places = tuple(range(2, array.ndim))
        error_means = np.zeros_like(means)
        product_means = np.zeros_like(means)
        for part in groups(len(array), self.images):
            error_means[part] = errors[part].mean(axis=(0, *places))
            product_means[part] = products[part].mean(axis=(0, *places))
        back = errors - _wide(error_means, array) - normal * _wide(product_means, array)
        sums = [products.sum(axis=(0, *places)), errors.sum(axis=(0, *places))]
        return [back * _wide(factors * weight, array), *sums, error_means, product_means]

    def emit(self, kernel: Any) -> None:
        values, weight, _, _, errors = kernel.inputs
        self._emit_sums(kernel)
        with kernel.each_block(), each_channel(kernel):
            self._emit_own(kernel)
            kernel(f"gain = mul(factor, {weight.load('channel')})")
            kernel(f"common = mul(gain, {kernel.outputs[3].load('channel')})")
            kernel(f"along = mul(mul(gain, factor), {kernel.outputs[4].load('channel')})")
            with each_place(kernel):
                kernel(f"taken = fma(sub({values.load('index')}, mean), along, common)")
                kernel(kernel.outputs[0].store("index", f"sub(mul(gain, {errors.load('index')}), taken)"))

    def _emit_own(self, kernel: Kernel) -> None:
        """Emit mean and factor of a channel in the groups of the lanes' samples."""
        kernel(f"mean = {kernel.inputs[2].load('channel')}")
        kernel(f"factor = {_factor(kernel.inputs[3].load('channel'), self.epsilon)}")

    def _emit_sums(self, kernel: Kernel) -> None:
        """Emit the sums over each group, added to the gradients, and as means given to each of its samples."""
        channels = kernel.inputs[1].value.size
        state = GroupState(kernel, channels, 2)
        with each_group(kernel, self.images):
            state.emit_clear()
            with state.each_block_of_group(), each_channel(kernel):
                self._emit_sums_of_block(kernel, state)
            kernel(f"share = np.float32(1) / np.float32((stop - start) * {kernel.inputs[0].value.size // channels})")
            with kernel.loop("channel", channels):
                for number, output in ((0, kernel.outputs[2]), (1, kernel.outputs[1])):
                    kernel(f"whole_sum = total({state.load(number)})")
                    kernel(f"{output.scalar('channel')} += whole_sum")
                    kernel(state.store(number, "splat(whole_sum * share)"))
            with state.each_block_of_group(), kernel.loop("channel", channels):
                # Lanes without a sample get zeros: their errors stay zero.
                for number in range(2):
                    state.emit_given(kernel.outputs[number + 3], "channel", f"mul(chosen, {state.load(number)})")

    def _emit_sums_of_block(self, kernel: Kernel, state: GroupState) -> None:
        """Emit what the samples of a block add to the sums of a channel: errors, and products with normal values."""
        values, _, _, _, errors = kernel.inputs
        self._emit_own(kernel)
        kernel("error_sum = zero()")
        kernel("product_sum = zero()")
        with each_place(kernel):
            kernel(f"error = {errors.load('index')}")
            kernel("error_sum = add(error_sum, error)")
            kernel(f"product_sum = fma(error, sub({values.load('index')}, mean), product_sum)")
        kernel(state.store(0, f"fma(chosen, error_sum, {state.load(0)})"))
        kernel(state.store(1, f"fma(chosen, mul(product_sum, factor), {state.load(1)})"))


@dataclass(frozen=True)
class Observed(Operator):
    """Sum over samples the statistics of their groups.

    Inputs: means, variances, and what makes variances unbiased.
    """

    data_inputs = 3

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, batched=False)] * 2

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        means, variances, corrections = arrays
        return [means.sum(axis=0), (variances * corrections).sum(axis=0)]

    def emit(self, kernel: Any) -> None:
        means, variances, corrections = kernel.inputs
        mask = kernel.scratch("mask", kernel.lanes)
        with kernel.each_lane():
            kernel(f"memory[{mask} + lane] = 1 if first + lane < count else 0")
        kernel(f"chosen = load(memory, {mask})")
        kernel(f"correction = {corrections.load(0)}")
        with kernel.loop("channel", means.value.size):
            kernel(kernel.outputs[0].add("channel", f"mul(chosen, {means.load('channel')})"))
            kernel(f"variance = mul(correction, {variances.load('channel')})")
            kernel(kernel.outputs[1].add("channel", "mul(chosen, variance)"))


def groups(samples: int, images: int) -> list[slice]:
    """Return the groups of `images` samples, the last one perhaps smaller."""
    return [slice(start, min(start + images, samples)) for start in range(0, samples, images)]


def _wide(statistics: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return (samples, channels) in a shape that meets `array`."""
    return statistics.reshape(*statistics.shape, *(1,) * (array.ndim - 2))


def _factor(variance: str, epsilon: float) -> str:
    return f"div(splat(1.0), root(add({variance}, splat({epsilon!r}))))"
