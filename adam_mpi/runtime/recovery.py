"""What the ranks of a new generation tell each other, and what follows from it: who has what, where training stands.

Pure: every rank hears the same states and comes to the same settlement.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.base.errors import LostState
from adam_mpi.base.text import number_ranges
from adam_mpi.cluster.layout import Layout
from adam_mpi.sharding import joint_batches
from adam_mpi.sharding.joint_batches import Cuts, Left
from adam_mpi.sharding.position import EPOCH, Position
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.shards import Shard, place


@dataclass(frozen=True)
class RecoveryPlan:
    holders: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard, the one that serves it first."""
    lacking: tuple[tuple[int, int], ...]
    """(rank, shard): who has to be sent a copy."""
    stale: frozenset[tuple[int, int]]
    """(rank, shard): copies that may lack something acknowledged, or that cannot go back to the complete clock: they
    count no more."""
    acknowledged: dict[int, int]
    """Pusher -> the last of its pushes that was acknowledged; whoever has another strip now begins anew."""
    promoted: int
    """Shards that another server serves now."""
    version: int | None
    """In synchronous training: the clock that is complete everywhere; what goes beyond it is taken back."""
    position: Position
    clocks: dict[int, int]
    """Pusher -> clock of its next push."""
    clock: int | None
    """With clocks: where new replicas begin; in synchronous training, and where replicas have strips, all of them."""
    begun: dict[int, int]
    """Pusher -> the clock after all that it sends again: nothing later is in any shard."""
    cuts: Cuts | None
    left: dict[int, Left]
    """With clocks: by number, what is left of batches that somebody has pushed his share of."""
    taken: dict[int, dict[int, int]]
    """Pusher -> shard -> the highest number of its messages that the shard has, where servers have told."""
    out: frozenset[int]
    """Numbers of the batches of this epoch that workers have in hand."""
    mean: tuple[float, float]
    """Loss and correct answers per image so far, in this epoch."""
    detected: float
    went_on: tuple[float | None, float | None]
    """When the generation that has ended had begun to work, as far as it had."""
    head: dict[str, Any] | None
    resent: int
    """Pushes that are sent again."""
    captured: tuple[str, ...]


