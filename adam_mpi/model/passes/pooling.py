"""Fuse relu with the max-pooling before or behind it, which gives the same: the largest of what is above zero."""

from dataclasses import replace

from adam_mpi.model.graph import Graph, Node
from adam_mpi.model.ops.masks import RELU
from adam_mpi.model.ops.pool import MaxPool


def fuse_pooling(graph: Graph) -> Graph:
    """Return `graph` with each pair of relu and max-pooling made one node."""
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        before = graph.producers.get(node.inputs[0])
        alone = before is not None and graph.only_consumer(node.inputs[0]) is not None
        if before is not None and alone and before.name in nodes:
            if isinstance(node.op, MaxPool) and before.op == RELU:
                node = replace(node, op=replace(node.op, relu=True), inputs=nodes.pop(before.name).inputs)
            elif node.op == RELU and isinstance(before.op, MaxPool) and not before.op.relu:
                node = _pooled(nodes.pop(before.name), node)
        nodes[node.name] = node
    return replace(graph, nodes=tuple(nodes.values()))


def _pooled(pool: Node, relu: Node) -> Node:
    """Return `relu` computed by the pooling before it."""
    assert isinstance(pool.op, MaxPool)
    winners = replace(pool.outputs[1], name=f"{relu.name}:1")
    return replace(relu, op=replace(pool.op, relu=True), inputs=pool.inputs, outputs=(*relu.outputs, winners))
