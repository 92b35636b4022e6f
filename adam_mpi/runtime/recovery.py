"""Decide how a job continues after a loss, from what the surviving ranks have: who holds what, where training stands.

Pure: every rank receives the same states and computes the same plan.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.base.errors import LostState
from adam_mpi.cluster.control_messages import GoBack
from adam_mpi.cluster.layout import Layout
from adam_mpi.runtime.shard_recovery import choose_holders, find_sound_copies, find_stale_copies
from adam_mpi.sharding import batches
from adam_mpi.sharding.batches import BatchCuts, BatchRemainder
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import EPOCH, Position, RankState


@dataclass(frozen=True)
class RecoveryPlan:
    """What all ranks do when they begin the next generation."""

    holders: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard; the first of them serves it."""
    lacking: tuple[tuple[int, int], ...]
    """(rank, shard) for each holder that has to receive a copy."""
    stale: frozenset[tuple[int, int]]
    """(rank, shard) for each copy that is discarded: it may lack an acknowledged push, or cannot go back to the last
    complete clock."""
    acknowledged: dict[int, int]
    """Pusher -> number of its last acknowledged push; a pusher with a new strip is not in it and starts at 0."""
    promoted: int
    """The number of shards that another server serves now."""
    version: int | None
    """The last complete clock in synchronous training, to which all shards return; None otherwise."""
    position: Position
    clocks: dict[int, int]
    """Pusher -> clock of its next push."""
    clock: int | None
    """Where replicas are bound by clocks: the clock at which new replicas start; None otherwise. In synchronous
    training, and where replicas have strips, all replicas start there."""
    begun: dict[int, int]
    """Pusher -> the clock after the last push that it sends again: no shard has anything later."""
    cuts: BatchCuts | None
    left: dict[int, BatchRemainder]
    """Where replicas are bound by clocks: number of a batch of which a share was pushed -> what remains of it."""
    taken: dict[int, dict[int, int]]
    """Pusher -> shard -> the highest number of its messages that the shard has, where servers have reported it."""
    out: frozenset[int]
    """Numbers of the batches of this epoch that workers are computing."""
    mean: tuple[float, ...]
    """The sums of loss and metrics per image so far in this epoch; empty without images."""
    detected: float
    """When the first rank noticed the loss, in seconds since 1970."""
    resumed_at: tuple[float | None, float | None]
    """When the generation that ended first applied a push of any pusher and of all pushers; None for what it did not
    reach."""
    coordinator: dict[str, Any] | None
    """The newest state of a coordinator that a surviving rank has, as JSON values."""
    resent: int
    """The number of pushes that are sent again."""
    captured: tuple[str, ...]
    """The layers that push factors."""


def order_to_follow(states: Sequence[RankState]) -> GoBack | None:
    """Return the order to go back that all ranks follow now; None if every rank with roles has followed the newest."""
    orders = [GoBack(**state.order) for state in states if state.order is not None]
    newest = max(orders, key=lambda order: order.number, default=None)
    if newest is None:
        return None
    followed = [state.restart.number if state.restart else 0 for state in states if not state.new]
    return newest if min(followed, default=newest.number) < newest.number else None


