"""Roles in the next generation: surviving ranks keep their roles; vacant roles are reassigned. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from adam_mpi import config
from adam_mpi.base.errors import LostState
from adam_mpi.cluster.layout import Layout, Place

ORDER = ("data", "worker", "server")
NEW = -1
"""The rank in the previous generation of a process that joins."""


def reassign_roles(hosts: Sequence[str], kept: Sequence[Place], wanted: config.Layout) -> Layout:
    """Return the layout of the next generation, whose ranks are on `hosts`.

    `kept` has the previous place of each rank, or for a rank that joins only its member number. Replicas keep their
    size. Raises LostState if too few ranks are left for a replica.
    """
    roles = [[role for role in place.roles if role != "worker"] for place in kept]
    idle = [rank for rank, place in enumerate(kept) if not place.roles]
    _fill("data", 1, roles, idle)
    fresh = [rank for rank in idle if kept[rank].rank == NEW]
    # Ranks that join take the roles with too few ranks: servers first, for the copies of shards.
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
    places = []
    for rank, host in enumerate(hosts):
        own = tuple(sorted(roles[rank], key=ORDER.index))
        replica, strip = strips.get(rank, (None, None))
        places.append(Place(rank, host, own, replica, strip, member_id=kept[rank].member))
    return Layout(tuple(places), wanted.partitions)


def _fill(role: str, count: int, roles: list[list[str]], idle: list[int]) -> None:
    """Give `role` to ranks until `count` have it: to idle ranks first, then to those with the fewest roles."""
    while sum(role in own for own in roles) < count:
        rank = idle.pop(0) if idle else min(range(len(roles)), key=lambda rank: (len(roles[rank]), rank))
        roles[rank].append(role)


def _replicas(kept: Sequence[Place], idle: list[int], size: int) -> list[list[int]]:
    """Return the ranks of each replica: complete ones as they are, others completed from idle ranks and each other."""
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
    """Return ranks for one replica where none is left: those with the fewest other roles."""
    if len(roles) < size:
        raise LostState(f"{len(roles)} ranks are left, a replica needs {size}; the job ends")
    return sorted(sorted(range(len(roles)), key=lambda rank: (len(roles[rank]), rank))[:size])
