"""Diagnostics of a model in training: the first NaN by layer, batch and step; and norms and dead units of layers."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adam_mpi.cluster.statistics import NotFiniteStatistics
from adam_mpi.model.context import Context
from adam_mpi.model.exchange import Exchange
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.parameters import Tensor, feeds, tensors, views
from adam_mpi.sharding.batch_parts import Batch

MOST_IMAGES = 64
"""The most images of a batch that are named."""


@dataclass(frozen=True)
class Trouble:
    """The first number of a worker that was not finite."""

    what: str
    """A description, such as "the output of conv2"."""
    layer: str
    step: int
    """The number of batches that its thread, or of pushes that its rank, had begun by then."""
    epoch: int
    batches: list[int]
    images: list[int]

    def stats(self) -> dict[str, Any]:
        """Return the fields, for a message."""
        return asdict(self)


def describe(trouble: NotFiniteStatistics) -> str:
    """Return a sentence about `trouble`, the fields of a Trouble."""
    batches = ", ".join(map(str, trouble["batches"]))
    return f"{trouble['what']} is not finite: step {trouble['step']}, epoch {trouble['epoch']}, batch {batches}"


class NaNDetector:
    """Find the layer that made the first NaN of one trainer thread."""

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        self.shapes = shapes
        self.steps = 0
        self.trouble: Trouble | None = None

    def look(self, loss: float, weights: np.ndarray, batch: Batch) -> None:
        """Look for what is not finite if `loss`, that of `batch` on `weights`, is not; a finite one costs nothing."""
        self.steps += 1
        if np.isfinite(loss) or self.trouble is not None:
            return
        what, layer = next(suspects(self.shapes, weights.copy(), batch.pixels), ("the loss", ""))
        images = batch.ids[:MOST_IMAGES].tolist()
        self.trouble = Trouble(
            what=what, layer=layer, step=self.steps, epoch=batch.epoch, batches=[batch.number], images=images
        )


def suspects(shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray) -> Iterator[tuple[str, str]]:
    """Yield (what, layer) of all that is not finite in a forward pass of `pixels`, in the order of the layers."""
    if not np.isfinite(pixels).all():
        yield "the input", "input"
    named = views(weights, tensors(shapes))
    # A strip alone does not know what its neighbors would have sent.
    whole = not any(isinstance(shape.layer, Exchange) for shape in shapes)
    outputs = activations(shapes, weights, pixels) if whole else {}
    for shape in shapes:
        for name in (f"{shape.name}/weight", f"{shape.name}/bias"):
            if name in named and not np.isfinite(named[name]).all():
                yield name, shape.name
        if shape.name in outputs and not np.isfinite(outputs[shape.name]).all():
            yield f"the output of {shape.name}", shape.name


SHARE = 0.005
"""The fraction of a worker's time that a Probe may take."""


class Probe:
    """Look at pushes from time to time, less often where the model is large."""

    def __init__(self, shapes: Sequence[LayerShape], interval: float) -> None:
        """Look at most every `interval` seconds."""
        self.tensors = tensors(shapes)
        self.interval = interval
        self.next = 0.0
        """When to look next."""
        self.rectified = {shape.name for index, shape in enumerate(shapes) if feeds(shapes[index + 1 :]) == "relu"}
        self.layers: dict[str, dict[str, float]] = {}

    def look(self, values: np.ndarray, images: int, weights: np.ndarray) -> None:
        """Update `layers` if it is time; `values` are sums of gradients over `images` images."""
        start = time.monotonic()
        if start < self.next or not images:
            return
        self.layers = figures(self.tensors, self.rectified, values, images, weights)
        self.next = start + max(self.interval, (time.monotonic() - start) / SHARE)


def figures(
    tensors: Sequence[Tensor], rectified: set[str], values: np.ndarray, images: int, weights: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return, by layer, the norms of its weights and of the mean gradient, and the fraction of dead units. Pure."""
    squares: dict[str, dict[str, float]] = {}
    for tensor in tensors:
        part = slice(tensor.offset, tensor.offset + tensor.size)
        layer = squares.setdefault(tensor.layer, {"weight_norm": 0.0, "gradient_norm": 0.0})
        layer["weight_norm"] += float(weights[part] @ weights[part])
        layer["gradient_norm"] += float(values[part] @ values[part]) / images**2
        # No error comes through relu to a unit that is active for none of the images: its bias has no gradient at all.
        if tensor.name.endswith("/bias") and tensor.layer in rectified:
            layer["dead"] = round(float(np.mean(values[part] == 0)), 4)
    return {
        name: {key: value if key == "dead" else float(f"{value**0.5:.5g}") for key, value in layer.items()}
        for name, layer in squares.items()
    }


def activations(shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Return, by layer, its output (images, channels, rows, columns); without dropout, the last before softmax."""
    context = Context(shapes, len(pixels), seed=0, dtype=np.float32)
    return {shape.name: output for shape, output in zip(shapes, context.walk(weights, pixels), strict=True)}
