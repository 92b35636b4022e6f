"""Optimizer rules: results do not depend on how pushes are folded, cut or sized."""

import numpy as np
import pytest
from local_server import LocalServer

from adam_mpi import config
from adam_mpi.optimizer import kernels, rules
from adam_mpi.optimizer.settings import BatchCounts, ImageCounts, Settings
from adam_mpi.server.replication_messages import Record, RecordMessage
from adam_mpi.sharding import message_formats
from adam_mpi.transport.mailbox import ReceivedMessage

SIZE, BATCH = 300, 8
LINEAR = ("descent", "momentum", "nesterov")
SETTINGS = [(0.9, 0.01, 0.1), (0.5, 0.2, 0.5), (0.99, 0.0, 0.03), (0.999, 0.3, 0.1), (0.9, 0.1, 0.0)]
"""(momentum, decay, rate); the fourth makes the velocity oscillate, the last takes no step at all."""


def textbook(kind, weights, velocity, gradient, momentum, decay, rate):
    """Return (weights, velocity) after one batch, in float64."""
    gradient = gradient + decay * weights
    if kind == "descent":
        return weights - rate * gradient, velocity
    velocity = momentum * velocity + gradient
    ahead = gradient + momentum * velocity if kind == "nesterov" else velocity
    return weights - rate * ahead, velocity


def stepped(kind, weights, velocity, total, momentum, decay, rate, begun, present):
    """Return (weights, velocity) after a step of the kernel on a sum of gradients."""
    rule = rules.RULES[kind]
    rows = rules.coefficients(rule, Settings(momentum, decay), rate, BatchCounts(0, begun, present))
    one = np.zeros(1, np.int64)
    scale = np.ones(1, np.float32)
    weights, velocity = (part.astype(np.float32) for part in (weights, velocity))
    states = velocity.reshape(1, -1)[: len(rule.states)]
    kernels.step(rule.kernel, weights, states, total.astype(np.float32), one, scale, rows)
    return weights, velocity


