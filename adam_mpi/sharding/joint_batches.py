"""Joint batches: who has which share of them, and what becomes of the shares when ranks are lost. Pure.

With clocks every batch is computed by all replicas together, each its share, and the n-th batch of an epoch is the n-th
clock after the first of that epoch. When ranks are lost each replica goes on where it is. Batches that somebody has
pushed his share of stay as they were cut, and every replica that is left computes its share of them; later ones are cut
anew. Shares of such batches that only the dead had are lost, and counted as skipped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

Piece = tuple[int, int]
"""(replica, of so many): a share of a batch."""


@dataclass(frozen=True)
class Cuts:
    """How the batches of an epoch were cut over replicas, one layout after the other; the same on all ranks."""

    epoch: int
    base: int
    """The clock of its first batch."""
    layouts: tuple[tuple[int, Mapping[int, int]], ...]
    """(first clock, worker -> replica)"""
    lost: frozenset[tuple[int, int]] = frozenset()
    """(clock, worker): shares of this epoch that a worker took along when it was lost."""
    number: int = 0
    """Grows with every generation."""

    def workers(self, clock: int) -> Mapping[int, int]:
        """Return the replica of each worker that had a share of this clock."""
        return next((replicas for first, replicas in reversed(self.layouts) if first <= clock), {})

    def piece(self, clock: int, worker: int) -> Piece:
        """Return the share of this clock that a worker has."""
        replicas = self.workers(clock)
        return replicas[worker], len(set(replicas.values()))


@dataclass(frozen=True)
class Progress:
    """What one rank knows of the clocks when a generation ends."""

    cuts: Cuts | None = None
    """None: it has just joined."""
    next: int | None = None
    """Of a worker: the clock of its next push."""
    base: tuple[int, int] | None = None
    """Of a worker: the newest epoch that it has begun, and the clock of that epoch's first batch."""
    pushed: Mapping[int, int] = field(default_factory=dict)
    """Of a worker: number of a batch of that epoch -> images of our share, which is pushed and not reported."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """Of a server: worker -> the clock of its next push; everything before is applied here."""


@dataclass(frozen=True)
class Left:
    """What is left of a batch that somebody has pushed his share of."""

    pushed: int
    """Images of shares that are pushed, and will be reported."""
    due: tuple[Piece, ...]
    """Shares to be handed out."""
    lost: tuple[Piece, ...]


def first_cuts(batches: np.ndarray, epoch: int, replicas: Mapping[int, int]) -> Cuts:
    """Return the cuts at the start of a job, whose first clock is 0; `batches`: which of the epoch are done."""
    return Cuts(epoch, -begun(batches), ((0, replicas),))


def begun(batches: np.ndarray) -> int:
    """Return how many batches of an epoch are done or begun: those come one after the other."""
    return int(batches.nonzero()[0].max(initial=-1)) + 1


def go_on(
    known: Mapping[int, Progress],
    replicas: Mapping[int, int],
    batches: np.ndarray,
    epoch: int,
    keep: bool,
    clock: int | None = None,
) -> tuple[Cuts, dict[int, Left]]:
    """Return the cuts of the next generation, and what is left of batches of the epoch that somebody has begun.

    `known`: by rank for life; `replicas`: of the workers there will be; `batches`: those that a part of is in the
    weights, to which those are added that a part of is on its way. `keep`: workers go on with what they have pushed;
    strips do not. `clock`: where all go on in synchronous training, which leaves nothing half done.
    """
    told_cuts = [told.cuts for told in known.values() if told.cuts is not None]
    earlier = max(told_cuts, key=lambda cuts: cuts.number, default=Cuts(epoch, 0, ()))
    alive = {worker: told for worker, told in known.items() if keep and told.next is not None and worker in replicas}
    for told in alive.values():
        if clock is None and told.base is not None and told.base[0] == epoch:
            batches[list(told.pushed)] = True
    count, reached = begun(batches), _reached(known.values())
    base = clock - count if clock is not None else _base(known.values(), epoch, count, reached)
    lost = earlier.lost if earlier.epoch == epoch else frozenset()
    if clock is None:
        ends = {worker: end for worker, end in reached.items() if worker not in alive}
        for at in range(max(base, min(ends.values(), default=0)), base + count):
            lost |= {(at, worker) for worker in earlier.workers(at) if ends.get(worker, at + 1) <= at}
    cuts = Cuts(epoch, base, _layouts(earlier, base, base + count, replicas), lost, earlier.number + 1)
    return cuts, {} if clock is not None else _window(cuts, count, alive)


def _reached(known: Collection[Progress]) -> dict[int, int]:
    """Worker -> the clock that all servers have come to with it."""
    reached: dict[int, int] = {}
    for told in known:
        for worker, clock in told.reached.items():
            reached[worker] = min(clock, reached.get(worker, clock))
    return reached


def _base(known: Collection[Progress], epoch: int, count: int, reached: Mapping[int, int]) -> int:
    """The clock of the epoch's first batch: of those who have begun it, else where all are who are left."""
    told = [progress.base[1] for progress in known if progress.base is not None and progress.base[0] == epoch]
    told += [progress.cuts.base for progress in known if progress.cuts is not None and progress.cuts.epoch == epoch]
    told += [progress.next for progress in known if progress.next is not None]
    return told[0] if told else max(reached.values(), default=count) - count


def _layouts(
    earlier: Cuts, base: int, clock: int, replicas: Mapping[int, int]
) -> tuple[tuple[int, Mapping[int, int]], ...]:
    """Those that batches of this epoch were cut by, and from a clock on the new one."""
    kept = [layout for layout in earlier.layouts if layout[0] < clock]
    needless = sum(first <= base for first, _ in kept) - 1
    return *kept[max(0, needless) :], (clock, dict(replicas))


def _window(cuts: Cuts, count: int, alive: Mapping[int, Progress]) -> dict[int, Left]:
    """Number -> what is left of a batch, where anything is."""
    due = min((told.next - cuts.base for told in alive.values() if told.next is not None), default=count)
    numbers = {number for told in alive.values() for number in told.pushed} | {at - cuts.base for at, _ in cuts.lost}
    left = {number: _left(cuts, number, alive) for number in sorted({*numbers, *range(max(0, due), count)})}
    return {number: rest for number, rest in left.items() if rest != Left(0, (), ())}


def _left(cuts: Cuts, number: int, alive: Mapping[int, Progress]) -> Left:
    clock, pushed, due = cuts.base + number, 0, list[Piece]()
    for worker in cuts.workers(clock):
        told = alive.get(worker)
        if told is not None and told.next is not None and told.next <= clock:
            due.append(cuts.piece(clock, worker))
        elif told is not None and told.base is not None and told.base[0] == cuts.epoch:
            pushed += told.pushed.get(number, 0)
    lost = {cuts.piece(clock, worker) for at, worker in cuts.lost if at == clock}
    return Left(pushed, tuple(sorted(due)), tuple(sorted(lost)))
