"""Batches: the parts that one is cut into for threads, and the shares that replicas have of joint batches. Pure.

A batch on strips is cut into consecutive parts. In a hybrid replica, whose ranks each hold pixels of their own share of
the images, it is cut into rounds: each takes images of every rank's share.

With clocks every batch is computed by all replicas together, each its share, and the n-th batch of an epoch is the n-th
clock after the first of that epoch. When ranks are lost, each replica continues where it is. Batches of which some
replica has pushed its share stay as they were cut, and every replica that is left computes its share of them; later
batches are cut for the new replicas. Shares of the former that only the dead had are lost, and counted as skipped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from adam_mpi.sharding.fields import INPUT, TARGET

LEAST_IMAGES = 16
"""Of a part, and of each rank of a hybrid replica: fewer images would leave vectors empty."""


@dataclass
class Batch:
    """Images with their ids: batch `number` of an epoch, or one replica's share of it."""

    phase: int
    epoch: int
    number: int
    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]
    """Name -> values of the images."""
    targets: Mapping[str, np.ndarray]
    edges: tuple[int, ...] = ()
    """In a hybrid replica, whose ranks have inputs of their own images only: where the images of each begin and end."""

    @property
    def pixels(self) -> np.ndarray:
        """Return the first input of a batch."""
        return next(iter(self.inputs.values()))

    @property
    def labels(self) -> np.ndarray:
        """Return the first target of a batch."""
        return next(iter(self.targets.values()))


def image_batch(
    number: int, ids: np.ndarray, labels: np.ndarray, pixels: np.ndarray, phase: int = 0, epoch: int = 0
) -> Batch:
    """Return a batch of images with a class each."""
    return Batch(
        phase=phase,
        epoch=epoch,
        number=number,
        ids=ids,
        inputs={INPUT: pixels},
        targets={TARGET: labels},
    )


def select(values: Mapping[str, np.ndarray], chosen: slice | np.ndarray) -> dict[str, np.ndarray]:
    """Return the `chosen` images of all arrays of a batch."""
    return {name: array[chosen] for name, array in values.items()}


def most_parts(in_flight: int, ranks: int) -> tuple[int, int]:
    """Return the most parts that a batch is cut into, and the ranks that share its images.

    A hybrid replica of `ranks` ranks has as many rounds as ranks; otherwise `in_flight` parts are computed at a time.
    """
    return (ranks, ranks) if ranks > 1 else (in_flight, 1)


