"""Apply kernels against the textbook rules in float64."""

import numpy as np
import pytest

from adam_mpi.base.native import address
from adam_mpi.server import apply_kernels, optimizer_rules

SIZES = [1, 7, 2049, apply_kernels.BLOCK - 1, apply_kernels.BLOCK, apply_kernels.BLOCK + 1, 10_001]
RATE, KEEP, DECAY = np.float32(0.1), np.float32(0.9), np.float32(0.01)


def textbook(kind, weights, state, gradient, rate=float(RATE), keep=float(KEEP), decay=float(DECAY)):
    """Return (weights, state) after one step of rule `kind` on `gradient`, in float64."""
    if kind == "additive":
        return weights + gradient, state
    gradient = gradient + decay * weights
    if kind == "descent":
        return weights - rate * gradient, state
    if kind == "adagrad":
        state = state + gradient**2
        return weights - rate * gradient / (np.sqrt(state) + 1e-8), state
    state = keep * state + gradient
    if kind == "nesterov":
        return weights - rate * (gradient + keep * state), state
    return weights - rate * state, state


def coefficients(kind, rate=RATE, keep=KEEP, decay=DECAY, batches=1.0):
    return optimizer_rules.coefficients(kind, (float(keep), float(decay)), float(rate), batches, batches)


def take(kind, *messages, **given):
    apply_kernels.step(apply_kernels.RULES.index(kind), *messages, coefficients(kind, **given))


def messages(count, size, seed=0):
    """Return memory with gradients, with gaps between them and in no order, and the start of each."""
    random = np.random.default_rng(seed)
    memory = np.full(count * (size + 5), np.nan, np.float32)
    starts = random.permutation(count) * (size + 5) + 2
    for start in starts:
        memory[start : start + size] = random.standard_normal(size)
    return memory, starts


def begin(size, seed=9):
    random = np.random.default_rng(seed)
    return random.standard_normal(size).astype(np.float32), random.random(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("kind", apply_kernels.RULES)
def test_kernels_follow_the_rule(kind, count, size):
    weights, state = begin(size)
    wanted = weights.astype(float), state.astype(float)
    scales = np.linspace(0.25, 1, count).astype(np.float32)
    for step in range(3):
        memory, starts = messages(count, size, step)
        total = sum(
            float(scale) * memory[start : start + size].astype(float)
            for start, scale in zip(starts, scales, strict=True)
        )
        wanted = textbook(kind, *wanted, total)
        take(kind, weights, state, memory, starts, scales)
    assert np.allclose(weights, wanted[0], rtol=1e-5, atol=1e-5)
    assert np.allclose(state, wanted[1], rtol=1e-5, atol=1e-5)


def test_momentum_zero_is_plain_descent():
    weights, state = begin(100)
    memory, starts = messages(1, 100)
    wanted = weights - RATE * memory[starts[0] : starts[0] + 100]
    take("momentum", weights, state, memory, starts, np.ones(1, np.float32), keep=0.0, decay=0.0)
    assert np.allclose(weights, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", apply_kernels.RULES)
def test_eight_folded_are_one_step_on_their_sum(kind):
    size, ones = 5000, np.ones(8, np.float32)
    memory, starts = messages(8, size)
    total = sum(memory[start : start + size].astype(float) for start in starts).astype(np.float32)
    folded, single = begin(size), begin(size)
    take(kind, *folded, memory, starts, ones)
    take(kind, *single, total, np.zeros(1, np.int64), ones[:1])
    assert np.allclose(folded[0], single[0], atol=1e-5) and np.allclose(folded[1], single[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", apply_kernels.RULES)
def test_a_call_for_several_shards_is_a_step_of_each(kind):
    sizes, counts = (1, 3000, 5000), (2, 1, 5)
    memory, starts = messages(sum(counts), max(sizes))
    scales, ends = np.linspace(0.25, 1, len(starts)).astype(np.float32), np.cumsum(counts)
    together, alone = ([begin(size) for size in sizes] for _ in range(2))
    places = np.array([(address(weights), address(state), weights.size) for weights, state in together])
    rows = np.array([coefficients(kind)] * 3)
    apply_kernels.steps(apply_kernels.RULES.index(kind), places, memory, ends, starts, scales, rows)
    for end, count, one, other in zip(ends, counts, alone, together, strict=True):
        own = slice(end - count, end)
        take(kind, *one, memory, starts[own], scales[own])
        assert np.array_equal(one, other)


def test_the_order_of_messages_is_the_order_of_the_sum():
    """Synchronous training depends on it: equal orders give equal bits."""
    memory, starts = messages(3, 3000)
    results = []
    for _ in range(2):
        weights, state = begin(3000)
        take("momentum", weights, state, memory, starts, np.ones(3, np.float32))
        results.append(weights)
    assert np.array_equal(*results)


@pytest.mark.parametrize("kind", apply_kernels.SPARSE_KERNELS)
def test_sparse_kernels_change_the_given_indices_and_nothing_else(kind):
    weights, state = begin(1000)
    indices, values = np.array([3, 999, 0, 500]), np.array([1, -2, 0.5, 3], np.float32)
    before = weights.copy(), state.copy()
    wanted = textbook(kind, *(a[indices].astype(float) for a in before), values.astype(float), keep=0.0, decay=0.0)
    apply_kernels.SPARSE_KERNELS[kind](weights, state, indices, values, RATE)
    assert np.allclose(weights[indices], wanted[0], atol=1e-6)
    if kind == "adagrad":
        assert np.allclose(state[indices], wanted[1], atol=1e-6)
    others = np.delete(np.arange(1000), indices)
    assert np.array_equal(weights[others], before[0][others]) and np.array_equal(state[others], before[1][others])


def test_an_index_given_twice_is_added_twice():
    weights = np.zeros(4, np.float32)
    apply_kernels.sparse_additive(weights, weights, np.array([2, 2]), np.array([1, 3], np.float32), RATE)
    assert weights.tolist() == [0, 0, 4, 0]


def test_add_and_average():
    total, values = begin(777)
    wanted = total + 0.5 * values
    apply_kernels.add(total, values, np.float32(0.5))
    assert np.allclose(total, wanted, atol=1e-6)
    mean, weights = begin(777)
    wanted = 0.9 * mean + 0.1 * weights
    apply_kernels.update_ema(mean, weights, np.float32(0.1))
    assert np.allclose(mean, wanted, atol=1e-6)
