"""What keeps the trainer threads of a worker waiting, for how long, and for whom it waits."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adam_mpi.worker.worker import Worker


class Waits:
    """Looked at in every round of the worker: a round with an idle thread counts for what is missing then."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.whom: dict[str, list[int]] = {}
        """What it waited for -> the members of the job that could end the last such wait."""
        self.last = time.perf_counter()

    def count(self, worker: "Worker") -> None:
        now, idle = time.perf_counter(), worker.idle_share
        if idle:
            missing, ranks = reason(worker)
            self.whom[missing] = [worker.world.layout.places[rank].member for rank in ranks]
            self.seconds[missing] += (now - self.last) * idle
        self.last = now

    def stats(self) -> dict[str, Any]:
        return {"waits": dict(self.seconds), "whom": self.whom}


def reason(worker: "Worker") -> tuple[str, list[int]]:
    """What a thread without a task waits for, and who has it."""
    data, pulls, pushes = worker.data, worker.pulls, worker.pushes
    unapplied = [lane.server for lane in pushes.lanes if lane.sent or lane.waiting]
    if worker.parked:
        return "strips", [rank for rank in worker.world.layout.strips(worker.world.rank) if rank != worker.world.rank]
    if data.drained:
        return ("pushes", unapplied) if unapplied else ("others", [])
    if worker.slot is not None or (worker.fresh and data.arrived):
        # A joint batch under way in other threads; or every contribution is on its way to the servers.
        return ("pushes", unapplied) if worker.slot is None else ("threads", [])
    if worker.fresh:
        return "data", data.asked
    if pulls.least is not None and pulls.reading == "heads":
        return "clock", []
    return "weights", pulls.servers


if TYPE_CHECKING:
    from adam_mpi.worker.worker import Worker


def told(worker: "Worker") -> dict[str, Any]:
    pulls, pushes, pulled = worker.pulls, worker.pushes, worker.all_pulled
    return {
        "role": "worker",
        "rank": worker.world.place.member,
        "cpu": time.process_time(),
        "images": worker.images,
        "busy": worker.busy,
        "starved": worker.waits.seconds["data"],
        "clock_wait": pulled["waited"],
        "queue": len(worker.data.arrived),
        "unacknowledged": len(pushes.unacknowledged),
        "pushes": {"sent": pushes.sent, "acknowledged": pushes.settled, "bytes": pushes.bytes}
        | {"last": pushes.last[0]},
        "carried": worker.carried,
        "left_behind": worker.left_behind,
        "pulls": {"count": pulled["count"], "bytes": pulled["bytes"]},
        "traffic": dict(pushes.traffic) | dict(worker.pull_traffic + pulls.traffic),
        "layers": worker.probe.layers if worker.probe else {},
        "trouble": _trouble(worker),
        **worker.waits.stats(),
    }


def _trouble(worker: "Worker") -> dict[str, Any] | None:
    """The first number that was not finite: where the way forward shows it, or only gradients."""
    found = [thread.nan_detector.trouble for thread in worker.trainers if thread.nan_detector.trouble is not None]
    first = min(found, key=lambda trouble: trouble.step) if found else worker.pushes.trouble
    return None if first is None else first.stats()
