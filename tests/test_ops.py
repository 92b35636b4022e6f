"""Every operator: gradients by finite differences, emitted kernels by reference kernels, both by PyTorch."""

import graphs
import numpy as np
import pytest

from adam_mpi import nn
from adam_mpi.base.errors import UserError
from adam_mpi.model.ops.operator import REGISTRY, MissingRule


def squares(*values):
    """Return a graph whose loss is the mean square of each value, with weights that tell places apart."""
    losses = []
    for value in values:
        flat = nn.dense(nn.flatten(value), 3, name=f"end{len(losses)}")
        losses.append(nn.mean(nn.elementwise(lambda x: x * x, flat)))
    return nn.graph(values, losses)


def mixed(shape, axes=(), name="input"):
    """Return a value of `shape` that depends on weights, so that errors go back through what takes it."""
    x = nn.input(shape, name=name, axes=axes)
    size = int(np.prod(shape))
    return nn.reshape(nn.dense(nn.flatten(x), size, name=f"begin_{name}"), list(shape))


def unary(kind, positive=False, **values):
    """Return a graph with the element-wise operator `kind`."""
    x = mixed((2, 3))
    if positive:
        x = nn.elementwise(lambda v: v * v + 0.5, x)
    return squares(getattr(nn, kind)(x, **values))


def binary(kind):
    return squares(getattr(nn, kind)(mixed((2, 3)), nn.scale(nn.sigmoid(mixed((2, 3), name="other")), offset=0.5)))


def conv(shape, channels, kernel, **values):
    return squares(nn.conv(mixed(shape), channels, kernel, **values))


def loss_of(kind, shape=(4,), **values):
    z = nn.dense(nn.input(shape), 3)
    return nn.graph(z, getattr(nn, kind)(z, nn.target((3,), "float"), **values))


def cross_entropy(shape, classes_first=False, **values):
    scores = mixed(shape)
    places = shape[1:] if classes_first else shape[:-1]
    target = nn.target(places)
    loss = nn.softmax_cross_entropy(scores, target, **values)
    return nn.graph(scores, loss, {"correct": nn.correct(scores, target)})


def matmul(first, second, **values):
    return squares(nn.matmul(mixed(first), mixed(second, name="other"), **values))


def attention(queries, keys, values, **options):
    given = [mixed(shape, name=name) for shape, name in ((queries, "query"), (keys, "key"), (values, "value"))]
    return squares(nn.attention(*given, **options))


def mixed_cross_entropy(**values):
    scores = mixed((3,))
    targets = [nn.target(name=name) for name in ("target", "target2")]
    return nn.graph(scores, nn.mixed_cross_entropy(scores, *targets, nn.input((), name="weight"), **values))


def soft_cross_entropy(shape):
    scores = mixed(shape)
    return nn.graph(scores, nn.soft_cross_entropy(scores, nn.softmax(nn.target(shape, "float"))))


def among_the_first(top):
    scores = mixed((4,))
    target = nn.target()
    loss = nn.softmax_cross_entropy(scores, target)
    return nn.graph(scores, loss, {"correct": nn.correct(scores, target, top=top)})


def upsample(shape, **values):
    return squares(nn.upsample(mixed(shape), **values))


def gather(places, rows=4):
    index = nn.input(places, "integer", name="index")
    return squares(nn.gather(mixed((rows, 3)), index))


def segment_sum(shape, places, segments):
    index = nn.input(places, "integer", name="index")
    return squares(nn.segment_sum(mixed(shape), index, segments))


def recurrent(kind, length=3, **values):
    return squares(getattr(nn, kind)(mixed((length, 4), axes=("token", "unit")), 5, **values))


