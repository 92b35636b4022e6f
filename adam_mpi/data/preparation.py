"""Batches made ready: read through the cache, then transformed; by threads, ahead of need, or at once."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from adam_mpi.data.course import Phase
from adam_mpi.data.sets import DataSet
from adam_mpi.data.transform import SAMPLE, Transformer


@dataclass(frozen=True)
class Block:
    """Images as the network sees them; fewer than were asked for when some are bad and skipped."""

    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray


class Preparation:
    def __init__(self, data: DataSet, seed: int) -> None:
        self.data = data
        wanted, source = data.data.transform, data.sources["train"]
        sample = np.arange(min(SAMPLE, data.description.train) if wanted.normalise else 0)
        images = data.read_usable("train", sample)[1]
        self.transformer = Transformer(wanted, source.shape, source.dtype, seed, images)
        # One thread reads, so that a slow disk keeps nobody but itself waiting; others transform what it has read.
        self.reading = ThreadPoolExecutor(1, "read")
        self.transforming = ThreadPoolExecutor(data.data.threads, "transform")

    def prepare(self, phase: Phase, images: np.ndarray) -> Block:
        """At once, by the caller."""
        return self._transform(phase, *self.data.read_usable(phase.part, images))

    def start(self, phase: Phase, images: np.ndarray) -> Future[Block]:
        """By the threads, first come first served."""
        read = self.reading.submit(self.data.read_usable, phase.part, images)
        return self.transforming.submit(lambda: self._transform(phase, *read.result()))

    def warm(self) -> None:
        """Compile, or load from numba's cache, what the first batch would wait for."""
        self.prepare(Phase(0, "train", 0), np.arange(1))

    def _transform(self, phase: Phase, ids: np.ndarray, images: np.ndarray, labels: np.ndarray) -> Block:
        return Block(ids, labels, self.transformer(images, ids, phase.epoch if phase.training else None))
