"""Learning-rate schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.config import Optimizer, load
from adam_mpi.server.optimizer_rules import SCHEDULES, images_passed, learning_rate
from adam_mpi.server.progress import ServerProgress
from adam_mpi.sharding.training_state import Position, batch_id


def rates(schedule, images, total=900, warmup=0.0):
    return [learning_rate(Optimizer(learning_rate=0.5, schedule=schedule, warmup=warmup), at, total) for at in images]


def test_constant_stays():
    assert rates("constant", [0, 450, 900, 2000]) == [0.5] * 4


def test_step_falls_after_each_third():
    assert rates("step", [0, 299, 300, 599, 600, 899]) == pytest.approx([0.5, 0.5, 0.15, 0.15, 0.045, 0.045])


def test_cosine_goes_from_the_rate_to_zero():
    assert rates("cosine", [0, 300, 450, 900, 1000]) == pytest.approx([0.5, 0.375, 0.25, 0, 0])


def test_warmup_rises_linearly_and_then_has_no_effect():
    warmed = rates("constant", [0, 50, 89, 90, 91], warmup=0.1)
    assert warmed == pytest.approx([0.5 / 90, 0.5 * 51 / 90, 0.5, 0.5, 0.5])
    assert rates("cosine", [450], warmup=0.1) == rates("cosine", [450])


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 0.9))
def test_a_rate_is_never_negative_nor_above_the_first(schedule, images, total, warmup):
    assert 0 <= rates(schedule, [images], total, warmup)[0] <= 0.5


def trained(batches, images=8, epochs=3):
    """Return the rates in epochs of `batches` batches of `images` images, where 80 images in batches of 8 were due."""
    settings = ["train.batch=8", f"train.epochs={epochs}", "optimizer.learning_rate=0.5", "optimizer.schedule=cosine"]
    progress = ServerProgress(load(None, settings), Position(12), 80)
    rates = []
    for epoch in range(1, epochs + 1):
        for number in range(batches):
            progress.position.add(np.array([batch_id(epoch, number)]))
            progress.position.images += images
            rates.append(progress.rate)
    return rates


def test_a_schedule_ends_with_training_although_images_are_left_out():
    assert trained(10)[-1] == pytest.approx(0)
    # Bad images: each batch lacks some.
    assert trained(10, images=5) == trained(10)
    # Epochs that end early: the first does not know it yet, the others are taken to be as long.
    assert trained(8)[-1] == pytest.approx(0)
    assert trained(8)[8:16] == pytest.approx(rates("cosine", [80 + 10 * n for n in range(1, 9)], 240))
    assert trained(8, epochs=1)[-1] == pytest.approx(rates("cosine", [64], 80)[0])


def test_every_image_counts_once_in_order():
    """This is the rate of synchronous training."""
    position = Position(13)
    batch = 16
    images = 200
    for epoch in (1, 2):
        for number in range(13):
            before = (epoch - 1) * images + number * batch
            assert images_passed(position, batch, images) == pytest.approx(before, abs=1e-9)
            position = position.after(np.array([batch_id(epoch, number)]), min(batch, images - number * batch))