def drawn(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, SIZE))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("batches", [1, 2, 7, 100])
@pytest.mark.parametrize("kind", LINEAR)
def test_a_fold_of_equal_gradients_is_as_many_steps(kind, batches, settings):
    weights, velocity, gradient = drawn(3)
    folded = stepped(kind, weights, velocity, batches * gradient, *settings, batches, batches)
    for _ in range(batches):
        weights, velocity = textbook(kind, weights, velocity, gradient, *settings)
    assert np.allclose(folded[0], weights, rtol=2e-5, atol=2e-5 * max(1, np.abs(weights).max()))
    if kind != "descent":
        assert np.allclose(folded[1], velocity, rtol=2e-5, atol=2e-5 * max(1, np.abs(velocity).max()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", LINEAR)
def test_parts_of_batches_are_together_what_the_whole_is(kind, settings):
    """Small pushes, as those of replicas that share a batch."""
    start, gradient = drawn(2), drawn(1, 1)[0]
    whole = stepped(kind, *start, gradient, *settings, 1, 1)
    for parts in ((0.5, 0.5), (0.1, 0.2, 0.7)):
        found = start
        for part in parts:
            found = stepped(kind, *found, part * gradient, *settings, part, part)
        assert np.allclose(found, whole, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", LINEAR)
def test_a_gradient_that_comes_in_pieces_is_one_step(kind, settings):
    start, pieces = drawn(2), drawn(3, 1)
    whole = stepped(kind, *start, pieces.sum(0), *settings, 4, 4)
    found = stepped(kind, *start, pieces[0], *settings, 4, 4)
    for piece in pieces[1:]:
        found = stepped(kind, *found, piece, *settings, 0, 4)
    assert np.allclose(found, whole, atol=1e-5)


def test_two_eigenvalues_that_meet_are_no_trouble():
    """Where decay is just so large that the velocity begins to swing."""
    momentum, rate = 0.9, 0.1
    meeting = (1 - np.sqrt(momentum)) ** 2 / rate
    for decay in (meeting, meeting * (1 + 1e-9), meeting * (1 - 1e-7)):
        settings, (weights, velocity, gradient) = (momentum, decay, rate), drawn(3)
        folded = stepped("momentum", weights, velocity, 16 * gradient, *settings, 16, 16)
        for _ in range(16):
            weights, velocity = textbook("momentum", weights, velocity, gradient, *settings)
        assert np.allclose(folded, (weights, velocity), atol=1e-4)


def test_adagrad_adds_the_square_of_the_mean_gradient_once_for_each_batch():
    weights, _, gradient = drawn(3)
    weights, squares = weights.astype(np.float32), np.zeros(SIZE, np.float32)
    found = stepped("adagrad", weights, squares, 4 * gradient, 0.0, 0.0, 0.1, 4, 4)
    for _ in range(4):
        squares = squares + gradient**2
    assert np.allclose(found[1], squares, rtol=1e-5)
    assert np.allclose(found[0], weights - 0.1 * 4 * gradient / np.sqrt(squares), atol=1e-5)


def served(*settings):
    given = ["server.shard=1024", "optimizer.learning_rate=0.1", "optimizer.schedule=constant", f"train.batch={BATCH}"]
    return LocalServer(config.load(None, [*given, *settings]), SIZE)


RULES = [
    ["optimizer.decay=0.3"],
    ["optimizer.momentum=0.9", "optimizer.decay=0.1"],
    ["optimizer.kind=nesterov", "optimizer.momentum=0.9", "optimizer.decay=0.1"],
    ["optimizer.ema=0.2", "optimizer.decay=0.3"],
    ["optimizer.kind=rmsprop", "optimizer.decay=0.1"],
    ["optimizer.kind=adam", "optimizer.decay=0.1"],
    ["optimizer.kind=adamw", "optimizer.decay=0.1"],
    ["optimizer.kind=ftrl", "optimizer.decay=0.1", "optimizer.l1=0.01"],
]


@pytest.mark.parametrize("codec", ["none", "bfloat16"])
@pytest.mark.parametrize("rule", RULES, ids=" ".join)
def test_folding_and_the_size_of_pushes_change_nothing(rule, codec):
    """Eight batches of equal gradients: one after the other, four folded twice, and as one push."""
    found = []
    for pushes, folds in ((8, 8), (8, 2), (1, 1)):
        local = served(*rule, f"push.codec={codec}")
        local.push(4.0, BATCH)
        for number in range(pushes):
            local.pushes.push(local.gradient_buffer(0.5 * BATCH * 8 / pushes, BATCH * 8 // pushes))
            if (number + 1) % (pushes // folds) == 0:
                local.pushes.step()
                local.apply_pushes()
        assert local.server.counts["steps"] == 1 + folds
        found.append(local.weights.copy())
        local.free()
    assert found[0].max() < -0.1
    assert np.allclose(found[1:], found[0], rtol=1e-5)


@pytest.mark.parametrize("codec", ["none", "bfloat16"])
@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "adam", "adamw", "ftrl"])
def test_adaptive_rules_take_each_of_several_pushes_in_turn(name, codec):
    """The same bits, one after the other and five at once, of one, two and a part of a batch."""
    gradients = drawn(5)
    found = []
    for at_once in (1, 5):
        local = served(f"optimizer.kind={name}", "optimizer.decay=0.1", f"push.codec={codec}")
        for number, gradient in enumerate(gradients):
            images = (BATCH, 2 * BATCH, BATCH // 2)[number % 3]
            local.pushes.push(local.gradient_buffer(images * gradient, images))
            if (number + 1) % at_once == 0:
                local.pushes.step()
                local.apply_pushes()
        own = local.server.shard_copies[0]
        assert local.server.counts["steps"] == 5 // at_once and own.batches == 6.5
        found.append((local.weights.copy(), own.states.copy()))
        local.free()
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert np.abs(found[0][0]).max() > 0.1


def test_the_running_average_moves_as_often_as_there_were_batches():
    """The weights do not change, so the average is known exactly."""
    means = []
    for pushes in (1, 4):
        local = served("optimizer.ema=0.2", "optimizer.learning_rate=0.0")
        for shard in local.memory_layout.shards:
            local.server.shard_copies[shard.index].ema[:] = 1.0
        for _ in range(pushes):
            local.push(1.0, 4 * BATCH // pushes)
        means.append(local.server.shard_copies[0].ema[0])
        local.free()
    assert means == pytest.approx([0.8**4] * 2)


def test_a_refused_push_does_not_count():
    local = served("optimizer.decay=0.3")
    local.push(1.0, BATCH)
    before = local.weights.copy()
    local.pushes.push(local.gradient_buffer(np.nan, BATCH))
    local.pushes.push(local.gradient_buffer(0.0, BATCH))
    local.pushes.step()
    local.apply_pushes()
    assert local.counts["refused"] == 1
    assert np.allclose(local.weights, before * (1 - 0.1 * 0.3), rtol=1e-6)
    local.free()


@pytest.mark.parametrize("rule", RULES, ids=" ".join)
def test_a_copy_on_another_server_takes_the_same_step_bit_by_bit(rule):
    """From its record alone: a fold of three pushes, the second half of a fourth, and a refused one."""
    local = served(*rule)
    copy = served(*rule)
    stepper = local.server.session.stepper
    for number, (images, part) in enumerate([(BATCH, 0), (3, 0), (2 * BATCH, 0), (5 * BATCH, 1)]):
        values = drawn(1, number)[0].astype(np.float32)
        messages = [message(number, images, part), message(100, BATCH, 0, finite=0)]
        counts = stepper.count_images(messages)
        assert counts == (images if part == 0 else 0, images, images if part == 1 else 0)
        stepper.step_folded(0, values, 0.1, counts, False)
        record = Record(
            shard=local.memory_layout.shards[0],
            version=number + 1,
            rate=0.1,
            values=values,
            notes=np.zeros(0, np.int64),
            done=print,
            image_counts=counts,
        )
        header = RecordMessage(record, np.zeros((), message_formats.HEADER), 0).write(np.zeros(0, np.uint32))
        carried = ImageCounts(*(int(header[name]) for name in ("clock", "part", "codec")))
        copy.server.session.stepper.step_folded(0, values, float(header["seen"].view(np.float64)), carried, False)
    for one, other in zip(local.server.shard_copies[0].parts, copy.server.shard_copies[0].parts, strict=True):
        assert np.array_equal(one, other)
    local.free()
    copy.free()


def message(sequence, images, part, finite=1):
    fields = dict.fromkeys(message_formats.HEADER.names, 0) | {"ring": 0, "start": 0, "sequence": sequence}
    return ReceivedMessage(**fields | {"images": images, "part": part, "parts": 2, "finite": finite})


def test_a_clock_of_synchronous_training_is_one_batch_however_many_images_it_has():
    local = served("consistency.staleness=0")
    assert local.server.session.stepper.count_images([message(1, 3, 0), message(2, 2, 0)]) == (BATCH, BATCH, BATCH)
    local.free()
