"""The prefetch queue: batches are loaded ahead in groups and handed out in order, each to all of its takers."""

from concurrent.futures import Future

from adam_mpi.data.batch_loader import PrefetchQueue


class Source:
    """Stands in for the threads: groups of batches are ready when the test says so."""

    def __init__(self):
        self.futures = {}

    def start(self, numbers):
        self.futures[tuple(numbers)] = Future()
        return self.futures[tuple(numbers)]

    def finish(self, *numbers):
        self.futures[numbers].set_result([f"batch {number}" for number in numbers])


def test_it_loads_ahead_and_hands_out_in_order():
    source = Source()
    queue = PrefetchQueue([1, 3, 5, 7, 9, 11], source, ahead=4, group=2)
    # The first group is small, because it is waited for.
    assert queue.fill() and not queue.fill() and list(source.futures) == [(1,), (3, 5), (7, 9)]
    source.finish(3, 5)
    assert queue.take() is None and (queue.ready, queue.loading) == (2, 3)
    source.finish(1)
    assert [queue.take() for _ in range(3)] == [(number, f"batch {number}") for number in (1, 3, 5)]
    assert queue.take() is None and queue.close() == [7, 9, 11] and len(queue) == 0


def test_a_batch_of_many_takers_stays_until_all_have_their_share():
    source = Source()
    queue = PrefetchQueue([0, 2, 4, 6], source, ahead=1, group=1, takers=2)
    queue.fill()
    source.finish(0)
    assert queue.take(0) == (0, "batch 0") and 0 in queue.started
    # The window of a slow replica does not hold back a fast one.
    assert queue.take(4) is None and (4,) in source.futures
    assert queue.take(0) == (0, "batch 0") and 0 not in queue.started


def test_a_stopped_queue_keeps_only_batches_that_some_replica_has_a_share_of():
    source = Source()
    queue = PrefetchQueue([0, 2, 4, 6], source, ahead=1, group=1, takers=2, begun={6: 1})
    queue.fill()
    source.finish(0)
    queue.take(0)
    queue.stop()
    assert queue.is_begun(0) and queue.is_begun(6) and not queue.is_begun(2) and len(queue) == 2
    assert queue.take(0) == (0, "batch 0") and queue.take(6) is None
    source.finish(6)
    assert queue.take(6) == (6, "batch 6") and len(queue) == 0
