"""Ranks with nothing to do leave the cores to others."""

import time
from types import SimpleNamespace

import numpy as np
import psutil
from launch import given

from adam_mpi.cluster import idle as idle_file
from adam_mpi.cluster.idle import Idle

SHARE = 0.05
SECONDS, TRIES = 3.0, 4


def test_an_idle_loop_rests_longer_and_longer_until_there_is_work(monkeypatch):
    now = [100.0]
    rests = []

    def rest(seconds):
        rests.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(idle_file, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    idle = Idle("sleep", rest)
    for _ in range(1000):
        idle.back_off(False)
    assert rests == sorted(rests) and rests[0] == Idle.SHORTEST and rests[-1] == Idle.LONGER
    # Work is delayed by at most an eighth of the wait, once that is longer than a few of the shortest rests.
    waited = np.cumsum([0, *rests])[:-1]
    assert all(seconds <= 1.001 * max(Idle.SHORTEST, before / 8) for seconds, before in zip(rests, waited, strict=True))
    resting = len(rests)
    idle.back_off(True)
    for _ in range(Idle.SPINS):
        idle.back_off(False)
    assert rests[resting:] == [Idle.SHORTEST]
    spinning = Idle("spin", rest)
    for _ in range(100):
        spinning.back_off(False)
    assert len(rests) == resting + 1


def test_a_patient_loop_rests_at_once(monkeypatch):
    now = [100.0]
    rests = []
    monkeypatch.setattr(idle_file, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    idle = Idle("sleep", rests.append, patient=True)
    for worked in (True, False, False, True, False):
        idle.back_off(worked)
    assert rests == 3 * [Idle.PATIENT]
    now[0] += 10
    idle.back_off(False)
    assert rests[-1] == Idle.LONGER


def used(process):
    times = process.cpu_times()
    return times.user + times.system


def shares(processes):
    """The share of a core that each process uses over a while."""
    before, began = [used(process) for process in processes], time.monotonic()
    time.sleep(SECONDS)
    took = time.monotonic() - began
    return [(used(process) - then) / took for process, then in zip(processes, before, strict=True)]


def test_all_others_hardly_run_while_a_worker_stands_still(start_job):
    """The other worker has nothing more to do in this epoch, and waits for the next."""
    keys = given("data.images=1000", "train.epochs=1000000", "observe.interval=0.5", "cluster.stopped=0")
    # With a batch in its hands, without which the epoch does not end.
    job = start_job(4, "train", *keys, *given('inject.faults=["stop rank=3 at=compute step=100"]'))
    job.until(lambda: any(line["done"] for line in job.metrics()), "the end of an epoch")
    *others, worker = (job.rank(number) for number in range(4))
    job.until(lambda: worker.status() == psutil.STATUS_STOPPED, "rank 3 to stop")
    try:
        # The best of a few: what was under way ends first, and on a busy machine every wake-up costs more.
        for _ in range(TRIES):
            measured = shares(others)
            if max(measured) < SHARE:
                break
    finally:
        worker.resume()
    figures = ", ".join(
        f"{name} {share:.1%}" for name, share in zip(("data", "server", "worker"), measured, strict=True)
    )
    assert max(measured) < SHARE, f"{figures} of a core"
    # Awake again, the worker trains on.
    lines = len(job.metrics())
    job.until(lambda: len(job.metrics()) > lines + 2, "more metrics")
