"""See a graph as a table of layers, which plans, reports and the flat vector of parameters need of a model.

The table goes where a stack of layers goes: a row per node, with its shapes and its parameters; `graph` is the model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from adam_mpi.base.errors import UserError
from adam_mpi.model.graph import Graph, Node, Parameter, Value, shape_text
from adam_mpi.model.layers import LayerShape, Shape
from adam_mpi.model.ops.conv import Conv
from adam_mpi.model.ops.conv_transpose import ConvTranspose
from adam_mpi.model.ops.dense import Dense


@dataclass(frozen=True)
class NodeShape(LayerShape):
    """A node as a row: `own` are the parameters that it is the first to read."""

    own: tuple[Parameter, ...] = ()
    multiplied: int = 0

    @property
    def parameters(self) -> int:
        return sum(parameter.size for parameter in self.own)

    @property
    def connections(self) -> int:
        return self.multiplied


class GraphLayers(tuple[LayerShape, ...]):
    """The nodes of `graph` as rows."""

    graph: Graph

    def __new__(cls, graph: Graph) -> "GraphLayers":
        made = super().__new__(cls, _rows(graph))
        made.graph = graph
        return made

    def __reduce__(self) -> tuple:
        return GraphLayers, (self.graph,)

    @property
    def fed(self) -> Value:
        """Return the input that samples are fed through: the first that is no target."""
        return self.graph.inputs[0]

    @property
    def target(self) -> Value | None:
        """Return the input that targets are fed through, if there is one."""
        return self.graph.inputs[1] if len(self.graph.inputs) > 1 else None


def _rows(graph: Graph) -> Iterator[LayerShape]:
    seen: set[str] = set()
    known = {parameter.name: parameter for parameter in graph.parameters}
    for node in graph.nodes:
        read = [known[name] for name in node.inputs if name in known]
        own = tuple(parameter for parameter in read if parameter.name not in seen)
        seen.update(parameter.name for parameter in own)
        data = graph.values[node.inputs[0]]
        yield NodeShape(
            name=node.name,
            layer=node.op,  # type: ignore[arg-type]
            input=planes(data.shape),
            output=planes(node.outputs[0].shape),
            weight=own[0].shape if own else None,
            own=own,
            multiplied=_connections(node, [parameter.shape for parameter in read]),
        )


def planes(shape: tuple[int, ...]) -> Shape:
    """Return `shape` with three axes: the last ones become one where there are more."""
    first, second, *rest = (*shape, 1, 1)
    return first, second, math.prod(rest)


def _connections(node: Node, parameters: list[tuple[int, ...]]) -> int:
    """Return the multiply-adds per sample of a node whose parameters are multiplied with."""
    if not parameters or not isinstance(node.op, Conv | ConvTranspose | Dense):
        return 0
    outputs = node.outputs[0].shape
    places = math.prod(outputs[:-1]) if isinstance(node.op, Dense) else math.prod(outputs[1:])
    return math.prod(parameters[0]) * places


def check_fed(layers: GraphLayers, given: Value, target: Value | None) -> None:
    """Raise UserError unless the graph takes samples like `given`, and targets like `target`, where that is known."""
    graph = layers.graph
    if len(graph.inputs) > 2:
        names = ", ".join(map(str, graph.inputs))
        raise UserError(f"the model has inputs {names}; data sets feed one input and one target")
    _check_alike(layers.fed, given, "input")
    if layers.target is not None and target is not None:
        _check_alike(layers.target, target, "target")


def _check_alike(wanted: Value, given: Value, role: str) -> None:
    if (planes(wanted.shape), wanted.dtype) != (planes(given.shape), given.dtype):
        raise UserError(
            f"the model's {role} {wanted} of type {wanted.dtype} is fed {given.dtype} of {shape_text(given.shape)} by "
            "the data set; change the model, or the data"
        )


def graph_bytes(layers: GraphLayers, images: int) -> int:
    """Return the memory of one context of batches of up to `images` images, from above: all values at once."""
    values = sum(value.size for node in layers.graph.nodes for value in node.outputs)
    return 2 * 4 * min(images, 64) * values
