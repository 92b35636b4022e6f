"""Check graphs: gradients against finite differences, emitted kernels against reference ones, both against PyTorch."""

import numpy as np

from adam_mpi.model.executors.generated import GeneratedExecutor
from adam_mpi.model.executors.reference import ReferenceExecutor

LANES = 4


def random_feed(graph, samples, seed=0, classes=3):
    """Return random samples for the inputs of `graph`; integers are below `classes`."""
    random = np.random.default_rng(seed)
    draw = {
        "float": lambda shape: random.standard_normal(shape),
        "byte": lambda shape: random.integers(0, 256, shape).astype(np.uint8),
        "integer": lambda shape: random.integers(0, classes, shape),
    }
    return {value.name: draw[value.dtype]((samples, *value.shape)) for value in graph.inputs}


def random_weights(graph, seed=1):
    """Return weights of some size everywhere, biases too; statistics are positive, as variances are."""
    weights = np.random.default_rng(seed).standard_normal(graph.size) * 0.5
    for p, start in zip(graph.parameters, graph.offsets.values(), strict=True):
        if p.kind == "statistic":
            weights[start : start + p.size] = np.abs(weights[start : start + p.size]) + 0.1
    return weights


def learned_part(graph):
    """Return 1 for each weight that is stepped by its gradient, 0 for statistics."""
    return np.concatenate([np.full(p.size, float(p.kind != "statistic")) for p in graph.parameters])


def check(graph, samples=5, seed=0, classes=3, feed=None, weights=None, tolerance=2e-5):
    """Check the gradient of `graph` by finite differences, and its emitted kernels, uncompiled, by reference ones."""
    feed = feed or random_feed(graph, samples, seed, classes)
    weights = random_weights(graph) if weights is None else weights
    check_gradient(graph, feed, weights)
    check_emitted(graph, feed, weights, tolerance)


def check_gradient(graph, feed, weights, step=1e-6, tolerance=1e-6):
    """Compare the gradient along three random directions with finite differences, in float64.

    Statistics are left as they are: what is returned for them is no gradient.
    """
    executor = ReferenceExecutor(graph, dtype=np.float64)
    gradient, _ = gradient_of(executor, weights, feed)
    learned = learned_part(graph)
    for number in range(3):
        direction = np.random.default_rng(number).standard_normal(graph.size) * learned
        ahead = gradient_of(executor, weights + step * direction, feed)[1]["loss"]
        behind = gradient_of(executor, weights - step * direction, feed)[1]["loss"]
        expected = (ahead - behind) / (2 * step)
        assert abs(gradient @ direction - expected) <= tolerance * (1 + abs(expected) + np.abs(gradient).max())


def check_emitted(graph, feed, weights, tolerance=2e-5, compiled=False):
    """Compare outputs, sums and gradients of emitted kernels with those of reference kernels in float64."""
    samples = len(next(iter(feed.values())))
    lanes = None if compiled else LANES
    emitted = GeneratedExecutor(graph, samples, compiled=compiled, lanes=lanes)
    exact = ReferenceExecutor(graph, dtype=np.float64)
    rounded = weights.astype(np.float32)
    feed = {name: array.astype(np.float32) if array.dtype == float else array for name, array in feed.items()}
    found, sums = gradient_of(emitted, rounded, feed)
    expected, exact_sums = gradient_of(exact, rounded.astype(float), feed)
    near(found, expected, tolerance)
    assert sums.keys() == exact_sums.keys()
    for name in sums:
        near(sums[name], exact_sums[name], tolerance)
    outputs = emitted.run(rounded, feed, graph.outputs)
    for name, array in exact.run(rounded.astype(float), feed, graph.outputs).items():
        near(outputs[name], array, tolerance)


def gradient_of(executor, weights, feed, epoch=0):
    """Return gradient and sums of one batch."""
    gradient = np.ones_like(weights)
    samples = len(next(iter(feed.values())))
    sums = executor.train(weights, gradient, feed, np.arange(samples), epoch, overwrite=True)
    return gradient, sums


def near(found, expected, tolerance):
    """Assert that arrays agree, relative to the largest number in them."""
    scale = 1 + np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


def check_torch(graph, feed, weights, module, tolerance=1e-9):
    """Compare loss and gradient in float64 with PyTorch: `module(tensors, parameters)` returns the loss summed up.

    `tensors` are the fed arrays by name, `parameters` those of the graph by name.
    """
    import torch

    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in feed.items()}
    parameters = {
        p.name: torch.from_numpy(weights[start : start + p.size].reshape(p.shape).copy()).requires_grad_()
        for p, start in zip(graph.parameters, graph.offsets.values(), strict=True)
    }
    loss = module(tensors, parameters)
    loss.backward()
    gradient, sums = gradient_of(ReferenceExecutor(graph, dtype=np.float64), weights, feed)
    near(sums["loss"], loss.item(), tolerance)
    expected = [np.zeros(p.shape) if p.grad is None else p.grad.numpy() for p in parameters.values()]
    near(gradient * learned_part(graph), np.concatenate([part.ravel() for part in expected]), tolerance)
