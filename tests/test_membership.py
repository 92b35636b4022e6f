"""Silent ranks are ended, a coordinator that was stopped checks its place, and missing ranks are replaced."""

import json
import threading
import time
import types

import pytest

from adam_mpi.base.errors import LostRun, RankFailure, Stall
from adam_mpi.cluster import fence, sentinel
from adam_mpi.cluster.control_messages import Grow, SparesReport, Spawn
from adam_mpi.config import load
from adam_mpi.runtime import supervision
from adam_mpi.runtime.supervision import LivenessMonitor, SpareKeeper, may_join


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, which only the test moves."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now.seconds)
    return now


class Place:
    roles = ("server",)

    def __init__(self, rank, name):
        self.rank = rank
        self.name = name

    def __str__(self):
        return self.name


@pytest.fixture
def world():
    places = [Place(0, "rank 0, data on a"), Place(1, "rank 1, server on a")]
    return types.SimpleNamespace(
        generation=0,
        place=types.SimpleNamespace(member=0),
        layout=types.SimpleNamespace(places=places),
        survivable=False,
        hosts=["a", "a"],
        pids=[70, 71],
        config=load(None),
    )


@pytest.fixture
def monitor(clock, world, tmp_path):
    """Of a coordinator that has just received messages of ranks 0 and 1."""
    (tmp_path / "log").mkdir()
    return LivenessMonitor(world, tmp_path, types.SimpleNamespace(check=lambda: None))


def be_silent(monitor, clock, seconds):
    """Let `seconds` pass in which only rank 0 sends messages."""
    for _ in range(2 * seconds):
        clock.seconds += 0.5
        monitor.received(0)
        monitor.step()


def test_a_rank_that_is_silent_for_too_long_is_named(monitor, clock):
    with pytest.raises(RankFailure, match="rank 1, server on a has sent nothing for 60 s"):
        be_silent(monitor, clock, 100)
    assert 160 < clock.seconds < 162


def test_the_sentinel_of_a_silent_rank_ends_it_where_the_others_can_continue(monitor, world, clock, tmp_path):
    world.survivable = True
    be_silent(monitor, clock, 61)
    orders = tmp_path / "log" / sentinel.ORDERS
    limit = time.time() + 20
    while not (orders.exists() and orders.read_text()):
        assert time.time() < limit, "no order in 20 s"
        time.sleep(0.002)
    assert json.loads(orders.read_text()) == ["a", 71, "has sent nothing for 60 s"]


def test_a_silent_rank_that_cannot_be_ended_ends_the_job(monitor, world, clock):
    world.survivable = True
    with pytest.raises(Stall, match="rank 1, server on a has sent nothing for 60 s, and could not be ended in"):
        be_silent(monitor, clock, 80)
    assert 170 < clock.seconds < 172


def test_a_coordinator_that_was_stopped_itself_accuses_no_rank(monitor, clock):
    for seconds in (0.5, 70.0, 0.5, 90.0, 0.5):
        clock.seconds += seconds
        monitor.step()
    assert not monitor.evicted


@pytest.mark.parametrize("error", [fence.Evicted("was taken for dead"), LostRun("has been taken by another job")])
def test_a_coordinator_that_was_stopped_finds_out_whether_others_have_its_place(error, monitor, clock, monkeypatch):
    def fail(*arguments):
        raise error

    if isinstance(error, LostRun):
        monitor.owner.check = fail
    else:
        monkeypatch.setattr(fence, "check_membership", fail)
    monitor.step()
    clock.seconds += 2
    with pytest.raises(type(error), match="taken"):
        monitor.step()


def test_a_disk_that_hangs_does_not_hold_up_a_coordinator_that_was_stopped(monitor, clock, monkeypatch):
    threads = []
    back = threading.Event()
    monkeypatch.setattr(supervision, "DISK_SECONDS", 0.01)

    def hang(*arguments):
        threads.append(threading.current_thread())
        back.wait(20)

    monkeypatch.setattr(fence, "check_membership", hang)
    clock.seconds += 2
    monitor.step()
    back.set()
    assert threads and threading.main_thread() not in threads


def test_all_missing_ranks_join_at_once_or_when_no_spare_is_starting():
    assert may_join(missing=1, ready=1, coming=0) and may_join(missing=2, ready=3, coming=1)
    assert not may_join(missing=2, ready=1, coming=1)
    assert may_join(missing=2, ready=1, coming=0)
    assert not may_join(missing=0, ready=2, coming=0) and not may_join(missing=1, ready=0, coming=1)


class Keeper(SpareKeeper):
    """Of a job that wants 8 ranks and two spares; it has `ranks` ranks."""

    def __init__(self, ranks=8):
        self.sent = []
        self.said = []
        layout = types.SimpleNamespace(starter=6, places=[Place(rank, f"rank {rank}") for rank in range(ranks)])
        world = types.SimpleNamespace(full=8, layout=layout, config=load(None, ["recover.spares=2"]))
        channel = types.SimpleNamespace(send=lambda message, rank: self.sent.append((rank, message)))
        super().__init__(world, channel, types.SimpleNamespace(in_progress=False), self.said.append)


def report(ready, coming, refused=False):
    return SparesReport(ready, coming, refused, [{"seconds": 1.0, "cpu": 0.5}])


def test_spares_are_ordered_once_and_again_when_one_is_taken():
    keeper = Keeper()
    keeper.step()
    keeper.step()
    assert keeper.sent == [(6, Spawn(2))]
    keeper.handle(6, report(2, 0))
    keeper.step()
    assert len(keeper.sent) == 1
    keeper.handle(6, report(1, 0))
    keeper.step()
    assert keeper.sent[1:] == [(6, Spawn(1))] and len(keeper.started) == 2


def test_missing_ranks_are_replaced_when_a_spare_is_ready():
    keeper = Keeper(ranks=7)
    keeper.step()
    assert keeper.sent == [(6, Spawn(3))]
    keeper.handle(6, report(1, 2))
    keeper.step()
    assert keeper.sent[1:] == [(rank, Grow(8)) for rank in range(7)]


def test_no_spare_is_started_before_the_others_apply_pushes_again():
    keeper = Keeper()
    keeper.recoveries.in_progress = True
    keeper.step()
    assert keeper.sent == []


def test_a_refusal_is_reported_once_and_ends_the_orders():
    keeper = Keeper()
    for _ in range(2):
        keeper.handle(6, report(0, 0, refused=True))
        keeper.step()
    assert keeper.sent == [] and len(keeper.said) == 1 and "no slot" in keeper.said[0]
