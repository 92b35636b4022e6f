"""Operators against PyTorch in float64: losses and gradients over generated shapes, and batches of 1 to 67 samples."""

import math

import graphs
import numpy as np
import pytest

from adam_mpi import nn

torch = pytest.importorskip("torch")
F = torch.nn.functional
SHAPES = 20
"""Generated shapes per operator."""


def shifted(shape, name="input", axes=()):
    """Return an input plus a parameter, so that a gradient tells errors of what takes it."""
    return nn.position_embedding(nn.input(shape, name=name, axes=axes), deviation=1.0, name=f"{name}_shifted")


def shift(tensors, parameters, name="input"):
    return tensors[name] + parameters[f"{name}_shifted/weight"]


def case(value, function):
    """Return a graph whose loss compares `value` with a target, and the same for PyTorch, with `function` for value."""
    target = nn.target(shape_of(value), "float")
    graph = nn.graph(value, nn.mean_squared_error(value, target))

    def module(tensors, parameters):
        off = (function(tensors, parameters) - tensors["target"]) ** 2
        return off.reshape(len(off), -1).mean(dim=1).sum()

    return graph, module


def shape_of(value):
    graph = nn.graph(value)
    return graph.values[graph.outputs[0]].shape


def unary(kind, function, positive=False, **values):
    def build(random):
        shape = tuple(random.integers(1, 8, random.integers(1, 4)))
        x = shifted(shape)
        x = nn.elementwise(lambda v: v * v + 0.1, x) if positive else x

        def module(t, p):
            given = shift(t, p)
            return function(given**2 + 0.1 if positive else given)

        return case(getattr(nn, kind)(x, **values), module)

    return build


def binary(kind, function):
    def build(random):
        shape = tuple(random.integers(1, 8, random.integers(1, 4)))
        value = getattr(nn, kind)(shifted(shape), shifted(shape, "other"))
        return case(value, lambda t, p: function(shift(t, p), shift(t, p, "other")))

    return build


def layer_norm(random):
    shape = tuple(random.integers(1, 9, random.integers(1, 4)))

    def module(t, p):
        return F.layer_norm(shift(t, p), shape[-1:], p["norm/weight"], p["norm/bias"], 1e-5)

    return case(nn.layer_norm(shifted(shape), name="norm"), module)


def group_norm(random):
    groups = int(random.integers(1, 5))
    shape = (groups * int(random.integers(1, 4)), *random.integers(1, 6, random.integers(1, 3)))

    def module(t, p):
        return F.group_norm(shift(t, p), groups, p["norm/weight"], p["norm/bias"], 1e-5)

    return case(nn.group_norm(shifted(shape), groups=groups, name="norm"), module)


def batch_norm(random):
    images = int(random.integers(2, 40))
    shape = (int(random.integers(1, 6)), *random.integers(2, 5, random.integers(1, 3)))

    def module(t, p):
        parts = shift(t, p).split(images)
        done = [F.batch_norm(x, None, None, p["norm/weight"], p["norm/bias"], True, 0.1, 1e-5) for x in parts]
        return torch.cat(done)

    return case(nn.batch_norm(shifted(shape), images=images, name="norm"), module)


def local_response_norm(random):
    shape = (int(random.integers(1, 12)), *random.integers(1, 5, 2))
    size = int(random.integers(1, 8))
    value = nn.lrn(shifted(shape), size=size, scale=0.4, offset=1.5, power=0.6)
    return case(value, lambda t, p: F.local_response_norm(shift(t, p), size, 0.4, 0.6, 1.5))


def softmax(random):
    shape = tuple(random.integers(1, 7, random.integers(1, 4)))
    axis = int(random.integers(-len(shape), 0))
    return case(nn.softmax(shifted(shape), axis=axis), lambda t, p: F.softmax(shift(t, p), axis))


def matmul(random):
    rows, depth, columns = random.integers(1, 11, 3)
    lead = tuple(random.integers(1, 4, random.integers(0, 3)))
    first, second = (bool(flag) for flag in random.integers(0, 2, 2))
    left = shifted((*lead, depth, rows) if first else (*lead, rows, depth))
    right = shifted((*lead, columns, depth) if second else (*lead, depth, columns), "other")

    def module(t, p):
        a = shift(t, p)
        b = shift(t, p, "other")
        return (a.mT if first else a) @ (b.mT if second else b)

    return case(nn.matmul(left, right, transpose_first=first, transpose_second=second), module)


def attention(random):
    heads = int(random.integers(1, 4))
    causal = bool(random.integers(0, 2))
    queries, keys, depth, width = random.integers(1, 20, 4)
    keys = queries if causal else keys
    shapes = {"query": (queries, heads * depth), "key": (keys, heads * depth), "value": (keys, heads * width)}
    given = [shifted(shape, name) for name, shape in shapes.items()]

    def module(t, p):
        parts = [shift(t, p, name).unflatten(-1, (heads, -1)).transpose(1, 2) for name in shapes]
        return F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2).flatten(2)

    return case(nn.attention(*given, heads=heads, causal=causal), module)


def embedding(random):
    entries = int(random.integers(3, 20))
    units = int(random.integers(1, 9))
    shape = tuple(random.integers(1, 6, random.integers(0, 3)))
    value = nn.embedding(nn.input(shape, "integer"), entries, units, name="look")
    return case(value, lambda t, p: F.embedding(t["input"], p["look/table"]))


