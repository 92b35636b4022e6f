"""Merge nodes that compute the same, and drop what nothing depends on."""

from dataclasses import replace

from adam_mpi.model.graph import Graph, Loss, Node


def simplify(graph: Graph) -> Graph:
    """Return `graph` with common subexpressions merged and dead nodes dropped."""
    return drop_dead(merge_common(graph))


def merge_common(graph: Graph) -> Graph:
    """Return `graph` with one node of all that apply the same operator to the same values.

    Operators that draw random numbers differ by the name that they are keyed with.
    """
    known: dict[tuple, Node] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        inputs = tuple(renamed.get(name, name) for name in node.inputs)
        same = known.setdefault((node.op, inputs), node)
        if same is node:
            nodes.append(replace(node, inputs=inputs))
        renamed.update({a.name: b.name for a, b in zip(node.outputs, same.outputs, strict=True) if a.name != b.name})
    return _renamed(replace(graph, nodes=tuple(nodes)), renamed)


def _renamed(graph: Graph, renamed: dict[str, str]) -> Graph:
    """Return `graph` with the values that are wanted of it under their new names."""
    return replace(
        graph,
        outputs=tuple(renamed.get(name, name) for name in graph.outputs),
        losses=tuple(Loss(renamed.get(loss.value, loss.value), loss.weight) for loss in graph.losses),
        sums=tuple((name, renamed.get(value, value)) for name, value in graph.sums),
        gradients=tuple((name, renamed.get(value, value)) for name, value in graph.gradients),
    )


def drop_dead(graph: Graph) -> Graph:
    """Return `graph` without the nodes, and the parameters, that nothing wanted depends on."""
    alive = graph.ancestors(graph.wanted)
    nodes = tuple(node for node in graph.nodes if node.name in alive)
    read = {name for node in nodes for name in node.inputs}
    parameters = tuple(parameter for parameter in graph.parameters if parameter.name in read)
    return replace(graph, nodes=nodes, parameters=parameters)
