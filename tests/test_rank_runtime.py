"""What a rank keeps when a generation ends, and for how long."""

import time

import pytest

from adam_mpi.runtime import rank_runtime
from adam_mpi.runtime.rank_runtime import RankRuntime


class Window:
    def __init__(self, late):
        self.late = late
        self.forgotten = 0

    def forget(self):
        self.forgotten += 1


class Role:
    def __init__(self, *transfers):
        self.left = list(transfers)

    def transfers(self):
        return self.left

    def stats(self):
        return {}


class ControlChannel:
    def send(self, message, to):
        pass


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, which only the test moves."""
    now = [time.monotonic()]
    monkeypatch.setattr(rank_runtime.time, "monotonic", lambda: now[0])
    return now


def test_only_memory_that_late_messages_may_touch_is_kept(clock):
    near = Window(late=False)
    far = Window(late=True)
    channel = ControlChannel()
    role = Role("a ring sender")
    [left] = RankRuntime(channel, {"worker": role}, None, [near, far]).abandon()
    assert near.forgotten == 1 and far.forgotten == 0
    assert left.windows == [far] and left.transfers == [channel, "a ring sender"]


def test_it_is_freed_after_a_while_without_another_loss(clock):
    far = Window(late=True)
    later = RankRuntime(ControlChannel(), {"data": Role()}, None, [])
    later.abandoned = RankRuntime(ControlChannel(), {}, None, [far]).abandon()
    later.report(0)
    assert far.forgotten == 0 and len(later.abandoned) == 1
    clock[0] += rank_runtime.LATE_SECONDS + 1
    later.report(0)
    later.report(0)
    assert far.forgotten == 1 and later.abandoned == []
