"""The reference engine's context: the buffers of one block of images, and the kernel calls bound to them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model import parameters, reference_buffers
from adam_mpi.model.exchange import Exchange, assembled_at
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.kernels import activations_and_loss
from adam_mpi.model.layers import Conv, LayerShape
from adam_mpi.model.reference_steps import Backward, Place, Steps, Views, bind


class Context:
    """Trains or evaluates blocks of up to `images` images; one thread at a time may use it.

    `weights` is read in place; other threads may change it at the same time.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        seed: int,
        dtype: DTypeLike,
        captured: Sequence[str] = (),
        form: InputFormat = SCALED_BYTES,
    ) -> None:
        self.seed = seed
        self.count = 0
        self.tensors = parameters.tensors(shapes)
        self.arrays = reference_buffers.allocate(reference_buffers.plan(shapes, images, dtype))
        self.levels = form.levels(dtype)
        self.places = _places(shapes, self.arrays)
        self.logits = self.places[-1].outputs.reshape(-1, images)
        self.errors = self.places[-1].errors.reshape(-1, images)
        self.steps = steps = self._bind(shapes, np.dtype(dtype).itemsize)
        self.outputs = [place.outputs for place in self.places]
        self.forward = [step.forward for step in steps]
        self.inference = [step.inference for step in steps]
        self.captured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for index, shape in enumerate(shapes):
            if shape.name in captured:
                steps[index] = self._capture(shape.name, self.places[index], steps[index])
        self.backward = _backward(shapes, steps)

    def train(
        self,
        weights: np.ndarray,
        gradient: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        ids: np.ndarray,
        epoch: int,
        overwrite: bool = False,
    ) -> tuple[float, int]:
        """Add the sum of the block's gradients to `gradient`, or overwrite it; return loss sum and number correct."""
        if overwrite:
            gradient[:] = 0
        views = parameters.views(weights, self.tensors)
        gradients = parameters.views(gradient, self.tensors)
        self.count = self.load(pixels)
        self._draw(ids, epoch)
        for forward in self.forward:
            forward(views)
        result = self._loss(labels)
        for backward in self.backward:
            backward(views, gradients)
        return result

    def evaluate(self, weights: np.ndarray, pixels: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """Return the loss sum and the number correct, without dropout."""
        self._infer(weights, pixels)
        return self._loss(labels)

    def predict(self, weights: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """Return the probabilities (images, classes)."""
        return self.outputs_of(self._infer(weights, pixels))

    def outputs_of(self, count: int) -> np.ndarray:
        """Return the probabilities of the first `count` images of the block, whose logits are computed."""
        activations_and_loss.softmax(self.logits, self.errors, self.arrays["normalizers"])
        return self.errors[:, :count].T.copy()

    def walk(self, weights: np.ndarray, pixels: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the output of one layer after the other, without dropout; (images, channels, rows, columns) each."""
        views = parameters.views(weights, self.tensors)
        count = self.load(pixels)
        for inference, outputs in zip(self.inference, self.outputs, strict=True):
            inference(views)
            # A copy: the next layer may work in place.
            yield np.moveaxis(outputs[..., :count], -1, 0).copy()

    def factors(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return activations and errors of a captured dense layer in the last block trained on: (images, features)."""
        activations, errors = self.captured[layer]
        return activations[:, : self.count].T, errors[:, : self.count].T

    def _bind(self, shapes: Sequence[LayerShape], itemsize: int) -> list[Steps]:
        """Return the kernel calls of each layer."""
        # Dropout masks depend on a layer's number in the whole model: the exchanges of a strip do not count.
        numbers = accumulate(not isinstance(shape.layer, Exchange) for shape in shapes)
        assembly = assembled_at(shape.layer for shape in shapes)
        steps = []
        for index, (shape, number) in enumerate(zip(shapes, numbers, strict=True)):
            place = self.places[index]
            keys = self.arrays["own keys" if index < assembly else "keys"]
            rows = _rows(shape, place, itemsize)
            steps.append(bind(shape, number - 1, place, arrays=self.arrays, keys=keys, rows=rows))
        return steps

    def _capture(self, name: str, place: Place, step: Steps) -> Steps:
        """Keep the factors of a layer's gradient, whose arrays other layers use again."""
        inputs = place.inputs.reshape(-1, place.inputs.shape[-1])
        errors = place.errors.reshape(-1, place.errors.shape[-1])
        kept_inputs = np.zeros_like(inputs)
        kept_errors = np.zeros_like(errors)
        self.captured[name] = (kept_inputs, kept_errors)

        def backward_weights(weights: Views, gradients: Views) -> None:
            kept_inputs[:] = inputs
            kept_errors[:] = errors
            if step.backward_weights is not None:
                step.backward_weights(weights, gradients)

        return replace(step, backward_weights=backward_weights)

    def load(self, block: np.ndarray) -> int:
        """Load images into the input, bytes by their levels and floats as they are; return how many."""
        if block.dtype != np.uint8:
            inputs = self.arrays["input"]
            inputs[..., : len(block)] = np.moveaxis(block, 0, -1)
            inputs[..., len(block) :] = 0
            return len(block)
        # Copied first, so that the kernel sees one type of array for any view.
        self.arrays["pixels"][: len(block)] = block
        activations_and_loss.load_pixels(self.arrays["pixels"], len(block), self.levels, self.arrays["input"])
        return len(block)

    def _draw(self, ids: np.ndarray, epoch: int) -> None:
        """Compute the random keys of the images `ids` in `epoch`."""
        self.arrays["ids"][: len(ids)] = ids
        activations_and_loss.image_keys(self.seed, epoch, self.arrays["ids"], self.arrays["keys"])

    def _infer(self, weights: np.ndarray, pixels: np.ndarray) -> int:
        """Compute the logits of `pixels` without dropout; return the number of images."""
        views = parameters.views(weights, self.tensors)
        count = self.load(pixels)
        for inference in self.inference:
            inference(views)
        return count

    def _loss(self, labels: np.ndarray) -> tuple[float, int]:
        """Turn logits into errors; return the loss sum and the number correct."""
        normalizers = self.arrays["normalizers"]
        self.arrays["labels"][: len(labels)] = labels
        activations_and_loss.softmax(self.logits, self.errors, normalizers)
        return activations_and_loss.cross_entropy(
            self.logits, normalizers, self.arrays["labels"], len(labels), self.errors
        )


def _places(shapes: Sequence[LayerShape], arrays: dict[str, np.ndarray]) -> list[Place]:
    """Return the arrays of each layer: inputs and outputs by name, errors as views of the two that alternate."""
    outputs = [arrays[name] for name in ["input", *reference_buffers.output_names(shapes)]]
    errors = [
        arrays[name][: math.prod(output.shape)].reshape(output.shape)
        for name, output in zip(reference_buffers.error_names(shapes), outputs, strict=True)
    ]
    return [Place(outputs[index], outputs[index + 1], errors[index], errors[index + 1]) for index in range(len(shapes))]


def _rows(shape: LayerShape, place: Place, itemsize: int) -> int:
    """Return how many output rows of a convolution are computed at a time; 0 for other layers."""
    return (
        reference_buffers.group_rows(shape, place.outputs.shape[-1], itemsize) if isinstance(shape.layer, Conv) else 0
    )


def _backward(shapes: Sequence[LayerShape], steps: list[Steps]) -> list[Backward]:
    """Return the calls of the way back, down to the first layer with weights, whose input errors nothing needs."""
    first = next(index for index, shape in enumerate(shapes) if shape.weight)
    calls = []
    for index in range(len(steps) - 1, first - 1, -1):
        calls += [steps[index].backward_weights, steps[index].backward_data if index > first else None]
    return [call for call in calls if call]
