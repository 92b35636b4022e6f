"""A trainer thread: computes batches on a copy of the weights its worker's threads share. It never calls MPI."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.fault_injection import Injector
from adam_mpi.config.checks import MOST_BATCHES
from adam_mpi.model.network import Network
from adam_mpi.transport.batch_message import Batch
from adam_mpi.worker.diagnostics import NaNDetector
from adam_mpi.worker.gradient_buffer import MOST_PUSHES, BatchResult, GradientBuffer, GradientPool, done_with
from adam_mpi.worker.thread_weights import ThreadWeights


@dataclass
class Result:
    """What a thread hands back: the images it is done with, a full contribution, or the error that ended it."""

    thread: int
    done: BatchResult | None = None
    token: object = None
    contribution: GradientBuffer | None = None
    error: BaseException | None = None


Task = Callable[["Trainer"], Result]


class Trainer(threading.Thread):
    def __init__(
        self,
        index: int,
        network: Network,
        copy: ThreadWeights,
        pool: GradientPool,
        results: SimpleQueue,
        injector: Injector,
    ) -> None:
        super().__init__(name=f"trainer-{index}", daemon=True)
        self.index, self.copy, self.pool, self.results, self.injector = index, copy, pool, results, injector
        self.context = copy.context
        self.nan_detector = NaNDetector(network.shapes)
        self.contribution: GradientBuffer | None = None
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.waiting = 0
        """Tasks given and not handed back; counted by the main thread."""
        self.unwanted = 0
        """How many of them are of a generation that has ended."""
        self.busy = 0.0

    @property
    def gradient(self) -> np.ndarray:
        return self.copy.gradient

    def give(self, task: Task) -> None:
        self.waiting += 1
        self.tasks.put(task)

    def capture(self, contribution: GradientBuffer) -> None:
        """Add the activations and errors of the block just computed, of the layers that push them."""
        for layer, factors in contribution.factors.items():
            factors.add(*self.context.factors(layer))

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            start = time.perf_counter()
            try:
                result = task(self)
            except BaseException as error:  # told to the main thread, which ends the job
                result = Result(self.index, error=error)
            self.busy += time.perf_counter() - start
            self.results.put(result)


def train(batch: Batch, token: object, factor: float, unit: float, images: int, largest: int) -> Task:
    """Compute a batch, predict its step on the local weights, hand the contribution over after `images` images.

    Or earlier, where the factors of a batch as large as the `largest` would not fit, or the number of one more: the
    last of an epoch is smaller than others, and need not be the last that a thread gets, and so is one with bad images.
    """

    def task(trainer: Trainer) -> Result:
        copy = trainer.copy
        done = _compute(trainer, batch, copy.weights, copy.begin(), copy.options)
        if trainer.contribution is None:
            # Quicker threads may have taken all there are.
            trainer.contribution = trainer.pool.take(wait=True)
        assert trainer.contribution is not None, "the pool has a contribution per thread and some for pushes"
        trainer.contribution.done.append(done)
        trainer.capture(trainer.contribution)
        result = Result(trainer.index, done, token)
        full = trainer.contribution.full(images) or not trainer.contribution.fits(largest)
        copy.step(trainer.contribution.values, factor, unit, last=full)
        if full:
            # When every other contribution is still under way, go on adding to this one: a full ring stops no thread.
            # Not for long: what servers cannot take in comes too late to be of use, and adds up to steps that diverge.
            # Nor beyond the room for batch numbers, nor where factors are kept: those would have to be kept of all.
            wait = trainer.contribution.images >= MOST_PUSHES * images or bool(trainer.contribution.factors)
            fresh = trainer.pool.take(wait or len(trainer.contribution.done) >= MOST_BATCHES)
            if fresh is not None:
                result.contribution, trainer.contribution = trainer.contribution, fresh
        return result

    return task


def hand_over(factor: float, unit: float) -> Task:
    """Hand over what has been summed up so far, however little."""

    def task(trainer: Trainer) -> Result:
        result = Result(trainer.index)
        if trainer.contribution is not None and trainer.contribution.done:
            trainer.copy.end(trainer.contribution.values, factor, unit)
            result.contribution, trainer.contribution = trainer.contribution, None
        return result

    return task


def compute(batch: Batch) -> Task:
    """Compute gradients into the thread's own array, for a step that all replicas take together."""

    def task(trainer: Trainer) -> Result:
        return Result(trainer.index, _compute(trainer, batch, trainer.copy.shared, True, {}))

    return task


def evaluate(batch: Batch, token: object) -> Task:
    def task(trainer: Trainer) -> Result:
        with trace.span("evaluate"):
            loss, correct = trainer.context.evaluate(trainer.copy.shared, batch.pixels, batch.labels)
        trainer.injector.at("evaluate")
        return Result(trainer.index, done_with(batch, loss, correct), token)

    return task


def _compute(
    trainer: Trainer, batch: Batch, weights: np.ndarray, overwrite: bool, options: dict[str, bool]
) -> BatchResult:
    start = time.perf_counter()
    loss, correct = 0.0, 0
    if batch.labels.size:
        with trace.span("kernels"):
            loss, correct = trainer.context.train(
                weights, trainer.gradient, batch.pixels, batch.labels, batch.ids, batch.epoch, overwrite, **options
            )
        trainer.nan_detector.look(loss, weights, batch)
    elif overwrite:
        trainer.gradient[:] = 0
    trainer.injector.slow(time.perf_counter() - start)
    trainer.injector.at("compute")
    return done_with(batch, loss, correct)
