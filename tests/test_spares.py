"""Those who stand by: who lets them in, when they join, and what becomes of one that does not answer."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import spares
from adam_mpi.cluster.spares import CALL, JoinPackage, Spare, Spares, doors
from adam_mpi.config import load
from adam_mpi.runtime.coordinator import Coordinator, may_join


class Link:
    """To a spare that answers, is silent, or is dead; it has words of its own to say."""

    def __init__(self, kind="answers", words=()):
        self.kind, self.words, self.heard = kind, list(words), []

    def Iprobe(self, source):
        if self.kind == "dead":
            raise MPI.Exception(MPI.ERR_OTHER)
        return bool(self.words)

    def recv(self, source):
        return self.words.pop(0)

    def send(self, word, to):
        if self.kind == "dead":
            raise MPI.Exception(MPI.ERR_OTHER)
        self.heard.append(word)
        if self.kind == "answers" and word == CALL:
            self.words.append(word)


def holding(*spares_held):
    held = Spares()
    held.held = [Spare(link, None, 0.0, ready, host="h", pid=0) for link, ready in spares_held]
    return held


def test_each_rank_lets_in_its_own_and_no_more_than_are_missing():
    assert doors([0, 2, 0, 1], 5) == [1, 1, 3]
    assert doors([0, 2, 0, 1], 2) == [1, 1]
    assert doors([2, 1], 0) == doors([2, 1], -1) == []


def test_all_that_are_missing_join_at_once_or_when_nobody_is_on_his_way():
    assert may_join(missing=1, ready=1, coming=0) and may_join(missing=2, ready=3, coming=1)
    assert not may_join(missing=2, ready=1, coming=1)
    assert may_join(missing=2, ready=1, coming=0)
    assert not may_join(missing=0, ready=2, coming=0) and not may_join(missing=1, ready=0, coming=1)


def test_only_who_answers_counts_and_a_stopped_or_dead_one_is_given_up(monkeypatch):
    monkeypatch.setattr(spares, "CALL_SECONDS", 0.01)
    here, stopped, dead, coming = Link(), Link("silent"), Link("dead"), Link("silent")
    held = holding((here, True), (stopped, True), (dead, True), (coming, False))
    assert held.call() == 1
    assert [spare.link for spare in held.held] == [here, coming]
    assert held.call() == 1, "the next call is a call of its own"


def test_one_that_is_stopped_is_ended_for_the_launcher_would_wait_for_it(monkeypatch):
    ended = []
    monkeypatch.setattr(spares, "CALL_SECONDS", 0.01)
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: ended.append((pid, number)))
    held = holding((Link("silent"), True), (Link("silent"), True))
    held.held[0].host, held.held[0].pid, held.held[1].pid = MPI.Get_processor_name(), 12, 13
    held.dismiss()
    assert ended == [(12, signal.SIGKILL)] and not held.held, "one on another host cannot be reached"


def test_the_head_is_told_when_one_is_ready_and_when_one_is_gone():
    link = Link("silent", words=[("h", 7), 0.8])
    held = holding((link, False))
    held.held[0].host = ""
    assert held.look() and held.told()["coming"] == 1
    assert held.look() and held.told() | {"started": []} == {"ready": 1, "coming": 0, "refused": False, "started": []}
    assert not held.look()
    link.kind = "dead"
    assert held.look() and held.told()["ready"] == 0


def test_a_new_generation_is_told_who_stands_by_and_old_orders_are_void():
    held = holding((Link("silent"), True))
    held.look()
    held.told()
    held.order(3)
    held.enter(None)
    assert held.ordered == 0 and held.look()


def luggage(seconds=30.0):
    job = SimpleNamespace(config=load(None, [f"recover.seconds={seconds}"]), directory=Path("run"))
    return JoinPackage(job, ())


def spawning(monkeypatch, spawn):
    comm = SimpleNamespace(Spawn=spawn, Set_errhandler=lambda handler: None)
    monkeypatch.setattr(
        spares,
        "MPI",
        SimpleNamespace(COMM_SELF=comm, Info=MPI.Info, Exception=MPI.Exception, ERRORS_RETURN=MPI.ERRORS_RETURN),
    )


def test_a_launcher_without_a_slot_is_asked_no_further(monkeypatch):
    def spawn(*words):
        raise MPI.Exception(MPI.ERR_SPAWN)

    spawning(monkeypatch, spawn)
    held = Spares()
    held.enter(luggage())
    held.order(3)
    assert held.look() and held.told()["refused"] and held.ordered == 0


def test_a_rank_that_hangs_while_it_starts_another_is_ended(monkeypatch):
    killed = threading.Event()
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: number == signal.SIGKILL and killed.set())
    monkeypatch.setattr(spares.logging, "shutdown", lambda: None)
    spawning(monkeypatch, lambda *words: killed.wait(30) or pytest.fail("nobody ended it"))
    held = Spares()
    held.enter(luggage(seconds=1.0))
    held.luggage.job.config.recover.seconds = 0.01
    held.order(1)
    with pytest.raises(AttributeError):
        # What a `Spawn` that hung returned is no communicator.
        held.look()
    assert killed.is_set()


def test_a_spare_answers_calls_and_hears_its_invitation():
    link = Link("silent", words=[CALL, "invitation"])
    assert spares.hear(link, lambda: False) == "invitation"
    assert link.heard == [CALL]


def test_a_spare_that_is_left_alone_ends():
    with pytest.raises(RankFailure, match="is gone"):
        spares.hear(Link("dead"), lambda: False)
    with pytest.raises(RankFailure, match="the job is over"):
        spares.hear(Link("silent"), lambda: True)


@pytest.fixture
def head():
    """Of a job of 8 ranks that wants to keep them, and two spares."""
    head = Coordinator.__new__(Coordinator)
    head.config = load(None, ["recover.spares=2"])
    head.full, head.members, head.recoveries, head.standing_by, head.refused = 8, list(range(8)), [], {}, False
    head.started, head.told_refusal, said = [], False, []
    head.progress = SimpleNamespace(say=said.append)
    head.said, head.sent = said, []
    head.channel = SimpleNamespace(send=lambda message, rank: head.sent.append((rank, message)))
    head.world = SimpleNamespace(layout=SimpleNamespace(starter=6, places=[SimpleNamespace(rank=r) for r in range(8)]))
    return head


def news(ready, coming, refused=False):
    return {"kind": "spares", "ready": ready, "coming": coming, "refused": refused, "started": []}


def test_spares_are_ordered_once_and_again_when_one_is_taken(head):
    head._keep_full()
    head._keep_full()
    assert head.sent == [(6, {"kind": "spawn", "ranks": 2})]
    head._hear_of_spares(6, news(2, 0))
    head._keep_full()
    assert len(head.sent) == 1
    head._hear_of_spares(6, news(1, 0))
    head._keep_full()
    assert head.sent[1:] == [(6, {"kind": "spawn", "ranks": 1})]


def test_whoever_is_missing_is_let_in_when_somebody_is_ready(head):
    head.members = list(range(7))
    head._keep_full()
    assert head.sent == [(6, {"kind": "spawn", "ranks": 3})]
    head._hear_of_spares(6, news(1, 2))
    head._keep_full()
    assert {message["kind"] for _, message in head.sent[1:]} == {"grow"} and head.sent[-1][1]["full"] == 8


def test_nobody_is_started_before_the_others_have_gone_on(head):
    head.recoveries = [{"seconds": None, "seconds_all": None, "detected": 1.0}]
    head.statistics = SimpleNamespace(of=lambda role: [])
    head._keep_full()
    assert head.sent == []


def test_a_refusal_is_told_once_and_ends_the_orders(head):
    for _ in range(2):
        head._hear_of_spares(6, news(0, 0, refused=True))
        head._keep_full()
    assert head.sent == [] and len(head.said) == 1 and "no slot" in head.said[0]
