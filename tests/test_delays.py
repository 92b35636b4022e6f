"""The delay of pushes in gradients of others, and what servers do with late ones."""

from types import SimpleNamespace

import pytest

from adam_mpi.config import load
from adam_mpi.server.delays import KEPT, PushDelays, ShardHistory


def push(pusher, seen, images=32):
    return SimpleNamespace(pusher=pusher, seen=seen, images=images, finite=1)


def test_a_delay_counts_the_gradients_of_others_since_the_weights_it_was_computed_on():
    history = ShardHistory(0)
    assert history.delays(0, [(1, 0, 1.0), (2, 0, 1.0)]) == [0, 1]
    assert history.delays(1, [(1, 0, 1.0)]) == [1]
    assert history.delays(2, [(2, 1, 2.0)]) == [1]
    assert history.delays(3, [(1, 3, 1.0)]) == [0]


def test_a_fold_of_many_pushes_is_not_one_step_late():
    history = ShardHistory(0)
    assert history.delays(0, [(pusher, 0, 1.0) for pusher in range(10)]) == list(range(10))


def test_a_push_later_than_what_is_remembered_counts_all_of_it():
    history = ShardHistory(7)
    for version in range(7, 7 + 2 * KEPT):
        history.delays(version, [(1, version, 1.0)])
    assert history.delays(7 + 2 * KEPT, [(2, 7, 1.0)]) == [KEPT - 1]


def test_late_pushes_are_scaled_to_a_stable_step():
    delays = PushDelays(load(None, ["optimizer.momentum=0.9", "optimizer.stale=scale"]))
    assert delays.factor(3.9, 0.1) == 1
    assert delays.factor(40.0, 0.1) == pytest.approx(0.1)
    assert delays.factor(40.0, 0.001) == 1


@pytest.mark.parametrize("settings", [["optimizer.stale=keep"], ["optimizer.kind=adam"], ["consistency.staleness=1"]])
def test_other_pushes_are_kept_as_they_are(settings):
    assert PushDelays(load(None, settings)).factor(1e6, 0.1) == 1


def test_pushes_beyond_the_limit_are_left_out():
    delays = PushDelays(load(None, ["optimizer.stale=drop:3"]))
    messages = [push(pusher, 0) for pusher in range(6)]
    found = delays.measure(0, 0, messages)
    assert delays.drop(messages, found) == 2
    assert [message.finite for message in messages] == [1, 1, 1, 1, 0, 0]