CASES = {
    "relu": lambda: unary("relu"),
    "tanh": lambda: unary("tanh"),
    "sigmoid": lambda: unary("sigmoid"),
    "gelu": lambda: unary("gelu"),
    "gelu by tanh": lambda: unary("gelu", form="tanh"),
    "maximum": lambda: binary("maximum"),
    "minimum": lambda: binary("minimum"),
    "silu": lambda: unary("silu"),
    "exp": lambda: unary("exp"),
    "log": lambda: unary("log", positive=True),
    "sqrt": lambda: unary("sqrt", positive=True),
    "absolute": lambda: unary("absolute"),
    "leaky_relu": lambda: unary("leaky_relu", slope=0.1),
    "power": lambda: unary("power", positive=True, exponent=1.7),
    "scale": lambda: unary("scale", factor=-2.0, offset=0.5),
    "subtract": lambda: binary("subtract"),
    "divide": lambda: binary("divide"),
    "add": lambda: squares(nn.add(mixed((2, 3)), mixed((1, 3), name="other"), mixed((2, 1), name="third"))),
    "multiply": lambda: binary("multiply"),
    "concat": lambda: squares(nn.concat(mixed((2, 2, 3)), mixed((2, 4, 3), name="other"), axis=1)),
    "slice": lambda: squares(nn.slice(mixed((3, 5, 2)), 1, 4, axis=1)),
    "pad": lambda: squares(nn.pad(mixed((2, 3)), 1, 2, axis=-1)),
    "reshape": lambda: squares(nn.relu(nn.reshape(mixed((2, 6)), [3, -1]))),
    "flatten": lambda: squares(nn.relu(nn.flatten(mixed((2, 3, 2))))),
    "transpose": lambda: squares(nn.transpose(mixed((2, 3, 4)), [2, 0, 1])),
    "sum": lambda: squares(nn.sum(mixed((2, 3, 4)), axes=[0, 2])),
    "mean": lambda: squares(nn.mean(mixed((2, 3, 4)), axes=[-1], keep=True)),
    "softmax": lambda: squares(nn.softmax(mixed((2, 4)))),
    "softmax of channels": lambda: squares(nn.softmax(mixed((3, 2, 2)), axis=0)),
    "softmax in the middle": lambda: squares(nn.softmax(mixed((2, 3, 2)), axis=-2)),
    "matmul": lambda: matmul((2, 5, 3), (2, 3, 6)),
    "matmul transposed first": lambda: matmul((3, 5), (3, 4), transpose_first=True),
    "matmul transposed second": lambda: matmul((3, 5), (4, 5), transpose_second=True),
    "matmul transposed both": lambda: matmul((3, 5), (7, 3), transpose_first=True, transpose_second=True),
    "attention": lambda: attention((5, 6), (7, 6), (7, 4), heads=2),
    "attention causal": lambda: attention((6, 4), (6, 4), (6, 8), heads=2, causal=True),
    "attention of many queries": lambda: attention((19, 3), (19, 3), (19, 2), causal=True),
    "embedding": lambda: squares(nn.embedding(nn.input((4,), "integer"), 3, 5)),
    "embedding of categories": lambda: squares(nn.embedding(nn.input((), "integer"), 4, 3)),
    "position_embedding": lambda: squares(nn.position_embedding(mixed((3, 2)))),
    "dropout": lambda: squares(nn.dropout(mixed((2, 3)), 0.0)),
    "dense": lambda: squares(nn.dense(mixed((3, 5), axes=("token", "unit")), 9)),
    "conv": lambda: conv((2, 5, 6), 3, 3, pad=1),
    "conv strided": lambda: conv((2, 7, 6), 3, [3, 2], stride=[2, 3], pad=[2, 0, 1, 1]),
    "conv dilated": lambda: conv((2, 7, 8), 2, [2, 3], dilation=[3, 2], pad=2, stride=2),
    "conv groups": lambda: conv((4, 4, 4), 6, 2, groups=2, bias=False),
    "conv depthwise": lambda: conv((5, 4, 4), 5, 3, groups=5, pad=1),
    "conv 1-D": lambda: conv((3, 9), 4, 3, stride=2, pad=1),
    "conv 3-D": lambda: conv((2, 3, 4, 3), 2, 2, pad=1),
    "conv_transpose": lambda: squares(nn.conv_transpose(mixed((2, 3, 4)), 3, 3, stride=2, pad=1, more=1)),
    "max_pool": lambda: squares(nn.max_pool(mixed((2, 5, 6)), 2)),
    "max_pool overlapping": lambda: squares(nn.max_pool(mixed((2, 6, 5)), 3, stride=2, pad=1)),
    "avg_pool": lambda: squares(nn.avg_pool(mixed((2, 5, 6)), [2, 3], stride=2, pad=1)),
    "avg_pool counting": lambda: squares(nn.avg_pool(mixed((2, 4, 4)), 3, stride=1, pad=1, count_pad=True)),
    "global_avg_pool": lambda: squares(nn.global_avg_pool(mixed((3, 4, 2)))),
    "layer_norm": lambda: squares(nn.layer_norm(mixed((3, 7)))),
    "layer_norm of one number": lambda: squares(nn.layer_norm(mixed((4, 1)))),
    "group_norm": lambda: squares(nn.group_norm(mixed((6, 3, 2)), groups=3)),
    "group_norm of vectors": lambda: squares(nn.group_norm(mixed((6,)), groups=2, epsilon=0.1)),
    "batch_norm": lambda: squares(nn.batch_norm(mixed((3, 2, 2)))),
    "batch_norm in small groups": lambda: squares(nn.batch_norm(mixed((3,)), images=3)),
    "lrn": lambda: squares(nn.lrn(mixed((7, 2, 2)), scale=0.3)),
    "lrn even": lambda: squares(nn.lrn(mixed((5, 3)), size=4, scale=0.5, offset=1.0, power=0.6)),
    "max_pool 1-D": lambda: squares(nn.max_pool(mixed((3, 9)), 3, stride=2, pad=1)),
    "avg_pool 3-D": lambda: squares(nn.avg_pool(mixed((2, 4, 3, 4)), 2, stride=[2, 1, 2], pad=[1, 0, 0, 0, 1, 1])),
    "global_max_pool": lambda: squares(nn.global_max_pool(mixed((3, 4, 2)))),
    "upsample": lambda: upsample((2, 3, 2), factor=[2, 3]),
    "upsample 1-D": lambda: upsample((2, 5)),
    "upsample bilinear": lambda: upsample((2, 3, 4), factor=[3, 2], mode="bilinear"),
    "upsample bilinear 3-D": lambda: upsample((1, 2, 1, 3), mode="bilinear"),
    "split": lambda: squares(*nn.split(mixed((3, 5)), [1, 3, 1], axis=1)),
    "split in part": lambda: squares(nn.split(mixed((6, 2)), 3)[1]),
    "gather": lambda: gather((5,)),
    "gather table": lambda: gather((2, 3)),
    "segment_sum": lambda: segment_sum((5, 2), (5,), 3),
    "segment_sum of several axes": lambda: segment_sum((2, 3, 2), (2, 3), 4),
    "lstm": lambda: recurrent("lstm"),
    "lstm bidirectional": lambda: recurrent("lstm", depth=2, bidirectional=True),
    "lstm last": lambda: recurrent("lstm", depth=2, bidirectional=True, last=True),
    "gru": lambda: recurrent("gru", depth=2),
    "gru of one step": lambda: recurrent("gru", length=1, last=True),
    "mean_squared_error": lambda: loss_of("mean_squared_error"),
    "mean_absolute_error": lambda: loss_of("mean_absolute_error"),
    "huber": lambda: loss_of("huber", delta=0.7),
    "binary_cross_entropy": lambda: loss_of("binary_cross_entropy"),
    "softmax_cross_entropy": lambda: cross_entropy((3,)),
    "softmax_cross_entropy smoothed": lambda: cross_entropy((2, 3), smoothing=0.1),
    "softmax_cross_entropy of maps": lambda: cross_entropy((3, 2, 2), classes_first=True),
    "softmax_cross_entropy weighed": lambda: cross_entropy((2, 3), smoothing=0.2, weights=[0.5, 2.0, 1.5]),
    "softmax_cross_entropy with a label that is ignored": lambda: cross_entropy((4, 3), ignore=1),
    "mixed_cross_entropy": lambda: mixed_cross_entropy(smoothing=0.1),
    "soft_cross_entropy": lambda: soft_cross_entropy((4,)),
    "soft_cross_entropy of a sequence": lambda: soft_cross_entropy((2, 3)),
    "correct": lambda: cross_entropy((3,)),
    "correct among the first two": lambda: among_the_first(2),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_emitted_kernels(name):
    graphs.check(CASES[name]())


def test_every_operator_is_checked():
    assert {name.partition(" ")[0] for name in CASES} >= set(REGISTRY)


@pytest.mark.parametrize("samples", [1, 3, 4, 9])
def test_batches_of_any_size(samples):
    x = nn.input((2, 4, 4), "byte", mean=[0.4, 0.5], deviation=[0.2, 0.3])
    y = nn.relu(nn.conv(x, 3, 3, pad=1))
    z = nn.dense(nn.max_pool(nn.add(y, nn.conv(y, 3, 1)), 2), 3)
    target = nn.target()
    graph = nn.graph(z, nn.softmax_cross_entropy(z, target), {"correct": nn.correct(z, target)})
    graphs.check(graph, samples)


def test_batches_larger_than_a_pass():
    z = nn.dense(nn.tanh(nn.dense(nn.input((3,)), 4)), 3)
    graphs.check(nn.graph(z, nn.softmax_cross_entropy(z, nn.target())), samples=150)


def test_a_function_of_the_users_own_is_one_node():
    x = mixed((4,))
    y = nn.elementwise(lambda a, b: a * nn.tanh(b) + nn.maximum(a, 0.3), x, nn.dense(x, 4))
    graph = squares(y)
    assert sum(node.name.startswith("elementwise") for node in graph.nodes) == 2
    graphs.check(graph)


def test_dropout_depends_on_seed_epoch_sample_name_and_unit_alone():
    graph = squares(nn.dropout(mixed((3, 4)), 0.5))
    feed = graphs.random_feed(graph, 6)
    weights = graphs.random_weights(graph)
    graphs.check_emitted(graph, feed, weights)
    from adam_mpi.model.executors.reference import ReferenceExecutor

    executor = ReferenceExecutor(graph, seed=3, dtype=np.float64)
    first = graphs.gradient_of(executor, weights, feed)[0]
    np.testing.assert_array_equal(first, graphs.gradient_of(executor, weights, feed)[0])
    assert np.abs(first - graphs.gradient_of(executor, weights, feed, epoch=1)[0]).max() > 1e-3
    halves = [
        graphs.gradient_of(executor, weights, {name: array[part] for name, array in feed.items()})[0]
        for part in (slice(0, 6),)
    ]
    np.testing.assert_allclose(first, halves[0])


def test_a_missing_rule_names_operator_and_rule():
    scores = mixed((3,))
    graph = nn.graph(scores, nn.correct(scores, nn.target()))
    with pytest.raises(MissingRule, match="operator correct has no gradient rule"):
        graphs.check_gradient(graph, graphs.random_feed(graph, 2), graphs.random_weights(graph))


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: nn.conv(nn.input((3, 4, 4)), 2, 7), r"node conv1 \(conv\) of input 3x4x4: a window of 7 does not fit"),
        (lambda: nn.conv(nn.input((3, 4, 4)), 2, 2, groups=2), "do not divide into 2 groups"),
        (lambda: nn.conv(nn.input((3, 4, 4)), 2, 2, pad=2), "a pad as wide as the window"),
        (lambda: nn.add(nn.input((3, 4)), nn.input((3, 5), name="b")), r"node add1 \(.*\) of input 3x4, b 3x5: shapes"),
        (lambda: nn.concat(nn.input((3, 4)), nn.input((2, 5), name="b")), "node concat1 .* do not meet"),
        (lambda: nn.mean_squared_error(nn.input((3,)), nn.target((4,), "float")), "prediction 3 and target 4"),
        (lambda: nn.dense(nn.input((3,), "integer"), 4), "integer"),
        (lambda: nn.matmul(nn.input((3, 4)), nn.input((3, 4), name="b")), "3x4 and 3x4 do not meet: 4 columns and 3"),
        (lambda: nn.attention(*[nn.input((3, 5), name=n) for n in "abc"], heads=2), "do not divide into 2 heads"),
        (lambda: nn.attention(*[nn.input((len(n), 4), name=n) for n in ("a", "bb", "cc")], causal=True), "do not meet"),
        (lambda: nn.embedding(nn.input((3,)), 4, 2), "an embedding looks up integers"),
        (lambda: nn.embedding(nn.input((3,), "integer"), 1 << 25, 2), "entries is too large; 16777216 are allowed"),
        (lambda: nn.softmax(nn.input((3,)), axis=1), "axis 1 does not exist; there are 1 axes"),
        (lambda: nn.soft_cross_entropy(nn.input((3,)), nn.target((4,), "float")), "scores 3 and target 4 do not meet"),
        (lambda: nn.softmax_cross_entropy(nn.input((3,)), nn.target(), weights=[1.0]), "1 class weights .* 3 classes"),
    ],
)
def test_shapes_that_do_not_meet(build, message):
    with pytest.raises(UserError, match=message):
        nn.graph(build())


