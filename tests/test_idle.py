"""Ranks with nothing to do leave the cores to others."""

import time

import psutil
from launch import given

SHARE = 0.05
SECONDS, TRIES = 3.0, 4


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
    told = ", ".join(f"{name} {share:.1%}" for name, share in zip(("data", "server", "worker"), measured, strict=True))
    assert max(measured) < SHARE, f"{told} of a core"
    # Awake again, the worker trains on.
    lines = len(job.metrics())
    job.until(lambda: len(job.metrics()) > lines + 2, "more metrics")
