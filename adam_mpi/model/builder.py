"""Build a graph node by node: names are made unique, shapes inferred, parameters made."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adam_mpi.base.errors import UserError
from adam_mpi.model.graph import Graph, Loss, Node, Parameter, Value
from adam_mpi.model.ops.operator import Composite, Operator


class GraphBuilder:
    """Collects inputs, parameters and nodes; with `graph` it begins with those of that graph.

    `prefix` precedes the names of nodes that are given none.
    """

    def __init__(self, graph: Graph | None = None, prefix: str = "") -> None:
        self.inputs: list[Value] = list(graph.inputs) if graph else []
        self.parameters: dict[str, Parameter] = {p.name: p for p in graph.parameters} if graph else {}
        self.nodes: list[Node] = list(graph.nodes) if graph else []
        self.values: dict[str, Value] = dict(graph.values) if graph else {}
        self.names = {node.name for node in self.nodes}
        self.numbers: Counter[str] = Counter()
        self.prefix = prefix

    def input(self, value: Value) -> Value:
        """Add an input; raise UserError if its name is taken."""
        if value.name in self.values:
            raise UserError(f"two inputs of the model are called {value.name!r}; rename one")
        self.inputs.append(value)
        self.values[value.name] = value
        return value

    def add(self, op: Operator, *inputs: Value) -> Value:
        """Add a node without parameters and return its only output."""
        return self.apply(op, inputs)[0]

    def layer(
        self, op: Operator, inputs: Sequence[Value], name: str = "", parameters: Sequence[str] | None = None
    ) -> tuple[Value, ...]:
        """Add a node as `apply` does, for a front end: inputs are adapted first to what the operator takes."""
        return self.apply(op, op.adapted(self, inputs), name, parameters)

    def apply(
        self, op: Operator, inputs: Sequence[Value], name: str = "", parameters: Sequence[str] | None = None
    ) -> tuple[Value, ...]:
        """Add a node that applies `op` to the data `inputs`; return its outputs.

        `parameters` are names of existing ones, which the node shares; without them it has its own.
        """
        node_name = self._free(name, op)
        op = op.bound(node_name, inputs)
        if op.data_inputs is not None and len(inputs) != op.data_inputs:
            raise UserError(f"node {node_name} takes {op.data_inputs} values, but {len(inputs)} are given")
        own = self._parameters(op, node_name, inputs, parameters)
        if isinstance(op, Composite):
            return self._compose(op, node_name, inputs, own)
        return self.call(op, inputs, own, node_name)

    def call(
        self, op: Operator, inputs: Sequence[Value], parameters: Sequence[Value], name: str = ""
    ) -> tuple[Value, ...]:
        """Add a node that applies `op` to data `inputs` and `parameters`, which are values; return its outputs."""
        name = name or self._free("", op)
        read = [*inputs, *parameters]
        op = op.bound(name, read)
        made = op.infer(name, read)
        # The first output is called as the node is, so that it is found by that name.
        ends = ["", *(f":{number}" for number in range(1, len(made)))]
        outputs = tuple(replace(value, name=name + end) for value, end in zip(made, ends, strict=True))
        self.append(Node(name, op, tuple(value.name for value in read), outputs))
        return outputs

    def _compose(
        self, op: Composite, name: str, inputs: Sequence[Value], parameters: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Add the nodes of a composite operator, the last one under its `name`."""
        prefix = self.prefix
        self.prefix = f"{name}."
        try:
            outputs = tuple(op.build(self, inputs, parameters))
        except ValueError as error:
            given = ", ".join(map(str, inputs))
            raise UserError(f"node {name} ({op.kind}) of {given}: {error}") from None
        self.prefix = prefix
        last = self.nodes[-1]
        if last.outputs[0].name != outputs[0].name or not last.name.startswith(f"{name}."):
            return outputs
        renamed = tuple(replace(value, name=name + value.name[len(last.name) :]) for value in last.outputs)
        self.nodes.pop()
        self.append(replace(last, name=name, outputs=renamed))
        return renamed[: len(outputs)]

    def append(self, node: Node) -> None:
        """Add `node` as it is."""
        self.nodes.append(node)
        self.names.add(node.name)
        self.values.update({value.name: value for value in node.outputs})

    def _parameters(
        self, op: Operator, node: str, inputs: Sequence[Value], shared: Sequence[str] | None
    ) -> list[Value]:
        """Return the parameters of a node: new ones, or those called `shared` if they have the right shapes."""
        try:
            wanted = op.parameters(inputs)
        except ValueError as error:
            given = ", ".join(map(str, inputs))
            raise UserError(f"node {node} ({op.kind or type(op).__name__}) of {given}: {error}") from None
        if shared is None:
            own = [replace(parameter, name=f"{node}/{parameter.name}") for parameter in wanted]
            self.parameters.update({parameter.name: parameter for parameter in own})
            self.values.update({parameter.name: parameter.value for parameter in own})
            return [parameter.value for parameter in own]
        known = [self.parameters[name] for name in shared]
        if [parameter.shape for parameter in known] != [parameter.shape for parameter in wanted]:
            there = ", ".join(str(parameter.value) for parameter in known)
            needed = ", ".join(str(parameter.value) for parameter in wanted)
            raise UserError(f"node {node} needs {needed}, but shares {there}; share between inputs of equal shapes")
        return [parameter.value for parameter in known]

    def _free(self, name: str, op: Operator) -> str:
        """Return the name of a node: the one that is given, or a new one after the operator's kind."""
        if name:
            if name in self.values or name in self.names:
                raise UserError(f"two nodes of the model are called {name!r}; rename one")
            return name
        stem = self.prefix + op.stem()
        while True:
            self.numbers[stem] += 1
            made = f"{stem}{self.numbers[stem]}"
            if made not in self.values and made not in self.names:
                return made

    def graph(
        self,
        outputs: Sequence[str] = (),
        losses: Sequence[Loss] = (),
        sums: Sequence[tuple[str, str]] = (),
        gradients: Sequence[tuple[str, str]] = (),
    ) -> Graph:
        """Return what was built, verified."""
        return Graph(
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters.values()),
            nodes=tuple(self.nodes),
            outputs=tuple(outputs),
            losses=tuple(losses),
            sums=tuple(sums),
            gradients=tuple(gradients),
        ).verify()
