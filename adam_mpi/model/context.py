"""One block of images on its way through the network: the buffers, and the kernel calls bound to them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model import buffers, parameters
from adam_mpi.model.exchange import Exchange, assembled_at
from adam_mpi.model.kernels import dropout, loss, pixels
from adam_mpi.model.layers import Conv, LayerShape
from adam_mpi.model.steps import Backward, Place, Steps, Views, bind


class Context:
    """Trains or evaluates blocks of up to `images` images; one thread at a time may use it.

    `weights` is read in place and may be changed by others meanwhile.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], images: int, seed: int, dtype: DTypeLike, captured: Sequence[str] = ()
    ) -> None:
        self.seed, self.count = seed, 0
        self.tensors = parameters.tensors(shapes)
        self.arrays = buffers.allocate(buffers.plan(shapes, images, dtype))
        self.levels = (np.arange(256) / 255).astype(dtype)
        self.places = places = _places(shapes, self.arrays)
        self.logits, self.errors = (values.reshape(-1, images) for values in (places[-1].outputs, places[-1].errors))
        # Dropout's masks know layers by their number among all of the model's, whatever a strip has between them.
        numbers = accumulate(not isinstance(shape.layer, Exchange) for shape in shapes)
        own = assembled_at(shape.layer for shape in shapes)
        drawn = [self.arrays["own keys" if index < own else "keys"] for index in range(len(shapes))]
        self.steps = steps = [
            bind(shape, number - 1, place, self.arrays, keys, _rows(shape, place, np.dtype(dtype).itemsize))
            for shape, number, place, keys in zip(shapes, numbers, places, drawn, strict=True)
        ]
        self.outputs = [place.outputs for place in places]
        self.forward = [step.forward for step in steps]
        self.inference = [step.inference for step in steps]
        self.captured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for index, shape in enumerate(shapes):
            if shape.name in captured:
                steps[index] = self._capture(shape.name, places[index], steps[index])
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
        views, gradients = parameters.views(weights, self.tensors), parameters.views(gradient, self.tensors)
        self.count = self.load(pixels)
        self._draw(ids, epoch)
        for forward in self.forward:
            forward(views)
        result = self._loss(labels)
        for backward in self.backward:
            backward(views, gradients)
        return result

    def evaluate(self, weights: np.ndarray, pixels: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """The loss sum and the number correct, without dropout."""
        self._infer(weights, pixels)
        return self._loss(labels)

    def predict(self, weights: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """Probabilities (images, classes)."""
        return self.probabilities(self._infer(weights, pixels))

    def probabilities(self, count: int) -> np.ndarray:
        """Of the first so many images of the block, after its last layer."""
        loss.softmax(self.logits, self.errors, self.arrays["normalizers"])
        return self.errors[:, :count].T.copy()

    def walk(self, weights: np.ndarray, pixels: np.ndarray) -> Iterator[np.ndarray]:
        """The output of one layer after the other, without dropout; (images, channels, rows, columns) each."""
        views, count = parameters.views(weights, self.tensors), self.load(pixels)
        for inference, outputs in zip(self.inference, self.outputs, strict=True):
            inference(views)
            # A copy: the next layer may work in place.
            yield np.moveaxis(outputs[..., :count], -1, 0).copy()

    def factors(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Activations and errors of a captured dense layer in the last block trained on, (images, features) each."""
        activations, errors = self.captured[layer]
        return activations[:, : self.count].T, errors[:, : self.count].T

    def _capture(self, name: str, place: Place, step: Steps) -> Steps:
        """Keep what a layer's gradient is the product of: the arrays themselves are used again by other layers."""
        inputs, errors = (array.reshape(-1, array.shape[-1]) for array in (place.inputs, place.errors))
        self.captured[name] = kept = (np.zeros_like(inputs), np.zeros_like(errors))

        def backward_weights(weights: Views, gradients: Views) -> None:
            kept[0][:], kept[1][:] = inputs, errors
            if step.backward_weights is not None:
                step.backward_weights(weights, gradients)

        return replace(step, backward_weights=backward_weights)

    def load(self, block: np.ndarray) -> int:
        """Pixels (uint8) become levels from 0 to 1; float32 numbers are taken as they are."""
        if block.dtype == np.float32:
            inputs = self.arrays["input"]
            inputs[..., : len(block)] = np.moveaxis(block, 0, -1)
            inputs[..., len(block) :] = 0
            return len(block)
        # Copied first, so that the kernel sees one type of array whatever the block is a view of.
        self.arrays["pixels"][: len(block)] = block
        pixels.load(self.arrays["pixels"], len(block), self.levels, self.arrays["input"])
        return len(block)

    def _draw(self, ids: np.ndarray, epoch: int) -> None:
        """The random keys of these images in this epoch."""
        self.arrays["ids"][: len(ids)] = ids
        dropout.image_keys(self.seed, epoch, self.arrays["ids"], self.arrays["keys"])

    def _infer(self, weights: np.ndarray, pixels: np.ndarray) -> int:
        views = parameters.views(weights, self.tensors)
        count = self.load(pixels)
        for inference in self.inference:
            inference(views)
        return count

    def _loss(self, labels: np.ndarray) -> tuple[float, int]:
        normalizers = self.arrays["normalizers"]
        self.arrays["labels"][: len(labels)] = labels
        loss.softmax(self.logits, self.errors, normalizers)
        return loss.cross_entropy(self.logits, normalizers, self.arrays["labels"], len(labels), self.errors)


def _places(shapes: Sequence[LayerShape], arrays: dict[str, np.ndarray]) -> list[Place]:
    """The arrays of each layer: inputs and outputs by name, errors as views of the two that take turns."""
    outputs = [arrays[name] for name in ["input", *buffers.output_names(shapes)]]
    errors = [
        arrays[name][: math.prod(output.shape)].reshape(output.shape)
        for name, output in zip(buffers.error_names(shapes), outputs, strict=True)
    ]
    return [Place(outputs[index], outputs[index + 1], errors[index], errors[index + 1]) for index in range(len(shapes))]


def _rows(shape: LayerShape, place: Place, itemsize: int) -> int:
    return buffers.group_rows(shape, place.outputs.shape[-1], itemsize) if isinstance(shape.layer, Conv) else 0


def _backward(shapes: Sequence[LayerShape], steps: list[Steps]) -> list[Backward]:
    """Last layer first; the first layer with weights ends it, as nobody needs the errors of its inputs."""
    first = next(index for index, shape in enumerate(shapes) if shape.weight)
    calls = []
    for index in range(len(steps) - 1, first - 1, -1):
        calls += [steps[index].backward_weights, steps[index].backward_data if index > first else None]
    return [call for call in calls if call]
