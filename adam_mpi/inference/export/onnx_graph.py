"""The ONNX nodes of a graph, by the ONNX rules of its operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from adam_mpi.model.graph import Graph, Value


class OnnxExport:
    """Collects nodes and constants while the operators of `graph` add theirs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str] | None = None, **attributes: Any) -> str:
        """Add an ONNX node and return the name of its first output; without `outputs` it is a new name."""
        made = list(outputs) if outputs else [f"onnx{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), made, **attributes))
        return made[0]

    def constant(self, values: np.ndarray) -> str:
        """Return the name of an ONNX constant with these `values`."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = values
        return name

    def value(self, name: str) -> Value:
        """Return the value `name` of the graph to export."""
        return self.graph.values[name]

    def rank(self, name: str) -> int:
        """Return how many axes the exported value `name` has, without samples."""
        return len(self.graph.values[name].shape)


def make(graph: Graph, weights: np.ndarray, result: str) -> onnx.GraphProto:
    """Return the ONNX graph that computes the first output of `graph`, under the name `result`, with `weights`.

    Raises MissingRule for an operator without an ONNX rule.
    """
    export = OnnxExport(graph)
    wanted = graph.outputs[0]
    needed = graph.ancestors([wanted])
    for node in graph.nodes:
        if node.name in needed:
            node.op.onnx(export, node.inputs, [value.name for value in node.outputs])
    export.node("Identity", [wanted], [result])
    read = {name for node in export.nodes for name in node.input}
    for parameter in graph.parameters:
        start = graph.offsets[parameter.name]
        if parameter.name in read:
            export.constants[parameter.name] = weights[start : start + parameter.size].reshape(parameter.shape)
    types = {"byte": TensorProto.UINT8, "float": TensorProto.FLOAT, "integer": TensorProto.INT64}
    fed = [value for value in graph.inputs if value.name in read]
    inputs = [helper.make_tensor_value_info(v.name, types[v.dtype], ["samples", *v.shape]) for v in fed]
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, ["samples", *graph.values[wanted].shape])
    kept = [numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in export.constants.items()]
    return helper.make_graph(export.nodes, "adam_mpi", inputs, [output], kept)
