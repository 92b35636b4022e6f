"""Spare processes: which ranks admit them, when they join, and what happens to one that does not answer."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import spares
from adam_mpi.cluster.control_messages import SparesReport
from adam_mpi.cluster.spares import PING, Invitation, JoinPackage, Spare, Spares, admitting_ranks
from adam_mpi.config import load


class Link:
    """A link to a spare that answers, is silent, or is dead; `messages` are what it sends."""

    def __init__(self, kind="answers", messages=()):
        self.kind = kind
        self.messages = list(messages)
        self.received = []

    def Iprobe(self, source):
        if self.kind == "dead":
            raise MPI.Exception(MPI.ERR_OTHER)
        return bool(self.messages)

    def recv(self, source):
        return self.messages.pop(0)

    def send(self, message, to):
        if self.kind == "dead":
            raise MPI.Exception(MPI.ERR_OTHER)
        self.received.append(message)
        if self.kind == "answers" and message == PING:
            self.messages.append(message)


def started(*spares_held):
    """Return the spares of a rank that has started these, each as (link, ready)."""
    held = Spares()
    held.held = [Spare(link, None, 0.0, ready, host="h", pid=0) for link, ready in spares_held]
    return held


def test_each_rank_admits_its_own_spares_and_no_more_than_are_missing():
    assert admitting_ranks([0, 2, 0, 1], 5) == [1, 1, 3]
    assert admitting_ranks([0, 2, 0, 1], 2) == [1, 1]
    assert admitting_ranks([2, 1], 0) == admitting_ranks([2, 1], -1) == []


def test_only_spares_that_respond_count_and_the_others_are_dropped(monkeypatch):
    monkeypatch.setattr(spares, "PING_SECONDS", 0.01)
    responding = Link()
    starting = Link("silent")
    held = started((responding, True), (Link("silent"), True), (Link("dead"), True), (starting, False))
    assert held.count_responding() == 1
    assert [spare.link for spare in held.held] == [responding, starting]
    assert held.count_responding() == 1, "an earlier answer does not count"


def test_a_stopped_spare_is_killed_because_the_launcher_would_wait_for_it(monkeypatch):
    killed = []
    monkeypatch.setattr(spares, "PING_SECONDS", 0.01)
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: killed.append((pid, number)))
    held = started((Link("silent"), True), (Link("silent"), True))
    held.held[0].host = MPI.Get_processor_name()
    held.held[0].pid = 12
    held.held[1].pid = 13
    held.dismiss()
    assert killed == [(12, signal.SIGKILL)] and not held.held, "a process of another host cannot be killed"


def test_a_report_is_due_when_a_spare_is_ready_and_when_one_is_gone():
    link = Link("silent", messages=[("h", 7), 0.8])
    held = started((link, False))
    held.held[0].host = ""
    assert held.poll() and held.report() == SparesReport(ready=0, coming=1, refused=False, started=[])
    assert held.poll()
    report = held.report()
    assert (report.ready, report.coming, report.refused) == (1, 0, False)
    assert [taken["cpu"] for taken in report.started] == [0.8]
    assert not held.poll()
    link.kind = "dead"
    assert held.poll() and held.report() == SparesReport(ready=0, coming=0, refused=False, started=[])


def test_an_invitation_goes_to_a_spare_that_is_ready():
    starting = Link()
    ready = Link()
    held = started((starting, False), (ready, True))
    invitation = Invitation("port", 8, 8, [], ())
    held.invite(invitation)
    assert ready.received == [invitation] and not starting.received
    assert [spare.link for spare in held.held] == [starting]


def test_a_new_generation_gets_a_report_and_drops_former_orders():
    held = started((Link("silent"), True))
    held.poll()
    held.report()
    held.order(3)
    held.begin_generation(None)
    assert held.ordered == 0 and held.poll()


def join_package(seconds=30.0):
    job = SimpleNamespace(config=load(None, [f"recover.seconds={seconds}"]), directory=Path("run"))
    return JoinPackage(job, ())


def spawning(monkeypatch, spawn):
    comm = SimpleNamespace(Spawn=spawn, Set_errhandler=lambda handler: None)
    monkeypatch.setattr(
        spares,
        "MPI",
        SimpleNamespace(COMM_SELF=comm, Info=MPI.Info, Exception=MPI.Exception, ERRORS_RETURN=MPI.ERRORS_RETURN),
    )


def test_after_a_refusal_of_the_launcher_no_more_spares_are_started(monkeypatch):
    def spawn(*words):
        raise MPI.Exception(MPI.ERR_SPAWN)

    spawning(monkeypatch, spawn)
    held = Spares()
    held.begin_generation(join_package())
    held.order(3)
    assert held.poll() and held.report().refused and held.ordered == 0


def test_a_rank_that_hangs_while_it_starts_a_spare_is_killed(monkeypatch):
    killed = threading.Event()
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: number == signal.SIGKILL and killed.set())
    monkeypatch.setattr(spares.logging, "shutdown", lambda: None)
    spawning(monkeypatch, lambda *words: killed.wait(30) or pytest.fail("the rank was not killed"))
    held = Spares()
    held.begin_generation(join_package(seconds=1.0))
    held.join_package.job.config.recover.seconds = 0.01
    held.order(1)
    with pytest.raises(AttributeError):
        # The `Spawn` that hung returns no communicator.
        held.poll()
    assert killed.is_set()


def test_a_spare_answers_pings_and_receives_its_invitation():
    link = Link("silent", messages=[PING, "invitation"])
    assert spares.receive(link, lambda: False) == "invitation"
    assert link.received == [PING]


def test_a_spare_ends_with_its_starter_and_with_the_job():
    with pytest.raises(RankFailure, match="is gone"):
        spares.receive(Link("dead"), lambda: False)
    with pytest.raises(RankFailure, match="the job is over"):
        spares.receive(Link("silent"), lambda: True)
