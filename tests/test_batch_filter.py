"""The gradient of a batch before it is used: clipped, and with the velocity of its thread."""

import math

import numpy as np
import pytest

from adam_mpi.config import Group, load
from adam_mpi.optimizer.groups import ALL, STATISTICS, GroupSpan
from adam_mpi.worker.batch_filter import BatchFilter

WHOLE = [GroupSpan(0, 3, ALL)]


def made(momentum=0.0, clip="none", spans=WHOLE):
    config = load(
        None,
        [
            "train.batch=4",
            f"optimizer.momentum={momentum}",
            "optimizer.momentum_where=replica",
            f"optimizer.clip_norm={clip}",
        ],
    )
    return BatchFilter(config, 3, spans)


def test_a_long_gradient_is_scaled_to_the_limit_of_the_mean_over_the_batch():
    gradient = np.array([12.0, 16.0, 0.0], np.float32)
    assert made(clip=1).apply(gradient) == pytest.approx(0.2)
    np.testing.assert_allclose(gradient, [2.4, 3.2, 0.0], rtol=1e-6)


def test_a_short_gradient_stays_as_it_is():
    gradient = np.array([1.0, -2.0, 0.5], np.float32)
    batch_filter = made(clip=1)
    assert batch_filter.apply(gradient) == 1
    np.testing.assert_array_equal(gradient, [1.0, -2.0, 0.5])
    assert batch_filter.clipped == 0


def test_pushes_of_a_thread_alone_are_nesterovs_steps():
    random = np.random.default_rng(0)
    batch_filter = made(momentum=0.9)
    velocity = np.zeros(3)
    for _ in range(5):
        gradient = random.standard_normal(3).astype(np.float32)
        velocity = 0.9 * velocity + gradient
        pushed = gradient.copy()
        batch_filter.apply(pushed)
        np.testing.assert_allclose(pushed, gradient + 0.9 * velocity, rtol=1e-5)


def test_the_velocity_is_of_clipped_gradients():
    batch_filter = made(momentum=0.5, clip=1)
    pushed = np.array([8.0, 0.0, 0.0], np.float32)
    batch_filter.apply(pushed)
    np.testing.assert_allclose(batch_filter.velocity, [4.0, 0.0, 0.0])
    np.testing.assert_allclose(pushed, [6.0, 0.0, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_to_the_servers_and_out_of_the_velocity(bad):
    batch_filter = made(momentum=0.9, clip=1)
    gradient = np.array([1.0, bad, 0.0], np.float32)
    batch_filter.apply(gradient)
    np.testing.assert_array_equal(gradient, [1.0, bad, 0.0])
    assert not batch_filter.velocity.any()


def test_nothing_is_done_with_clocks_or_without_clip_and_momentum():
    assert not made().active
    clocked = load(None, ["consistency.staleness=0", "optimizer.clip_norm=1", "optimizer.momentum=0.9"])
    assert not BatchFilter(clocked, 3, WHOLE).active


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_running_statistics_are_neither_measured_nor_changed(momentum):
    batch_filter = made(
        momentum=momentum, clip=1, spans=[GroupSpan(0, 1, ALL), GroupSpan(1, 2, STATISTICS), GroupSpan(2, 3, ALL)]
    )
    gradient = np.array([3.0, 1000.0, 0.0], np.float32)
    assert batch_filter.apply(gradient) == 1
    np.testing.assert_allclose(gradient, [3.0 * (1 + momentum), 1000.0, 0.0])


def test_frozen_parameters_have_no_gradient_and_no_part_in_the_norm():
    frozen = GroupSpan(1, 3, Group("*", frozen=True))
    gradient = np.array([3.0, 1000.0, math.nan], np.float32)
    assert made(clip=1, spans=[GroupSpan(0, 1, ALL), frozen]).apply(gradient) == 1
    np.testing.assert_array_equal(gradient, [3.0, 0.0, 0.0])
