"""Apply kernels against the textbook rules in float64."""

import numpy as np
import pytest
from textbook import SETTINGS, step_of

from adam_mpi.optimizer import ema, kernels, rules, sparse_kernels
from adam_mpi.optimizer.settings import BatchCounts

SIZES = [1, 7, 2049, kernels.BLOCK - 1, kernels.BLOCK, kernels.BLOCK + 1, 10_001]
RATE = 0.1
ALL = list(rules.RULES)
SEQUENTIAL = [name for name, rule in rules.RULES.items() if not rule.linear]


def rows_of(name, settings=SETTINGS, before=0.0, batches=1.0):
    return rules.coefficients(rules.RULES[name], settings, RATE, BatchCounts(before, batches, batches))


def take(name, weights, states, memory, starts, scales, rows=None):
    given = rows_of(name) if rows is None else rows
    kernels.step(rules.RULES[name].kernel, weights, states, memory, starts, scales, given)


def messages(count, size, seed=0):
    """Return memory with gradients, with gaps between them and in no order, and the start of each."""
    random = np.random.default_rng(seed)
    memory = np.full(count * (size + 5), np.nan, np.float32)
    starts = random.permutation(count) * (size + 5) + 2
    for start in starts:
        memory[start : start + size] = random.standard_normal(size)
    return memory, starts


def begin(name, size, seed=9):
    random = np.random.default_rng(seed)
    weights = random.standard_normal(size).astype(np.float32)
    return weights, random.random((len(rules.RULES[name].states), size)).astype(np.float32)


def wide(weights, states):
    return weights.astype(float), states.astype(float)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("name", ALL)
