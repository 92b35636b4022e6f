"""Describe a model as a graph: named values, parameters, and nodes in topological order. Pure, immutable.

A value has a shape per sample; one that is not `batched` (a parameter, a gradient of a parameter) has it as a whole.
Parameters are values too: the inputs of a node are the names of its data, then those of its parameters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from adam_mpi.base.errors import UserError
from adam_mpi.model.initialization import Initialization

if TYPE_CHECKING:
    from adam_mpi.model.ops.operator import Operator

Shape = tuple[int, ...]
DTYPES = ("float", "integer", "byte")
"""float: of the precision that an executor computes in; integer: int64; byte: uint8."""
KINDS = ("weight", "bias", "table", "statistic")
AXES = {
    1: ("unit",),
    2: ("channel", "column"),
    3: ("channel", "row", "column"),
    4: ("channel", "depth", "row", "column"),
}
"""Rank -> names of the axes where nothing else is known."""


@dataclass(frozen=True)
class Value:
    """Describe a named array: its shape, per sample if it is `batched`, its type, and names of its axes."""

    name: str
    shape: Shape
    dtype: str = "float"
    axes: tuple[str, ...] = ()
    batched: bool = True

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            names = AXES.get(len(self.shape)) or tuple(f"axis{number}" for number in range(len(self.shape)))
            object.__setattr__(self, "axes", names)

    @property
    def size(self) -> int:
        """Return how many numbers it has, per sample if it is batched."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {shape_text(self.shape)}"


@dataclass(frozen=True)
class Parameter:
    """Describe a part of the flat weights: its shape, its initial values, and what it is.

    `kind`: a weight (the first axis is of outputs), a bias, a table (looked up by rows), or a statistic, which is
    averaged over samples and never stepped.
    """

    name: str
    shape: Shape
    init: Initialization = field(default_factory=Initialization)
    kind: str = "weight"

    @property
    def size(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)

    @property
    def layer(self) -> str:
        """Return the name of the node that it was made for."""
        return self.name.rpartition("/")[0]

    @property
    def value(self) -> Value:
        """Return the value that nodes read."""
        return Value(self.name, self.shape, batched=False)


@dataclass(frozen=True)
class Node:
    """Apply `op` to the values named `inputs`, data first and then parameters; it makes `outputs`."""

    name: str
    op: "Operator"
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Loss:
    """Weigh a value, one number per sample, in the objective."""

    value: str
    weight: float = 1.0


@dataclass(frozen=True)
class Graph:
    """A model: what it is fed, its parameters in the order of the flat vector, its nodes, and what is wanted of it."""

    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    """(name, value) of numbers per sample that executors add up over a batch: metrics."""
    gradients: tuple[tuple[str, str], ...] = ()
    """(parameter, value): the gradient of a parameter is the sum of all values that are listed for it."""

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Return all values by name."""
        parts = (self.inputs, (p.value for p in self.parameters), *(node.outputs for node in self.nodes))
        return {value.name: value for part in parts for value in part}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Return the node that makes each value; inputs and parameters have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def _consumers(self) -> Mapping[str, tuple[Node, ...]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def consumers(self, value: str) -> tuple[Node, ...]:
        """Return the nodes that read `value`, once for each time they read it."""
        return self._consumers.get(value, ())

    def only_consumer(self, value: str) -> Node | None:
        """Return the node that alone reads `value`, which nothing else wants; None if there is none such."""
        found = {node.name: node for node in self.consumers(value)}
        return next(iter(found.values())) if len(found) == 1 and value not in self.wanted else None

    @cached_property
    def wanted(self) -> frozenset[str]:
        """Return the values that are read from outside the graph."""
        names = [*self.outputs, *(loss.value for loss in self.losses), *(value for _, value in self.sums)]
        return frozenset([*names, *(value for _, value in self.gradients)])

    @cached_property
    def evaluated(self) -> frozenset[str]:
        """Return the names of the nodes that are computed without training too."""
        names = [*self.outputs, *(loss.value for loss in self.losses), *(value for _, value in self.sums)]
        return self.ancestors(names)

    def ancestors(self, values: Iterable[str]) -> frozenset[str]:
        """Return the names of the nodes that `values` depend on."""
        wanted = set(values)
        found = set()
        for node in reversed(self.nodes):
            if any(value.name in wanted for value in node.outputs):
                found.add(node.name)
                wanted.update(node.inputs)
        return frozenset(found)

    def needs_only(self, value: str, fed: Iterable[str]) -> bool:
        """Return whether `value` depends on no inputs but those in `fed`."""
        nodes = self.ancestors([value])
        read = {name for node in self.nodes if node.name in nodes for name in node.inputs}
        return not {known.name for known in self.inputs}.intersection(read | {value}).difference(fed)

    @property
    def size(self) -> int:
        """Return the length of the flat vector of parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Return where each parameter begins in the flat vector."""
        found: dict[str, int] = {}
        offset = 0
        for parameter in self.parameters:
            found[parameter.name] = offset
            offset += parameter.size
        return found

    def node(self, name: str) -> Node:
        """Return the node `name`; raise UserError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise UserError(f"the model has no node {name!r}; it has {', '.join(node.name for node in self.nodes)}")

    def verify(self) -> "Graph":
        """Return the graph if names are unique, nodes in topological order, shapes as inferred, and losses scalar.

        Raises UserError that names the node and its shapes otherwise.
        """
        known: dict[str, Value] = {}
        for value in [*self.inputs, *(parameter.value for parameter in self.parameters)]:
            _define(known, value, "the inputs and parameters")
        for node in self.nodes:
            _verify_node(node, known)
        for name in self.wanted:
            if name not in known:
                raise UserError(f"the model has no value {name!r}, which is wanted of it; it has {', '.join(known)}")
        for loss in self.losses:
            if known[loss.value].shape or not known[loss.value].batched:
                raise UserError(f"loss {known[loss.value]} is no single number per sample; take its mean or sum first")
        return self


def _define(known: dict[str, Value], value: Value, where: str) -> None:
    if value.name in known:
        raise UserError(f"two values of the model are called {value.name!r}, the second in {where}; rename one")
    known[value.name] = value


def _verify_node(node: Node, known: dict[str, Value]) -> None:
    """Raise UserError unless `node` reads what is known and makes what its shape rule says; add what it makes."""
    for name in node.inputs:
        if name not in known:
            raise UserError(f"node {node.name} reads {name!r}, which no node before it makes; the order is wrong")
    inferred = node.op.infer(node.name, [known[name] for name in node.inputs])
    if [replace(value, name="") for value in node.outputs] != [replace(value, name="") for value in inferred]:
        made = ", ".join(shape_text(value.shape) for value in inferred)
        raise UserError(f"node {node.name} makes {made}, but {', '.join(map(str, node.outputs))} is noted")
    for value in node.outputs:
        _define(known, value, f"node {node.name}")


def shape_text(shape: Iterable[int]) -> str:
    """Return `shape` as text, like 3x32x32; a single number is "scalar"."""
    return "x".join(map(str, shape)) or "scalar"