def plan_recovery(
    states: Sequence[RankState], layout: Layout, shards: Sequence[Shard], copies: int, staleness: float
) -> RecoveryPlan:
    """`states` in the order of ranks."""
    have, version = _sound(states, layout, shards, staleness == 0)
    holders, lacking = _hold(states, layout, shards, copies, have)
    stale = {
        (rank, shard) for rank in layout.servers for shard in states[rank].copies.keys() - have[states[rank].member]
    }
    promoted = sum(shard not in states[ranks[0]].served for shard, ranks in enumerate(holders))
    batches = [batch for state in states for batch in state.batches]
    position = _position([state.positions for state in states], version, max(batches, default=0) // EPOCH)
    out = [batch % EPOCH for batch in batches if batch // EPOCH == position.epoch]
    clocks = {state.member: state.clock for state in states if state.clock is not None}
    clock, cuts, left = None, None, dict[int, Left]()
    if not np.isinf(staleness):
        cuts, left, out = *_go_on(states, layout, position, version), []
        clock = cuts.layouts[-1][0]
    nexts = _next(clocks, layout, clock, staleness == 0)
    return RecoveryPlan(
        holders,
        lacking,
        frozenset(stale),
        _acknowledged(states, layout, version),
        promoted,
        version,
        position,
        nexts,
        clock,
        _begun(states, nexts),
        cuts,
        left,
        _taken(states, holders),
        frozenset(out),
        _mean([state.tally for state in states if state.tally[0] == position.epoch]),
        min(state.detected for state in states if state.detected),
        earliest(state.went_on for state in states),
        _newest_head([state.head for state in states]),
        sum(state.unacknowledged for state in states),
        max(state.captured for state in states),
    )


def _acknowledged(states: Sequence[RankState], layout: Layout, version: int | None) -> dict[int, int]:
    """Pusher -> the number of its last acknowledged push, if it goes on with the same strip.

    In synchronous training one strip may have had a clock acknowledged that others have not, and that is taken back.
    """
    same = [state for state, place in zip(states, layout.places, strict=True) if state.strip == (place.strip or 0)]
    told = {state.member: state.acknowledged for state in same if state.acknowledged is not None}
    return {member: number for member, (number, clock) in told.items() if version is None or clock <= version}


def _complete(states: Sequence[RankState], servers: Sequence[RankState], strips: int) -> int:
    """In synchronous training: a clock that is complete, as far as one can tell; a later one may be."""
    # Nobody begins a clock before the one before it is acknowledged everywhere.
    newest = max((version for state in servers for version in state.copies.values()), default=0)
    reached: dict[int, int] = {}
    for state in states:
        if state.acknowledged is not None:
            reached[state.strip] = max(state.acknowledged[1], reached.get(state.strip, 0))
    return max(newest - 1, min(reached.values()) if len(reached) == strips else 0)


def _sound(
    states: Sequence[RankState], layout: Layout, shards: Sequence[Shard], synchronous: bool
) -> tuple[dict[int, dict[int, int]], int | None]:
    """Server -> shard -> version of its copies that have all that was ever acknowledged; and the complete clock.

    Raises LostState if a shard has none.
    """
    servers = [states[rank] for rank in layout.servers]
    if not synchronous:
        known = {state.member: state.acknowledged[0] for state in states if state.acknowledged is not None}
        have = {state.member: {s: v for s, v in state.copies.items() if _in_sync(state, s, known)} for state in servers}
        _check_left(have, servers, shards)
        return have, None
    least = _complete(states, servers, layout.partitions)
    have = {state.member: {s: v for s, v in state.copies.items() if v >= least} for state in servers}
    _check_left(have, servers, shards)
    version = min(_newest(have, shards))
    for state in servers:
        held = have[state.member].items()
        have[state.member] = {s: min(v, version) for s, v in held if v <= version or s not in state.firm}
    reached = {member: {s: v for s, v in held.items() if v == version} for member, held in have.items()}
    _check_left(reached, servers, shards)
    return have, version


def _in_sync(state: RankState, shard: int, known: Mapping[int, int]) -> bool:
    """Whether nothing can have been acknowledged without this copy.

    One that was sent anew, or did not have to be, was waited for. Of another one only the pushers can tell, all of
    those who could push to it: whether one that is lost had pushes acknowledged nobody knows.
    """
    if shard not in state.behind:
        return True
    began = state.began.get(state.behind[shard], {})
    return all(known.get(pusher) == number for pusher, number in began.items())


def _check_left(have: Mapping[int, Mapping[int, int]], servers: Sequence[RankState], shards: Sequence[Shard]) -> None:
    """Raise LostState, with their numbers, if there are shards that nobody has."""
    missing = [s.index for s in shards if not any(s.index in held for held in have.values())]
    stale = [shard for shard in missing if any(shard in state.copies for state in servers)]
    gone = [shard for shard in missing if shard not in stale]
    told = []
    if gone:
        told.append(f"no copy is left of {len(gone)} of {len(shards)} shards ({number_ranges(gone)})")
    if stale:
        what = f"of {len(stale)} of {len(shards)} shards ({number_ranges(stale)}) only copies are left"
        told.append(f"{what} that were being rebuilt and may lack acknowledged pushes")
    if told:
        raise LostState("; ".join(told))


def _hold(
    states: Sequence[RankState],
    layout: Layout,
    shards: Sequence[Shard],
    copies: int,
    have: Mapping[int, Mapping[int, int]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """Holders of each shard, and who of them has to be sent a copy."""
    wanted = place(shards, {layout.places[rank].member: layout.places[rank].host for rank in layout.servers}, copies)
    rank_of = {state.member: rank for rank, state in enumerate(states)}
    holders, lacking = [], []
    for shard, best in zip(shards, _newest(have, shards), strict=True):
        versions = {member: held.get(shard.index, -1) for member, held in have.items()}
        acting, behind = act(wanted[shard.index], versions, best, copies)
        holders.append(tuple(rank_of[member] for member in acting))
        lacking += [(rank_of[member], shard.index) for member in behind]
    return tuple(holders), tuple(lacking)


def act(wanted: Sequence[int], versions: Mapping[int, int], newest: int, copies: int) -> tuple[list[int], list[int]]:
    """Who holds a shard, the one that serves it first, and who of them is behind.

    Of those that have the newest version the one most wanted serves. While fewer copies than wanted are whole, those
    that are stay, wanted or not.
    """
    whole = [member for member in [*wanted, *sorted(versions)] if versions.get(member) == newest]
    whole = list(dict.fromkeys(whole))
    behind = [member for member in wanted if member not in whole]
    kept = whole if behind else whole[:copies]
    return kept + behind, behind


def _newest(have: Mapping[int, Mapping[int, int]], shards: Sequence[Shard]) -> list[int]:
    """The highest version of each shard that somebody has."""
    return [max(held[shard.index] for held in have.values() if shard.index in held) for shard in shards]


def _position(known: Sequence[Mapping[int, Position]], version: int | None, begun: int) -> Position:
    """Of the newest epoch, every batch that any part was applied of; in synchronous training, that of the clock.

    `begun`: an epoch that somebody has batches of, though none may be applied yet.
    """
    if version is not None:
        told = [positions[version] for positions in known if version in positions]
        if not told:
            raise LostState(f"nobody is left who knows which batches clock {version} has")
        return told[0]
    positions = [position for by_clock in known for position in by_clock.values()]
    latest = max(positions, key=lambda position: (position.epoch, position.images))
    result = Position(latest.batches.size, max(latest.epoch, begun), latest.images, latest.clock)
    for position in positions:
        if position.epoch == result.epoch:
            result.batches |= position.batches
    return result


def _go_on(
    states: Sequence[RankState], layout: Layout, position: Position, version: int | None
) -> tuple[Cuts, dict[int, Left]]:
    """With clocks: where replicas go on, and what is left of batches; the position gets those that somebody has begun.

    In synchronous training a clock that is not complete is computed again.
    """
    keep = version is None and layout.partitions == 1
    if keep:
        position.images = _images(states)
    replicas = {layout.places[rank].member: layout.places[rank].replica or 0 for rank in layout.workers}
    known = {state.member: state.progress for state in states}
    return joint_batches.go_on(known, replicas, position.batches, position.epoch, keep, version)


def _images(states: Sequence[RankState]) -> int:
    """Images that are applied and will not be counted again because their push is sent again."""
    pushes = [(state.member, *push) for state in states for push in state.resent]
    told = []
    for state in states:
        known = sum(images for pusher, clock, images in pushes if clock < state.progress.reached.get(pusher, 0))
        told += [position.images - known for position in state.positions.values()]
    return max(told)


def _begun(states: Sequence[RankState], nexts: Mapping[int, int]) -> dict[int, int]:
    """Pusher -> the clock after those that it sends again; where it goes on, if it sends nothing."""
    ends = {state.member: clock + 1 for state in states for clock, _ in state.resent}
    return {pusher: max(clock, ends.get(pusher, clock)) for pusher, clock in nexts.items()}


def _taken(states: Sequence[RankState], holders: Sequence[tuple[int, ...]]) -> dict[int, dict[int, int]]:
    """Pusher -> shard -> the highest number of its messages that is in the copy which serves from now on."""
    taken: dict[int, dict[int, int]] = defaultdict(dict)
    for shard, ranks in enumerate(holders):
        for pusher, number in states[ranks[0]].tables.get(shard, {}).items():
            taken[pusher][shard] = number
    return dict(taken)


def earliest(times: Iterable[Sequence[float | None]]) -> tuple[float | None, float | None]:
    """When servers went on, with any pusher and with all of them, as each of them saw it."""
    first, whole = zip(*times, strict=True)
    return min(filter(None, first), default=None), min(filter(None, whole), default=None)


def _newest_head(states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    return max((state for state in states if state), key=lambda state: state["number"], default=None)


def _next(clocks: Mapping[int, int], layout: Layout, clock: int | None, synchronous: bool) -> dict[int, int]:
    """New pushers begin where the slowest of the others is; with clocks, where nobody has begun.

    In synchronous training all begin alike. So do the strips of a replica, which push alike: where the fastest of
    them is, as no clock comes twice; and with clocks, those of all replicas.
    """
    workers = [layout.places[rank] for rank in layout.workers]
    if clock is not None:
        alike = synchronous or layout.partitions > 1
        return {worker.member: clock if alike else clocks.get(worker.member, clock) for worker in workers}
    least, furthest = min(clocks.values(), default=0), defaultdict[int | None, int](int)
    for worker in workers:
        furthest[worker.replica] = max(furthest[worker.replica], clocks.get(worker.member, least))
    return {worker.member: furthest[worker.replica] for worker in workers}


def _mean(tallies: Sequence[tuple[int, float, float, float]]) -> tuple[float, float]:
    images = max(1.0, sum(tally[1] for tally in tallies))
    return sum(tally[2] for tally in tallies) / images, sum(tally[3] for tally in tallies) / images
