"""Recognize relu, and its mask on the way back, which kernels of the layers around it compute besides."""

from adam_mpi.model.expression import apply, symbol
from adam_mpi.model.graph import Graph, Node, Value
from adam_mpi.model.ops.elementwise import Elementwise

RELU = Elementwise(apply("relu", symbol(0)))
MASKS = {
    Elementwise(apply("greater", symbol(1), 0.0, symbol(0), 0.0)): (0, 1),
    Elementwise(apply("greater", symbol(0), 0.0, symbol(1), 0.0)): (1, 0),
}
"""Operator that lets errors pass where a value is above zero -> which inputs are the errors and the value."""


def only_mask(graph: Graph, errors: str) -> tuple[Node, Value] | None:
    """Return the node that alone reads `errors` and lets them pass where a value is above zero, and that value."""
    node = graph.only_consumer(errors)
    if node is None or node.op not in MASKS:
        return None
    first, second = MASKS[node.op]  # type: ignore[index]
    return (node, graph.values[node.inputs[second]]) if node.inputs[first] == errors else None


def masked_by(graph: Graph, errors: str, value: str) -> Node | None:
    """Return the node that alone reads `errors` and lets them pass where `value` is above zero, if there is one."""
    found = only_mask(graph, errors)
    return found[0] if found is not None and found[1].name == value else None
