"""What the ranks of a new generation tell each other, and what follows from it: who has what, where training stands.

Pure: every rank hears the same words and comes to the same settlement.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adam_mpi.cluster.layout import Layout
from adam_mpi.durable.position import EPOCH, Position
from adam_mpi.errors import LostState
from adam_mpi.server.shards import Shard, place


@dataclass
class Word:
    """What one rank brings along."""

    member: int
    detected: float = 0.0
    """When it saw the failure, in seconds since 1970."""
    copies: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> version of its whole copy."""
    served: frozenset[int] = frozenset()
    """Of a server: the shards that it served."""
    went_on: tuple[float | None, float | None] = (None, None)
    """Of a server: when in its generation it first had something to apply, of any pusher and of all."""
    positions: dict[int, Position] = field(default_factory=dict)
    """Of a server: where training stands; in synchronous training by clock, before and after the last one."""
    clock: int | None = None
    """Of a worker: that of its first push that is not acknowledged."""
    batches: frozenset[int] = frozenset()
    """Of a worker: ids of batches that it has in hand, and will report."""
    tally: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    """Of a data rank: epoch, images, loss and correct answers counted so far."""
    unacknowledged: int = 0
    head: dict[str, Any] | None = None
    """The last state of the head that it has heard of."""
    captured: tuple[str, ...] = ()
    """Layers that push factors; a new rank knows none."""


@dataclass(frozen=True)
class Settlement:
    holders: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard, the one that serves it first."""
    lacking: tuple[tuple[int, int], ...]
    """(rank, shard): who has to be sent a copy."""
    promoted: int
    """Shards that another server serves now."""
    version: int | None
    """In synchronous training: the clock that is complete everywhere; what goes beyond it is taken back."""
    position: Position
    clocks: dict[int, int]
    """Pusher -> clock of its next push."""
    clock: int | None
    """With clocks: where all replicas go on."""
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


def settle(words: Sequence[Word], layout: Layout, shards: Sequence[Shard], copies: int, staleness: float) -> Settlement:
    """`words` in the order of ranks."""
    holders, lacking, version = _hold(words, layout, shards, copies, staleness == 0)
    promoted = sum(shard not in words[ranks[0]].served for shard, ranks in enumerate(holders))
    batches = [batch for word in words for batch in word.batches]
    position = _position([word.positions for word in words], version, max(batches, default=0) // EPOCH)
    out = [batch % EPOCH for batch in batches if batch // EPOCH == position.epoch]
    clocks = {word.member: word.clock for word in words if word.clock is not None}
    clock = None if np.isinf(staleness) else version if version is not None else max(clocks.values(), default=0)
    if clock is not None:
        # Joint batches that somebody has begun stay as they are; a clock that is not complete is computed again.
        position.batches[out if version is None else []] = True
        out = []
    return Settlement(
        holders, lacking, promoted, version, position, _next(clocks, layout, clock), clock, frozenset(out),
        _mean([word.tally for word in words if word.tally[0] == position.epoch]),
        min(word.detected for word in words if word.detected), earliest(word.went_on for word in words),
        _newest_head([word.head for word in words]),
        sum(word.unacknowledged for word in words), max(word.captured for word in words),
    )  # fmt: skip


def _hold(
    words: Sequence[Word], layout: Layout, shards: Sequence[Shard], copies: int, synchronous: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...], int | None]:
    """Holders of each shard, who of them has to be sent a copy, and in synchronous training the complete clock."""
    have = {words[rank].member: words[rank].copies for rank in layout.servers}
    newest, version = _newest(have, shards), None
    if synchronous:
        version = min(newest)
        newest = [version] * len(shards)
        have = {member: {s: min(v, version) for s, v in held.items()} for member, held in have.items()}
    wanted = place(shards, {layout.places[rank].member: layout.places[rank].host for rank in layout.servers}, copies)
    rank_of = {word.member: rank for rank, word in enumerate(words)}
    holders, lacking = [], []
    for shard, best in zip(shards, newest, strict=True):
        versions = {member: held.get(shard.index, -1) for member, held in have.items()}
        acting, behind = act(wanted[shard.index], versions, best, copies)
        holders.append(tuple(rank_of[member] for member in acting))
        lacking += [(rank_of[member], shard.index) for member in behind]
    return tuple(holders), tuple(lacking), version


def act(
    wanted: Sequence[int], versions: Mapping[int, int], newest: int, copies: int
) -> tuple[list[int], list[int]]:
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
    """The highest version of each shard that somebody has whole."""
    newest = [max((held[s.index] for held in have.values() if s.index in held), default=None) for s in shards]
    lost = sum(version is None for version in newest)
    if lost:
        raise LostState(f"no copy is left of {lost} of {len(shards)} shards")
    return [version for version in newest if version is not None]


def _position(known: Sequence[Mapping[int, Position]], version: int | None, begun: int) -> Position:
    """Of the newest epoch, every batch that any part was applied of; in synchronous training, that of the clock.

    `begun`: an epoch that somebody has batches of, though none may be applied yet.
    """
    if version is not None:
        return next(positions[version] for positions in known if version in positions)
    positions = [position for by_clock in known for position in by_clock.values()]
    latest = max(positions, key=lambda position: (position.epoch, position.images))
    result = Position(latest.batches.size, max(latest.epoch, begun), latest.images, latest.clock)
    for position in positions:
        if position.epoch == result.epoch:
            result.batches |= position.batches
    return result


def earliest(times: Iterable[Sequence[float | None]]) -> tuple[float | None, float | None]:
    """When servers went on, with any pusher and with all of them, as each of them saw it."""
    first, whole = zip(*times, strict=True)
    return min(filter(None, first), default=None), min(filter(None, whole), default=None)


def _newest_head(states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    return max((state for state in states if state), key=lambda state: state["number"], default=None)


def _next(clocks: Mapping[int, int], layout: Layout, clock: int | None) -> dict[int, int]:
    """New pushers begin where the slowest of the others is; with clocks all begin alike.

    So do the strips of a replica, which push alike: where the fastest of them is, as no clock comes twice.
    """
    workers = [layout.places[rank] for rank in layout.workers]
    if clock is not None:
        return {worker.member: clock for worker in workers}
    least, furthest = min(clocks.values(), default=0), defaultdict[int | None, int](int)
    for worker in workers:
        furthest[worker.replica] = max(furthest[worker.replica], clocks.get(worker.member, least))
    return {worker.member: furthest[worker.replica] for worker in workers}


def _mean(tallies: Sequence[tuple[int, float, float, float]]) -> tuple[float, float]:
    images = max(1.0, sum(tally[1] for tally in tallies))
    return sum(tally[2] for tally in tallies) / images, sum(tally[3] for tally in tallies) / images
