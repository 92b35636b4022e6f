"""Ready models that are built in Python against equal ones of PyTorch: gradients to 1e-9, and 1e-4 compiled."""

import graphs
import numpy as np
import pytest

from adam_mpi import ready_models
from adam_mpi.config.training_sections import Model
from adam_mpi.model.frontends import configured
from adam_mpi.model.input_format import InputFormat

torch = pytest.importorskip("torch")
F = torch.nn.functional


def dense(x, p, name):
    return F.linear(x, p[f"{name}/weight"], p.get(f"{name}/bias"))


def norm(x, p, name):
    return F.layer_norm(x, x.shape[-1:], p[f"{name}/weight"], p[f"{name}/bias"])


def regression(t, p):
    x = F.relu(dense(F.relu(dense(t["input"], p, "dense1")), p, "dense2"))
    return ((dense(x, p, "dense3") - t["target"]) ** 2).mean(dim=1).sum()


def gpt(heads, layers):
    def module(t, p):
        x = F.embedding(t["input"], p["tokens/table"]) + p["positions/weight"]
        for number in range(1, layers + 1):
            name = f"block{number}."
            y = norm(x, p, f"{name}norm1")
            parts = [
                dense(y, p, name + part).unflatten(-1, (heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            ]
            y = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
            x = x + dense(y, p, f"{name}projection")
            y = F.gelu(dense(norm(x, p, f"{name}norm2"), p, f"{name}inner"), approximate="tanh")
            x = x + dense(y, p, f"{name}outer")
        scores = dense(norm(x, p, "norm"), p, "head")
        return F.cross_entropy(scores.flatten(0, 1), t["target"].flatten(), reduction="sum") / scores.shape[1]

    return module


def clicks(categories, hidden):
    def module(t, p):
        parts = t["categories"].unbind(1)
        wide = dense(t["input"], p, "wide") + sum(
            F.embedding(part, p[f"wide{n}/table"]) for n, part in enumerate(parts[:categories])
        )
        x = torch.cat([t["input"], *(F.embedding(part, p[f"deep{n}/table"]) for n, part in enumerate(parts))], dim=1)
        for number in range(hidden):
            x = F.relu(dense(x, p, f"hidden{number}"))
        return F.binary_cross_entropy_with_logits(wide + dense(x, p, "deep"), t["target"], reduction="sum")

    return module


SMALL = {
    "regression": (lambda: ready_models.mlp_regression(5, 2, (7, 6)), regression),
    "gpt": (lambda: ready_models.char_gpt(5, 7, 8, 2, 2), gpt(2, 2)),
    "clicks": (lambda: ready_models.wide_and_deep(3, (3, 4, 5), 2, (6,)), clicks(3, 1)),
}
WHOLE = {
    "regression": (ready_models.mlp_regression, regression),
    "gpt": (ready_models.char_gpt, gpt(4, 4)),
    "clicks": (ready_models.wide_and_deep, clicks(8, 2)),
}


def some_weights(graph):
    return graphs.random_weights(graph) * 0.3


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_gradients_of_pytorch(name):
    build, module = SMALL[name]
    graph = build()
    feed = graphs.random_feed(graph, 5)
    weights = some_weights(graph)
    graphs.check_torch(graph, feed, weights, module)
    graphs.check_emitted(graph, feed, weights, tolerance=1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_models_have_the_gradients_of_pytorch(name):
    build, module = WHOLE[name]
    graph = build()
    graphs.check_torch(graph, graphs.random_feed(graph, 3), some_weights(graph), module)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WHOLE)
def test_compiled_models_have_their_gradients_too(name):
    graph = WHOLE[name][0]()
    feed = graphs.random_feed(graph, 17)
    graphs.check_emitted(graph, feed, some_weights(graph), tolerance=1e-4, compiled=True)


def test_dropout_stands_where_it_is_asked_for():
    graph = ready_models.char_gpt(5, 4, 8, 2, 2, dropout=0.1)
    assert sum(node.name.startswith("dropout") for node in graph.nodes) == 5
    executor = graphs.ReferenceExecutor(graph)
    assert np.isfinite(graphs.gradient_of(executor, some_weights(graph), graphs.random_feed(graph, 2))[1]["loss"])


def test_a_list_of_layers_describes_the_same():
    width = 8
    dense = {"kind": "dense", "units": width}
    block = [
        {"kind": "layer_norm", "name": "norm1"},
        *(dense | {"name": part, "inputs": ["norm1"]} for part in ("query", "key", "value")),
        {"kind": "attention", "heads": 2, "causal": True, "inputs": ["query", "key", "value"]},
        dense | {"name": "projection"},
        {"kind": "add", "inputs": ["input", "projection"], "name": "middle"},
        {"kind": "layer_norm", "name": "norm2"},
        {"kind": "dense", "units": 4 * width, "name": "inner"},
        {"kind": "gelu", "form": "tanh"},
        dense | {"name": "outer"},
        {"kind": "add", "inputs": ["middle", "outer"]},
    ]
    layers = [
        {"kind": "embedding", "entries": 5, "units": width, "name": "tokens"},
        {"kind": "position_embedding", "name": "positions"},
        {"repeat": 2, "name": "block", "layers": block},
        {"kind": "layer_norm", "name": "norm"},
        {"kind": "dense", "units": 5, "bias": False, "name": "head"},
    ]
    listed = configured.infer(Model(layers=layers), (7,), 5, InputFormat("int64")).graph
    built = ready_models.char_gpt(5, 7, width, 2, 2)
    assert listed.parameters == built.parameters
    feed = graphs.random_feed(built, 3)
    one, other = (graphs.gradient_of(graphs.ReferenceExecutor(g), some_weights(built), feed) for g in (listed, built))
    np.testing.assert_array_equal(one[0], other[0])
    assert one[1] == other[1]
