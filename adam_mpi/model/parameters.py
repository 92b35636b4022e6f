"""The flat parameter vector: where each layer's weight and bias lie in it, and their initial values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.exchange import Exchange
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.layers import (
    Activation,
    Conv,
    Dense,
    Dropout,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    missing_rule,
)
from adam_mpi.model.passes.initial import activation_behind, pieces

PIECE = 1 << 20
"""Values that are drawn at a time."""


@dataclass(frozen=True)
class Tensor:
    """A named piece of the flat vector: `size` values from `offset`, seen as `shape`."""

    name: str
    layer: str
    shape: tuple[int, ...]
    offset: int
    size: int
    factored: bool = True
    """Whether the gradient of a matrix can be pushed as activations and errors."""
    statistic: bool = False
    """Whether its values are averages over images, which no rule steps."""


def tensors(shapes: Sequence[LayerShape]) -> tuple[Tensor, ...]:
    """Return the weight, then the bias, of each layer, one after the other without gaps."""
    if isinstance(shapes, GraphLayers):
        graph = shapes.graph
        return tuple(
            Tensor(
                name=p.name,
                layer=p.layer,
                shape=p.shape,
                offset=graph.offsets[p.name],
                size=p.size,
                factored=False,
                statistic=p.kind == "statistic",
            )
            for p in graph.parameters
        )
    found: list[Tensor] = []
    offset = 0
    for layer in shapes:
        for part, shape in (("weight", layer.weight), ("bias", layer.bias)):
            if shape:
                found.append(Tensor(f"{layer.name}/{part}", layer.name, shape, offset, math.prod(shape)))
                offset += found[-1].size
    return tuple(found)


def total(shapes: Sequence[LayerShape]) -> int:
    """Return the length of the flat vector."""
    return sum(layer.parameters for layer in shapes)


def spans(shapes: Sequence[LayerShape]) -> dict[str, tuple[int, int]]:
    """Return where the parameters of each layer begin and end in the flat vector."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in tensors(shapes):
        start = found.get(tensor.layer, (tensor.offset, 0))[0]
        found[tensor.layer] = (start, tensor.offset + tensor.size)
    return found


def views(flat: np.ndarray, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return the `tensors` as views into the flat vector, by name."""
    return {tensor.name: flat[tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape) for tensor in tensors}


def initial(shapes: Sequence[LayerShape], seed: int) -> np.ndarray:
    """Return the initial values: He before relu, four times Glorot before sigmoid, Glorot elsewhere, bias zero.

    The values of a layer depend only on `seed` and on its index in the stack.
    """
    flat = np.zeros(total(shapes), np.float32)
    for start, values in drawn(shapes, seed):
        flat[start : start + len(values)] = values
    return flat


def drawn(shapes: Sequence[LayerShape], seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the initial values that are not zero, in pieces with their offsets: a layer may be larger than memory."""
    if isinstance(shapes, GraphLayers):
        yield from pieces(shapes.graph, seed)
        return
    offsets = {tensor.name: tensor.offset for tensor in tensors(shapes)}
    for index, layer in enumerate(shapes):
        if layer.weight:
            key = np.array([seed % 2**64, index], np.uint64)
            random = np.random.Generator(np.random.Philox(key=key))
            offset = offsets[f"{layer.name}/weight"]
            deviation = np.float32(_deviation(shapes, index))
            for first in range(0, math.prod(layer.weight), PIECE):
                size = min(PIECE, math.prod(layer.weight) - first)
                yield offset + first, random.standard_normal(size, dtype=np.float32) * deviation


def _deviation(shapes: Sequence[LayerShape], index: int) -> float:
    """Return the standard deviation of the initial weights of the layer at `index`."""
    weight = shapes[index].weight or ()
    inputs = math.prod(weight[1:])
    outputs = weight[0] * math.prod(weight[2:])
    function = feeds(shapes[index + 1 :])
    if function == "relu":
        return math.sqrt(2 / inputs)
    # The slope of a sigmoid at 0 is a quarter of the one that Glorot's rule assumes.
    return (4 if function == "sigmoid" else 1) * math.sqrt(2 / (inputs + outputs))


def rectified(shapes: Sequence[LayerShape]) -> set[str]:
    """Return the layers whose outputs go through relu before other weights."""
    if isinstance(shapes, GraphLayers):
        return {p.layer for p in shapes.graph.parameters if activation_behind(shapes.graph, p.name) == "relu"}
    return {shape.name for index, shape in enumerate(shapes) if feeds(shapes[index + 1 :]) == "relu"}


def feeds(following: Sequence[LayerShape]) -> str | None:
    """Return the first activation before the next weights, or None; pooling, norms and dropout do not matter."""
    for shape in following:
        if isinstance(shape.layer, Conv | Dense):
            return None
        if isinstance(shape.layer, Activation):
            return shape.layer.function
        if not isinstance(shape.layer, MaxPool | LocalResponseNorm | Dropout | Exchange):
            raise missing_rule(shape.layer, "initialization rule (feeds in model/parameters.py)")
    return None
