"""How a model fares, layer by layer: norms of weights and gradients, and units that no longer answer."""

import time
from collections.abc import Sequence

import numpy as np

from adam_mpi.model.layers import LayerShape
from adam_mpi.model.parameters import Tensor, feeds, tensors

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
