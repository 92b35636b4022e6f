"""Apply threads: every job once, those of a shard on one thread, errors where they are heard."""

import threading
from functools import partial

import pytest

from adam_mpi.base.thread_pool import ThreadPool


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_job_runs_once_and_a_shard_stays_on_its_thread(threads):
    appliers, seen = ThreadPool(threads), {}

    def note(shard):
        seen.setdefault(shard, []).append(threading.get_ident())

    for _ in range(20):
        appliers.run([(shard, partial(note, shard)) for shard in range(9)])
    assert all(len(idents) == 20 and len(set(idents)) == 1 for idents in seen.values())
    assert len({idents[0] for idents in seen.values()}) == threads


@pytest.mark.parametrize("shard", [0, 1])
def test_an_error_is_raised_where_the_batch_was_started(shard):
    appliers = ThreadPool(2)

    def fail():
        raise ZeroDivisionError(f"shard {shard}")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match=f"shard {shard}"):
            appliers.run([(shard, fail), (shard + 2, lambda: None)])


def test_after_an_error_nobody_is_still_at_work():
    appliers = ThreadPool(2)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        appliers.run([(0, fail), (1, lambda: None)])
    assert appliers.done.empty()


def test_threads_end_when_nothing_is_to_be_run_any_more():
    before = set(threading.enumerate())
    appliers = ThreadPool(3)
    mine = set(threading.enumerate()) - before
    appliers.run([(shard, lambda: None) for shard in range(9)])
    assert len(mine) == 2
    appliers.close()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
