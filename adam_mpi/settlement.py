"""What the ranks of a new generation tell each other, and what follows from it: who has what, where training stands.

Pure: every rank hears the same words and comes to the same settlement.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adam_mpi.cluster.layout import Layout
from adam_mpi.data import joint
from adam_mpi.data.joint import Cuts, Left, Progress
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
    resent: tuple[tuple[int, int], ...] = ()
    """Of a worker: clock and images of every push that it will send again."""
    progress: Progress = field(default_factory=Progress)
    """How far it is with batches that all replicas compute together."""
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server, where pushes may have to be taken back: shard -> pusher -> the highest number of its messages."""
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


def settle(words: Sequence[Word], layout: Layout, shards: Sequence[Shard], copies: int, staleness: float) -> Settlement:
    """`words` in the order of ranks."""
    holders, lacking, version = _hold(words, layout, shards, copies, staleness == 0)
    promoted = sum(shard not in words[ranks[0]].served for shard, ranks in enumerate(holders))
    batches = [batch for word in words for batch in word.batches]
    position = _position([word.positions for word in words], version, max(batches, default=0) // EPOCH)
    out = [batch % EPOCH for batch in batches if batch // EPOCH == position.epoch]
    clocks = {word.member: word.clock for word in words if word.clock is not None}
    clock, cuts, left = None, None, dict[int, Left]()
    if not np.isinf(staleness):
        cuts, left, out = *_go_on(words, layout, position, version), []
        clock = cuts.layouts[-1][0]
    nexts = _next(clocks, layout, clock, staleness == 0)
    return Settlement(
        holders, lacking, promoted, version, position, nexts, clock,
        _begun(words, nexts), cuts, left, _taken(words, holders), frozenset(out),
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


def _go_on(
    words: Sequence[Word], layout: Layout, position: Position, version: int | None
) -> tuple[Cuts, dict[int, Left]]:
    """With clocks: where replicas go on, and what is left of batches; the position gets those that somebody has begun.

    In synchronous training a clock that is not complete is computed again.
    """
    keep = version is None and layout.partitions == 1
    if keep:
        position.images = _images(words)
    replicas = {layout.places[rank].member: layout.places[rank].replica or 0 for rank in layout.workers}
    known = {word.member: word.progress for word in words}
    return joint.go_on(known, replicas, position.batches, position.epoch, keep, version)


def _images(words: Sequence[Word]) -> int:
    """Images that are applied and will not be counted again because their push is sent again."""
    pushes = [(word.member, *push) for word in words for push in word.resent]
    told = []
    for word in words:
        known = sum(images for pusher, clock, images in pushes if clock < word.progress.reached.get(pusher, 0))
        told += [position.images - known for position in word.positions.values()]
    return max(told)


def _begun(words: Sequence[Word], nexts: Mapping[int, int]) -> dict[int, int]:
    """Pusher -> the clock after those that it sends again; where it goes on, if it sends nothing."""
    ends = {word.member: clock + 1 for word in words for clock, _ in word.resent}
    return {pusher: max(clock, ends.get(pusher, clock)) for pusher, clock in nexts.items()}


def _taken(words: Sequence[Word], holders: Sequence[tuple[int, ...]]) -> dict[int, dict[int, int]]:
    """Pusher -> shard -> the highest number of its messages that is in the copy which serves from now on."""
    taken: dict[int, dict[int, int]] = defaultdict(dict)
    for shard, ranks in enumerate(holders):
        for pusher, number in words[ranks[0]].tables.get(shard, {}).items():
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
