"""The state of a running job, rank by rank: who is busy, who is slow, who waits for whom. Pure.

The head writes it to `status.json` of the run directory; the live view and `adam_mpi top` show it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from adam_mpi.cluster.layout import Layout

RankState = Mapping[str, Any]
LEAST = 0.05
"""Share of the time from which on it is told what a rank waits for."""
SLOW = 1.4
"""A worker is slow when an image takes it so many times as long as the median of all."""


def pulse(before: RankState, after: RankState) -> dict[str, Any]:
    """What a role did between two of its words: shares of the time, and amounts per second."""
    seconds = max(after["at"] - before["at"], 1e-9)

    def rate(key: str) -> float:
        return (after.get(key, 0) - before.get(key, 0)) / seconds

    moved = _bytes(after) - _bytes(before)
    found = {"busy": min(rate("busy"), 1.0), "bytes": moved / seconds, "images": rate("images")}
    if after["role"] == "worker":
        waited = {reason: total - before["waits"].get(reason, 0.0) for reason, total in after["waits"].items()}
        found["waits"] = {reason: round(spent / seconds, 3) for reason, spent in waited.items() if spent > 0}
    if after["role"] == "server":
        found["apply_batch"] = (after["folded"] - before["folded"]) / max(after["steps"] - before["steps"], 1)
    return found


def _bytes(word: RankState) -> int:
    """What a role has sent or, for a server, received."""
    return word["pushes"]["bytes"] + word["pulls"]["bytes"] if word["role"] == "worker" else word["bytes"]


def ranks(
    layout: Layout, words: Mapping[tuple[str, int], RankState], pulses: Mapping[tuple[str, int], RankState], now: float
) -> list[dict[str, Any]]:
    """A row for each role of each rank."""
    slow, behind, rows = _slow(pulses), _behind(words), []
    places = {place.member: place for place in layout.places}
    for (role, rank), word in sorted(words.items()):
        # Words are of ranks by their number for life; some may be of those that are gone.
        if rank not in places or role not in places[rank].roles:
            continue
        place, seen = places[rank], pulses.get((role, rank), {})
        row = {"rank": rank, "role": role, "host": place.host, "replica": place.replica, "strip": place.strip}
        busy = round(seen.get("busy", 0.0), 3)
        waits = seen.get("waits", {}) if role == "worker" else {_lacks(word): round(1 - busy, 3)}
        row |= {"busy": busy, "waits": waits, "queue": word["queue"]}
        row |= {"images": round(seen.get("images", 0.0), 1), "bytes": round(seen.get("bytes", 0.0))}
        silent = round(max(now - word["heard"], 0.0), 1)
        whom = word.get("whom", {}) | {"clock": [other for other in sorted(slow) or behind if other != rank]}
        rows.append(row | {"waiting": _waiting(waits, whom), "slow": rank in slow, "silent": silent})
    return rows


def _lacks(word: RankState) -> str:
    """What keeps a server or a data rank from doing more."""
    if word["role"] == "server":
        return "pushes"
    return "asks" if not word["asks"] else "its threads" if word["preparing"] else "others"


def _waiting(waits: Mapping[str, float], whom: Mapping[str, Sequence[int]]) -> str:
    """What a rank waits for more than now and then, and whom: "clock of rank 3 64%"."""
    most = sorted(((share, reason) for reason, share in waits.items() if share >= LEAST), reverse=True)
    parts = []
    for share, reason in most:
        of = f" of rank {', '.join(map(str, whom[reason]))}" if whom.get(reason) else ""
        parts.append(f"{reason}{of} {share:.0%}")
    return ", ".join(parts)


def _slow(pulses: Mapping[tuple[str, int], RankState]) -> set[int]:
    """Workers that compute for much longer on an image than others."""
    costs = {
        rank: seen["busy"] / seen["images"]
        for (role, rank), seen in pulses.items()
        if role == "worker" and seen["images"] > 0
    }
    middle = median(costs.values()) if len(costs) > 1 else 0.0
    return {rank for rank, cost in costs.items() if middle and cost > SLOW * middle}


def _behind(words: Mapping[tuple[str, int], RankState]) -> list[int]:
    """The workers that others wait for when they wait for a clock: those that are least far."""
    clocks: dict[int, int] = {}
    for word in words.values():
        for pusher, clock in word.get("clocks", {}).items():
            clocks[int(pusher)] = min(clock, clocks.get(int(pusher), clock))
    least = min(clocks.values(), default=0)
    return sorted(pusher for pusher, clock in clocks.items() if clock == least and len(set(clocks.values())) > 1)


def groups(rows: Sequence[RankState]) -> list[dict[str, Any]]:
    """The same by role: means of shares and queues, sums of amounts, and what most of the waiting is for."""
    found = []
    for role in ("data", "worker", "server"):
        same = [row for row in rows if row["role"] == role]
        waits: Counter[str] = Counter()
        for row in same:
            waits.update(row["waits"])
        top = waits.most_common(1)
        if same:
            found.append(
                {
                    "role": role,
                    "ranks": len(same),
                    "busy": round(_mean(same, "busy"), 3),
                    "waiting": top[0][0] if top else "",
                    "waited": round(top[0][1] / len(same), 3) if top else 0.0,
                    "queue": round(_mean(same, "queue"), 1),
                    "bytes": sum(row["bytes"] for row in same),
                }
            )
    return found


def _mean(rows: Sequence[RankState], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)