def plan_recovery(
    states: Sequence[RankState], layout: Layout, shards: Sequence[Shard], copies: int, staleness: float
) -> RecoveryPlan:
    """Return the recovery plan: how the job continues, from the states of all ranks in the order of ranks.

    `layout` is that of the next generation, `copies` the wanted number of copies of each shard. Raise LostState if the
    states do not have every acknowledged push.
    """
    synchronous = staleness == 0
    sound = find_sound_copies(states, layout, shards, synchronous)
    holders = choose_holders(states, layout, shards, copies, sound)
    batches = [batch for state in states for batch in state.batches]
    position = _recovered_position([state.positions for state in states], sound.clock, max(batches, default=0) // EPOCH)
    joint = None if np.isinf(staleness) else _joint_batches(states, layout, position, sound.clock)
    clock = None if joint is None else joint.cuts.layouts[-1][0]
    clocks = _next_clocks(states, layout, clock, synchronous)
    tallies = [state.epoch_sums for state in states if state.epoch_sums[0] == position.epoch]
    return RecoveryPlan(
        holders=holders.ranks,
        lacking=holders.lacking,
        stale=find_stale_copies(states, layout, sound),
        acknowledged=_acknowledged(states, layout, sound.clock),
        promoted=sum(shard not in states[ranks[0]].served for shard, ranks in enumerate(holders.ranks)),
        version=sound.clock,
        position=position,
        clocks=clocks,
        clock=clock,
        begun=_clocks_after_resent(states, clocks),
        cuts=None if joint is None else joint.cuts,
        left={} if joint is None else joint.left,
        taken=_messages_taken(states, holders.ranks),
        out=_batches_in_progress(batches, position.epoch) if joint is None else frozenset(),
        mean=_mean_sums(tallies),
        detected=min(state.detected for state in states if state.detected),
        resumed_at=earliest(state.resumed_at for state in states),
        coordinator=newest_coordinator([state.coordinator for state in states]),
        resent=sum(state.unacknowledged for state in states),
        captured=max(state.captured for state in states),
    )


def _acknowledged(states: Sequence[RankState], layout: Layout, version: int | None) -> dict[int, int]:
    """Return for the recovery the last acknowledged push of each pusher that keeps its strip.

    In synchronous training one strip may have an acknowledgement of a clock that other strips lack: that clock is
    computed again, and its acknowledgement does not count. `version` is the last complete clock there.
    """
    acknowledged = {}
    for state, place in zip(states, layout.places, strict=True):
        if state.acknowledged is None or state.strip != (place.strip or 0):
            continue
        number, clock = state.acknowledged
        if version is None or clock <= version:
            acknowledged[state.member] = number
    return acknowledged


def _recovered_position(known: Sequence[Mapping[int, Position]], version: int | None, begun: int) -> Position:
    """Return where the recovered training stands, from the positions that servers `known`, by clock.

    In synchronous training it is the position of the complete clock `version`; raise LostState if no server knows it.
    Otherwise it has every batch of the newest epoch of which any server has applied a part. `begun` is the newest epoch
    of which a worker has batches, though none of them may be applied yet.
    """
    if version is not None:
        at_version = [positions[version] for positions in known if version in positions]
        if not at_version:
            raise LostState(f"no surviving rank knows which batches clock {version} has")
        return at_version[0]
    positions = [position for by_clock in known for position in by_clock.values()]
    latest = max(positions, key=lambda position: (position.epoch, position.images))
    result = Position(latest.batches.size, latest.epoch, latest.images, latest.clock)
    result.lasted = latest.lasted
    for position in positions:
        if position.epoch == result.epoch:
            result.batches |= position.batches
    result.begin_epoch(begun)
    return result


def _batches_in_progress(batches: Iterable[int], epoch: int) -> frozenset[int]:
    """Return the numbers of those `batches` that belong to the `epoch` of the recovery."""
    return frozenset(batch % EPOCH for batch in batches if batch // EPOCH == epoch)


@dataclass(frozen=True)
class _JointBatches:
    cuts: BatchCuts
    left: dict[int, BatchRemainder]


def _joint_batches(
    states: Sequence[RankState], layout: Layout, position: Position, version: int | None
) -> _JointBatches:
    """Return how joint batches are cut after the recovery, and what remains of those begun.

    Add the batches of which a share was pushed to `position`. In synchronous training a clock that is not complete is
    computed again, and a replica of strips discards what it has not had acknowledged.
    """
    keeps_pushed = version is None and layout.partitions == 1
    if keeps_pushed:
        position.images = _images_applied_once(states)
    replicas = {layout.places[rank].member: layout.places[rank].replica or 0 for rank in layout.workers}
    progress = {state.member: state.progress for state in states}
    cuts, left = batches.resume_batches(
        progress, replicas, position.batches, position.epoch, keep=keeps_pushed, clock=version
    )
    return _JointBatches(cuts, left)


def _images_applied_once(states: Sequence[RankState]) -> int:
    """Return the images applied at the recovery, without those counted again as their push is sent again."""
    resent = [(state.member, clock, images) for state in states for clock, images in state.resent]
    counts = []
    for state in states:
        again = sum(images for pusher, clock, images in resent if clock < state.progress.reached.get(pusher, 0))
        counts += [position.images - again for position in state.positions.values()]
    return max(counts)


def _next_clocks(states: Sequence[RankState], layout: Layout, clock: int | None, synchronous: bool) -> dict[int, int]:
    """Return the clock of the next push of each pusher after the recovery.

    Where replicas are bound by clocks, new pushers start at `clock`, which no replica has begun; in synchronous
    training, and where replicas have strips, all pushers start there. Otherwise new pushers start where the slowest
    pusher is. The strips of a replica push together: they start where the fastest of them is, as no clock comes twice.
    """
    known = {state.member: state.clock for state in states if state.clock is not None}
    workers = [layout.places[rank] for rank in layout.workers]
    if clock is not None:
        together = synchronous or layout.partitions > 1
        return {worker.member: clock if together else known.get(worker.member, clock) for worker in workers}
    slowest = min(known.values(), default=0)
    fastest = defaultdict[int | None, int](int)
    for worker in workers:
        fastest[worker.replica] = max(fastest[worker.replica], known.get(worker.member, slowest))
    return {worker.member: fastest[worker.replica] for worker in workers}


def _clocks_after_resent(states: Sequence[RankState], clocks: Mapping[int, int]) -> dict[int, int]:
    """Return the clock after the last push that each pusher sends again after a loss; else its next clock."""
    ends = {state.member: clock + 1 for state in states for clock, _ in state.resent}
    return {pusher: max(clock, ends.get(pusher, clock)) for pusher, clock in clocks.items()}


def _messages_taken(states: Sequence[RankState], holders: Sequence[tuple[int, ...]]) -> dict[int, dict[int, int]]:
    """Return, by pusher and shard, the highest message number in the copy that serves after the recovery."""
    taken: dict[int, dict[int, int]] = defaultdict(dict)
    for shard, ranks in enumerate(holders):
        for pusher, number in states[ranks[0]].tables.get(shard, {}).items():
            taken[pusher][shard] = number
    return dict(taken)


def earliest(times: Iterable[Sequence[float | None]]) -> tuple[float | None, float | None]:
    """Return the earliest first and second time in the pairs of all surviving ranks; None where all are None.

    Each server reports when it first applied a push of any pusher and when it had applied one of all pushers.
    """
    any_pusher, all_pushers = zip(*times, strict=True)
    return min(filter(None, any_pusher), default=None), min(filter(None, all_pushers), default=None)


def newest_coordinator(states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the coordinator state with the highest number that survives; None if no rank has one."""
    return max((state for state in states if state), key=lambda state: state["number"], default=None)


def _mean_sums(tallies: Sequence[tuple[int, float, tuple[float, ...]]]) -> tuple[float, ...]:
    """Return the sums of loss and metrics per image before the recovery, from `tallies` of (epoch, images, sums)."""
    images = max(1.0, sum(tally[1] for tally in tallies))
    return tuple(sum(values) / images for values in zip(*(tally[2] for tally in tallies), strict=True))