def test_kernels_follow_the_rule(name, count, size):
    weights, states = begin(name, size)
    wanted = wide(weights, states)
    scales = np.linspace(0.25, 1, count).astype(np.float32)
    for number in range(3):
        memory, starts = messages(count, size, number)
        total = sum(
            float(scale) * memory[start : start + size].astype(float)
            for start, scale in zip(starts, scales, strict=True)
        )
        wanted = step_of(name, *wanted, total, RATE, number)
        take(name, weights, states, memory, starts, scales, rows_of(name, before=number))
    assert np.allclose(weights, wanted[0], rtol=1e-5, atol=1e-5)
    assert np.allclose(states, wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_a_row_for_each_message_is_a_step_for_each_message(name):
    size, count = 5000, 5
    weights, states = begin(name, size)
    wanted = wide(weights, states)
    memory, starts = messages(count, size)
    scales = np.linspace(0.25, 1, count).astype(np.float32)
    for number, (start, scale) in enumerate(zip(starts, scales, strict=True)):
        wanted = step_of(name, *wanted, float(scale) * memory[start : start + size].astype(float), RATE, number)
    rows = np.concatenate([rows_of(name, before=number) for number in range(count)])
    take(name, weights, states, memory, starts, scales, rows)
    assert np.allclose(weights, wanted[0], rtol=1e-5, atol=1e-5)
    assert np.allclose(states, wanted[1], rtol=1e-5, atol=1e-5)


def test_momentum_zero_is_plain_descent():
    weights, states = begin("momentum", 100)
    memory, starts = messages(1, 100)
    wanted = weights - np.float32(RATE) * memory[starts[0] : starts[0] + 100]
    plain = rows_of("momentum", SETTINGS._replace(momentum=0.0, decay=0.0))
    take("momentum", weights, states, memory, starts, np.ones(1, np.float32), plain)
    assert np.allclose(weights, wanted, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_eight_folded_are_one_step_on_their_sum(name):
    size, ones = 5000, np.ones(8, np.float32)
    memory, starts = messages(8, size)
    total = sum(memory[start : start + size].astype(float) for start in starts).astype(np.float32)
    folded, single = begin(name, size), begin(name, size)
    take(name, *folded, memory, starts, ones)
    take(name, *single, total, np.zeros(1, np.int64), ones[:1])
    assert np.allclose(folded[0], single[0], atol=1e-5) and np.allclose(folded[1], single[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_call_for_several_shards_is_a_step_of_each(name):
    sizes, counts = (1, 3000, 5000), (2, 1, 5)
    memory, starts = messages(sum(counts), max(sizes))
    scales, ends = np.linspace(0.25, 1, len(starts)).astype(np.float32), np.cumsum(counts)
    together, alone = ([begin(name, size) for size in sizes] for _ in range(2))
    places = np.array([kernels.place(*one) for one in together])
    rows = np.concatenate([rows_of(name)] * 3)
    kernels.steps(rules.RULES[name].kernel, places, memory, ends, starts, scales, np.arange(1, 4), rows)
    for end, count, one, other in zip(ends, counts, alone, together, strict=True):
        own = slice(end - count, end)
        take(name, *one, memory, starts[own], scales[own])
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


@pytest.mark.parametrize("name", ALL)
def test_a_part_of_a_shard_is_stepped_and_nothing_else(name):
    weights, states = begin(name, 1000)
    before = weights.copy(), states.copy()
    part = slice(300, 800)
    alone = weights[part].copy(), states[:, part].copy()
    memory, starts = messages(1, 500)
    places = np.array([kernels.place(weights, states, part)])
    one = np.ones(1, np.float32)
    kernels.steps(
        rules.RULES[name].kernel, places, memory, np.ones(1, int), starts, one, np.ones(1, int), rows_of(name)
    )
    take(name, *alone, memory, starts, one)
    assert np.array_equal(weights[part], alone[0]) and np.array_equal(states[:, part], alone[1])
    for found, was in zip((weights, states), before, strict=True):
        assert np.array_equal(found[..., :300], was[..., :300]) and np.array_equal(found[..., 800:], was[..., 800:])


def test_the_order_of_messages_is_the_order_of_the_sum():
    """Synchronous training depends on it: equal orders give equal bits."""
    memory, starts = messages(3, 3000)
    results = []
    for _ in range(2):
        weights, states = begin("momentum", 3000)
        take("momentum", weights, states, memory, starts, np.ones(3, np.float32))
        results.append(weights)
    assert np.array_equal(*results)


@pytest.mark.parametrize("count", [4, 5000])
@pytest.mark.parametrize("name", ALL)
def test_sparse_steps_change_the_given_indices_and_nothing_else(name, count):
    size = 10_000
    weights, states = begin(name, size)
    random = np.random.default_rng(3)
    indices, values = random.permutation(size)[:count], random.standard_normal(count).astype(np.float32)
    before = weights.copy(), states.copy()
    wanted = weights[indices].astype(float), states[:, indices].astype(float)
    wanted = step_of(name, *wanted, values.astype(float), RATE, 0)
    sparse_kernels.step_at(rules.RULES[name].kernel, weights, states, indices, values, rows_of(name))
    assert np.allclose(weights[indices], wanted[0], atol=1e-5)
    assert np.allclose(states[:, indices], wanted[1], atol=1e-5)
    others = np.delete(np.arange(size), indices)
    assert np.array_equal(weights[others], before[0][others])
    assert np.array_equal(states[:, others], before[1][:, others])


def test_an_index_given_twice_is_added_twice():
    weights = np.zeros(4, np.float32)
    indices, values = np.array([2, 2]), np.array([1, 3], np.float32)
    states = np.zeros((0, 4), np.float32)
    sparse_kernels.step_at(rules.RULES["additive"].kernel, weights, states, indices, values, rows_of("additive"))
    assert weights.tolist() == [0, 0, 4, 0]


def test_add_and_average():
    total, values = np.random.default_rng(9).random((2, 777), np.float32)
    wanted = total + 0.5 * values
    kernels.add(total, values, np.float32(0.5))
    assert np.allclose(total, wanted, atol=1e-6)
    mean, weights = np.random.default_rng(8).random((2, 777), np.float32)
    wanted = 0.9 * mean + 0.1 * weights
    ema.update_ema(mean, weights, np.float32(0.1))
    assert np.allclose(mean, wanted, atol=1e-6)
