"""The hunt for the first NaN: which layer made it, of which batch, in which step."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adam_mpi.model.context import Context
from adam_mpi.model.exchange import Exchange
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.parameters import Tensor, feeds, tensors, views
from adam_mpi.transport.batch_message import Batch

MOST_IMAGES = 64


@dataclass(frozen=True)
class Trouble:
    """The first number of a worker that was not finite."""

    what: str
    """As "the output of conv2"."""
    layer: str
    step: int
    """How many batches its thread, or how many pushes its rank, had begun by then."""
    epoch: int
    batches: list[int]
    images: list[int]

    def stats(self) -> dict[str, Any]:
        return asdict(self)


def describe(trouble: dict[str, Any]) -> str:
    batches = ", ".join(map(str, trouble["batches"]))
    return f"{trouble['what']} is not finite: step {trouble['step']}, epoch {trouble['epoch']}, batch {batches}"


class NaNDetector:
    """Of one trainer thread; `look` after each batch, which costs nothing until there is something to find."""

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        self.shapes, self.steps = shapes, 0
        self.trouble: Trouble | None = None

    def look(self, loss: float, weights: np.ndarray, batch: Batch) -> None:
        self.steps += 1
        if np.isfinite(loss) or self.trouble is not None:
            return
        what, layer = next(suspects(self.shapes, weights.copy(), batch.pixels), ("the loss", ""))
        images = batch.ids[:MOST_IMAGES].tolist()
        self.trouble = Trouble(what, layer, self.steps, batch.epoch, [batch.number], images)


def suspects(shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray) -> Iterator[tuple[str, str]]:
    """(what, layer) of all that is not finite on an image's way through the network, in order."""
    if not np.isfinite(pixels).all():
        yield "the input", "input"
    named = views(weights, tensors(shapes))
    # A strip alone cannot tell what its neighbors would have sent.
    whole = not any(isinstance(shape.layer, Exchange) for shape in shapes)
    outputs = activations(shapes, weights, pixels) if whole else {}
    for shape in shapes:
        for name in (f"{shape.name}/weight", f"{shape.name}/bias"):
            if name in named and not np.isfinite(named[name]).all():
                yield name, shape.name
        if shape.name in outputs and not np.isfinite(outputs[shape.name]).all():
            yield f"the output of {shape.name}", shape.name


SHARE = 0.005
"""Of a worker's time that may go into this."""


class Probe:
    """Looks at a push now and then; rarely where the model is large."""

    def __init__(self, shapes: Sequence[LayerShape], interval: float) -> None:
        self.tensors, self.interval, self.next = tensors(shapes), interval, 0.0
        self.rectified = {shape.name for index, shape in enumerate(shapes) if feeds(shapes[index + 1 :]) == "relu"}
        self.layers: dict[str, dict[str, float]] = {}

    def look(self, values: np.ndarray, images: int, weights: np.ndarray) -> None:
        """`values`: sums of gradients over so many images."""
        start = time.monotonic()
        if start < self.next or not images:
            return
        self.layers = figures(self.tensors, self.rectified, values, images, weights)
        self.next = start + max(self.interval, (time.monotonic() - start) / SHARE)


def figures(
    tensors: Sequence[Tensor], rectified: set[str], values: np.ndarray, images: int, weights: np.ndarray
) -> dict[str, dict[str, float]]:
    """Layer -> norms of its weights and of the mean gradient, and the fraction of its units that are dead. Pure."""
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
    """Layer -> its output, (images, channels, rows, columns); without dropout, the last before softmax."""
    context = Context(shapes, len(pixels), seed=0, dtype=np.float32)
    return {shape.name: output for shape, output in zip(shapes, context.walk(weights, pixels), strict=True)}
