"""The head, without a job around it."""

import json
import threading
import time
import types

import pytest

from adam_mpi.base.errors import LostRun, LostState, RankFailure, Stall, UserError
from adam_mpi.cluster import fence, sentinel
from adam_mpi.config import load
from adam_mpi.monitor.status_writer import StatusWriter
from adam_mpi.runtime import coordinator as heads
from adam_mpi.runtime.coordinator import Coordinator


@pytest.fixture
def clock(monkeypatch):
    """Time as the test wants it."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(heads.time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def head(clock, tmp_path):
    """One that has just heard of ranks 0 and 1."""
    head = Coordinator.__new__(Coordinator)
    places = ["rank 0, data on a", "rank 1, server on a"]
    place = types.SimpleNamespace(member=0)
    head.config, head.directory = load(None), tmp_path
    head.world = types.SimpleNamespace(generation=0, place=place, layout=types.SimpleNamespace(places=places))
    head.checkpoints = types.SimpleNamespace(owner=types.SimpleNamespace(check=lambda: None))
    head.world.survivable, head.world.hosts, head.world.pids, head.evicted = False, ["a", "a"], [70, 71], {}
    (tmp_path / "log").mkdir()
    head.stepped, head.heard = clock.seconds, dict.fromkeys(range(2), clock.seconds)
    return head


def look(head):
    head._notice_stop()
    head._check_silence()


def test_who_is_silent_for_too_long_is_named(head, clock):
    with pytest.raises(RankFailure, match="rank 1, server on a has not been heard of for 60 s"):
        for _ in range(200):
            clock.seconds += 0.5
            head.heard[0] = clock.seconds
            look(head)
    assert 160 < clock.seconds < 162


def be_silent(head, clock, seconds):
    """Only rank 0 is heard of for so long."""
    for _ in range(2 * seconds):
        clock.seconds += 0.5
        head.heard[0] = clock.seconds
        look(head)


def test_where_others_can_go_on_the_sentinel_of_a_silent_rank_is_told_to_end_it(head, clock, tmp_path):
    head.world.survivable = True
    be_silent(head, clock, 61)
    orders, limit = tmp_path / "log" / sentinel.ORDERS, time.time() + 20
    while not (orders.exists() and orders.read_text()):
        assert time.time() < limit, "no order in 20 s"
        time.sleep(0.002)
    assert json.loads(orders.read_text()) == ["a", 71, "was not heard of for 60 s"]


def test_a_silent_rank_that_cannot_be_ended_ends_the_job(head, clock):
    head.world.survivable = True
    with pytest.raises(Stall, match="rank 1, server on a has not been heard of for 60 s, and could not be ended in"):
        be_silent(head, clock, 80)
    assert 170 < clock.seconds < 172


def test_a_head_that_stood_still_itself_accuses_nobody(head, clock):
    for seconds in (0.5, 70.0, 0.5, 90.0, 0.5):
        clock.seconds += seconds
        look(head)


@pytest.mark.parametrize("error", [fence.Evicted("was taken for dead"), LostRun("has been taken by another job")])
def test_a_head_that_stood_still_finds_out_whether_others_have_its_place(error, head, clock, monkeypatch):
    def told(*arguments):
        raise error

    if isinstance(error, LostRun):
        head.checkpoints.owner.check = told
    else:
        monkeypatch.setattr(fence, "check", told)
    look(head)
    clock.seconds += 2
    with pytest.raises(type(error), match="taken"):
        look(head)


def test_a_disk_that_hangs_does_not_stop_a_head_that_stood_still(head, clock, monkeypatch):
    looking, back = [], threading.Event()
    monkeypatch.setattr(heads, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(fence, "check", lambda *arguments: looking.append(threading.current_thread()) or back.wait(20))
    clock.seconds += 2
    look(head)
    back.set()
    assert looking and threading.main_thread() not in looking


def test_a_disk_that_hangs_does_not_keep_a_job_from_ending_that_computes_nan(head, monkeypatch):
    hanging, back, written = threading.Event(), threading.Event(), []
    monkeypatch.setattr(heads.time, "monotonic", time.perf_counter)
    monkeypatch.setattr(heads, "SETTLE_SECONDS", 0.01)
    head.status_writer, head.progress = (
        StatusWriter(head.directory),
        types.SimpleNamespace(name=lambda phase: "epoch 1/1 train"),
    )
    head._summary = lambda status: {}
    head._write_summary = lambda summary: hanging.set() or back.wait(20) or written.append(summary)
    figures = {"images": 320, "images_not_finite": 320}
    with pytest.raises(UserError, match="the loss of 320 of 320 images is not finite"):
        head._check_losses(None, figures, done=True)
    assert hanging.wait(20) and written == []
    back.set()


def test_a_job_that_loses_the_run_while_it_writes_its_weights_leaves_no_marker(head):
    """Writing them may take longer than an owner may be silent."""
    lost = []

    def check():
        if lost:
            raise LostRun("has been taken by another job")

    head.checkpoints.owner.check, head.checkpoints.write_weights = check, lambda: lost.append(True)
    head.status_writer, head.stopped_by = StatusWriter(head.directory), ""
    with pytest.raises(LostRun):
        head._write_results({})
    assert not (head.directory / "DONE").exists()


def test_a_recovery_that_the_next_loss_interrupted_lasts_until_pushes_are_applied_again(head):
    losses = [{"detected": at, "seconds": seconds, "seconds_all": None} for at, seconds in ((10.0, 0.2), (12.0, None))]
    head.recoveries = losses
    head.world.generation, words = 2, {"generation": 2, "rebuilt": 1, "dropped": 0, "went_on": [12.5, None]}
    head.statistics = types.SimpleNamespace(of=lambda role: [words])
    first, last = head.told_recoveries()
    assert first == losses[0] and last["seconds"] == 0.5 and last["seconds_all"] is None and last["rebuilt"] == 1
    words["went_on"] = [12.5, 13.0]
    assert [recovery["seconds_all"] for recovery in head.told_recoveries()] == [3.0, 1.0]


def test_a_job_whose_weights_lack_acknowledged_pushes_does_not_end_as_done(head):
    head.members, head.stopped_by = [1, 2], ""
    head.statistics = types.SimpleNamespace(short=lambda members, pushers: {"2": 3}, finals=lambda role, members: 1)
    head.world.layout.workers, head.world.layout.servers = [0], [1]
    head.checkpoints.finished = lambda: True
    head.finished, head.finishing, head.ending = False, True, None
    with pytest.raises(LostState, match="acknowledged pushes are not in all weights: 3 of rank 2; the job is not done"):
        head._finish()
    assert head.ending is None and not (head.directory / "DONE").exists()
    assert not (head.directory / "DONE").exists()
