"""Batches made ready: read through the cache, then transformed; by threads, ahead of need, or at once."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from adam_mpi.base import trace
from adam_mpi.data.sets import DataSet
from adam_mpi.data.transform import SAMPLE, Transformer
from adam_mpi.sharding.phases import Phase


@dataclass(frozen=True)
class Block:
    """Images as the network sees them; fewer than were asked for when some are bad and skipped."""

    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray


class BatchLoader:
    def __init__(self, data: DataSet, seed: int) -> None:
        self.data = data
        wanted, source = data.data.transform, data.sources["train"]
        sample = np.arange(min(SAMPLE, data.description.train) if wanted.normalize else 0)
        images = data.read_usable("train", sample)[1]
        self.transformer = Transformer(wanted, source.shape, source.dtype, seed, images)
        self.busy = 0.0
        """Seconds in which threads transformed, all threads together."""
        # One thread reads, so that a slow disk keeps nobody but itself waiting; others transform what it has read.
        self.reading = ThreadPoolExecutor(1, "read")
        self.transforming = ThreadPoolExecutor(data.data.threads, "transform")

    def prepare(self, phase: Phase, images: np.ndarray) -> Block:
        """At once, by the caller."""
        return self._transform(phase, images, *self.data.read_usable(phase.part, images))[1]

    def start(self, phase: Phase, batches: list[np.ndarray]) -> Future[list[Block]]:
        """By the threads, first come first served; several batches at once, or handing over would cost the most."""
        images = np.concatenate(batches)
        edges = np.cumsum([len(batch) for batch in batches])
        read = self.reading.submit(self.data.read_usable, phase.part, images)
        return self.transforming.submit(lambda: self._cut(edges, self._transform(phase, images, *read.result())))

    def warm(self) -> None:
        """Compile, or load from numba's cache, what the first batch would wait for."""
        self.prepare(Phase(0, "train", 0), np.arange(1))

    def _transform(
        self, phase: Phase, asked: np.ndarray, kept: np.ndarray, images: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, Block]:
        ids = asked[kept]
        began = time.perf_counter()
        with trace.span("prepare"):
            pixels = self.transformer(images, ids, phase.epoch if phase.training else None)
        self.busy += time.perf_counter() - began
        return kept, Block(ids, labels, pixels)

    def _cut(self, edges: np.ndarray, transformed: tuple[np.ndarray, Block]) -> list[Block]:
        """Into the batches again, of which some may have become smaller."""
        kept, block = transformed
        cuts = [0, *np.searchsorted(kept, edges).tolist()]
        return [Block(block.ids[a:b], block.labels[a:b], block.pixels[a:b]) for a, b in pairwise(cuts)]


# Images prepared by a thread at a time, and batches prepared ahead for each replica besides those it has in hand.
GROUP, AHEAD = 256, 4
Start = Callable[[list[int]], Future[list[Block]]]


class PrefetchQueue:
    """Batches in a fixed order, each for `takers` takers; prepared in groups until `ahead` of them are on their way."""

    def __init__(
        self,
        numbers: Iterable[int],
        start: Start,
        ahead: int,
        group: int,
        takers: int = 1,
        begun: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`begun`: batches that some have their shares of already -> how many takers are left."""
        self.upcoming, self.start, self.ahead, self.group, self.takers = deque(numbers), start, ahead, group, takers
        self.begun = begun
        self.started: dict[int, tuple[Future[list[Block]], int]] = {}
        """Number -> the group it is prepared in, and its place there."""
        self.taken: dict[int, int] = {}
        self.size = 1
        """Of the next group: the first batches of a phase are waited for, so groups begin small."""

    def __len__(self) -> int:
        return len(self.upcoming) + len(self.started)

    @property
    def ready(self) -> int:
        """Batches that could be taken now."""
        return sum(future.done() for future, _ in self.started.values())

    def fill(self) -> bool:
        """Have the next batches prepared."""
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            self._begin()
            worked = True
        return worked

    def take(self, number: int | None = None) -> tuple[int, Block] | None:
        """(number, batch) of the next batch or of the named one, if it is ready."""
        while self.upcoming and (number not in self.started if number is not None else not self.started):
            self._begin()
        number = next(iter(self.started)) if number is None else number
        future, place = self.started[number]
        if not future.done():
            return None
        self.taken[number] = self.taken.get(number, 0) + 1
        if self.taken[number] == self.begun.get(number, self.takers):
            del self.started[number], self.taken[number]
        return number, future.result()[place]

    def close(self) -> list[int]:
        """Hand out no more; returns the batches that nobody has taken."""
        left = [*self.started, *self.upcoming]
        self.started.clear()
        self.upcoming.clear()
        return left

    def stop(self) -> None:
        """Hand out no more, but for the shares of those batches that somebody has a share of."""
        self.upcoming = deque(number for number in self.upcoming if number in self.begun)
        wanted = self.taken.keys() | self.begun.keys()
        self.started = {number: place for number, place in self.started.items() if number in wanted}

    def is_begun(self, number: int) -> bool:
        """Whether somebody has taken his share of a batch, and others have not."""
        return number in self.started or number in self.upcoming and number in self.begun

    def _begin(self) -> None:
        numbers = [self.upcoming.popleft() for _ in range(min(self.size, len(self.upcoming)))]
        self.size = min(2 * self.size, self.group)
        future = self.start(numbers)
        self.started |= {number: (future, place) for place, number in enumerate(numbers)}
