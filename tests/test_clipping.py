"""Clipping in synchronous training: of the whole step, whatever the layout, and once for each push."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_server import LocalServer

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.optimizer.clipping import clip_factors, clips_steps, squared_norm
from adam_mpi.server.clipped_clocks import ClippedClocks, tensor_parts
from adam_mpi.sharding.shards import Shard

SIZE, BATCH = 1000, 8
TENSORS = (Tensor("dense1/weight", "dense1", (9, 100), 0, 900), Tensor("dense1/bias", "dense1", (100,), 900, 100))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0, 10), st.floats(0, 10))
def test_nothing_is_longer_than_its_limit_and_what_is_short_stays(squares, whole, tensor):
    factors = clip_factors(squares, whole, tensor)
    lengths = [factor * square**0.5 for factor, square in zip(factors, squares, strict=True)]
    assert all(0 < factor <= 1 for factor in factors)
    if whole:
        assert sum(length**2 for length in lengths) ** 0.5 <= whole * (1 + 1e-9)
    if tensor:
        assert max(lengths) <= tensor * (1 + 1e-9)
    if (not whole or sum(squares) ** 0.5 <= whole) and (not tensor or max(squares) ** 0.5 <= tensor):
        assert factors == [1.0] * len(squares)


def test_a_squared_norm_is_added_up_in_float64():
    values = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    assert squared_norm(values) == pytest.approx(float((values.astype(float) ** 2).sum()), rel=1e-13)


def given_config(*settings):
    common = ["server.shard=64", "optimizer.learning_rate=0.1", "optimizer.schedule=constant", f"train.batch={BATCH}"]
    return config.load(None, [*common, "consistency.staleness=0", *settings])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_ring_needs_no_room_for_a_whole_push(threads):
    """Slots are free once their values are summed; but nothing is acknowledged as a whole before the step is taken."""
    local = LocalServer(given_config("optimizer.clip_norm=2", f"server.threads={threads}"), SIZE, TENSORS)
    shards = local.memory_layout.shards
    assert local.memory_layout.slots < len(shards)
    gradient = np.random.default_rng(0).standard_normal(SIZE)
    limit = 2 / np.linalg.norm(gradient)
    for number in range(1, 4):
        local.push(BATCH * gradient, BATCH)
        assert np.allclose(local.weights, -0.1 * number * limit * gradient, atol=1e-6)
        assert {own.version for own in local.server.shard_copies.values()} == {number}
        assert local.pushes.last == (number, number) and not local.server.session.clipped.open
    local.free()


def test_no_shard_steps_before_the_norms_of_all_servers_are_known():
    local = LocalServer(given_config("optimizer.clip_norm=1"), SIZE, TENSORS)
    clipped = local.server.session.clipped
    clipped.servers = [0, 7]
    sent = []
    clipped.send = lambda message, server: sent.append((server, message))
    local.pushes.push(local.gradient_buffer(BATCH, BATCH))
    for _ in range(200):
        local.server.step()
        local.pushes.step()
    ((server, mine),) = sent
    assert server == 7 and mine.finite and mine.squares == [900.0, 100.0] and clipped.awaited == [7]
    assert not local.weights.any() and local.pushes.completed == 0
    assert [wait.rank for wait in local.server.awaits()] == [7]
    local.server.handle(type(mine)(7, mine.clock, [3000.0, 0.0], True))
    local.apply_pushes()
    assert np.allclose(local.weights, -0.1 / 4000**0.5) and local.pushes.completed == 1 and not clipped.awaited
    local.free()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_clock_with_a_gradient_that_is_not_finite_takes_no_step_anywhere(where):
    local = LocalServer(given_config("optimizer.clip_norm=1", "optimizer.kind=adam"), SIZE, TENSORS)
    clipped = local.server.session.clipped
    values = np.ones(SIZE, np.float32)
    values[500] = np.nan if where == "here" else 1
    if where == "elsewhere":
        clipped.servers = [0, 7]
        clipped.send = lambda message, server: clipped.receive(type(message)(7, message.clock, [], False))
    local.pushes.push(local.gradient_buffer(BATCH * values, BATCH))
    local.apply_pushes()
    assert not local.weights.any() and {own.version for own in local.server.shard_copies.values()} == {1}
    assert all(own.batches == 0 and not own.states.any() for own in local.server.shard_copies.values())
    clipped.servers = [0]
    local.push(BATCH * np.ones(SIZE), BATCH)
    assert np.allclose(local.weights, -0.1, atol=1e-5)
    local.free()


def test_the_parts_of_a_shard_are_those_of_its_tensors():
    layout = SimpleNamespace(tensors=TENSORS)
    assert tensor_parts(layout, Shard(0, "dense1", 850, 70)) == [(0, slice(0, 50)), (1, slice(50, 70))]
    assert tensor_parts(layout, Shard(1, "dense1", 900, 100)) == [(1, slice(0, 100))]


def test_the_last_message_of_a_push_is_finished_after_all_others():
    clocks = ClippedClocks.__new__(ClippedClocks)
    clocks.open = Counter()
    clocks.last = {}
    first, second, last = (SimpleNamespace(ring=0, sequence=5, last=number == 2) for number in range(3))
    for message in (first, second, last):
        clocks.open_message(message)
    assert clocks.finished(last) == []
    assert clocks.finished(first) == [first]
    assert clocks.finished(second) == [second, last] and not clocks.open and not clocks.last


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["consistency.staleness=2"], "no push is the gradient of a batch; set consistency.staleness = 0 or inf"),
        (["consistency.staleness=0", "optimizer.where=worker"], 'needs optimizer.where = "server"'),
    ],
)
@pytest.mark.parametrize("key", ["clip_norm", "clip_tensor"])
def test_clipping_is_refused_where_there_is_no_gradient_of_a_batch(key, settings, error):
    with pytest.raises(UserError, match=f"optimizer.{key} = 1: .*{error}"):
        config.load(None, [*settings, f"optimizer.{key}=1"])


def test_words_for_no_limit():
    for word in ("none", "auto"):
        assert not clips_steps(config.load(None, ["consistency.staleness=0", f"optimizer.clip_norm={word}"]))
    assert not clips_steps(config.load(None, ["optimizer.clip_norm=1"]))
