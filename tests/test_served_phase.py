"""What a data rank queues and counts when a phase starts, or is resumed in a later generation. No MPI, no threads."""

from types import SimpleNamespace

import numpy as np
import pytest

from adam_mpi.config import load
from adam_mpi.data.served_phase import Resumed, ServedPhase
from adam_mpi.model.metrics import ACCURACY
from adam_mpi.sharding.batches import BatchRemainder
from adam_mpi.sharding.training_state import Phase, Position

IMAGES, BATCH, BATCHES = 50, 8, 7
TRAIN = Phase(3, "train", 2)


def start(*settings, resumed=None, generation=0, data_ranks=1, rank=0, phase=TRAIN):
    """The phase on one of `data_ranks` data ranks with two replicas."""
    config = load(None, [f"train.batch={BATCH}", *settings])
    served = SimpleNamespace(config=config, owners=None, loader=None, metrics=ACCURACY, count=lambda part: IMAGES)
    layout = SimpleNamespace(replicas=2, data=tuple(range(data_ranks)), partitions=1)
    world = SimpleNamespace(layout=layout, rank=rank, generation=generation)
    return ServedPhase(phase, served, world, resumed)


def done(*numbers):
    """The position after these batches of the epoch of TRAIN."""
    position = Position(BATCHES, TRAIN.epoch)
    position.batches[list(numbers)] = True
    return position


def queued(served):
    return [list(queue.upcoming) for queue in served.queues]


def test_data_ranks_take_turns_and_static_shares_have_queues_of_their_own():
    assert queued(start()) == [list(range(BATCHES))]
    assert queued(start(data_ranks=2, rank=1)) == [[1, 3, 5]]
    first, second = queued(start("epoch.assignment=static"))
    assert first + second == list(range(BATCHES)) and len(first) == 4


def test_a_job_that_resumes_counts_only_what_it_does_itself():
    served = start(resumed=Resumed(done(0, 2, 6)))
    assert queued(served) == [[1, 3, 4, 5]]
    assert served.epoch_progress.finished == 0 and served.epoch_progress.owed.tolist() == [4 * BATCH]


def test_a_later_generation_counts_what_earlier_ones_did_and_waits_for_what_workers_hold():
    resumed = Resumed(done(0, 1, 2, 6), in_flight=frozenset({2}), mean=(0.5, 0.25))
    served = start(resumed=resumed, generation=1)
    assert queued(served) == [[3, 4, 5]]
    progress = served.epoch_progress
    # Batch 6 has the two images that are left of 50.
    assert progress.finished == 2 * BATCH + 2 and progress.sums.tolist() == [9.0, 4.5]
    assert progress.owed.tolist() == [4 * BATCH] and not progress.done[2]
    served.report(2, BATCH, np.array([1.0, 1.0]))
    assert progress.done[2] and progress.finished == 3 * BATCH + 2


@pytest.mark.parametrize("lost", [(), ((0, 2),)])
def test_joint_batches_that_some_replicas_have_pushed_are_completed(lost):
    # Of batch 1 one half is still to be handed out; the other half is pushed and will be reported, or was lost.
    left = BatchRemainder(pushed=0 if lost else BATCH // 2, due=((1, 2),), lost=lost)
    resumed = Resumed(done(0, 1), mean=(1.0, 1.0), partial={1: left})
    served = start("consistency.staleness=1", resumed=resumed, generation=1)
    progress = served.epoch_progress
    assert queued(served) == [[1, 2, 3, 4, 5, 6]] and served.queues[0].begun == {1: 1}
    assert progress.left[1] == (BATCH // 2 if lost else BATCH) and not progress.done[1]
    assert progress.finished == BATCH and progress.skipped == (BATCH // 2 if lost else 0)


def test_other_phases_start_from_their_first_batch():
    resumed = Resumed(done(0, 1))
    assert resumed.of(TRAIN) is resumed
    assert resumed.of(Phase(4, "validation", 2)) is None and resumed.of(Phase(5, "train", 3)) is None
    served = start(phase=Phase(4, "test", 2), resumed=None, generation=2)
    assert queued(served) == [list(range(BATCHES))] and not served.joint and not served.static
    np.testing.assert_array_equal(served.order.images, np.arange(IMAGES))


def test_a_closed_phase_skips_what_is_not_handed_out():
    served = start(resumed=Resumed(done(0, 1), in_flight=frozenset({1})), generation=1)
    assert not served.share_completed
    served.close()
    assert served.share_completed and served.is_exhausted(0) and served.remaining == 0
    assert served.epoch_progress.skipped == 4 * BATCH + 2 and not served.epoch_progress.complete
    served.report(1, BATCH, np.zeros(2))
    assert served.epoch_progress.complete
