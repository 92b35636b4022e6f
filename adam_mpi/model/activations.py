"""What every layer makes of a block of images, layer by layer, on the reference kernels."""

from collections.abc import Sequence

import numpy as np

from adam_mpi.model.context import Context
from adam_mpi.model.layers import LayerShape


def activations(shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Layer -> its output, (images, channels, rows, columns); without dropout, the last before softmax."""
    context = Context(shapes, len(pixels), seed=0, dtype=np.float32)
    return {shape.name: output for shape, output in zip(shapes, context.walk(weights, pixels), strict=True)}
