"""Graphs: front ends give equal ones, passes keep what they compute, and bad input is refused in one line."""

from dataclasses import replace

import graphs
import numpy as np
import pytest

from adam_mpi import nn
from adam_mpi.base.errors import UserError
from adam_mpi.model.builder import GraphBuilder
from adam_mpi.model.executors.reference import ReferenceExecutor
from adam_mpi.model.frontends import layer_list
from adam_mpi.model.graph import Value
from adam_mpi.model.passes.fusion import fuse_elementwise
from adam_mpi.model.passes.gradient import differentiate
from adam_mpi.model.passes.initial import initial
from adam_mpi.model.passes.simplify import simplify
from adam_mpi.model.passes.training import training_graph

RESIDUAL = [
    {"kind": "conv", "channels": 4, "kernel": 3, "pad": 1, "name": "stem"},
    {
        "repeat": 2,
        "name": "stage",
        "layers": [
            {"kind": "conv", "channels": 4, "kernel": 3, "pad": 1, "name": "a"},
            "relu",
            {"kind": "conv", "channels": 4, "kernel": 3, "pad": 1},
            {"kind": "add", "inputs": ["conv1", "input"]},
        ],
    },
    {"kind": "concat", "inputs": ["stage1", "stage2", "stage1.a"]},
    {"kind": "dense", "units": 3},
]


def from_list(entries, shape=(2, 4, 4)):
    tape = GraphBuilder()
    first = tape.input(Value("input", shape))
    last = layer_list.build(tape, layer_list.read(entries), first, layer_list.Scope("", {"input": first}))
    return simplify(tape.graph([last.name]))


def test_front_ends_give_equal_graphs():
    x = nn.input((2, 4, 4))
    y = nn.conv(x, 4, 3, pad=1, name="stem")
    blocks = []
    for number in (1, 2):
        a = nn.conv(y, 4, 3, pad=1, name=f"stage{number}.a")
        r = nn.relu(a, name=f"stage{number}.relu1")
        b = nn.conv(r, 4, 3, pad=1, name=f"stage{number}.conv1")
        y = nn.add(b, y, name=f"stage{number}.add1")
        blocks.append((y, a))
    z = nn.dense(nn.concat(blocks[0][0], blocks[1][0], blocks[0][1]), 3)
    assert from_list(RESIDUAL) == nn.graph(z)


def test_a_layer_object_shares_its_parameters():
    layer = nn.Layer("dense", name="shared", units=3)
    x = nn.input((3,))
    y = layer(nn.tanh(layer(x)))
    graph = nn.graph(y, nn.mean(y * y))
    assert [p.name for p in graph.parameters] == ["shared/weight", "shared/bias"]
    graphs.check(graph)
    listed = from_list(
        [{"kind": "dense", "units": 3, "name": "shared"}, "tanh", {"kind": "dense", "units": 3, "shared": "shared"}],
        (3,),
    )
    assert listed.parameters == graph.parameters
    assert len(differentiate(graph).gradients) == 4


def test_errors_of_several_consumers_are_added_up_by_a_node():
    x = nn.dense(nn.input((3,)), 4)
    y = nn.add(nn.tanh(x), nn.sigmoid(x), nn.concat(nn.slice(x, 2, 4), nn.slice(x, 0, 2)))
    graph = nn.graph(y, nn.mean(y * y))
    assert any(node.name.startswith("d/accumulate") for node in simplify(differentiate(graph)).nodes)
    graphs.check(graph)


def test_common_nodes_are_merged_and_dead_ones_dropped():
    x = nn.input((3,))
    y = nn.dense(x, 4)
    unused = nn.dense(nn.tanh(y), 9)
    graph = nn.graph(nn.add(nn.tanh(y), nn.tanh(y)))
    assert [node.name for node in graph.nodes] == ["dense1", "tanh1", "add1"]
    assert unused.layer is not None
    assert graph.nodes[-1].inputs == ("tanh1", "tanh1")
    dropped = nn.graph(nn.add(nn.dropout(y, 0.5), nn.dropout(y, 0.5)))
    assert len(dropped.nodes) == 4


def test_only_values_with_one_consumer_are_fused():
    x = nn.dense(nn.input((3,)), 4)
    a = nn.tanh(x)
    b = nn.sigmoid(a)
    y = nn.multiply(b, a)
    graph = nn.graph(y, nn.mean(y))
    fused = fuse_elementwise(graph)
    assert [node.name for node in fused.nodes] == ["dense1", "tanh1", "multiply1", "mean1"]
    feed = graphs.random_feed(graph, 4)
    weights = graphs.random_weights(graph)
    one = ReferenceExecutor(graph, dtype=np.float64)
    other = ReferenceExecutor(fused, dtype=np.float64)
    np.testing.assert_allclose(
        graphs.gradient_of(one, weights, feed)[0], graphs.gradient_of(other, weights, feed)[0], rtol=1e-12
    )


