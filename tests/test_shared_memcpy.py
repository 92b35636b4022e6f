"""Two ways to copy the body of a message: both write the same, and the quicker one is used."""

import numpy as np
import pytest

from adam_mpi.transport import mailbox, shared_memcpy
from adam_mpi.transport.shared_memcpy import LEAST, TRIES, TURN, SharedMemcpy, copy_past

GUARD = 0xDEADBEEF


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 1000, 1024, 5000])
@pytest.mark.parametrize("start", [0, 1, 5, 15, 16, 32])
def test_what_is_written_past_the_caches_is_the_same(size, start):
    target, values = np.full(6000, GUARD, np.uint32), np.random.default_rng(size).random(size, np.float32)
    words = values.view(np.uint32)
    assert copy_past(target[start : start + size], words)
    assert np.array_equal(target[start : start + size], words)
    assert np.all(target[:start] == GUARD) and np.all(target[start + size :] == GUARD)


@pytest.mark.parametrize("place", [0, 7, 16, 1500, 2999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_an_infinity_is_noticed_wherever_it_is(place, value):
    values = np.ones(3000, np.float32)
    values[place] = value
    assert not copy_past(np.zeros(3000, np.uint32), values.view(np.uint32))


class Clock:
    """A clock that advances only during copies, by `seconds` of each way."""

    def __init__(self, seconds):
        self.now = 0.0
        self.seconds = seconds
        self.taken = []

    def ways(self):
        def way(number):
            def copy(body, values):
                self.now += self.seconds[number]
                self.taken.append(number)
                return True

            return copy

        return way(0), way(1)


@pytest.mark.parametrize(("seconds", "chosen"), [((1.0, 0.9), 0), ((1.0, 2.0), 0), ((5.0, 1.0), 1)])
def test_the_way_past_the_caches_is_taken_where_the_other_takes_much_longer(monkeypatch, seconds, chosen):
    clock = Clock(seconds)
    monkeypatch.setattr(shared_memcpy, "WAYS", clock.ways())
    monkeypatch.setattr(shared_memcpy, "perf_counter", lambda: clock.now)
    own, body = SharedMemcpy(), np.zeros(LEAST, np.uint32)
    for _ in range(TURN):
        assert own.copy(body, body)
    assert clock.taken == [0, 1, 0, 1] + [chosen] * (TURN - TRIES)
    # A server that has been moved to another core is noticed at the next turn.
    clock.seconds = seconds[::-1] if chosen else (5.0, 1.0)
    clock.taken.clear()
    for _ in range(TURN):
        own.copy(body, body)
    assert clock.taken[TRIES:] == [1 - chosen] * (TURN - TRIES)


def test_one_slow_copy_by_chance_changes_nothing(monkeypatch):
    clock = Clock([1.0, 1.0])
    monkeypatch.setattr(shared_memcpy, "WAYS", clock.ways())
    monkeypatch.setattr(shared_memcpy, "perf_counter", lambda: clock.now)
    own, body = SharedMemcpy(), np.zeros(LEAST, np.uint32)
    for turn in range(TURN):
        clock.seconds[0] = 100.0 if turn == 0 else 1.0
        own.copy(body, body)
    assert clock.taken[TRIES:] == [0] * (TURN - TRIES)


def test_little_is_copied_the_usual_way(monkeypatch):
    clock = Clock((5.0, 1.0))
    monkeypatch.setattr(shared_memcpy, "WAYS", clock.ways())
    words = np.arange(LEAST - 1, dtype=np.uint32)
    body = np.zeros_like(words)
    assert SharedMemcpy().copy(body, words) == mailbox.finite(words) and np.array_equal(body, words)
    assert not clock.taken
