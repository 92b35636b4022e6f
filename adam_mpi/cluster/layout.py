"""The roles of the ranks: chosen from hosts and configured numbers at the start, from survivors after a loss. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from adam_mpi import config
from adam_mpi.base.errors import LostState, UserError


@dataclass(frozen=True)
class Place:
    """The roles of one rank. A rank without a role is a standby: a worker that no replica needs."""

    rank: int
    host: str
    roles: tuple[str, ...]
    replica: int | None = None
    strip: int | None = None
    member_id: int | None = None
    """Its member number, where that is not its rank: ranks are renumbered when others are lost, members are not."""

    @property
    def member(self) -> int:
        """Return the number that identifies this rank in the layouts of all generations."""
        return self.rank if self.member_id is None else self.member_id

    def __str__(self) -> str:
        detail = "" if self.replica is None else f" (replica {self.replica}, strip {self.strip})"
        return f"rank {self.member}, {'+'.join(self.roles) or 'standby'}{detail} on {self.host}"


@dataclass(frozen=True)
class Layout:
    """The places of all ranks of a generation."""

    places: tuple[Place, ...]
    partitions: int

    def ranks_with(self, role: str) -> tuple[int, ...]:
        """Return the ranks that have `role`."""
        return tuple(place.rank for place in self.places if role in place.roles)

    @property
    def data(self) -> tuple[int, ...]:
        return self.ranks_with("data")

    @property
    def servers(self) -> tuple[int, ...]:
        return self.ranks_with("server")

    @property
    def workers(self) -> tuple[int, ...]:
        return self.ranks_with("worker")

    @property
    def coordinator(self) -> int:
        """Return the data rank that moves the job from epoch to epoch and reports."""
        return self.data[0]

    @property
    def starter(self) -> int:
        """Return the rank of the layout that starts spares: no data rank or server where possible, as it blocks."""

        def cost(place: Place) -> tuple[bool, bool, int, int]:
            return "data" in place.roles, "server" in place.roles, len(place.roles), -place.rank

        return min(self.places, key=cost).rank

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model in the layout of roles."""
        return len(self.workers) // self.partitions

    def strips(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the replica of worker `rank` in the layout, in the order of their strips."""
        replica = self.places[rank].replica
        members = [place for place in self.places if place.replica == replica] if replica is not None else []
        return tuple(place.rank for place in sorted(members, key=lambda place: place.strip or 0)) or (rank,)

    @property
    def pushers(self) -> tuple[int, ...]:
        """Return the workers of the layout in the order of replicas and strips."""
        workers = [self.places[rank] for rank in self.workers]
        return tuple(place.rank for place in sorted(workers, key=lambda place: (place.replica or 0, place.strip or 0)))

    def survives(self, copies: int) -> int:
        """Return how many servers of the layout may be lost at once, with `copies` copies of each shard."""
        return min(copies, len(self.servers)) - 1

    def count_on_host(self, host: str, role: str) -> int:
        """Return the number of ranks on `host` that have `role`."""
        return sum(place.host == host and role in place.roles for place in self.places)


def arrange(hosts: Sequence[str], wanted: config.Layout) -> Layout:
    """Return the layout of roles at the start, for ranks on `hosts`, with the numbers and hosts of `wanted`."""
    data, servers, folded = _numbers(len(hosts), wanted)
    free = list(range(len(hosts)))
    data_ranks = _spread(free, data, hosts, "data", wanted)
    if not folded:
        free = [rank for rank in free if rank not in data_ranks]
        server_ranks = _spread(free, servers, hosts, "server", wanted)
        free = [rank for rank in free if rank not in server_ranks]
    else:
        server_ranks = data_ranks
        if len(hosts) > wanted.partitions:
            free = [rank for rank in free if rank not in data_ranks]
    strips = _strips(free, hosts, wanted)
    return Layout(
        tuple(_place_roles(rank, host, data_ranks, server_ranks, strips) for rank, host in enumerate(hosts)),
        wanted.partitions,
    )


def _numbers(size: int, wanted: config.Layout) -> tuple[int, int, bool]:
    """Return the numbers of data and server ranks at the start, and whether one rank has both roles."""
    data = wanted.data or max(1, size // 8)
    servers = wanted.servers or max(1, size // 4)
    if data + servers + wanted.partitions <= size:
        return data, servers, False
    # Numbers that are not configured shrink first; then one rank serves both data and parameters.
    data = wanted.data or 1
    servers = wanted.servers or 1
    if data + servers + wanted.partitions <= size:
        return data, servers, False
    if data == servers == 1 and wanted.partitions <= size:
        return 1, 1, True
    if wanted.partitions > size:
        raise UserError(f"layout.partitions = {wanted.partitions}: only {size} ranks; start more or set at most {size}")
    raise UserError(
        f"layout.data = {data} and layout.servers = {servers} leave no worker: a replica needs {wanted.partitions} "
        f"of {size} ranks; start at least {data + servers + wanted.partitions} or lower them"
    )


def _spread(free: list[int], count: int, hosts: Sequence[str], role: str, wanted: config.Layout) -> list[int]:
    """Return `count` of the `free` ranks for `role`, spread over its allowed hosts, least used hosts first."""
    candidates = _allowed(free, hosts, role, wanted)
    if len(candidates) < count:
        raise UserError(
            f"layout.place.{role} = {wanted.place.get(role)}: matches {len(candidates)} free ranks, {count} needed; "
            f"hosts are {', '.join(sorted(set(hosts)))}"
        )
    taken = Counter({host: hosts.count(host) - sum(hosts[rank] == host for rank in free) for host in hosts})
    chosen: list[int] = []
    for _ in range(count):
        rank = min((r for r in candidates if r not in chosen), key=lambda r: (taken[hosts[r]], r))
        taken[hosts[rank]] += 1
        chosen.append(rank)
    return sorted(chosen)


def _strips(free: list[int], hosts: Sequence[str], wanted: config.Layout) -> dict[int, tuple[int, int]]:
    """Return rank -> (replica, strip); replicas within one host come first, then those over several hosts."""
    candidates = _allowed(free, hosts, "worker", wanted)
    size = wanted.partitions
    if len(candidates) < size:
        raise UserError(
            f"layout.place.worker = {wanted.place.get('worker')}: matches {len(candidates)} free ranks, "
            f"a replica needs {size}; hosts are {', '.join(sorted(set(hosts)))}"
        )
    whole: list[int] = []
    rest: list[int] = []
    for host in dict.fromkeys(hosts[rank] for rank in candidates):
        here = [rank for rank in candidates if hosts[rank] == host]
        cut = len(here) - len(here) % size
        whole += here[:cut]
        rest += here[cut:]
    ordered = whole + rest[: len(rest) - len(rest) % size]
    return {rank: divmod(position, size) for position, rank in enumerate(ordered)}


def _allowed(free: list[int], hosts: Sequence[str], role: str, wanted: config.Layout) -> list[int]:
    """Return the hosts that the configuration allows for `role`."""
    patterns = wanted.place.get(role) or ["*"]
    return [rank for rank in free if any(fnmatch(hosts[rank], pattern) for pattern in patterns)]


def _place_roles(
    rank: int, host: str, data: list[int], servers: list[int], strips: dict[int, tuple[int, int]]
) -> Place:
    roles = [role for role, ranks in (("data", data), ("worker", strips), ("server", servers)) if rank in ranks]
    return Place(rank, host, tuple(roles), *strips.get(rank, (None, None)))


ORDER = ("data", "worker", "server")
NEW = -1
"""The rank in the previous generation of a process that joins."""


def reassign_roles(hosts: Sequence[str], kept: Sequence[Place], wanted: config.Layout) -> Layout:
    """Return the layout of roles of the next generation, whose ranks are on `hosts`.

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
    """Return the ranks of each replica after a loss: complete ones as they are, others completed from idle ranks."""
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
    """Return ranks for one replica where none is left after a loss: those with the fewest other roles."""
    if len(roles) < size:
        raise LostState(f"{len(roles)} ranks are left, a replica needs {size}; the job ends")
    return sorted(sorted(range(len(roles)), key=lambda rank: (len(roles[rank]), rank))[:size])
