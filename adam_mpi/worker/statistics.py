"""The statistics of a worker: what it has done, what keeps its threads waiting, for how long, and on which rank."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from adam_mpi.worker.diagnostics import Trouble

if TYPE_CHECKING:
    from adam_mpi.worker.worker import Worker


class Waits:
    """Count the time of idle threads; it is sampled in every step of the worker.

    The time since the last sample counts for what is missing now.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        """What the threads waited for -> for how long."""
        self.whom: dict[str, list[int]] = {}
        """What the threads waited for -> the members of the job that could end the last such wait."""
        self.last = time.perf_counter()

    def count(self, worker: "Worker") -> None:
        """Count the time since the last call for what the idle threads of `worker` lack now."""
        now = time.perf_counter()
        idle = worker.replica.idle_share
        if idle:
            missing, ranks = reason(worker)
            self.whom[missing] = [worker.world.layout.places[rank].member for rank in ranks]
            self.seconds[missing] += (now - self.last) * idle
        self.last = now

    def stats(self) -> dict[str, Any]:
        """Return the seconds and the members, by what the threads waited for."""
        return {"waits": dict(self.seconds), "whom": self.whom}


def reason(worker: "Worker") -> tuple[str, list[int]]:
    """Return what a thread of `worker` without a task waits for, and the ranks that could end the wait."""
    replica = worker.replica
    data = worker.current.data
    pulls = worker.current.pulls
    if replica.waits_for_strips:
        return "strips", [rank for rank in worker.world.layout.strips(worker.world.rank) if rank != worker.world.rank]
    unapplied = [sender.server for sender in worker.pushes.rings.senders if sender.sent or sender.waiting]
    if data.drained:
        return ("pushes", unapplied) if unapplied else ("others", [])
    if replica.computes_share:
        return "threads", []
    if worker.current.fresh and data.arrived:
        # Every gradient buffer is on its way to the servers.
        return "pushes", unapplied
    if worker.current.fresh:
        return "data", data.asked
    if pulls.least is not None and pulls.reading == "heads":
        return "clock", []
    return "weights", pulls.servers


def worker_statistics(worker: "Worker") -> dict[str, Any]:
    """Return the statistics of `worker`, as the coordinator receives them."""
    pushes = worker.pushes
    pulled = worker.pulled
    trouble = _first_trouble(worker)
    return {
        "role": "worker",
        "rank": worker.world.place.member,
        "cpu": time.process_time(),
        "images": worker.held.images,
        "busy": worker.replica.busy,
        "starved": worker.waits.seconds["data"],
        "clock_wait": pulled["waited"],
        "queue": len(worker.current.data.arrived),
        "unacknowledged": len(pushes.unacknowledged),
        "pushes": {
            "sent": pushes.sent,
            "acknowledged": pushes.completed,
            "bytes": pushes.bytes,
            "last": pushes.last[0],
        },
        "carried": worker.pushes.carried,
        "left_behind": worker.left_behind,
        "pulls": {"count": pulled["count"], "bytes": pulled["bytes"]},
        "traffic": dict(pushes.traffic) | dict(worker.pull_traffic_before + worker.current.pulls.traffic),
        "layers": worker.probe.layers if worker.probe else {},
        "trouble": None if trouble is None else trouble.stats(),
        **worker.waits.stats(),
    }


def _first_trouble(worker: "Worker") -> Trouble | None:
    """Return the first number that was not finite, in a forward pass if one shows it, else in a gradient."""
    return worker.replica.trouble or worker.pushes.trouble
