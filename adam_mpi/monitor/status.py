"""The state of a running job, rank by rank: which are busy, which are slow, and what they wait for. Pure.

The coordinator writes it to `status.json` of the run directory; the live view and `adam_mpi top` show it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypedDict

from adam_mpi.cluster.layout import Layout
from adam_mpi.cluster.role_statistics import DataStatistics, Reporter, RoleStatistics, ServerStatistics

LEAST_SHARE = 0.05
"""A wait is shown from this share of the time."""
SLOW_FACTOR = 1.4
"""A worker is slow when an image takes it this many times as long as the median of all workers."""


@dataclass(frozen=True)
class Activity:
    """What a role did between two of its reports: shares of the time, and amounts per second."""

    busy: float = 0.0
    bytes: float = 0.0
    images: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Of a worker: what its threads waited for -> the share of the time."""
    apply_batch: float = 0.0
    """Of a server: pushes per step of the optimizer."""


class RankRow(TypedDict):
    """What `status.json` says about one role of one rank."""

    rank: int
    role: str
    host: str
    replica: int | None
    strip: int | None
    busy: float
    waits: dict[str, float]
    queue: int
    images: float
    bytes: int
    waiting: str
    """What it waits for and for which ranks, as a text."""
    slow: bool
    silent: float
    """Seconds since its last report."""


class RoleRow(TypedDict):
    """What `status.json` says about all ranks of one role."""

    role: str
    ranks: int
    busy: float
    waiting: str
    """What most of the waiting is for."""
    waited: float
    queue: float
    bytes: int


def activity(before: RoleStatistics, after: RoleStatistics, elapsed: float) -> Activity:
    """Return a role's activity for the status, between its reports `before` and `after`, `elapsed` seconds apart."""
    seconds = max(elapsed, 1e-9)
    busy = min((after["busy"] - before["busy"]) / seconds, 1.0)
    moved = (_bytes(after) - _bytes(before)) / seconds
    if after["role"] == "worker" and before["role"] == "worker":
        waited = {reason: total - before["waits"].get(reason, 0.0) for reason, total in after["waits"].items()}
        return Activity(
            busy=busy,
            bytes=moved,
            images=(after["images"] - before["images"]) / seconds,
            waits={reason: round(spent / seconds, 3) for reason, spent in waited.items() if spent > 0},
        )
    if after["role"] == "server" and before["role"] == "server":
        steps = max(after["steps"] - before["steps"], 1)
        return Activity(busy=busy, bytes=moved, apply_batch=(after["folded"] - before["folded"]) / steps)
    return Activity(busy=busy, bytes=moved)


def _bytes(values: RoleStatistics) -> int:
    """Return the bytes in the status that a role has sent or, for a server, received."""
    if values["role"] == "worker":
        return values["pushes"]["bytes"] + values["pulls"]["bytes"]
    return values["bytes"]


def ranks(
    layout: Layout,
    reports: Mapping[Reporter, RoleStatistics],
    activities: Mapping[Reporter, Activity],
    silent: Mapping[Reporter, float],
) -> list[RankRow]:
    """Return a status row for each role of each rank of `layout`; `silent`: seconds since each report."""
    slow = _slow_workers(activities)
    blocking = sorted(slow) or _last_in_clock(reports.values())
    places = {place.member: place for place in layout.places}
    rows: list[RankRow] = []
    for (role, rank), values in sorted(reports.items()):
        # Reports are kept by the number that a rank keeps for the whole job; some are of ranks that are gone.
        if rank not in places or role not in places[rank].roles:
            continue
        place = places[rank]
        seen = activities.get((role, rank), Activity())
        busy = round(seen.busy, 3)
        waits = seen.waits if values["role"] == "worker" else {_lacks(values): round(1 - busy, 3)}
        whom = values["whom"] if values["role"] == "worker" else {}
        rows.append(
            {
                "rank": rank,
                "role": role,
                "host": place.host,
                "replica": place.replica,
                "strip": place.strip,
                "busy": busy,
                "waits": waits,
                "queue": values["queue"],
                "images": round(seen.images, 1),
                "bytes": round(seen.bytes),
                "waiting": _describe_waits(waits, {**whom, "clock": [other for other in blocking if other != rank]}),
                "slow": rank in slow,
                "silent": round(max(silent[role, rank], 0.0), 1),
            }
        )
    return rows


def _lacks(values: DataStatistics | ServerStatistics) -> str:
    """Return for the status what keeps a server or a data rank from doing more."""
    if values["role"] == "server":
        return "pushes"
    return "asks" if not values["asks"] else "its threads" if values["preparing"] else "others"


def _describe_waits(waits: Mapping[str, float], whom: Mapping[str, Sequence[int]]) -> str:
    """Return status text about what a rank often waits for, and for which ranks: "clock of rank 3 64%"."""
    most = sorted(((share, reason) for reason, share in waits.items() if share >= LEAST_SHARE), reverse=True)
    parts = []
    for share, reason in most:
        of = f" of rank {', '.join(map(str, whom[reason]))}" if whom.get(reason) else ""
        parts.append(f"{reason}{of} {share:.0%}")
    return ", ".join(parts)


def _slow_workers(activities: Mapping[Reporter, Activity]) -> set[int]:
    """Return the workers that the status calls slow: they compute much longer on an image than others."""
    costs = {
        rank: seen.busy / seen.images
        for (role, rank), seen in activities.items()
        if role == "worker" and seen.images > 0
    }
    middle = median(costs.values()) if len(costs) > 1 else 0.0
    return {rank for rank, cost in costs.items() if middle and cost > SLOW_FACTOR * middle}


def _last_in_clock(reports: Iterable[RoleStatistics]) -> list[int]:
    """Return the workers that the status calls last: those with the lowest clock; empty if all have the same."""
    clocks: dict[int, int] = {}
    for values in reports:
        if values["role"] == "server":
            for pusher, clock in values["clocks"].items():
                clocks[int(pusher)] = min(clock, clocks.get(int(pusher), clock))
    least = min(clocks.values(), default=0)
    return sorted(pusher for pusher, clock in clocks.items() if clock == least and len(set(clocks.values())) > 1)


def groups(rows: Sequence[RankRow]) -> list[RoleRow]:
    """Return a status row per role: means of shares and queues, sums of amounts, and what most waiting is for."""
    found: list[RoleRow] = []
    for role in ("data", "worker", "server"):
        same = [row for row in rows if row["role"] == role]
        if not same:
            continue
        waits: Counter[str] = Counter()
        for row in same:
            waits.update(row["waits"])
        reason, waited = next(iter(waits.most_common(1)), ("", 0.0))
        found.append(
            {
                "role": role,
                "ranks": len(same),
                "busy": round(sum(row["busy"] for row in same) / len(same), 3),
                "waiting": reason,
                "waited": round(waited / len(same), 3),
                "queue": round(sum(row["queue"] for row in same) / len(same), 1),
                "bytes": sum(row["bytes"] for row in same),
            }
        )
    return found
