"""A whole replica on trainer threads: what they are given, what they return, and the scales of their steps."""

from collections import deque
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from adam_mpi.config import load
from adam_mpi.sharding.training_state import batch_id
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool, StepScales, add_scaled
from adam_mpi.worker.replica import Computed
from adam_mpi.worker.thread_replica import JointShare, ThreadReplica
from adam_mpi.worker.trainer import TaskResult
from adam_mpi.worker.worker import Worker
from adam_mpi.worker.worker_generation import HeldBatches, WorkerGeneration


class Thread:
    """A trainer thread that only counts its tasks."""

    def __init__(self, waiting, gradient=0.0):
        self.waiting = waiting
        self.unwanted = 0
        self.buffer = None
        self.gradient = np.full(4, gradient, np.float32)

    def give(self, task):
        self.waiting += 1

    def capture(self, buffer):
        pass


def replica(*threads, settings=()):
    """Return a replica of four parameters with `threads` that compute nothing."""
    made = ThreadReplica.__new__(ThreadReplica)
    made.config = load(None, settings)
    made.pool = GradientPool(4, 4, {}, 1)
    made.local = np.zeros(4, np.float32)
    made.predicted = np.zeros(4, np.float32)
    made.scales = StepScales.at(0.1, made.config)
    made.trainers = list(threads)
    made.finished = deque()
    made.rested = deque()
    made.results = SimpleQueue()
    made.joint = None
    return made


def worker(arrived, fresh=True, training=True, settings=()):
    """Return a worker with two threads, one of which has a task, and `arrived` batches."""
    made = Worker.__new__(Worker)
    made.config = load(None, settings)
    made.replica = replica(Thread(0), Thread(1), settings=settings)
    batches = [("slot", SimpleNamespace(epoch=1, number=number)) for number in range(arrived)]
    data = SimpleNamespace(
        phase=SimpleNamespace(training=training),
        arrived=batches,
        take_batch=lambda: batches.pop(0) if batches else None,
    )
    held = HeldBatches(None, None)
    made.current = WorkerGeneration(None, data, None, held, fresh=fresh)
    return made


def waiting(worker):
    return [thread.waiting for thread in worker.replica.trainers]


def test_threads_get_all_arrived_batches_before_a_recovery():
    busy = worker(arrived=6)
    busy.compute_on()
    assert waiting(busy) == [4, 3]
    assert busy.current.held.ids == {batch_id(1, number) for number in range(6)}


@pytest.mark.parametrize(
    "not_now", [{"fresh": False}, {"training": False}, {"settings": ["consistency.staleness=0"]}], ids=str
)
def test_threads_get_no_batch_whose_result_would_be_dropped(not_now):
    idle = worker(arrived=6, **not_now)
    idle.compute_on()
    assert waiting(idle) == [0, 1]
    assert not idle.current.held.ids


@pytest.mark.parametrize("where", ["server", "worker"])
def test_a_predicted_push_changes_weights_as_its_gradient_does(where):
    config = load(None, [f"optimizer.where={where}", "train.batch=8", "push.protocol=delta"])
    scales = StepScales.at(0.4, config)
    assert scales.weights == pytest.approx(-0.05)
    assert scales.push * scales.predicted == pytest.approx(scales.weights)
    gradient = np.array([1.0, -2.0], np.float32)
    stepped = np.ones(2, np.float32)
    push = np.zeros(2, np.float32)
    predicted = np.ones(2, np.float32)
    add_scaled(stepped, gradient, np.float32(scales.weights))
    add_scaled(push, gradient, np.float32(scales.push))
    add_scaled(predicted, push, np.float32(scales.predicted))
    np.testing.assert_allclose(stepped, [0.95, 1.1], rtol=1e-6)
    np.testing.assert_allclose(predicted, stepped, rtol=1e-6)


def test_pulled_weights_get_the_steps_of_missing_pushes_and_of_running_sums():
    made = replica(Thread(0), settings=["train.batch=1"])
    made.trainers[0].buffer = made.pool.take()
    made.trainers[0].buffer.values[:] = 2.0
    made.renew(np.ones(4, np.float32), [(slice(0, 2), np.full(2, 5.0, np.float32))])
    np.testing.assert_allclose(made.local, [0.3, 0.3, 0.8, 0.8], rtol=1e-6)


def test_pulled_weights_stay_as_they_are_when_nothing_is_missing():
    made = replica(Thread(0))
    made.renew(np.arange(4, dtype=np.float32), [])
    np.testing.assert_array_equal(made.local, np.arange(4))


def test_the_parts_of_a_joint_batch_are_summed_when_all_threads_are_done():
    made = replica(Thread(1, gradient=1.0), Thread(1, gradient=2.0))
    buffer = made.pool.take()
    made.joint = JointShare("slot", buffer)
    made.results.put(TaskResult(1, BatchResult(0, 3, 5, np.array([0.5, 2]), 1)))
    assert made.collect() and not made.finished and made.computes_share
    made.results.put(TaskResult(0, BatchResult(0, 3, 4, np.array([0.5, 2]), 1)))
    assert made.collect() and not made.computes_share and not made.working
    assert list(made.finished) == [Computed(slot="slot", gradient=buffer)]
    assert [done.images for done in buffer.done] == [4, 5]
    assert (buffer.values == 3).all()


def test_results_of_an_abandoned_generation_are_ignored_and_buffers_come_back():
    made = replica(Thread(1), Thread(0))
    free = made.pool.free.qsize()
    made.joint = JointShare("slot", made.pool.take())
    made.finished.append(Computed(gradient=made.pool.take()))
    made.abandon()
    assert made.pool.free.qsize() == free and not made.finished
    made.results.put(TaskResult(0, BatchResult(0, 3, 4, np.array([0.5, 2]), 1)))
    assert made.collect() and not made.finished and not made.working


def test_the_error_of_a_task_is_raised():
    made = replica(Thread(1))
    made.results.put(TaskResult(0, error=ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        made.collect()


def test_unpushed_batches_are_dropped_and_pushed_ones_stay():
    pushed = GradientBuffer(0, np.zeros(1), [BatchResult(0, 7, 4, np.array([0.0, 0]), 1)])
    held = HeldBatches(SimpleNamespace(acknowledged=deque(), unacknowledged=deque([pushed])), None)
    for number in (7, 8):
        held.note_taken(SimpleNamespace(epoch=1, number=number))
    held.drop_unpushed()
    assert held.ids == {batch_id(1, 7)}
    held.uncount()
    assert not held.ids and not pushed.counted
