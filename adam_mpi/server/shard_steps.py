"""The steps of the configured rule on the shards of a server: their coefficients, and the parts of shards by group."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adam_mpi.config import Config
from adam_mpi.optimizer import kernels, rules, sparse_kernels
from adam_mpi.optimizer.groups import ALL, STATISTICS, GroupSpan, parts_of
from adam_mpi.optimizer.kernels import Place
from adam_mpi.optimizer.rules import AVERAGE, Rule
from adam_mpi.optimizer.settings import BatchCounts, ImageCounts, Settings, settings_of
from adam_mpi.server.kernel_call import KernelCall
from adam_mpi.sharding.shard_copy import ShardCopy

Gradients = tuple[Sequence[int], Sequence[float]]
"""Where gradients begin in a memory, and what each of them is multiplied by."""


class Part(NamedTuple):
    """The parameters of a shard from `first` to `stop` that are stepped alike."""

    first: int
    stop: int
    place: Place
    settings: Settings
    rate: float
    """Factor of the learning rate."""
    rule: Rule


class ShardSteps:
    """Takes the steps of shards, and counts the batches that each of them is stepped on."""

    def __init__(self, config: Config, shard_copies: Mapping[int, ShardCopy], groups: Sequence[GroupSpan]) -> None:
        """`groups` are those of all parameters; none is one group of all."""
        self.rule = rules.rule_of(config.optimizer)
        self.batch = config.train.batch
        self.shard_copies = shard_copies
        self.settings = settings_of(config.optimizer)
        self.parts = {index: self._parts(own, groups) for index, own in shard_copies.items()}
        """Shard -> its parts that are stepped; frozen ones are left out."""
        self.frozen = frozenset(index for index, parts in self.parts.items() if not parts)
        """Shards of which no parameter is stepped."""
        self.last: tuple[tuple[str, Settings, float, BatchCounts], np.ndarray] | None = None
        """Rule, settings, rate and batches of the coefficients that were looked up last, and those."""

    def _parts(self, own: ShardCopy, groups: Sequence[GroupSpan]) -> list[Part]:
        """Return the parts of the shard `own` that are stepped."""
        grouped = (
            list(parts_of(groups, own.shard.start, own.shard.stop)) if groups else [(slice(0, own.shard.size), ALL)]
        )
        return [
            Part(
                first=part.start,
                stop=part.stop,
                place=kernels.place(own.weights, own.states, part),
                settings=self.settings._replace(decay=self.settings.decay * group.decay_factor),
                rate=group.learning_rate_factor,
                rule=AVERAGE if group == STATISTICS else self.rule,
            )
            for part, group in grouped
            if not group.frozen
        ]

    def rows(self, index: int, rate: float, images: ImageCounts) -> np.ndarray:
        """Return the coefficients of the steps of shard `index`, without groups, on a gradient; count its batches."""
        return rules.coefficients(self.rule, self.settings, rate, self._count(index, images))

    def step_at(self, index: int, indices: np.ndarray, values: np.ndarray, rate: float, images: ImageCounts) -> None:
        """Step the parameters at `indices` of shard `index` on the gradient `values`, and no others."""
        own = self.shard_copies[index]
        rows = self.rows(index, rate, images)
        sparse_kernels.step_at(self.rule.kernel, own.weights, own.states, indices, values, rows)

    def run(
        self,
        index: int,
        part: slice,
        memory: np.ndarray,
        gradients: Gradients,
        counts: Sequence[ImageCounts],
        rate: float,
    ) -> None:
        """Step the parameters `part` of shard `index`; the `gradients` lie in `memory`. See `add`."""
        call = KernelCall(self.rule.kernel)
        self.add(call, index, part, gradients, counts, rate)
        call.run(memory)

    def add(
        self,
        call: KernelCall,
        index: int,
        part: slice,
        gradients: Gradients,
        counts: Sequence[ImageCounts],
        rate: float,
    ) -> None:
        """Add the steps of the parameters `part` of shard `index` to `call`.

        `counts` are the images of all `gradients` together, or of each of them, which are then taken in turn.
        """
        batches = [self._count(index, images) for images in counts]
        starts, scales = gradients
        first = part.start or 0
        for alike in self.parts[index]:
            low = max(first, alike.first)
            high = alike.stop if part.stop is None else min(part.stop, alike.stop)
            if low < high:
                rows = [self._rows(alike, rate, each) for each in batches]
                own = gradients if low == first else ([start + low - first for start in starts], scales)
                place = kernels.part_of_place(alike.place, low - alike.first, high - low)
                call.of_kernel(alike.rule.kernel).add(place, *_in_turn(own, rows), rows)

    def _rows(self, part: Part, rate: float, counts: BatchCounts) -> np.ndarray:
        """Return the coefficients of `part`, mostly those of the part before: shards are stepped alike."""
        key = (part.rule.name, part.settings, rate * part.rate, counts)
        last = self.last
        # Another thread may replace it meanwhile.
        if last is None or last[0] != key:
            last = (key, rules.coefficients(part.rule, part.settings, rate * part.rate, counts))
            self.last = last
        return last[1]

    def _count(self, index: int, images: ImageCounts) -> BatchCounts:
        """Return the batches of a gradient of `images`, and count them in shard `index`."""
        own = self.shard_copies[index]
        counts = BatchCounts(own.batches, images.begun / self.batch, images.present / self.batch)
        own.batches += counts.begun
        return counts


def _in_turn(gradients: Gradients, rows: Sequence[np.ndarray]) -> Gradients:
    """Return each of the `gradients` as often as it has rows of coefficients; all once if they have rows together."""
    starts, scales = gradients
    if len(rows) != len(starts) or sum(map(len, rows)) == len(starts):
        return gradients
    return (
        [start for start, of in zip(starts, rows, strict=True) for _ in of],
        [scale for scale, of in zip(scales, rows, strict=True) for _ in of],
    )
