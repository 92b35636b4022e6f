"""Decide which copies of shards can be trusted after a loss, and which servers hold each shard from then on. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adam_mpi.base.errors import LostState
from adam_mpi.base.log import format_ranges
from adam_mpi.cluster.layout import Layout
from adam_mpi.sharding.shards import Shard, place
from adam_mpi.sharding.training_state import RankState

Versions = Mapping[int, Mapping[int, int]]
"""Server (its member number) -> shard -> version of its copy."""


@dataclass(frozen=True)
class SoundCopies:
    """The copies that have every acknowledged push."""

    versions: Versions
    clock: int | None
    """The last complete clock in synchronous training; None otherwise."""


@dataclass(frozen=True)
class Holders:
    """The servers of each shard in the next generation."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard; the first of them serves it."""
    lacking: tuple[tuple[int, int], ...]
    """(rank, shard) for each holder that has to receive a copy."""


def find_sound_copies(
    states: Sequence[RankState], layout: Layout, shards: Sequence[Shard], synchronous: bool
) -> SoundCopies:
    """Return the shard copies that have every acknowledged push; raise LostState if a shard has none.

    `states` has the state of each rank in the order of ranks.
    """
    servers = [states[rank] for rank in layout.servers]
    if synchronous:
        return _sound_synchronous(states, servers, shards, layout.partitions)
    acknowledged = {state.member: state.acknowledged[0] for state in states if state.acknowledged is not None}
    versions = {
        state.member: {
            shard: version for shard, version in state.copies.items() if _has_all_pushes(state, shard, acknowledged)
        }
        for state in servers
    }
    _check_every_shard_is_left(versions, servers, shards)
    return SoundCopies(versions, None)


def _sound_synchronous(
    states: Sequence[RankState], servers: Sequence[RankState], shards: Sequence[Shard], strips: int
) -> SoundCopies:
    """Return the shard copies at the last complete clock, or that can be taken back to it, and that clock.

    The clock is complete when every shard has a copy of it; a clock beyond it is computed again.
    """
    least = _least_complete_clock(states, servers, strips)
    recent = {
        state.member: {shard: version for shard, version in state.copies.items() if version >= least}
        for state in servers
    }
    _check_every_shard_is_left(recent, servers, shards)
    clock = min(newest_versions(recent, shards))
    versions = {}
    for state in servers:
        # A firm copy cannot take its last step back: one that is beyond the clock is of no use.
        usable = {
            shard: version
            for shard, version in recent[state.member].items()
            if version <= clock or shard not in state.firm
        }
        versions[state.member] = {shard: min(version, clock) for shard, version in usable.items()}
    at_clock = {
        member: {shard: version for shard, version in held.items() if version == clock}
        for member, held in versions.items()
    }
    _check_every_shard_is_left(at_clock, servers, shards)
    return SoundCopies(versions, clock)


def _least_complete_clock(states: Sequence[RankState], servers: Sequence[RankState], strips: int) -> int:
    """Return a clock of synchronous training that is certainly complete; a later one may be complete too."""
    # No replica begins a clock before the clock before it is acknowledged by all servers.
    newest = max((version for state in servers for version in state.copies.values()), default=0)
    reached: dict[int, int] = {}
    for state in states:
        if state.acknowledged is not None:
            reached[state.strip] = max(state.acknowledged[1], reached.get(state.strip, 0))
    by_acknowledgements = min(reached.values()) if len(reached) == strips else 0
    return max(newest - 1, by_acknowledgements)


def _has_all_pushes(state: RankState, shard: int, acknowledged: Mapping[int, int]) -> bool:
    """Return whether the copy of `shard` on this server has all pushes that can have been acknowledged.

    Pushes wait for a copy that was complete when the generation began or has been rebuilt since. They do not wait for a
    copy that is being rebuilt: it is sound only if every pusher of its strip is alive and has had no push acknowledged
    since the generation began. `acknowledged` maps each living pusher to the number of its last acknowledged push.
    """
    if shard not in state.behind:
        return True
    at_start = state.began.get(state.behind[shard], {})
    return all(acknowledged.get(pusher) == number for pusher, number in at_start.items())


def _check_every_shard_is_left(versions: Versions, servers: Sequence[RankState], shards: Sequence[Shard]) -> None:
    """Raise LostState, with their numbers, if there are shards of which `versions` has no copy."""
    missing = [shard.index for shard in shards if not any(shard.index in held for held in versions.values())]
    stale = [shard for shard in missing if any(shard in state.copies for state in servers)]
    gone = [shard for shard in missing if shard not in stale]
    reasons = []
    if gone:
        reasons.append(f"no copy is left of {len(gone)} of {len(shards)} shards ({format_ranges(gone)})")
    if stale:
        which = f"of {len(stale)} of {len(shards)} shards ({format_ranges(stale)})"
        reasons.append(f"{which} only copies are left that were being rebuilt and may lack acknowledged pushes")
    if reasons:
        raise LostState("; ".join(reasons))


def choose_holders(
    states: Sequence[RankState], layout: Layout, shards: Sequence[Shard], copies: int, sound: SoundCopies
) -> Holders:
    """Return which ranks hold each shard after a loss, and which of them have to receive a copy of it."""
    hosts = {layout.places[rank].member: layout.places[rank].host for rank in layout.servers}
    preferred = place(shards, hosts, copies)
    rank_of = {state.member: rank for rank, state in enumerate(states)}
    ranks = []
    lacking = []
    for shard, newest in zip(shards, newest_versions(sound.versions, shards), strict=True):
        versions = {member: held.get(shard.index, -1) for member, held in sound.versions.items()}
        members, behind = choose_members(preferred[shard.index], versions, newest, copies)
        ranks.append(tuple(rank_of[member] for member in members))
        lacking += [(rank_of[member], shard.index) for member in behind]
    return Holders(tuple(ranks), tuple(lacking))


def choose_members(
    preferred: Sequence[int], versions: Mapping[int, int], newest: int, copies: int
) -> tuple[list[int], list[int]]:
    """Return the members that hold a shard after a loss, its server first, and those of them that lack it.

    `preferred` has the members in the order of the placement, `versions` what each member has. The first preferred
    member with the `newest` version serves. As long as a preferred member lacks the shard, all members that have the
    newest version keep it, so that the number of complete copies does not fall.
    """
    complete = [member for member in [*preferred, *sorted(versions)] if versions.get(member) == newest]
    complete = list(dict.fromkeys(complete))
    behind = [member for member in preferred if member not in complete]
    kept = complete if behind else complete[:copies]
    return kept + behind, behind


def find_stale_copies(states: Sequence[RankState], layout: Layout, sound: SoundCopies) -> frozenset[tuple[int, int]]:
    """Return (rank, shard) for each copy that a server has and that is not sound: it has to be discarded."""
    return frozenset(
        (rank, shard)
        for rank in layout.servers
        for shard in states[rank].copies.keys() - sound.versions[states[rank].member].keys()
    )


def newest_versions(versions: Versions, shards: Sequence[Shard]) -> list[int]:
    """Return the highest version of each shard that any surviving server has."""
    return [max(held[shard.index] for held in versions.values() if shard.index in held) for shard in shards]
