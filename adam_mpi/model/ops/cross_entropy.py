"""Softmax cross-entropy with label smoothing, class weights and a label that is ignored."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.graph import Shape, Value, shape_text
from adam_mpi.model.ops.fields import hidden, number, numbers, optional_whole, whole
from adam_mpi.model.ops.operator import Operator, Run, register
from adam_mpi.model.ops.softmax import emit_softmax, softmax


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

    def layout(self, shape: Shape) -> tuple[int, str, int]:
        """Return how many classes scores of `shape` have, the index of the first at a place, and their distance."""
        classes = shape[self.axis]
        last = self.axis == len(shape) - 1
        return (classes, f"place * {classes}", 1) if last else (classes, "place", math.prod(shape[1:]))

    @contextmanager
    def emit_label(self, kernel: Any, labels: Any) -> Iterator[None]:
        """Emit `label`, the class at a place; what is written meanwhile is for places that are not ignored."""
        kernel(f"label = int({labels.scalar('place')})")
        with nullcontext() if self.ignore is None else kernel.inside(f"if label != {self.ignore}:"):
            yield

    def emit_loss(self, kernel: Any, scores: Any, classes: int, begin: str, step: int, places: int) -> None:
        """Emit what the loss of the sample in `lane` has of one place."""
        own = f"normalizer - {scores.scalar(f'{begin} + label * {step}')}"
        if self.weights or self.smoothing:
            weights = kernel.constants(np.array(self.weights or [1.0] * classes))
            kernel(f"own = np.float32({1 - self.smoothing!r}) * {weights}[label] * ({own})")
            with kernel.loop("k", classes):
                other = f"normalizer - {scores.scalar(f'{begin} + k * {step}')}"
                kernel(f"own += np.float32({self.smoothing / classes!r}) * {weights}[k] * ({other})")
            own = "own"
        share = f" * np.float32({1 / places!r})" if places > 1 else ""
        kernel(f"{kernel.outputs[0].scalar(0)} += ({own}){share}")

    def emit_back(self, kernel: Any, classes: int, index: str, side: str) -> None:
        """Emit the errors at one place; the memory `side` has room for two vectors.

        All classes get their probability, less what smoothing gives them, lane by lane; then labels are told apart.
        """
        probabilities, labels, _ = kernel.inputs
        errors = kernel.outputs[0]
        weights = kernel.constants(np.array(self.weights or [1.0] * classes))
        mean = float(np.mean(self.weights or [1.0]))
        with kernel.each_lane():
            kernel(f"memory[{side} + lane] = 0")
            kernel(f"memory[{side} + {kernel.lanes} + lane] = 0")
            with self.emit_label(kernel, labels):
                kernel(f"mass = np.float32({1 - self.smoothing!r}) * {weights}[label]")
                kernel(f"memory[{side} + lane] = (mass + np.float32({self.smoothing * mean!r})) * {_seed(kernel)}")
                kernel(f"memory[{side} + {kernel.lanes} + lane] = {_seed(kernel)}")
        kernel(f"scaled = load(memory, {side})")
        kernel(f"share = load(memory, {side} + {kernel.lanes})")
        with kernel.loop("k", classes):
            value = f"mul({probabilities.load(index)}, scaled)"
            if self.smoothing:
                value = f"fma(share, splat(np.float32({-self.smoothing / classes!r}) * {weights}[k]), {value})"
            kernel(errors.store(index, value))
        with kernel.each_lane(), self.emit_label(kernel, labels):
            kernel("k = label")
            kernel(f"mass = np.float32({1 - self.smoothing!r}) * {weights}[label]")
            kernel(f"{errors.scalar(index)} -= mass * {_seed(kernel)}")


def _seed(kernel: Any) -> str:
    """Return the expression of the error of the loss of the sample in `lane`, for one of its places."""
    places = kernel.inputs[1].value.size
    return f"{kernel.inputs[2].scalar(0)}{f' * np.float32({1 / places!r})' if places > 1 else ''}"


@register("softmax_cross_entropy")
@dataclass(frozen=True)
class SoftmaxCrossEntropy(Operator):
    """Compute the cross-entropy of softmax of the first input with the classes that are the second one.

    Classes lie along the last axis of the first input, or along the first one; the target has its other axes. The loss
    of a sample is the mean over its places; places with the label `ignore` count as zero. The second output has the
    probabilities.
    """

    dtypes: ClassVar[tuple[str, ...]] = ()
    data_inputs = 2
    smoothing: float = number(0, default=0.0, below=1)
    weights: tuple[float, ...] = numbers()
    ignore: int | None = optional_whole()

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

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        # Only the probabilities are exported: there is no target outside training.
        labels = export.value(inputs[1]).shape
        axis = self.targets(export.value(inputs[0]).shape, labels).axis
        export.node("Softmax", inputs[:1], outputs[1:], axis=axis + 1)

    def emit(self, kernel: Any) -> None:
        scores, labels = kernel.inputs
        targets = self.targets(scores.value.shape, labels.value.shape)
        classes, begin, step = targets.layout(scores.value.shape)
        places = labels.value.size
        side = kernel.scratch("side", 2 * kernel.lanes)
        with kernel.each_lane():
            kernel(f"{kernel.outputs[0].scalar(0)} = 0")
        with kernel.loop("place", places):
            emit_softmax(kernel, scores, kernel.outputs[1], classes, begin, step)
            kernel(f"store(memory, {side}, best)")
            kernel(f"store(memory, {side} + {kernel.lanes}, sums)")
            with kernel.each_lane(), targets.emit_label(kernel, labels):
                kernel(f"normalizer = np.log(memory[{side} + {kernel.lanes} + lane]) + memory[{side} + lane]")
                targets.emit_loss(kernel, scores, classes, begin, step, places)


@dataclass(frozen=True)
class CrossEntropyBack(Operator):
    """Return the errors of the scores, from probabilities, classes, and the error of each sample's loss."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    targets: Targets = hidden()
    data_inputs = 3

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        probabilities, labels, seeds = arrays
        wanted = self.targets.wanted(probabilities, labels)
        mass = wanted.sum(axis=self.targets.axis + 1, keepdims=True)
        return [(probabilities * mass - wanted) * seeds.reshape(-1, *(1,) * (probabilities.ndim - 1))]

    def emit(self, kernel: Any) -> None:
        probabilities, labels, _ = kernel.inputs
        classes, begin, step = self.targets.layout(probabilities.value.shape)
        side = kernel.scratch("side", 2 * kernel.lanes)
        with kernel.loop("place", labels.value.size):
            self.targets.emit_back(kernel, classes, f"{begin} + k * {step}", side)