def random_graph(seed):
    """Return a random graph with skips, concats, shared weights and several losses."""
    random = np.random.default_rng(seed)
    shared = nn.Layer("conv", channels=4, kernel=3, pad=1)
    values = [nn.conv(nn.input((2, 5, 5)), 4, 3, pad=1)]
    for _ in range(6):
        x, y = (values[random.integers(len(values))] for _ in range(2))
        values.append(
            [
                lambda x=x: nn.relu(x),
                lambda x=x: shared(x),
                lambda x=x, y=y: nn.add(x, y),
                lambda x=x, y=y: nn.conv(nn.concat(x, y), 4, 1),
                lambda x=x, y=y: x * nn.sigmoid(y),
                lambda x=x: nn.max_pool(x, 3, stride=1, pad=1),
                lambda x=x: nn.conv(x, 4, 3, pad=2, dilation=2, groups=2),
            ][random.integers(7)]()
        )
    z = nn.dense(nn.global_avg_pool(nn.add(*values[-2:])), 3)
    target = nn.target()
    rest = nn.mean(nn.elementwise(lambda v: v * v, values[3]))
    return nn.graph(z, [nn.softmax_cross_entropy(z, target), (rest, 0.3)], {"correct": nn.correct(z, target)})


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs(seed):
    graph = random_graph(seed)
    differentiate(simplify(graph)).verify()
    training_graph(graph).verify()
    graphs.check(graph, samples=1 + seed, tolerance=1e-4)


def test_first_weights_depend_on_names_alone():
    x = nn.input((3,))
    one = nn.graph(nn.dense(nn.dense(x, 4, name="a"), 5, name="b"))
    other = nn.graph(nn.dense(nn.tanh(nn.dense(nn.dense(x, 3, name="c"), 4, name="a")), 5, name="b"))
    drawn = {g: initial(g, 7)[g.offsets["b/weight"] :][:20] for g in (one, other)}
    np.testing.assert_array_equal(drawn[one], drawn[other])
    assert not np.array_equal(initial(one, 8), initial(one, 7))


@pytest.mark.parametrize(
    "entries, message",
    [
        ([{"kind": "add", "inputs": ["conv1"], "name": "a"}, {"kind": "conv", "channels": 1, "kernel": 1}], "cycle"),
        ([{"kind": "add", "inputs": ["nothing"]}], r"model.layers\[0\] \(add\) takes 'nothing'.* there are input"),
        ([{"kind": "convolution"}], r"model.layers\[0\].kind is 'convolution'; allowed are"),
        ([{"kind": "dense", "units": 0}], "units is 0; give a whole number, 1 or more"),
        ([{"kind": "dense"}], "units is missing"),
        ([{"kind": "dense", "units": 1, "width": 2}], "width is not known; a dense layer has units, bias"),
        ([{"repeat": 0, "layers": ["relu"]}], "repeat is 0"),
        ([{"kind": "relu", "name": "x"}, {"kind": "relu", "name": "x"}], "two nodes of the model are called 'x'"),
        ([{"kind": "conv", "channels": 1, "kernel": 5}], r"node conv1 \(conv\) of input 2x4x4: a window of 5"),
    ],
)
def test_a_wrong_list_is_refused_in_one_line(entries, message):
    with pytest.raises(UserError, match=message) as caught:
        from_list(entries)
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_wrong_is_refused():
    graph = nn.graph(nn.dense(nn.tanh(nn.input((3,))), 4))
    with pytest.raises(UserError, match="node dense1 reads 'tanh1', which no node before it makes"):
        replace(graph, nodes=graph.nodes[::-1]).verify()
    wrong = replace(graph.nodes[0], outputs=(Value("tanh1", (5,)),))
    with pytest.raises(UserError, match="node tanh1 makes 3, but tanh1 5 is noted"):
        replace(graph, nodes=(wrong, *graph.nodes[1:])).verify()
    with pytest.raises(UserError, match="no single number per sample"):
        nn.graph(nn.input((3,)), nn.input((3,), name="other"))
    with pytest.raises(UserError, match="the model has no loss"):
        differentiate(graph)


def test_what_is_fed_is_checked():
    z = nn.dense(nn.input((3,)), 4)
    executor = ReferenceExecutor(nn.graph(z, nn.softmax_cross_entropy(z, nn.target())))
    weights = np.zeros(16, np.float32)
    with pytest.raises(UserError, match="nothing is fed for input target scalar"):
        executor.evaluate(weights, {"input": np.zeros((2, 3))})
    with pytest.raises(UserError, match="input input 3 is fed samples of 4"):
        executor.evaluate(weights, {"input": np.zeros((2, 4)), "target": np.zeros(2, int)})
    with pytest.raises(UserError, match="the model has no value 'nothing'"):
        executor.run(weights, {"input": np.zeros((2, 3))}, ["nothing"])


def test_a_softmax_loss_counts_right_classes_by_itself():
    scores = nn.dense(nn.input((4,)), 3)
    loss = nn.softmax_cross_entropy(scores, nn.target())
    counted = nn.graph(scores, [(nn.mean_squared_error(scores, nn.input((3,), name="wanted")), 0.5), loss])
    assert [name for name, _ in counted.sums] == ["correct"]
    assert nn.graph(scores, loss) == nn.graph(scores, loss, {"correct": nn.correct(scores, loss.inputs[1])})
    assert not nn.graph(scores, nn.mean_squared_error(scores, nn.input((3,), name="wanted"))).sums
