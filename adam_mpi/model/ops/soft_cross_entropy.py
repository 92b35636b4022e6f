"""Softmax cross-entropy with targets that are not one class: mixtures of two, and distributions over all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.expression import symbol
from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.cross_entropy import SoftmaxCrossEntropy
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.fields import number, numbers, optional_whole
from adam_mpi.model.ops.operator import Composite, Operator, Run, register
from adam_mpi.model.ops.softmax import emit_softmax, softmax


@register("mixed_cross_entropy")
@dataclass(frozen=True)
class MixedCrossEntropy(Composite):
    """Weigh the cross-entropy of scores with a class, and with a second one, as mixup and cutmix give them.

    Inputs: scores, classes, second classes, and the weight of the first ones, from 0 to 1, one number per sample.
    """

    data_inputs: ClassVar[int] = 4
    smoothing: float = number(0, default=0.0, below=1)
    weights: tuple[float, ...] = numbers()
    ignore: int | None = optional_whole()

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        scores, target, second, weight = inputs
        if weight.shape:
            raise ValueError(f"the weight of the first classes {weight} is not one number per sample")
        each = SoftmaxCrossEntropy(self.smoothing, self.weights, self.ignore)
        losses = [tape.apply(each, [scores, classes])[0] for classes in (target, second)]
        mixture = symbol(2) * symbol(0) + (1.0 - symbol(2)) * symbol(1)
        return [tape.add(Elementwise(mixture, "mixture"), *losses, weight)]


@register("soft_cross_entropy")
@dataclass(frozen=True)
class SoftCrossEntropy(Operator):
    """Compute the cross-entropy of softmax along the last axis with a distribution (second input) of equal shape.

    The loss of a sample is the mean over its places. The second output has the probabilities.
    """

    data_inputs: ClassVar[int] = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        scores, target = inputs
        if not scores.shape or scores.shape != target.shape:
            given = f"scores {shape_text(scores.shape)} and target {shape_text(target.shape)}"
            raise ValueError(f"{given} do not meet")
        return [Value("", ()), Value("", scores.shape, axes=scores.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(SoftCrossEntropyBack(), outputs[1], inputs[1], errors[0]), None]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        scores, target = arrays
        peak = scores.max(axis=-1, keepdims=True)
        normalizer = peak + np.log(np.exp(scores - peak).sum(axis=-1, keepdims=True))
        losses = (target * (normalizer - scores)).sum(axis=-1).reshape(len(scores), -1).mean(axis=1)
        return [losses, softmax(scores, -1)]

    def emit(self, kernel: Any) -> None:
        scores, target = kernel.inputs
        classes = scores.value.shape[-1]
        places = scores.value.size // classes
        kernel("loss = zero()")
        with kernel.loop("place", places):
            emit_softmax(kernel, scores, kernel.outputs[1], classes, f"place * {classes}")
            kernel("normalizer = add(best, logarithm(sums))")
            with kernel.loop("k", classes):
                kernel(f"at = place * {classes} + k")
                kernel(f"loss = fma({target.load('at')}, sub(normalizer, {scores.load('at')}), loss)")
        kernel(kernel.outputs[0].store(0, f"mul(loss, splat({1 / places!r}))"))


@dataclass(frozen=True)
class SoftCrossEntropyBack(Operator):
    """Return the errors of scores, from probabilities, the wanted distribution, and the errors of losses."""

    data_inputs: ClassVar[int] = 3

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        probabilities, target, seeds = arrays
        places = int(np.prod(target.shape[1:-1]))
        error = probabilities * target.sum(axis=-1, keepdims=True) - target
        return [error * (seeds / places).reshape(-1, *(1,) * (target.ndim - 1))]

    def emit(self, kernel: Any) -> None:
        probabilities, target, seeds = kernel.inputs
        classes = target.value.shape[-1]
        places = target.value.size // classes
        kernel(f"seed = mul({seeds.load(0)}, splat({1 / places!r}))")
        with kernel.loop("place", places):
            kernel("mass = zero()")
            with kernel.loop("k", classes):
                kernel(f"mass = add(mass, {target.load(f'place * {classes} + k')})")
            with kernel.loop("k", classes):
                kernel(f"at = place * {classes} + k")
                off = f"sub(mul({probabilities.load('at')}, mass), {target.load('at')})"
                kernel(kernel.outputs[0].store("at", f"mul({off}, seed)"))
