"""The order of an epoch: every image once, the same however many ranks take part."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.data.order import Order
from adam_mpi.sharding.phases import Phase


def epoch(number, count, batch, seed=1, part="train"):
    return Order(Phase(0, part, number), count, batch, seed)


sizes = {"count": st.integers(1, 700), "batch": st.integers(1, 64)}


@given(**sizes, replicas=st.integers(1, 9), seed=st.integers(0, 2**63))
def test_every_image_exactly_once_in_batches_and_in_shares(count, batch, replicas, seed):
    order = epoch(3, count, batch, seed)
    batches = [order[number] for number in range(len(order))]
    assert sorted(np.concatenate(batches)) == list(range(count))
    assert all(images.size == batch for images in batches[:-1]) and 0 < batches[-1].size <= batch
    for number, images in enumerate(batches):
        shares = [order.share(number, replica, replicas) for replica in range(replicas)]
        assert np.array_equal(np.concatenate(shares), images)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(**sizes, other=st.integers(1, 64))
def test_the_order_of_images_does_not_depend_on_the_batch(count, batch, other):
    assert np.array_equal(epoch(1, count, batch).images, epoch(1, count, other).images)


def test_epochs_and_seeds_differ_and_repeat():
    first = epoch(1, 500, 32).images
    assert np.array_equal(first, epoch(1, 500, 32).images)
    assert not np.array_equal(first, epoch(2, 500, 32).images)
    assert not np.array_equal(first, epoch(1, 500, 32, seed=2).images)


def test_what_is_not_trained_on_keeps_its_order():
    assert np.array_equal(epoch(2, 100, 32, part="validation").images, np.arange(100))
