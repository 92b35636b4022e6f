"""Softmax, and softmax cross-entropy with label smoothing, class weights and a label that is ignored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.graph import Shape, Value, shape_text
from adam_mpi.model.ops.fields import hidden, number
from adam_mpi.model.ops.operator import Operator, Run, register


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    """Return the probabilities along `axis`."""
    shifted = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


@register("softmax")
@dataclass(frozen=True)
class Softmax(Operator):
    """Turn numbers along the last axis into probabilities."""

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(SoftmaxBack(), outputs[0], errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [softmax(arrays[0], -1)]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Softmax", inputs, outputs, axis=-1)


@dataclass(frozen=True)
class SoftmaxBack(Operator):
    """Take errors (second input) back through a softmax whose probabilities are the first input."""

    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        probabilities, errors = arrays
        return [probabilities * (errors - (errors * probabilities).sum(axis=-1, keepdims=True))]


@dataclass(frozen=True)
class Targets:
    """Describe how classes are told apart: the axis of classes (without samples), and what weighs them."""

    axis: int
    smoothing: float
    weights: tuple[float, ...]
    ignore: int | None

    def wanted(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the probability that each class should have, times the weight of the place, in the shape of logits."""
        classes = logits.shape[self.axis + 1]
        kept = np.ones(labels.shape, bool) if self.ignore is None else labels != self.ignore
        known = np.where(kept, labels, 0)
        places = math.prod(labels.shape[1:])
        weights = np.array(self.weights or [1.0] * classes, logits.dtype)
        share = np.full((classes, classes), self.smoothing / classes, logits.dtype)
        share[np.arange(classes), np.arange(classes)] += 1 - self.smoothing
        each = share * weights[None]
        return np.moveaxis(each[known] * kept[..., None] / places, -1, self.axis + 1).astype(logits.dtype)


@register("softmax_cross_entropy")
@dataclass(frozen=True)
class SoftmaxCrossEntropy(Operator):
    """Compute the cross-entropy of softmax of the first input with the classes that are the second one.

    Classes lie along the last axis of the first input, or along the first one; the target has its other axes. The loss
    of a sample is the mean over its places; places with the label `ignore` count as zero. The second output has the
    probabilities.
    """

    data_inputs = 2
    smoothing: float = number(0, default=0.0, below=1)
    weights: tuple[float, ...] = hidden(())
    ignore: int | None = hidden(None)

    def targets(self, logits: Shape, labels: Shape) -> Targets:
        """Return how classes lie in values of these shapes per sample; raise ValueError if they do not meet."""
        for axis in (len(logits) - 1, 0):
            if logits and labels == logits[:axis] + logits[axis + 1 :]:
                if self.weights and len(self.weights) != logits[axis]:
                    raise ValueError(f"{len(self.weights)} class weights are given for {logits[axis]} classes")
                return Targets(axis, self.smoothing, self.weights, self.ignore)
        raise ValueError(f"scores {shape_text(logits)} and target {shape_text(labels)} do not meet")

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        scores, target = inputs
        if target.dtype != "integer":
            raise ValueError(f"the target is of type {target.dtype}; classes are integers")
        self.targets(scores.shape, target.shape)
        return [Value("", ()), Value("", scores.shape, axes=scores.axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        targets = self.targets(inputs[0].shape, inputs[1].shape)
        return [tape.add(CrossEntropyBack(targets), outputs[1], inputs[1], errors[0]), None]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        logits, labels = arrays
        targets = self.targets(logits.shape[1:], labels.shape[1:])
        axis = targets.axis + 1
        wanted = targets.wanted(logits, labels)
        peak = logits.max(axis=axis, keepdims=True)
        normalizer = peak + np.log(np.exp(logits - peak).sum(axis=axis, keepdims=True))
        losses = (wanted * (normalizer - logits)).reshape(len(logits), -1).sum(axis=1)
        return [losses, softmax(logits, axis)]


@dataclass(frozen=True)
class CrossEntropyBack(Operator):
    """Return the errors of the scores, from probabilities, classes, and the error of each sample's loss."""

    targets: Targets = hidden()
    data_inputs = 3

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        probabilities, labels, seeds = arrays
        wanted = self.targets.wanted(probabilities, labels)
        mass = wanted.sum(axis=self.targets.axis + 1, keepdims=True)
        return [(probabilities * mass - wanted) * seeds.reshape(-1, *(1,) * (probabilities.ndim - 1))]


@register("correct")
@dataclass(frozen=True)
class Correct(Operator):
    """Make 1 of a sample where the target (second input) is among the `top` largest scores, averaged over places."""

    data_inputs = 2
    top: int = hidden(1)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        SoftmaxCrossEntropy().targets(inputs[0].shape, inputs[1].shape)
        return [Value("", ())]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        scores, labels = arrays
        axis = SoftmaxCrossEntropy().targets(scores.shape[1:], labels.shape[1:]).axis + 1
        own = np.take_along_axis(scores, np.expand_dims(labels, axis), axis=axis)
        # Of equal scores the first one is the larger.
        places = np.arange(scores.shape[axis]).reshape(-1, *(1,) * (scores.ndim - axis - 1))
        ahead = (scores > own) | ((scores == own) & (places < np.expand_dims(labels, axis)))
        right = (ahead.sum(axis=axis) < self.top).reshape(len(scores), -1)
        return [right.mean(axis=1).astype(scores.dtype)]
