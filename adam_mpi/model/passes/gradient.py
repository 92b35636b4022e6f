"""Add the way back to a graph: the gradient of the losses with respect to all parameters."""

from collections.abc import Sequence

from adam_mpi.base.errors import UserError
from adam_mpi.model.builder import GraphBuilder
from adam_mpi.model.graph import Graph, Node, Value
from adam_mpi.model.ops.elementwise import total
from adam_mpi.model.ops.seed import Seed


def differentiate(graph: Graph) -> Graph:
    """Return `graph` with the nodes that compute the gradients of its parameters.

    Errors of a value with several consumers are added up by a node. A parameter that several nodes read has several
    gradients, which executors add up. Raises UserError for a graph without loss, MissingRule for an operator without
    gradient rule on a path from a parameter to a loss.
    """
    if not graph.losses:
        raise UserError("the model has no loss; add one, like softmax_cross_entropy of its output and a target")
    tape = GraphBuilder(graph, prefix="d/")
    errors: dict[str, list[Value]] = {}
    for loss in graph.losses:
        errors.setdefault(loss.value, []).append(tape.add(Seed(loss.weight), graph.values[loss.value]))
    learning = _learning(graph)
    for node in reversed(graph.nodes):
        if learning.intersection(node.inputs):
            _back(tape, graph, node, errors, learning)
    found = [(p.name, error.name) for p in graph.parameters for error in errors.get(p.name, ())]
    return tape.graph(graph.outputs, graph.losses, graph.sums, found)


def _back(tape: GraphBuilder, graph: Graph, node: Node, errors: dict[str, list[Value]], learning: set[str]) -> None:
    """Add the nodes that take the errors of the outputs of `node` to its inputs."""
    own = [_accumulated(tape, errors.get(value.name, ())) for value in node.outputs]
    if not any(own):
        return
    inputs = [graph.values[name] for name in node.inputs]
    back = node.op.gradient(tape, inputs, node.outputs, own)
    for value, error in zip(inputs, back, strict=True):
        if error is not None and value.name in learning:
            if error.shape != value.shape:
                raise AssertionError(f"gradient rule of node {node.name}: the error of {value} is {error}")
            errors.setdefault(value.name, []).append(error)


def _accumulated(tape: GraphBuilder, errors: Sequence[Value]) -> Value | None:
    if not errors:
        return None
    return errors[0] if len(errors) == 1 else tape.add(total(len(errors)), *errors)


def _learning(graph: Graph) -> set[str]:
    """Return the values that depend on parameters, and the parameters."""
    found = {parameter.name for parameter in graph.parameters}
    for node in graph.nodes:
        if found.intersection(node.inputs):
            found.update(value.name for value in node.outputs if value.dtype == "float")
    return found