def count_parts(images: int, most: int, ranks: int = 1) -> int:
    """Return how many parts a batch of `images` images has, at most `most`."""
    return max(1, min(most, -(-images // (LEAST_IMAGES * ranks))))


def largest_part(batch: int, most: int, ranks: int = 1) -> int:
    """Return the most images of a part of a batch of up to `batch` images: the capacity of a context.

    Shares and rounds are both cut evenly: that may add an image for each rank but one.
    """
    return min(batch, max(LEAST_IMAGES * ranks, -(-batch // most)) + ranks - 1)


def shares(images: int, ranks: int) -> tuple[int, ...]:
    """Return the edges of `ranks` consecutive shares of a batch of `images` images, of nearly equal size."""
    return tuple(rank * images // ranks for rank in range(ranks + 1))


def cut_batch(batch: Batch, parts: int) -> list[Batch]:
    """Return `batch` cut into `parts` consecutive parts of nearly equal size."""
    pieces = [slice(first, last) for first, last in pairwise(shares(batch.ids.size, parts))]
    return [
        replace(batch, ids=batch.ids[piece], inputs=select(batch.inputs, piece), targets=select(batch.targets, piece))
        for piece in pieces
    ]


def cut_rounds(batch: Batch, rounds: int, rank: int) -> list[Batch]:
    """Return `batch` of a hybrid replica, as `rank` has it, cut into `rounds` with nearly equal parts of all shares."""
    found = []
    for number in range(rounds):
        taken = [
            (a + number * (b - a) // rounds, a + (number + 1) * (b - a) // rounds) for a, b in pairwise(batch.edges)
        ]
        chosen = np.concatenate([np.arange(a, b) for a, b in taken])
        edges = (0, *(int(edge) for edge in np.cumsum([b - a for a, b in taken])))
        first, last = (image - batch.edges[rank] for image in taken[rank])
        own = select(batch.inputs, slice(first, last))
        targets = select(batch.targets, chosen)
        found.append(replace(batch, ids=batch.ids[chosen], inputs=own, targets=targets, edges=edges))
    return found


Share = tuple[int, int]
"""A share of a batch: (replica, number of replicas)."""


@dataclass(frozen=True)
class BatchCuts:
    """How the batches of an epoch are cut over replicas, one layout after the other; the same on all ranks."""

    epoch: int
    base: int
    """The clock of the first batch of the epoch."""
    layouts: tuple[tuple[int, Mapping[int, int]], ...]
    """(first clock, worker -> replica) of each layout."""
    lost: frozenset[tuple[int, int]] = frozenset()
    """(clock, worker): shares of this epoch that were lost with a worker."""
    number: int = 0
    """Grows with every generation."""

    def workers(self, clock: int) -> Mapping[int, int]:
        """Return worker -> replica, of the workers that have a share of the joint batch of `clock`."""
        return next((replicas for first, replicas in reversed(self.layouts) if first <= clock), {})

    def piece(self, clock: int, worker: int) -> Share:
        """Return the share of the joint batch of `clock` that `worker` has."""
        replicas = self.workers(clock)
        return replicas[worker], len(set(replicas.values()))


@dataclass(frozen=True)
class Progress:
    """What one rank knows about the clocks when a generation ends."""

    cuts: BatchCuts | None = None
    """None if the rank has just joined."""
    next: int | None = None
    """Of a worker: the clock of its next push."""
    base: tuple[int, int] | None = None
    """Of a worker: the newest epoch that it has begun, and the clock of that epoch's first batch."""
    pushed: Mapping[int, int] = field(default_factory=dict)
    """Of a worker: number of a batch of that epoch -> images of its share, if that is pushed and not reported."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """Of a server: worker -> the clock of its next push; everything before it is applied there."""


@dataclass(frozen=True)
class BatchRemainder:
    """What is left of a batch of which some replica has pushed its share."""

    pushed: int
    """Images of shares that are pushed, and will be reported."""
    due: tuple[Share, ...]
    """Shares to be given to their replicas."""
    lost: tuple[Share, ...]
    """Shares that only the dead had."""


def first_cuts(batches: np.ndarray, epoch: int, replicas: Mapping[int, int]) -> BatchCuts:
    """Return the cuts at the start of a job, whose first clock is 0; `batches` says which of `epoch` are done."""
    return BatchCuts(epoch, -begun(batches), ((0, replicas),))


def begun(batches: np.ndarray) -> int:
    """Return how many batches of an epoch are done or begun: batches are begun in order."""
    return int(batches.nonzero()[0].max(initial=-1)) + 1


def resume_batches(
    known: Mapping[int, Progress],
    replicas: Mapping[int, int],
    batches: np.ndarray,
    epoch: int,
    keep: bool,
    clock: int | None = None,
) -> tuple[BatchCuts, dict[int, BatchRemainder]]:
    """Return the cuts of joint batches in the next generation, and number -> the rest of batches that are begun.

    `known`: member -> its progress. `replicas`: worker -> replica in the next generation. `batches`: which batches have
    a share in the weights; those with a share on its way are added. `keep`: workers keep what they have pushed, which
    strips do not. `clock`: where all continue in synchronous training, which leaves no batch partly done.
    """
    all_cuts = [progress.cuts for progress in known.values() if progress.cuts is not None]
    earlier = max(all_cuts, key=lambda cuts: cuts.number, default=BatchCuts(epoch, 0, ()))
    alive = {
        worker: progress
        for worker, progress in known.items()
        if keep and progress.next is not None and worker in replicas
    }
    for progress in alive.values():
        if clock is None and progress.base is not None and progress.base[0] == epoch:
            batches[list(progress.pushed)] = True
    count = begun(batches)
    reached = _reached(known.values())
    base = clock - count if clock is not None else _base(known.values(), epoch, count, reached)
    lost = earlier.lost if earlier.epoch == epoch else frozenset()
    if clock is None:
        ends = {worker: end for worker, end in reached.items() if worker not in alive}
        lost |= _lost(earlier, ends, base, base + count)
    layouts = _layouts(earlier, base, base + count, replicas)
    cuts = BatchCuts(epoch=epoch, base=base, layouts=layouts, lost=lost, number=earlier.number + 1)
    return cuts, {} if clock is not None else _window(cuts, count, alive)


def _lost(earlier: BatchCuts, ends: Mapping[int, int], base: int, stop: int) -> frozenset[tuple[int, int]]:
    """Return (clock, worker) of the shares of joint batches from clock `base` to `stop` that were lost with workers.

    `ends`: worker that is gone -> the clock of its first push that is not applied.
    """
    lost: set[tuple[int, int]] = set()
    for clock in range(max(base, min(ends.values(), default=0)), stop):
        lost |= {(clock, worker) for worker in earlier.workers(clock) if ends.get(worker, clock + 1) <= clock}
    return frozenset(lost)


def _reached(known: Collection[Progress]) -> dict[int, int]:
    """Return worker -> the clock up to which all servers have applied its shares of joint batches."""
    reached: dict[int, int] = {}
    for progress in known:
        for worker, clock in progress.reached.items():
            reached[worker] = min(clock, reached.get(worker, clock))
    return reached


def _base(known: Collection[Progress], epoch: int, count: int, reached: Mapping[int, int]) -> int:
    """Return the clock of the first batch of `epoch`: from ranks that have begun it, else where all others are."""
    found = [progress.base[1] for progress in known if progress.base is not None and progress.base[0] == epoch]
    found += [progress.cuts.base for progress in known if progress.cuts is not None and progress.cuts.epoch == epoch]
    found += [progress.next for progress in known if progress.next is not None]
    return found[0] if found else max(reached.values(), default=count) - count


def _layouts(
    earlier: BatchCuts, base: int, clock: int, replicas: Mapping[int, int]
) -> tuple[tuple[int, Mapping[int, int]], ...]:
    """Return the earlier layouts of joint batches of this epoch, and the new one from `clock` on."""
    kept = [layout for layout in earlier.layouts if layout[0] < clock]
    needless = sum(first <= base for first, _ in kept) - 1
    return *kept[max(0, needless) :], (clock, dict(replicas))


def _window(cuts: BatchCuts, count: int, alive: Mapping[int, Progress]) -> dict[int, BatchRemainder]:
    """Return number -> what is left of a joint batch, where anything is."""
    due = min((known.next - cuts.base for known in alive.values() if known.next is not None), default=count)
    pushed = {number for known in alive.values() for number in known.pushed}
    numbers = pushed | {clock - cuts.base for clock, _ in cuts.lost}
    left = {number: _left(cuts, number, alive) for number in sorted({*numbers, *range(max(0, due), count)})}
    return {number: rest for number, rest in left.items() if rest != BatchRemainder(0, (), ())}


def _left(cuts: BatchCuts, number: int, alive: Mapping[int, Progress]) -> BatchRemainder:
    """Return what is left of joint batch `number`."""
    clock = cuts.base + number
    pushed = 0
    due: list[Share] = []
    for worker in cuts.workers(clock):
        known = alive.get(worker)
        if known is not None and known.next is not None and known.next <= clock:
            due.append(cuts.piece(clock, worker))
        elif known is not None and known.base is not None and known.base[0] == cuts.epoch:
            pushed += known.pushed.get(number, 0)
    lost = {cuts.piece(clock, worker) for at, worker in cuts.lost if at == clock}
    return BatchRemainder(pushed, tuple(sorted(due)), tuple(sorted(lost)))
