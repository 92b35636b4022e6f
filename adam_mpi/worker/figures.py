"""What a worker tells of itself: how far it is, what it has sent and received, what it waits for, what troubles it."""

import time
from typing import TYPE_CHECKING, Any

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
    found = [thread.hunter.trouble for thread in worker.trainers if thread.hunter.trouble is not None]
    first = min(found, key=lambda trouble: trouble.step) if found else worker.pushes.trouble
    return None if first is None else first.stats()
