"""The thread pool runs every job once, those of a number on one thread, and raises their errors in the caller."""

import threading
from functools import partial

import pytest

from adam_mpi.base.pools import ThreadPool


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_job_runs_once_and_a_number_stays_on_its_thread(threads):
    pool = ThreadPool(threads)
    seen = {}

    def note(number):
        seen.setdefault(number, []).append(threading.get_ident())

    for _ in range(20):
        pool.run([(number, partial(note, number)) for number in range(9)])
    assert all(len(idents) == 20 and len(set(idents)) == 1 for idents in seen.values())
    assert len({idents[0] for idents in seen.values()}) == threads


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_is_raised_by_run(number):
    pool = ThreadPool(2)

    def fail():
        raise ZeroDivisionError(f"number {number}")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match=f"number {number}"):
            pool.run([(number, fail), (number + 2, lambda: None)])


def test_after_an_error_no_thread_is_still_running_a_job():
    pool = ThreadPool(2)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.run([(0, fail), (1, lambda: None)])
    assert pool.done.empty()


def test_threads_end_when_the_pool_is_closed():
    before = set(threading.enumerate())
    pool = ThreadPool(3)
    mine = set(threading.enumerate()) - before
    pool.run([(number, lambda: None) for number in range(9)])
    assert len(mine) == 2
    pool.close()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
