"""Batches made ready: read through the cache, then transformed; by threads, ahead of need, or at once."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adam_mpi.data.course import Phase
from adam_mpi.data.sets import DataSet
from adam_mpi.data.transform import SAMPLE, Transformer
from adam_mpi.observe import trace


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
