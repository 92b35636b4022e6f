"""Decide how each parameter is drawn at first, and draw it: by its name and the seed, not by its position."""

from collections.abc import Iterator

import numpy as np

from adam_mpi.model.graph import Graph
from adam_mpi.model.initialization import Initialization, drawn
from adam_mpi.model.ops.elementwise import Elementwise

FARTHEST = 8
"""Nodes behind the weights among which an activation is looked for."""


def initialization(graph: Graph, parameter: str) -> Initialization:
    """Return how `parameter` is drawn: as it says, or by the activation that it feeds."""
    own = next(p for p in graph.parameters if p.name == parameter)
    if own.init.kind != "auto":
        return own.init
    function = activation_behind(graph, parameter)
    if function == "relu":
        return Initialization("he", own.init.gain)
    # The slope of a sigmoid at 0 is a quarter of the one that Glorot's rule assumes.
    return Initialization("glorot", own.init.gain * (4 if function == "sigmoid" else 1))


def activation_behind(graph: Graph, parameter: str) -> str | None:
    """Return the first activation behind `parameter` before other weights; where the way forks, the first branch's."""
    node = graph.consumers(parameter)[0]
    for _ in range(FARTHEST):
        following = graph.consumers(node.outputs[0].name)
        if not following:
            return None
        node = following[0]
        if any(name in graph.offsets for name in node.inputs):
            return None
        if isinstance(node.op, Elementwise):
            found = node.op.activation()
            if found:
                return found
    return None


def initial(graph: Graph, seed: int) -> np.ndarray:
    """Return the first values of the flat vector."""
    flat = np.zeros(graph.size, np.float32)
    for start, values in pieces(graph, seed):
        flat[start : start + len(values)] = values
    return flat


def pieces(graph: Graph, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first values that are not zero, in pieces with their offsets: a layer may be larger than memory."""
    for parameter in graph.parameters:
        init = initialization(graph, parameter.name)
        for start, values in drawn(parameter.name, parameter.shape, init, seed):
            yield graph.offsets[parameter.name] + start, values
