"""Fuse element-wise nodes with their only consumer, where that is element-wise too."""

from dataclasses import replace

from adam_mpi.model import expression
from adam_mpi.model.graph import Graph, Node
from adam_mpi.model.ops.elementwise import Elementwise

LARGEST_INPUTS = 6
"""Values that a fused node reads at most: more would not stay in registers."""


def fuse_elementwise(graph: Graph) -> Graph:
    """Return `graph` with chains of element-wise nodes made one.

    Only values with one consumer that nothing else wants, and of the shape of what is made of them, disappear.
    """
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            producer = graph.producers.get(name)
            if producer is not None and producer.name in nodes and _fits(graph, nodes[producer.name], node, name):
                node = _joined(nodes.pop(producer.name), node, name)
        nodes[node.name] = node
    return replace(graph, nodes=tuple(nodes.values()))


def _fits(graph: Graph, first: Node, second: Node, value: str) -> bool:
    """Return whether `value`, which `first` makes, can disappear into `second`."""
    if not isinstance(first.op, Elementwise) or not isinstance(second.op, Elementwise):
        return False
    if value in graph.wanted or len({node.name for node in graph.consumers(value)}) > 1:
        return False
    made = first.outputs[0]
    result = second.outputs[0]
    inputs = {*first.inputs, *second.inputs} - {value}
    return made.shape == result.shape and made.batched == result.batched and len(inputs) <= LARGEST_INPUTS


def _joined(first: Node, second: Node, value: str) -> Node:
    """Return `second` with `first` computed inside it, under the name of `second`."""
    inputs = list(dict.fromkeys([name for name in (*first.inputs, *second.inputs) if name != value]))
    assert isinstance(first.op, Elementwise)
    assert isinstance(second.op, Elementwise)
    inner = expression.substitute(first.op.expression, _places(first.inputs, inputs))
    table = _places([name if name != value else "" for name in second.inputs], inputs)
    for number, name in enumerate(second.inputs):
        if name == value:
            table[expression.symbol(number)] = inner
    joined = expression.substitute(second.op.expression, table)
    return replace(second, op=replace(second.op, expression=joined), inputs=tuple(inputs))


def _places(names: list[str] | tuple[str, ...], inputs: list[str]) -> dict:
    """Return the symbol of each of `names` -> its symbol among `inputs`."""
    return {
        expression.symbol(number): expression.symbol(inputs.index(name))
        for number, name in enumerate(names)
        if name in inputs
    }
