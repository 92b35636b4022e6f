"""Random graphs against PyTorch: skips, concats, gates, parameters that several nodes share, several losses."""

import graphs
import numpy as np
import pytest
from random_graphs import CLASSES, Program

from adam_mpi.model.executors.reference import ReferenceExecutor

torch = pytest.importorskip("torch")

COUNT = 60


def numbered(default):
    """Return the numbers of all random graphs, those from `default` on for --full only."""
    return [pytest.param(seed, marks=[pytest.mark.full] if seed >= default else []) for seed in range(COUNT)]


def drawn(seed):
    """Return a random program, its graph, samples and weights."""
    program = Program(seed)
    graph = program.graph()
    samples = (1, 2, 5, 9)[seed % 4]
    return program, graph, graphs.random_feed(graph, samples, seed, CLASSES), graphs.random_weights(graph, seed)


@pytest.mark.parametrize("seed", numbered(20))
def test_random_graphs_in_float64(seed):
    program, graph, feed, weights = drawn(seed)
    graphs.check_torch(graph, feed, weights, program.torch)


@pytest.mark.parametrize("seed", numbered(20))
def test_random_graphs_in_float32(seed):
    _, graph, feed, weights = drawn(seed)
    expected, exact_sums = graphs.gradient_of(ReferenceExecutor(graph, dtype=np.float64), weights, feed)
    found, sums = graphs.gradient_of(ReferenceExecutor(graph), weights.astype(np.float32), feed)
    graphs.near(found, expected, 1e-4)
    graphs.near(sums["loss"], exact_sums["loss"], 1e-4)


@pytest.mark.parametrize("seed", numbered(12))
def test_random_graphs_emitted(seed):
    _, graph, feed, weights = drawn(seed)
    graphs.check_emitted(graph, feed, weights, tolerance=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(0, COUNT, 12))
def test_random_graphs_compiled(seed):
    _, graph, feed, weights = drawn(seed)
    graphs.check_emitted(graph, feed, weights, tolerance=1e-4, compiled=True)
