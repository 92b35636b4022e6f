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
