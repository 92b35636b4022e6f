"""Norms: groups of samples whatever the passes are, running statistics, and numbers far from zero."""

import graphs
import numpy as np
import pytest

from adam_mpi import nn
from adam_mpi.base.errors import UserError
from adam_mpi.model.engine import graph_program
from adam_mpi.model.executors.reference import ReferenceExecutor


def normalized(images, channels=3):
    x = nn.input((channels, 2))
    y = nn.batch_norm(nn.elementwise(lambda v: v * v + 3.0, x), images=images, name="norm")
    return nn.graph(y, nn.mean(nn.dense(nn.flatten(y), 2, name="end")))


def part_of(graph, flat, name):
    parameter = next(p for p in graph.parameters if p.name == name)
    start = graph.offsets[name]
    return flat[start : start + parameter.size].reshape(parameter.shape)


@pytest.mark.parametrize("images, samples", [(8, 9), (6, 25), (5, 13), (70, 75), (64, 64), (1, 3)])
def test_groups_of_a_batch_norm_do_not_depend_on_passes_and_blocks(images, samples):
    graph = normalized(images)
    graphs.check(graph, samples, tolerance=1e-4)


@pytest.mark.parametrize("images, lanes, blocks", [(64, 16, 4), (48, 16, 3), (10, 16, 5), (70, 4, 35), (1, 16, 4)])
def test_no_pass_cuts_a_group(images, lanes, blocks):
    assert graph_program.pass_blocks(normalized(images), lanes) == blocks


def test_statistics_get_the_sum_of_what_samples_observed():
    graph = normalized(images=4)
    feed = graphs.random_feed(graph, 6)
    weights = graphs.random_weights(graph)
    gradient, _ = graphs.gradient_of(ReferenceExecutor(graph, dtype=np.float64), weights, feed)
    values = feed["input"] ** 2 + 3.0
    parts = [values[:4], values[4:]]
    expected = sum(len(part) * part.mean(axis=(0, 2)) for part in parts)
    np.testing.assert_allclose(part_of(graph, gradient, "norm/mean"), expected)
    expected = sum(len(part) * (part.var(axis=(0, 2), ddof=0) * len(part) * 2 / (len(part) * 2 - 1)) for part in parts)
    np.testing.assert_allclose(part_of(graph, gradient, "norm/variance"), expected)


def test_evaluation_takes_running_statistics():
    graph = normalized(images=4)
    feed = graphs.random_feed(graph, 3)
    weights = graphs.random_weights(graph)
    executor = ReferenceExecutor(graph, dtype=np.float64)
    found = executor.run(weights, feed, ["norm"])["norm"]
    mean, variance, weight, bias = (
        part_of(graph, weights, f"norm/{name}")[:, None] for name in ("mean", "variance", "weight", "bias")
    )
    expected = (feed["input"] ** 2 + 3.0 - mean) / np.sqrt(variance + 1e-5) * weight + bias
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("kind, values", [("layer_norm", {}), ("group_norm", {"groups": 1}), ("batch_norm", {})])
def test_numbers_far_from_zero_keep_their_digits(kind, values):
    x = nn.input((2, 8))
    y = getattr(nn, kind)(nn.scale(x, offset=1000.0), **values)
    graph = nn.graph(y, nn.mean(nn.elementwise(lambda v: v * v * v, y)))
    feed = {"input": np.round(graphs.random_feed(graph, 9)["input"] * 64) / 64}
    graphs.check_emitted(graph, feed, graphs.random_weights(graph), tolerance=1e-4)


@pytest.mark.slow
def test_compiled_norms():
    x = nn.input((6, 5, 3))
    y = nn.batch_norm(nn.conv(x, 6, 3, pad=1), images=20)
    y = nn.relu(nn.add(nn.group_norm(y, groups=3), nn.lrn(y)))
    z = nn.dense(nn.layer_norm(nn.flatten(y)), 3)
    graph = nn.graph(z, nn.softmax_cross_entropy(z, nn.target()))
    graphs.check_emitted(
        graph, graphs.random_feed(graph, 67), graphs.random_weights(graph), tolerance=2e-4, compiled=True
    )


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(
        UserError, match=r"node group_norm1 \(group_norm\) of input 6x2: 6 channels do not divide into 4"
    ):
        nn.graph(nn.group_norm(nn.input((6, 2)), groups=4))