def function_of_the_user(random):
    shape = tuple(random.integers(1, 6, 2))
    value = nn.elementwise(
        lambda x, y: x * nn.tanh(y) - nn.exp(x / (1.0 + y * y)), shifted(shape), shifted(shape, "other")
    )

    def module(t, p):
        x = shift(t, p)
        y = shift(t, p, "other")
        return x * torch.tanh(y) - torch.exp(x / (1.0 + y * y))

    return case(value, module)


def loss_case(shape, targets, build, function):
    """Return a graph with the loss that `build` makes of scores and `targets`, and the same for PyTorch."""
    scores = shifted(shape)
    graph = nn.graph(scores, build(scores, *targets))
    return graph, lambda t, p: function(shift(t, p), t)


def cross_entropy(random):
    classes = int(random.integers(3, 8))
    places = tuple(random.integers(1, 5, random.integers(0, 3)))
    smoothing = float(random.choice([0.0, 0.3]))
    weights = random.uniform(0.2, 2, classes).tolist() if random.integers(2) else []
    ignore = int(random.integers(3)) if random.integers(2) else None

    def module(scores, tensors):
        known = torch.tensor(weights, dtype=torch.float64) if weights else None
        return F.cross_entropy(
            scores.reshape(-1, classes),
            tensors["target"].reshape(-1),
            weight=known,
            ignore_index=-100 if ignore is None else ignore,
            reduction="sum",
            label_smoothing=smoothing,
        ) / math.prod(places)

    def build(scores, target):
        return nn.softmax_cross_entropy(scores, target, smoothing=smoothing, weights=weights, ignore=ignore)

    return loss_case((*places, classes), [nn.target(places)], build, module)


def mixed_cross_entropy(random):
    classes = int(random.integers(3, 8))
    targets = [nn.target(), nn.target(name="target2"), nn.input((), name="weight")]

    def module(scores, t):
        one = F.cross_entropy(scores, t["target"], reduction="none")
        other = F.cross_entropy(scores, t["target2"], reduction="none")
        return (t["weight"] * one + (1 - t["weight"]) * other).sum()

    return loss_case((classes,), targets, nn.mixed_cross_entropy, module)


def soft_cross_entropy(random):
    shape = tuple(random.integers(1, 7, 2))

    def module(scores, t):
        wanted = F.softmax(t["target"], -1)
        return F.cross_entropy(scores.mT, wanted.mT, reduction="sum") / shape[0]

    target = nn.softmax(nn.target(shape, "float"))
    return loss_case(shape, [target], nn.soft_cross_entropy, module)


def loss(kind, function, **values):
    def build(random):
        shape = tuple(random.integers(1, 7, random.integers(1, 3)))

        def module(given, t):
            each = function(given, t["target"])
            return each.reshape(len(each), -1).mean(dim=1).sum()

        def of(scores, target):
            return getattr(nn, kind)(scores, target, **values)

        return loss_case(shape, [nn.target(shape, "float")], of, module)

    return build


CASES = {
    "relu": unary("relu", F.relu),
    "leaky_relu": unary("leaky_relu", lambda x: F.leaky_relu(x, 0.2), slope=0.2),
    "gelu": unary("gelu", F.gelu),
    "gelu by tanh": unary("gelu", lambda x: F.gelu(x, approximate="tanh"), form="tanh"),
    "silu": unary("silu", F.silu),
    "tanh": unary("tanh", torch.tanh),
    "sigmoid": unary("sigmoid", torch.sigmoid),
    "exp": unary("exp", torch.exp),
    "log": unary("log", torch.log, positive=True),
    "sqrt": unary("sqrt", torch.sqrt, positive=True),
    "power": unary("power", lambda x: x**-1.3, positive=True, exponent=-1.3),
    "absolute": unary("absolute", torch.abs),
    "divide": binary("divide", torch.div),
    "subtract": binary("subtract", torch.sub),
    "maximum": binary("maximum", torch.maximum),
    "minimum": binary("minimum", torch.minimum),
    "function of the user": function_of_the_user,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "lrn": local_response_norm,
    "softmax": softmax,
    "matmul": matmul,
    "attention": attention,
    "embedding": embedding,
    "softmax_cross_entropy": cross_entropy,
    "mixed_cross_entropy": mixed_cross_entropy,
    "soft_cross_entropy": soft_cross_entropy,
    "binary_cross_entropy": loss(
        "binary_cross_entropy", lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none")
    ),
    "mean_squared_error": loss("mean_squared_error", lambda x, t: (x - t) ** 2),
    "mean_absolute_error": loss("mean_absolute_error", lambda x, t: (x - t).abs()),
    "huber": loss("huber", lambda x, t: F.huber_loss(x, t, reduction="none", delta=0.6), delta=0.6),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch(name):
    for number in range(SHAPES):
        random = np.random.default_rng(number)
        graph, module = CASES[name](random)
        samples = (1, 67, int(random.integers(2, 67)))[number % 3]
        feed = graphs.random_feed(graph, samples, seed=number)
        weights = graphs.random_weights(graph, number)
        graphs.check_torch(graph, feed, weights, module)
