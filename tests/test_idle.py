"""Ranks with nothing to do leave the cores to others."""

import time

from launch import given

SHARE = 0.05
SECONDS = 4.0


def used(process):
    times = process.cpu_times()
    return times.user + times.system


def test_data_and_server_ranks_hardly_run_while_the_worker_stands_still(start_job):
    job = start_job(3, "train", *given("data.images=1000", "train.epochs=1000000", "observe.interval=0.5"))
    job.until(lambda: any(line["done"] for line in job.metrics()), "the end of an epoch")
    data, server, worker = (job.rank(number) for number in range(3))
    worker.suspend()
    try:
        # What was under way ends; from then on there is nothing to do.
        job.until(lambda: still([data, server]), "a standstill", timeout=30)
        before, began = [used(data), used(server)], time.monotonic()
        time.sleep(SECONDS)
        took = time.monotonic() - began
        shares = [(now - then) / took for now, then in zip([used(data), used(server)], before, strict=True)]
    finally:
        worker.resume()
    assert max(shares) < SHARE, f"data {shares[0]:.1%}, server {shares[1]:.1%} of a core"
    # Awake again, the worker trains on.
    images = len(job.metrics())
    job.until(lambda: len(job.metrics()) > images + 2, "more metrics")


def still(processes, seconds=0.5):
    """Whether the processes use less than half a core over this while."""
    before = [used(process) for process in processes]
    time.sleep(seconds)
    return all(used(process) - then < 0.5 * seconds for process, then in zip(processes, before, strict=True))
