"""The progress of a phase: when shares are complete, what is skipped, and what a report may not do."""

import numpy as np
import pytest

from adam_mpi.data.epoch import EpochProgress, Order
from adam_mpi.sharding.training_state import Phase


def start(done=None, strips=1):
    """Batches 0, 2, 4 and 6 of seven; the first two are one share, the others another."""
    order = Order(Phase(0, "train", 1), 25, 4, 1)
    return EpochProgress(order, range(0, 7, 2), lambda number: number // 4, 2, done, strips)


def test_it_knows_when_shares_are_complete():
    progress = start()
    assert progress.owed.tolist() == [8, 5] and not progress.complete
    assert not progress.report(0, 3, np.array([1.0, 2])) and not progress.report(0, 1, np.array([1.0, 1]))
    assert progress.done.tolist() == [True] + [False] * 6
    assert progress.report(2, 4, np.array([1.0, 4])) and not progress.complete
    assert not progress.leave_out(4, 1) and not progress.report(4, 3, np.array([0.0, 0]))
    progress.skip(6)
    assert progress.complete and progress.skipped == 1 and progress.finished == 11 and not progress.done[6]
    assert progress.sums.tolist() == [3.0, 7.0]


def test_a_batch_reported_twice_is_an_error():
    progress = start()
    progress.report(0, 4, np.array([0.0, 0]))
    with pytest.raises(AssertionError, match="batch 0: 4 images reported, 0 are out"):
        progress.report(0, 4, np.array([0.0, 0]))


def test_it_resumes_from_a_position():
    progress = start(np.arange(7) < 3)
    assert progress.owed.tolist() == [0, 5] and progress.done[:3].all() and progress.first_open == 3


def test_each_strip_reports_every_image():
    progress = start(strips=2)
    progress.resume(10, (0.5, 0.25), skipped=3)
    assert progress.finished == 10 and progress.skipped == 3 and progress.sums.tolist() == [5.0, 2.5]
    progress.report(0, 4, np.array([2.0, 2]))
    assert progress.finished == 12 and not progress.done[0]
    progress.report(0, 4, np.array([2.0, 2]))
    assert progress.finished == 14 and progress.done[0] and progress.sums.tolist() == [7.0, 4.5]


def test_sums_that_are_not_finite_are_left_out_and_counted():
    progress = start()
    progress.report(0, 2, np.array([np.nan, 1.0]))
    progress.report(0, 2, np.array([3.0, 2.0]))
    assert progress.sums.tolist() == [3.0, 3.0] and progress.not_finite == 2