@register("correct")
@dataclass(frozen=True)
class Correct(Operator):
    """Make 1 of a sample where the target (second input) is among the `top` largest scores, averaged over places.

    Places with the label `ignore` do not count.
    """

    dtypes: ClassVar[tuple[str, ...]] = ()
    data_inputs = 2
    top: int = whole(default=1)
    ignore: int | None = optional_whole()

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        if inputs[1].dtype != "integer":
            raise ValueError(f"the target is of type {inputs[1].dtype}; classes are integers")
        self.targets(inputs[0].shape, inputs[1].shape)
        return [Value("", ())]

    def targets(self, scores: Shape, labels: Shape) -> Targets:
        """Return how classes lie in values of these shapes per sample; raise ValueError if they do not meet."""
        return SoftmaxCrossEntropy(ignore=self.ignore).targets(scores, labels)

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        scores, labels = arrays
        axis = self.targets(scores.shape[1:], labels.shape[1:]).axis + 1
        kept = np.ones(labels.shape, bool) if self.ignore is None else labels != self.ignore
        known = np.expand_dims(np.where(kept, labels, 0), axis)
        own = np.take_along_axis(scores, known, axis=axis)
        # Of equal scores the first one is the larger.
        places = np.arange(scores.shape[axis]).reshape(-1, *(1,) * (scores.ndim - axis - 1))
        ahead = (scores > own) | ((scores == own) & (places < known))
        right = ((ahead.sum(axis=axis) < self.top) & kept).reshape(len(scores), -1)
        counted = np.maximum(kept.reshape(len(scores), -1).sum(axis=1), 1)
        return [(right.sum(axis=1) / counted).astype(scores.dtype)]

    def emit(self, kernel: Any) -> None:
        scores, labels = kernel.inputs
        targets = self.targets(scores.value.shape, labels.value.shape)
        classes, begin, step = targets.layout(scores.value.shape)
        side = kernel.scratch("side", 3 * kernel.lanes)
        places = [f"{side} + {row * kernel.lanes}" for row in range(3)]
        kernel("right = zero()")
        kernel("counted = zero()")
        with kernel.loop("place", labels.value.size):
            with kernel.each_lane():
                kernel(f"memory[{places[2]} + lane] = 0")
                with targets.emit_label(kernel, labels):
                    kernel(f"memory[{places[0]} + lane] = label")
                    kernel(f"memory[{places[1]} + lane] = {scores.scalar(f'{begin} + label * {step}')}")
                    kernel(f"memory[{places[2]} + lane] = 1")
            for name, place in zip(("label_of_lane", "own", "kept"), places, strict=True):
                kernel(f"{name} = load(memory, {place})")
            kernel("ahead = zero()")
            with kernel.loop("k", classes):
                kernel(f"other = {scores.load(f'{begin} + k * {step}')}")
                kernel("tie = greater(label_of_lane, splat(np.float32(k)), splat(1.0), zero())")
                kernel("tie = equal(other, own, tie, zero())")
                kernel("ahead = add(ahead, greater(other, own, splat(1.0), tie))")
            kernel(f"right = add(right, greater(splat({float(self.top)!r}), ahead, kept, zero()))")
            kernel("counted = add(counted, kept)")
        kernel(kernel.outputs[0].store(0, "div(right, maximum(counted, splat(1.0)))"))
