"""Roles in the next generation: who is left keeps what he did; what nobody is left for others take on. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from adam_mpi import config
from adam_mpi.base.errors import LostState
from adam_mpi.cluster.layout import Layout, Place

NEW = -1
"""The rank, so far, of one that has just been started."""


def go_on(hosts: Sequence[str], kept: Sequence[Place], wanted: config.Layout) -> Layout:
    """`kept`: what each rank did before, or for a new one its number for life only. Replicas keep their size."""
    roles = [[role for role in place.roles if role != "worker"] for place in kept]
    idle = [rank for rank, place in enumerate(kept) if not place.roles]
    _fill("data", 1, roles, idle)
    fresh = [rank for rank in idle if kept[rank].rank == NEW]
    # New ranks do what is short: copies of shards first.
    short = ("server", wanted.servers or max(1, len(hosts) // 4)), ("data", wanted.data or len(hosts) // 8)
    for role, count in short:
        for rank in fresh[: max(0, count - sum(role in own for own in roles))]:
            roles[rank].append(role)
            idle.remove(rank)
            fresh.remove(rank)
    replicas = _replicas(kept, idle, wanted.partitions) or [_any_ranks(roles, wanted.partitions)]
    strips = {rank: (number, strip) for number, ranks in enumerate(replicas) for strip, rank in enumerate(ranks)}
    for rank in strips:
        roles[rank].append("worker")
    places = [
        Place(rank, host, tuple(sorted(roles[rank], key=_order)), *_strip(strips.get(rank)), kept[rank].member)
        for rank, host in enumerate(hosts)
    ]
    return Layout(tuple(places), wanted.partitions)


def _strip(strip: tuple[int, int] | None) -> tuple[int | None, int | None]:
    return strip or (None, None)


def _order(role: str) -> int:
    return ("data", "worker", "server").index(role)


def _fill(role: str, count: int, roles: list[list[str]], idle: list[int]) -> None:
    """Have a role taken on: by one who does nothing, else by whoever does least."""
    while sum(role in own for own in roles) < count:
        rank = idle.pop(0) if idle else min(range(len(roles)), key=lambda rank: (len(roles[rank]), rank))
        roles[rank].append(role)


def _replicas(kept: Sequence[Place], idle: list[int], size: int) -> list[list[int]]:
    """Whole replicas as they are; broken ones are filled up, from those who do nothing and from one another."""
    strips: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, place in enumerate(kept):
        if place.replica is not None and place.strip is not None:
            strips[place.replica][place.strip] = rank
    whole = [number for number, held in strips.items() if len(held) == size]
    broken = sorted((n for n in strips if n not in whole), key=lambda number: -len(strips[number]))
    while broken:
        number = broken.pop(0)
        missing = [strip for strip in range(size) if strip not in strips[number]]
        while len(missing) > len(idle) and broken:
            idle += strips[broken.pop()].values()
        if len(missing) > len(idle):
            idle += strips[number].values()
            break
        strips[number] |= {strip: idle.pop(0) for strip in missing}
        whole.append(number)
    formed = [[strips[number][strip] for strip in range(size)] for number in sorted(whole)]
    while len(idle) >= size:
        formed.append([idle.pop(0) for _ in range(size)])
    return formed


def _any_ranks(roles: list[list[str]], size: int) -> list[int]:
    """No replica is left: ranks with other roles train too, those that do least first."""
    if len(roles) < size:
        raise LostState(f"{len(roles)} ranks are left, a replica needs {size}; the job ends")
    return sorted(sorted(range(len(roles)), key=lambda rank: (len(roles[rank]), rank))[:size])
