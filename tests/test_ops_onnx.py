"""ONNX rules of operators: what onnxruntime computes of an export is what the reference kernels compute."""

import graphs
import numpy as np
import pytest

from adam_mpi import nn, ready_models
from adam_mpi.base.errors import UserError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SEQUENCE = {"token": (4, 6), "other": (5, 6), "values": (5, 4)}


def sequences(**options):
    return nn.attention(*[nn.input(shape, name=name) for name, shape in SEQUENCE.items()], **options)


def causal():
    x = nn.input((5, 6))
    return nn.attention(x, nn.relu(x), x, heads=3, causal=True)


def products(first, second, **options):
    return nn.matmul(nn.input(first), nn.input(second, name="other"), **options)


CASES = {
    "layer_norm": lambda: nn.layer_norm(nn.input((3, 5))),
    "group_norm": lambda: nn.group_norm(nn.input((6, 3, 2)), groups=3),
    "group_norm of vectors": lambda: nn.group_norm(nn.input((6,)), groups=2),
    "batch_norm": lambda: nn.batch_norm(nn.input((6, 3, 2))),
    "batch_norm of vectors": lambda: nn.batch_norm(nn.input((6,))),
    "lrn": lambda: nn.lrn(nn.input((6, 3, 2)), scale=0.5),
    "softmax": lambda: nn.softmax(nn.input((6, 3, 2)), axis=0),
    "softmax from the end": lambda: nn.softmax(nn.input((6, 3, 2)), axis=-2),
    "matmul": lambda: products((2, 4, 3), (2, 3, 5)),
    "matmul transposed": lambda: products((3, 4), (5, 3), transpose_first=True, transpose_second=True),
    "attention": lambda: sequences(heads=2),
    "attention causal": causal,
    "embedding": lambda: nn.position_embedding(nn.embedding(nn.input((4,), "integer"), 3, 5)),
    "gelu": lambda: nn.gelu(nn.input((4,))),
    "gelu by tanh": lambda: nn.gelu(nn.input((4,)), form="tanh"),
    "leaky_relu": lambda: nn.leaky_relu(nn.input((4,)), slope=0.1),
    "silu": lambda: nn.silu(nn.input((4,))),
    "absolute": lambda: nn.absolute(nn.input((4,))),
    "minimum": lambda: nn.minimum(nn.input((4,)), nn.input((4,), name="other")),
    "maximum": lambda: nn.maximum(nn.input((4,)), nn.input((4,), name="other")),
    "function of the user": lambda: nn.elementwise(
        lambda x: x * nn.tanh(x) - nn.exp(x) / (1.0 + x * x), nn.input((4,))
    ),
}
MODELS = {
    "gpt": lambda: ready_models.char_gpt(5, 7, 8, 2, 2),
    "clicks": lambda: ready_models.wide_and_deep(3, (3, 4, 5), 2, (6,)),
    "regression": lambda: ready_models.mlp_regression(5, 2),
}


def check(graph):
    from adam_mpi.inference.export import onnx_file, onnx_graph

    weights = graphs.random_weights(graph).astype(np.float32)
    made = onnx.helper.make_model(
        onnx_graph.make(graph, weights, "result"),
        opset_imports=[onnx.helper.make_opsetid("", onnx_file.OPERATORS)],
        ir_version=onnx_file.FORMAT,
    )
    onnx.checker.check_model(made)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feed = graphs.random_feed(graph, 7)
    wanted = graphs.ReferenceExecutor(graph).run(weights, feed, graph.outputs)[graph.outputs[0]]
    given = {part.name: feed[part.name] for part in session.get_inputs()}
    found = session.run(None, {k: v.astype(np.float32) if v.dtype == float else v for k, v in given.items()})[0]
    graphs.near(found, wanted, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_operators(name):
    check(nn.graph(CASES[name]()))


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    check(MODELS[name]())


def test_a_window_that_onnx_puts_elsewhere_is_refused():
    with pytest.raises(UserError, match="lrn1: ONNX puts a window of 4 channels elsewhere"):
        check(nn.graph(nn.lrn(nn.input((6, 3)), size=4)))
