"""The order of an epoch: every image once, the same for any number of ranks; batches with owners and skewed shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.data.epoch import Order
from adam_mpi.data.epoch import draw_owners as draw_owners
from adam_mpi.sharding.training_state import Phase


def epoch(number, count, batch, seed=1, part="train"):
    return Order(Phase(0, part, number), count, batch, seed)


counts = st.integers(1, 300)
batches = st.integers(1, 40)
replicas = st.integers(1, 6)
skews = st.sampled_from(["by_class", "dirichlet:0.05", "dirichlet:1", "dirichlet:100"])
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


@given(counts, replicas, skews)
def test_every_image_has_one_owner(count, replicas, kind):
    owners = draw_owners(kind, np.arange(count) % 7, replicas, 3)
    assert owners.shape == (count,) and owners.min() >= 0 and owners.max() < replicas
    np.testing.assert_array_equal(owners, draw_owners(kind, np.arange(count) % 7, replicas, 3))


def test_by_class_gives_each_replica_classes_of_its_own():
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    owners = draw_owners("by_class", labels, 5, 1)
    assert (np.bincount(owners) == 200).all()
    assert all(len(np.unique(labels[owners == replica])) <= 4 for replica in range(5))


def test_dirichlet_is_the_more_uneven_the_smaller_it_is():
    labels = np.arange(6000) % 10

    def unevenness(kind):
        owners = draw_owners(kind, labels, 4, 1)
        return np.std([[(labels[owners == replica] == label).sum() for label in range(10)] for replica in range(4)])

    assert unevenness("dirichlet:0.1") > 2 * unevenness("dirichlet:2") > 4 * unevenness("dirichlet:1000")
    assert (draw_owners("dirichlet:1", labels, 4, 1) != draw_owners("dirichlet:1", labels, 4, 2)).any()


@given(counts, batches, replicas, skews)
def test_batches_of_one_owner(count, batch, replicas, kind):
    owners = draw_owners(kind, np.arange(count) % 7, replicas, 3)
    order = Order(Phase(0, "train", 1), count, batch, 5, owners)
    parts = [order[number] for number in range(len(order))]
    assert sorted(np.concatenate(parts)) == list(range(count))
    for number, images in enumerate(parts):
        assert 0 < len(images) <= batch and (owners[images] == order.owner(number, replicas)).all()
    again = Order(Phase(0, "train", 2), count, batch, 5, owners)
    assert count < 20 or (again.images != order.images).any()


@given(counts, batches, replicas, skews)
def test_joint_batches_spread_every_owner_evenly(count, batch, replicas, kind):
    owners = draw_owners(kind, np.arange(count) % 7, replicas, 3)
    order = Order(Phase(0, "train", 1), count, batch, 5, owners, joint=True)
    assert len(order) == -(-count // batch)
    for replica in range(replicas):
        shares = [order.share(number, replica, replicas) for number in range(len(order))]
        np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.flatnonzero(owners == replica))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch


@given(counts, batches, replicas)
def test_static_shares_are_even_and_cover_all(count, batch, replicas):
    order = Order(Phase(0, "train", 1), count, batch, 5)
    owned = np.bincount([order.owner(number, replicas) for number in range(len(order))], minlength=replicas)
    assert owned.sum() == len(order) and owned.max() - owned.min() <= 1


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.skew=by_name"], "data.skew = 'by_name'.*by_class"),
        (["data.skew=dirichlet:-1"], "data.skew.*ALPHA > 0"),
        (["epoch.quorum=0.5"], "epoch.quorum = 0.5: needs epoch.assignment"),
        (["epoch.quorum=0.5", "epoch.assignment=static", "consistency.staleness=0"], "needs.*staleness = inf"),
    ],
)
def test_mistakes_in_the_configuration_of_shares_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        load(None, settings)
