"""Load batches: read images through the cache and transform them, in threads ahead of need, or at once."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np

from adam_mpi.base import trace
from adam_mpi.data.epoch import Order
from adam_mpi.data.sets import DataSet
from adam_mpi.data.transform import SAMPLE, Transformer
from adam_mpi.sharding.training_state import Phase

GROUP = 256
"""Images that a thread loads at a time."""
AHEAD = 4
"""Batches loaded ahead for each replica, beyond those that it holds."""


@dataclass(frozen=True)
class LoadedBatch:
    """Images as the network sees them; fewer than requested when some are bad and skipped."""

    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray

    def select(self, chosen: np.ndarray | slice) -> "LoadedBatch":
        """Return the `chosen` images as a batch of their own."""
        return LoadedBatch(self.ids[chosen], self.labels[chosen], self.pixels[chosen])


class BatchLoader:
    """Reads batches of a data set in one thread and transforms them in `data.threads` others."""

    def __init__(self, data: DataSet, seed: int) -> None:
        """Sample the training part for its mean and deviation where the config asks for normalization."""
        self.data = data
        wanted = data.data.transform
        source = data.sources["train"]
        sample = np.arange(min(SAMPLE, data.description.train) if wanted.normalize else 0)
        images = data.read_usable("train", sample)[1]
        self.transformer = Transformer(wanted, source.shape, source.dtype, seed, images)
        self.busy = 0.0
        """Seconds in which threads transformed, summed over all threads."""
        # One thread reads, so that a slow disk delays only itself; the others transform what it has read.
        self.reading = ThreadPoolExecutor(1, "read")
        self.transforming = ThreadPoolExecutor(data.data.threads, "transform")

    def prepare(self, phase: Phase, images: np.ndarray) -> LoadedBatch:
        """Load `images` of the part of `phase` in the calling thread."""
        return self._transform(phase, images, *self.data.read_usable(phase.part, images))[1]

    def start(self, phase: Phase, batches: list[np.ndarray]) -> Future[list[LoadedBatch]]:
        """Load `batches` (the ids of each one's images) in the threads, first come first served.

        One call takes several batches, because handing over single ones would cost more than loading them.
        """
        images = np.concatenate(batches)
        edges = np.cumsum([len(batch) for batch in batches])
        read = self.reading.submit(self.data.read_usable, phase.part, images)
        return self.transforming.submit(self._finish, phase, images, edges, read)

    def warm(self) -> None:
        """Compile, or load from numba's cache, what the first batch would wait for."""
        self.prepare(Phase(0, "train", 0), np.arange(1))

    def _finish(
        self,
        phase: Phase,
        requested: np.ndarray,
        edges: np.ndarray,
        read: Future[tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> list[LoadedBatch]:
        """Transform what was `read` and split it at `edges`; batches with bad images become smaller."""
        kept, batch = self._transform(phase, requested, *read.result())
        cuts = [0, *np.searchsorted(kept, edges).tolist()]
        return [batch.select(slice(first, last)) for first, last in pairwise(cuts)]

    def _transform(
        self, phase: Phase, requested: np.ndarray, kept: np.ndarray, images: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, LoadedBatch]:
        """Return `kept` (the positions of usable images among those requested) and their batch."""
        ids = requested[kept]
        began = time.perf_counter()
        with trace.span("prepare"):
            pixels = self.transformer(images, ids, phase.epoch if phase.training else None)
        self.busy += time.perf_counter() - began
        return kept, LoadedBatch(ids, labels, pixels)


class BatchSource(Protocol):
    """What a PrefetchQueue loads its batches from."""

    def start(self, numbers: list[int]) -> Future[list[LoadedBatch]]:
        """Load the batches with these `numbers`."""


@dataclass(frozen=True)
class PhaseBatches:
    """The batches of one phase, loaded by their numbers in `order`."""

    loader: BatchLoader
    phase: Phase
    order: Order

    def start(self, numbers: list[int]) -> Future[list[LoadedBatch]]:
        """Load the batches with these `numbers` in the threads of the loader."""
        return self.loader.start(self.phase, [self.order[number] for number in numbers])


class PrefetchQueue:
    """Batches in a fixed order, each taken by `takers` replicas; loaded in groups until `ahead` of them are started."""

    def __init__(
        self,
        numbers: Iterable[int],
        source: BatchSource,
        ahead: int,
        group: int,
        takers: int = 1,
        begun: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Queue `numbers`; `begun` maps batches that some replicas have already to how many takers are left."""
        self.upcoming = deque(numbers)
        self.source = source
        self.ahead = ahead
        self.group = group
        self.takers = takers
        self.begun = begun
        self.started: dict[int, tuple[Future[list[LoadedBatch]], int]] = {}
        """Number -> the group it is loaded in, and its index there."""
        self.taken: dict[int, int] = {}
        self.size = 1
        """Batches of the next group: the first batches of a phase are waited for, so groups start small."""

    def __len__(self) -> int:
        return len(self.upcoming) + len(self.started)

    @property
    def ready(self) -> int:
        """Return the number of prefetched batches that can be taken now."""
        return sum(future.done() for future, _ in self.started.values())

    @property
    def loading(self) -> int:
        """Return the number of batches whose loading is under way."""
        return len(self.started) - self.ready

    def fill(self) -> bool:
        """Start loading batches until `ahead` are started; return whether any was."""
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            self._start()
            worked = True
        return worked

    def take(self, number: int | None = None) -> tuple[int, LoadedBatch] | None:
        """Return (number, batch) of the next batch, or of batch `number`; None while it is loading."""
        while self.upcoming and (number not in self.started if number is not None else not self.started):
            self._start()
        number = next(iter(self.started)) if number is None else number
        future, index = self.started[number]
        if not future.done():
            return None
        self.taken[number] = self.taken.get(number, 0) + 1
        if self.taken[number] == self.begun.get(number, self.takers):
            del self.started[number], self.taken[number]
        return number, future.result()[index]

    def close(self) -> list[int]:
        """Empty the queue; return the batches that nobody has taken."""
        left = [*self.started, *self.upcoming]
        self.started.clear()
        self.upcoming.clear()
        return left

    def stop(self) -> None:
        """Drop all batches but those of which some replica has a share and others do not."""
        self.upcoming = deque(number for number in self.upcoming if number in self.begun)
        wanted = self.taken.keys() | self.begun.keys()
        self.started = {number: group for number, group in self.started.items() if number in wanted}

    def is_begun(self, number: int) -> bool:
        """Return whether batch `number` of a stopped queue still has to be taken by some replicas."""
        return number in self.started or number in self.upcoming and number in self.begun

    def _start(self) -> None:
        """Start loading the next group."""
        numbers = [self.upcoming.popleft() for _ in range(min(self.size, len(self.upcoming)))]
        self.size = min(2 * self.size, self.group)
        future = self.source.start(numbers)
        self.started |= {number: (future, index) for index, number in enumerate(numbers)}
