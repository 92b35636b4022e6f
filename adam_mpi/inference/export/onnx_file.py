"""Write ONNX: the whole network from pixels to probabilities, so that a user needs nothing but the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from adam_mpi.base.errors import UserError
from adam_mpi.inference.export import onnx_graph
from adam_mpi.inference.trained import INPUT, PROBABILITIES, Trained
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.layers import (
    Activation,
    AvgPool,
    Conv,
    Dense,
    Dropout,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    missing_rule,
)

# Every runtime since 2020 has this operator set, and it has float32 versions of all operators here.
OPERATORS = 13
FORMAT = 7
POINTWISE = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


def write(model: Trained, path: Path) -> None:
    """Export `model` to `path` as ONNX; raise UserError for a layer that ONNX computes in another way."""
    if isinstance(model.shapes, GraphLayers):
        graph = onnx_graph.make(model.shapes.graph, model.weights, PROBABILITIES)
    else:
        graph = _stack(model)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPERATORS)], ir_version=FORMAT)
    helper.set_model_props(made, {"classes": "\n".join(model.names)})
    onnx.checker.check_model(made)
    onnx.save(made, path)


def _stack(model: Trained) -> onnx.GraphProto:
    """Return the graph of a stack of layers."""
    last = model.shapes[-1].name
    constants = {**model.tensors, **_scaling(model)}
    nodes = [
        *_scale_nodes(model),
        *_layer_nodes(model.shapes),
        helper.make_node("Softmax", [last], [PROBABILITIES], axis=1),
    ]
    inner = model.inputs.network_shape(model.config.data.transform)
    pixels = TensorProto.UINT8 if model.inputs.dtype == "uint8" else TensorProto.FLOAT
    return helper.make_graph(
        nodes,
        "adam_mpi",
        [helper.make_tensor_value_info(INPUT, pixels, ["images", *inner])],
        [helper.make_tensor_value_info(PROBABILITIES, TensorProto.FLOAT, ["images", model.inputs.classes])],
        [numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in constants.items()],
    )


def _scaling(model: Trained) -> dict[str, np.ndarray]:
    """Return mean and factor for the ONNX nodes that bring pixels to 0 to 1, or normalized inputs to deviation 1."""
    if model.inputs.mean:
        mean = np.array(model.inputs.mean, np.float32)
        factor = np.array(model.inputs.factor, np.float32)
    else:
        mean = np.zeros(1, np.float32)
        factor = np.full(1, 1 / 255 if model.inputs.dtype == "uint8" else 1, np.float32)
    return {"mean": mean[:, None, None], "factor": factor[:, None, None]}


def _scale_nodes(model: Trained) -> Iterator[onnx.NodeProto]:
    """Yield the ONNX nodes that bring the input to what the first layer takes."""
    yield helper.make_node("Cast", [INPUT], ["numbers"], to=TensorProto.FLOAT)
    yield helper.make_node("Sub", ["numbers", "mean"], ["centered"])
    yield helper.make_node("Mul", ["centered", "factor"], ["scaled"])


def _layer_nodes(shapes: tuple[LayerShape, ...]) -> Iterator[onnx.NodeProto]:
    """Yield the ONNX nodes of all layers; the first dense layer has its input flattened."""
    before = "scaled"
    flat = False
    for shape in shapes:
        if isinstance(shape.layer, Dense) and not flat:
            yield helper.make_node("Flatten", [before], ["flat"], axis=1)
            before = "flat"
            flat = True
        yield _node(shape, before)
        before = shape.name


def _node(shape: LayerShape, before: str) -> onnx.NodeProto:
    """Return the ONNX node of one layer, whose input is the value `before`."""
    layer = shape.layer
    name = shape.name
    weights = [before, f"{name}/weight", f"{name}/bias"]
    if isinstance(layer, Conv):
        sides: dict[str, Any] = {"kernel_shape": [layer.kernel] * 2, "strides": [layer.stride] * 2}
        sides["pads"] = [layer.pad] * 4
        return helper.make_node("Conv", weights, [name], **sides)
    if isinstance(layer, Dense):
        return helper.make_node("Gemm", weights, [name], transB=1)
    if isinstance(layer, MaxPool):
        kind = "AveragePool" if isinstance(layer, AvgPool) else "MaxPool"
        return helper.make_node(kind, [before], [name], kernel_shape=[layer.size] * 2, strides=[layer.stride] * 2)
    if isinstance(layer, LocalResponseNorm):
        if layer.size % 2 == 0:
            raise UserError(f"{name}: ONNX puts a window of {layer.size} channels elsewhere; take an odd size, or npz")
        numbers: dict[str, Any] = {"size": layer.size, "bias": layer.offset, "alpha": layer.scale, "beta": layer.power}
        return helper.make_node("LRN", [before], [name], **numbers)
    if isinstance(layer, Activation) and layer.function in POINTWISE:
        return helper.make_node(POINTWISE[layer.function], [before], [name])
    if isinstance(layer, Dropout):
        # Dropout does nothing outside of training.
        return helper.make_node("Identity", [before], [name])
    raise missing_rule(layer, "ONNX rule (_node in inference/export/onnx_file.py)")
