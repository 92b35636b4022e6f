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
from adam_mpi.data.sets import DataSet, Samples
from adam_mpi.data.transform import Transformer, mixes
from adam_mpi.sharding.batches import select
from adam_mpi.sharding.fields import OTHER, WEIGHT
from adam_mpi.sharding.training_state import Phase

GROUP = 256
"""Images that a thread loads at a time."""
AHEAD = 4
"""Batches loaded ahead for each replica, beyond those that it holds."""


@dataclass(frozen=True)
class LoadedBatch:
    """Images as the network sees them; fewer than requested when some are bad and skipped."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]
    """Name -> values of the images."""
    targets: Mapping[str, np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        """Return the first input of a loaded batch."""
        return next(iter(self.inputs.values()))

    @property
    def labels(self) -> np.ndarray:
        """Return the first target of a loaded batch."""
        return next(iter(self.targets.values()))

    def select(self, chosen: np.ndarray | slice) -> "LoadedBatch":
        """Return the `chosen` images of a loaded batch as a batch of their own."""
        return LoadedBatch(self.ids[chosen], select(self.inputs, chosen), select(self.targets, chosen))


@dataclass(frozen=True)
class Partners:
    """The images that others are mixed with."""

    ids: np.ndarray
    """The partner of each image."""
    kept: np.ndarray
    """Positions of the images whose partner can be used."""
    images: np.ndarray
    """Those partners."""
    labels: np.ndarray


@dataclass(frozen=True)
class ReadSamples:
    """What was read for some batches."""

    samples: Samples
    partners: Partners | None = None
    """None where images are not mixed."""


class BatchLoader:
    """Reads batches of a data set in one thread and transforms them in `data.threads` others."""

    def __init__(self, data: DataSet, seed: int) -> None:
        """Make a loader of batches; sample the training part for mean and deviation if they are to be normalized."""
        self.data = data
        source = data.sources["train"]
        self.transformer = Transformer(data.data.transform, source.image_shape, source.dtype, seed, data.moments())
        self.busy = 0.0
        """Seconds in which threads transformed, summed over all threads."""
        # One thread reads, so that a slow disk delays only itself; the others transform what it has read.
        self.reading = ThreadPoolExecutor(1, "read")
        self.transforming = ThreadPoolExecutor(data.data.threads, "transform")

    def prepare(self, phase: Phase, images: np.ndarray) -> LoadedBatch:
        """Load `images` of the part of `phase` in the calling thread, as one batch."""
        return self._transform(phase, images, self._read(phase, images))[1]

    def start(self, phase: Phase, batches: list[np.ndarray]) -> Future[list[LoadedBatch]]:
        """Load `batches` (the ids of each one's images) in the loader's threads, first come first served.

        One call takes several batches, because handing over single ones would cost more than loading them.
        """
        images = np.concatenate(batches)
        edges = np.cumsum([len(batch) for batch in batches])
        read = self.reading.submit(self._read, phase, images)
        return self.transforming.submit(self._finish, phase, images, edges, read)

    def warm(self) -> None:
        """Compile, or load from numba's cache, what loading the first batch would wait for."""
        self.prepare(Phase(0, "train", 0), np.arange(1))

    def _finish(
        self,
        phase: Phase,
        requested: np.ndarray,
        edges: np.ndarray,
        read: Future[ReadSamples],
    ) -> list[LoadedBatch]:
        """Transform the images that the loader `read` and split them at `edges`; bad images make batches smaller."""
        kept, batch = self._transform(phase, requested, read.result())
        cuts = [0, *np.searchsorted(kept, edges).tolist()]
        return [batch.select(slice(first, last)) for first, last in pairwise(cuts)]

    def _read(self, phase: Phase, requested: np.ndarray) -> ReadSamples:
        """Read images of the part of `phase` for the loader and, where training images are mixed, their partners."""
        read = self.data.read_samples(phase.part, requested)
        if not (phase.training and mixes(self.data.data.transform)):
            return ReadSamples(read)
        ids = requested[read.kept]
        partners = self.transformer.partners(ids, phase.epoch, self.data.description.train)
        kept, images, labels = self.data.read_usable(phase.part, partners)
        return ReadSamples(read, Partners(partners, kept, images, labels))

    def _transform(self, phase: Phase, requested: np.ndarray, read: ReadSamples) -> tuple[np.ndarray, LoadedBatch]:
        """Return the positions of usable images among those that a batch requested, and their loaded batch."""
        samples = read.samples
        ids = requested[samples.kept]
        first = next(iter(samples.inputs))
        targets = samples.targets
        began = time.perf_counter()
        with trace.span("prepare"):
            pixels = self.transformer(samples.inputs[first], ids, phase.epoch if phase.training else None)
            if mixes(self.data.data.transform):
                pixels, soft = self._mix(pixels, ids, phase, targets, read.partners)
                targets = targets | soft
        self.busy += time.perf_counter() - began
        return samples.kept, LoadedBatch(ids, {**samples.inputs, first: pixels}, targets)

    def _mix(
        self,
        pixels: np.ndarray,
        ids: np.ndarray,
        phase: Phase,
        targets: Mapping[str, np.ndarray],
        partners: Partners | None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return a batch's images mixed with their `partners`, and soft targets; one without partner stays as it is."""
        others = next(iter(targets.values())).copy()
        weights = np.ones(len(ids), np.float32)
        if partners is not None:
            kept = partners.kept
            pixels = pixels.copy()
            changed = self.transformer(partners.images, partners.ids[kept], phase.epoch)
            pixels[kept], weights[kept] = self.transformer.mix(pixels[kept], changed, ids[kept], phase.epoch)
            others[kept] = partners.labels
        return pixels, {OTHER: others, WEIGHT: weights}


class BatchSource(Protocol):
    """What a PrefetchQueue loads its batches from."""

    def start(self, numbers: list[int]) -> Future[list[LoadedBatch]]:
        """Load the batches with these `numbers` for a prefetch queue."""


@dataclass(frozen=True)
class PhaseBatches:
    """The batches of one phase, loaded by their numbers in `order`."""

    loader: BatchLoader
    phase: Phase
    order: Order

    def start(self, numbers: list[int]) -> Future[list[LoadedBatch]]:
        """Load the batches of the phase with these `numbers` in the threads of the loader."""
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
        """Return the number of prefetched batches whose loading is under way."""
        return len(self.started) - self.ready

    def fill(self) -> bool:
        """Start loading batches until `ahead` are prefetched; return whether any was started."""
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            self._start()
            worked = True
        return worked

    def take(self, number: int | None = None) -> tuple[int, LoadedBatch] | None:
        """Return (number, batch) of the next prefetched batch, or of batch `number`; None while it is loading."""
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
        """Empty the prefetch queue; return the batches that nobody has taken."""
        left = [*self.started, *self.upcoming]
        self.started.clear()
        self.upcoming.clear()
        return left

    def stop(self) -> None:
        """Drop all prefetched batches but those of which some replica has a share and others do not."""
        self.upcoming = deque(number for number in self.upcoming if number in self.begun)
        wanted = self.taken.keys() | self.begun.keys()
        self.started = {number: group for number, group in self.started.items() if number in wanted}

    def is_begun(self, number: int) -> bool:
        """Return whether batch `number` of a stopped prefetch queue still has to be taken by some replicas."""
        return number in self.started or number in self.upcoming and number in self.begun

    def _start(self) -> None:
        """Start loading the next group of batches to prefetch."""
        numbers = [self.upcoming.popleft() for _ in range(min(self.size, len(self.upcoming)))]
        self.size = min(2 * self.size, self.group)
        future = self.source.start(numbers)
        self.started |= {number: (future, index) for index, number in enumerate(numbers)}
