"""The hunt for the first NaN: which layer made it, of which batch, in which step."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adam_mpi.data.batch import Batch
from adam_mpi.model.activations import activations
from adam_mpi.model.exchange import Exchange
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.parameters import tensors, views

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


class Hunter:
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
    # A strip alone cannot tell what its neighbours would have sent.
    whole = not any(isinstance(shape.layer, Exchange) for shape in shapes)
    outputs = activations(shapes, weights, pixels) if whole else {}
    for shape in shapes:
        for name in (f"{shape.name}/weight", f"{shape.name}/bias"):
            if name in named and not np.isfinite(named[name]).all():
                yield name, shape.name
        if shape.name in outputs and not np.isfinite(outputs[shape.name]).all():
            yield f"the output of {shape.name}", shape.name
