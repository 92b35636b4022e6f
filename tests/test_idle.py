"""Ranks with nothing to do leave the cores to others."""

import time

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


def test_data_and_server_ranks_hardly_run_while_the_worker_stands_still(start_job):
    job = start_job(3, "train", *given("data.images=1000", "train.epochs=1000000", "observe.interval=0.5"))
    job.until(lambda: any(line["done"] for line in job.metrics()), "the end of an epoch")
    data, server, worker = (job.rank(number) for number in range(3))
    worker.suspend()
    try:
        # The best of a few: what was under way ends first, and on a busy machine every wake-up costs more.
        for _ in range(TRIES):
            measured = shares([data, server])
            if max(measured) < SHARE:
                break
    finally:
        worker.resume()
    assert max(measured) < SHARE, f"data {measured[0]:.1%}, server {measured[1]:.1%} of a core"
    # Awake again, the worker trains on.
    lines = len(job.metrics())
    job.until(lambda: len(job.metrics()) > lines + 2, "more metrics")
