"""Learning-rate schedules."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.checkpoint.resume import merge_positions
from adam_mpi.config import Optimizer, load
from adam_mpi.optimizer.schedules import SCHEDULES, learning_rate
from adam_mpi.runtime.recovery import _position
from adam_mpi.runtime.role_setup import initial_position
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


def trained(batches, images=8, epochs=3, between=lambda position: position):
    """Return the rates in epochs of `batches` batches of `images` images, where 80 images in batches of 8 were due.

    `between` is called with the position after each batch, and returns the one that training continues from.
    """
    settings = ["train.batch=8", f"train.epochs={epochs}", "optimizer.learning_rate=0.5", "optimizer.schedule=cosine"]
    progress = ServerProgress(load(None, settings), Position(12), 80)
    rates = []
    for epoch in range(1, epochs + 1):
        for number in range(batches):
            progress.position.add(np.array([batch_id(epoch, number)]))
            progress.position.images += images
            progress.position = between(progress.position)
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


def resumed(position):
    """Return the position after a store of two servers was written and read."""
    known = merge_positions([Position.unpack(position.pack()) for _ in range(2)])
    job = SimpleNamespace(config=load(None, ["train.batch=8"]), replicas=2, resume=SimpleNamespace(position=known))
    job.description = SimpleNamespace(train=80)
    return initial_position(job)


def recovered(position):
    """Return the position after the loss of a rank."""
    return _position([{0: position}, {0: Position(12)}], version=None, begun=position.epoch)


@pytest.mark.parametrize("between", [resumed, recovered])
def test_a_schedule_ends_with_training_although_it_is_interrupted_in_epochs_that_end_early(between):
    assert trained(8, between=between) == trained(8)


def test_an_epoch_that_only_workers_have_begun_completes_the_one_before():
    position = Position(12, epoch=1)
    position.batches[:8] = True
    begun = _position([{0: position}], version=None, begun=2)
    assert (begun.epoch, begun.lasted, begun.count) == (2, 8, 0)


def test_positions_of_the_first_files_of_format_4_are_read():
    """They end with the bits of the batches."""
    position = Position(12, 3, 200, 40)
    position.lasted = 8
    short = Position.unpack(position.pack()[:-8])
    assert short.agrees(position) and short.lasted == 0


def test_every_image_counts_once_in_order():
    """This is the rate of synchronous training."""
    position = Position(13)
    batch = 16
    images = 200
    for epoch in (1, 2):
        for number in range(13):
            before = (epoch - 1) * images + number * batch
            assert position.images_passed(batch, images) == pytest.approx(before, abs=1e-9)
            position = position.after(np.array([batch_id(epoch, number)]), min(batch, images - number * batch))