def test_of_equal_scores_the_first_is_the_larger_and_ignored_places_do_not_count():
    scores = nn.input((4, 3))
    target = nn.target((4,))
    graph = nn.graph(scores, (), {"correct": nn.correct(scores, target, ignore=-1)})
    feed = {"input": np.zeros((2, 4, 3)), "target": np.array([[0, 1, -1, 0], [-1, -1, -1, -1]])}
    emitted = graphs.GeneratedExecutor(graph, 2, compiled=False, lanes=4)
    for executor in (graphs.ReferenceExecutor(graph), emitted):
        assert executor.evaluate(np.zeros(0, np.float32), feed)["correct"] == pytest.approx(2 / 3)


def test_an_entry_that_a_table_lacks_is_named_or_makes_nan():
    value = nn.embedding(nn.input((2,), "integer"), 4, 3)
    graph = nn.graph(value, nn.mean(value))
    feed = {"input": np.array([[0, 3], [4, -1]])}
    weights = graphs.random_weights(graph).astype(np.float32)
    with pytest.raises(UserError, match="an embedding of 4 entries is asked for entry 4"):
        graphs.ReferenceExecutor(graph).evaluate(weights, feed)
    emitted = graphs.GeneratedExecutor(graph, 2, compiled=False, lanes=4)
    found = emitted.run(weights, feed, graph.outputs)[graph.outputs[0]]
    np.testing.assert_array_equal(np.isnan(found).any(axis=2), [[False, False], [True, True]])
    gradient, _ = graphs.gradient_of(emitted, weights, feed)
    np.testing.assert_allclose(gradient.reshape(4, 3), [[1 / 6] * 3, [0] * 3, [0] * 3, [1 / 6] * 3], rtol=1e-6)


@pytest.mark.slow
def test_compiled_attention_and_products():
    tokens = nn.input((19,), "integer", axes=("token",))
    x = nn.position_embedding(nn.embedding(tokens, 3, 12, deviation=1.0))
    heads = [nn.dense(x, 12) for _ in range(3)]
    y = nn.layer_norm(nn.add(x, nn.attention(*heads, heads=2, causal=True)))
    weighed = nn.matmul(nn.softmax(nn.matmul(y, y, transpose_second=True), axis=0), y)
    z = nn.dense(nn.gelu(weighed, form="tanh"), 5)
    target = nn.target((19,))
    loss = nn.softmax_cross_entropy(z, target, smoothing=0.1, weights=[1, 2, 1, 1, 0.5], ignore=1)
    graph = nn.graph(z, loss, {"correct": nn.correct(z, target, top=2)})
    graphs.check_emitted(
        graph, graphs.random_feed(graph, 67), graphs.random_weights(graph), tolerance=2e-4, compiled=True
    )
