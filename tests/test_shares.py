"""Whose batch is whose: orders with owners, skewed shares, tallies and lines. No MPI."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.data import order as skew
from adam_mpi.data.batch_loader import PrefetchQueue
from adam_mpi.data.epoch_progress import EpochProgress
from adam_mpi.data.order import Order
from adam_mpi.sharding.phases import Phase

counts, batches, replicas = st.integers(1, 300), st.integers(1, 40), st.integers(1, 6)
skews = st.sampled_from(["by_class", "dirichlet:0.05", "dirichlet:1", "dirichlet:100"])


@given(counts, replicas, skews)
def test_every_image_has_one_owner(count, replicas, kind):
    owners = skew.owners(kind, np.arange(count) % 7, replicas, 3)
    assert owners.shape == (count,) and owners.min() >= 0 and owners.max() < replicas
    np.testing.assert_array_equal(owners, skew.owners(kind, np.arange(count) % 7, replicas, 3))


def test_by_class_gives_each_replica_classes_of_its_own():
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    owners = skew.owners("by_class", labels, 5, 1)
    assert (np.bincount(owners) == 200).all()
    assert all(len(np.unique(labels[owners == replica])) <= 4 for replica in range(5))


def test_dirichlet_is_the_more_uneven_the_smaller_it_is():
    labels = np.arange(6000) % 10

    def unevenness(kind):
        owners = skew.owners(kind, labels, 4, 1)
        return np.std([[(labels[owners == replica] == label).sum() for label in range(10)] for replica in range(4)])

    assert unevenness("dirichlet:0.1") > 2 * unevenness("dirichlet:2") > 4 * unevenness("dirichlet:1000")
    assert (skew.owners("dirichlet:1", labels, 4, 1) != skew.owners("dirichlet:1", labels, 4, 2)).any()


@given(counts, batches, replicas, skews)
def test_batches_of_one_owner(count, batch, replicas, kind):
    owners = skew.owners(kind, np.arange(count) % 7, replicas, 3)
    order = Order(Phase(0, "train", 1), count, batch, 5, owners)
    parts = [order[number] for number in range(len(order))]
    assert sorted(np.concatenate(parts)) == list(range(count))
    for number, images in enumerate(parts):
        assert 0 < len(images) <= batch and (owners[images] == order.owner(number, replicas)).all()
    again = Order(Phase(0, "train", 2), count, batch, 5, owners)
    assert count < 20 or (again.images != order.images).any()


@given(counts, batches, replicas, skews)
def test_joint_batches_spread_every_owner_evenly(count, batch, replicas, kind):
    owners = skew.owners(kind, np.arange(count) % 7, replicas, 3)
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


def tally(done=None):
    order = Order(Phase(0, "train", 1), 25, 4, 1)
    return EpochProgress(order, range(0, 7, 2), lambda number: number // 4, 2, done)


def test_a_tally_knows_when_shares_are_complete():
    counted = tally()
    assert counted.owed.tolist() == [8, 5] and not counted.complete
    assert not counted.report(0, 3, 1.0, 2) and not counted.report(0, 1, 1.0, 1)
    assert counted.done.tolist() == [True] + [False] * 6
    assert counted.report(2, 4, 1.0, 4) and not counted.complete
    assert not counted.leave_out(4, 1) and not counted.report(4, 3, 0.0, 0)
    counted.skip(6)
    assert counted.complete and counted.skipped == 1 and counted.finished == 11 and not counted.done[6]
    assert counted.loss == 3.0 and counted.correct == 7


def test_a_batch_reported_twice_is_an_error():
    counted = tally()
    counted.report(0, 4, 0.0, 0)
    with pytest.raises(AssertionError, match="batch 0: 4 images reported, 0 are out"):
        counted.report(0, 4, 0.0, 0)


def test_a_tally_goes_on_from_a_position():
    counted = tally(np.arange(7) < 3)
    assert counted.owed.tolist() == [0, 5] and counted.done[:3].all()


class Kitchen:
    """Stands in for the threads: groups of batches are ready when the test says so."""

    def __init__(self):
        self.futures = {}

    def start(self, numbers):
        self.futures[tuple(numbers)] = Future()
        return self.futures[tuple(numbers)]

    def finish(self, *numbers):
        self.futures[numbers].set_result([f"batch {number}" for number in numbers])


def test_a_line_prepares_ahead_and_hands_out_in_order():
    kitchen = Kitchen()
    line = PrefetchQueue([1, 3, 5, 7, 9, 11], kitchen.start, ahead=4, group=2)
    # The first group is small, because it is waited for.
    assert line.fill() and not line.fill() and list(kitchen.futures) == [(1,), (3, 5), (7, 9)]
    kitchen.finish(3, 5)
    assert line.take() is None
    kitchen.finish(1)
    assert [line.take() for _ in range(3)] == [(number, f"batch {number}") for number in (1, 3, 5)]
    assert line.take() is None and line.close() == [7, 9, 11] and len(line) == 0


def test_a_line_of_many_takers_keeps_a_batch_until_all_have_their_share():
    kitchen = Kitchen()
    line = PrefetchQueue([0, 2, 4, 6], kitchen.start, ahead=1, group=1, takers=2)
    line.fill()
    kitchen.finish(0)
    assert line.take(0) == (0, "batch 0") and 0 in line.started
    # A fast replica is not kept waiting by the window of a slow one.
    assert line.take(4) is None and (4,) in kitchen.futures
    assert line.take(0) == (0, "batch 0") and 0 not in line.started


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.skew=by_name"], "data.skew = 'by_name'.*by_class"),
        (["data.skew=dirichlet:-1"], "data.skew.*ALPHA > 0"),
        (["epoch.quorum=0.5"], "epoch.quorum = 0.5: needs epoch.assignment"),
        (["epoch.quorum=0.5", "epoch.assignment=static", "consistency.staleness=0"], "needs.*staleness = inf"),
        (["data.transform.rotatoin=3"], "did you mean data.transform.rotation"),
        (["data.transform.reflect=3"], "data.transform.reflect = 3: expected true or false"),
    ],
)
def test_mistakes_in_the_configuration_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        load(None, settings)
