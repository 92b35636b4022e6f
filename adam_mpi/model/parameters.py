"""The flat parameter vector: where each layer's weight and bias lie in it, and its first values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.layers import Activation, Conv, Dense, LayerShape

PIECE = 1 << 20


@dataclass(frozen=True)
class Tensor:
    """A named piece of the flat vector: `size` values from `offset`, seen as `shape`."""

    name: str
    layer: str
    shape: tuple[int, ...]
    offset: int
    size: int


def tensors(shapes: Sequence[LayerShape]) -> tuple[Tensor, ...]:
    """Weight, then bias, of each layer, one after the other without gaps."""
    found: list[Tensor] = []
    offset = 0
    for layer in shapes:
        for part, shape in (("weight", layer.weight), ("bias", layer.bias)):
            if shape:
                found.append(Tensor(f"{layer.name}/{part}", layer.name, shape, offset, math.prod(shape)))
                offset += found[-1].size
    return tuple(found)


def total(shapes: Sequence[LayerShape]) -> int:
    """Length of the flat vector."""
    return sum(layer.parameters for layer in shapes)


def spans(shapes: Sequence[LayerShape]) -> dict[str, tuple[int, int]]:
    """Where the parameters of each layer begin and end in the flat vector."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in tensors(shapes):
        found[tensor.layer] = found.get(tensor.layer, (tensor.offset, 0))[0], tensor.offset + tensor.size
    return found


def views(flat: np.ndarray, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """The tensors as views into the flat vector, by name."""
    return {tensor.name: flat[tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape) for tensor in tensors}


def initial(shapes: Sequence[LayerShape], seed: int) -> np.ndarray:
    """First values: He before relu, four times Glorot before sigmoid, Glorot elsewhere, bias zero; a layer's depend on
    seed and its own place only."""
    flat = np.zeros(total(shapes), np.float32)
    for start, values in drawn(shapes, seed):
        flat[start : start + len(values)] = values
    return flat


def drawn(shapes: Sequence[LayerShape], seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Those that are not zero, piece by piece, each with its place: a layer may be larger than memory."""
    places = {tensor.name: tensor.offset for tensor in tensors(shapes)}
    for index, layer in enumerate(shapes):
        if layer.weight:
            key = np.array([seed % 2**64, index], np.uint64)
            random = np.random.Generator(np.random.Philox(key=key))
            place, deviation = places[f"{layer.name}/weight"], np.float32(_deviation(shapes, index))
            for first in range(0, math.prod(layer.weight), PIECE):
                size = min(PIECE, math.prod(layer.weight) - first)
                yield place + first, random.standard_normal(size, dtype=np.float32) * deviation


def _deviation(shapes: Sequence[LayerShape], index: int) -> float:
    """Standard deviation of a layer's weights."""
    weight = shapes[index].weight or ()
    inputs, outputs = math.prod(weight[1:]), weight[0] * math.prod(weight[2:])
    function = feeds(shapes[index + 1 :])
    if function == "relu":
        return math.sqrt(2 / inputs)
    # The slope of a sigmoid is a quarter of that which Glorot's rule is made for.
    return (4 if function == "sigmoid" else 1) * math.sqrt(2 / (inputs + outputs))


def feeds(following: Sequence[LayerShape]) -> str | None:
    """The first activation before the next weights, if there is one; pools and dropout in between do not matter."""
    for shape in following:
        if isinstance(shape.layer, Conv | Dense):
            return None
        if isinstance(shape.layer, Activation):
            return shape.layer.function
    return None
