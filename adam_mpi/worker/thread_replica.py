"""A whole replica in one rank: trainer threads that share the local weights, each with batches of its own."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from adam_mpi.cluster.fault_injection import Injector
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import tensors
from adam_mpi.optimizer.groups import group_spans
from adam_mpi.sharding.batches import cut_batch
from adam_mpi.sharding.fields import Field
from adam_mpi.worker import trainer
from adam_mpi.worker.batch_filter import BatchFilter
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.diagnostics import Trouble
from adam_mpi.worker.gradient_buffer import GradientBuffer, GradientPool, StepScales, add_scaled, renew
from adam_mpi.worker.replica import Computed, drop_finished
from adam_mpi.worker.thread_weights import ThreadWeights
from adam_mpi.worker.trainer import TaskResult, Trainer
from adam_mpi.worker.worker_generation import WorkerGeneration

TASKS_AHEAD = 2
"""Tasks that a thread is given ahead, so that the next one is there when it finishes one."""
NO_LIMIT = 1 << 30


@dataclass
class JointShare:
    """The share of one clock's batch that the threads compute together."""

    slot: Slot
    buffer: GradientBuffer
    """Where the gradients of the threads are summed."""
    parts: list[TaskResult] = field(default_factory=list)


class ThreadReplica:
    """Compute whole batches on trainer threads."""

    strip: int | None = None
    resumes = True

    def __init__(
        self,
        config: Config,
        network: Network,
        threads: int,
        *,
        pool: GradientPool,
        injector: Injector,
        metrics: MetricSet = ACCURACY,
        fields: Sequence[Field] = (),
    ) -> None:
        """Start the threads; batches have `fields`."""
        self.fields = fields
        self.config = config
        self.network = network
        self.pool = pool
        self.local = np.zeros(pool.size, np.float32)
        self.predicted = np.zeros_like(self.local)
        """Where pulled weights and the predicted steps are added up."""
        self.scales = StepScales.at(0.0, config)
        self.finished: deque[Computed] = deque()
        self.results: SimpleQueue[TaskResult] = SimpleQueue()
        self.rested: deque[TaskResult] = deque()
        """Results that ended a rest."""
        self.joint: JointShare | None = None
        self.batches_per_push = -(-config.push.images // config.train.batch)
        self.single = threads == 1
        spans = group_spans(tensors(network.shapes), config.optimizer.groups)
        filters = [BatchFilter(config, pool.size, spans) for _ in range(threads)]
        self.trainers = [
            Trainer(
                index=index,
                network=network,
                copy=ThreadWeights(
                    network,
                    self.local,
                    index,
                    alone=threads == 1 or self.batches_per_push == 1,
                    one_by_one=batch_filter.active,
                ),
                batch_filter=batch_filter,
                pool=pool,
                results=self.results,
                injector=injector,
                metrics=metrics,
            )
            for index, batch_filter in enumerate(filters)
        ]
        for thread in self.trainers:
            thread.start()

    def begin_generation(self, world: World) -> DataClient:
        """Return the client that receives whole batches in `world`; the threads continue with what they have."""
        return DataClient(world, self.fields)

    def abandon(self) -> None:
        """Ignore the results of all tasks given so far, and give the buffer of the joint share back."""
        for thread in self.trainers:
            thread.unwanted = thread.waiting
        if self.joint is not None:
            self.pool.give(self.joint.buffer)
            self.joint = None
        drop_finished(self.finished, self.pool)

    def feed(self, current: WorkerGeneration) -> bool:
        """Give arrived batches to the threads; return whether one was given."""
        if current.data.shared:
            return self._feed_share(current)
        if current.data.phase.training:
            return self._give_out(current, TASKS_AHEAD, self._room(current))
        return self._give_out(current, TASKS_AHEAD)

    def _room(self, current: WorkerGeneration) -> int:
        """Return how many batches the threads may be given until servers have applied more of what was pushed."""
        under_way = current.unapplied() * self.batches_per_push + sum(thread.waiting for thread in self.trainers)
        return self.config.push.in_flight * len(self.trainers) * self.batches_per_push - under_way

    def compute_through_recovery(self, current: WorkerGeneration) -> None:
        """Spread every batch of `current` that has arrived over the threads."""
        waiting = sum(thread.waiting for thread in self.trainers)
        self._give_out(current, -(-(waiting + len(current.data.arrived)) // len(self.trainers)))

    def _give_out(self, current: WorkerGeneration, ahead: int, most: int = NO_LIMIT) -> bool:
        """Give `most` arrived batches to the threads until each has `ahead` tasks; return whether one was given."""
        given = 0
        training = current.data.phase.training
        for thread in self.trainers:
            while thread.waiting < ahead and given < most and (taken := current.take_batch()) is not None:
                slot, batch = taken
                if training:
                    images = self.config.push.images
                    task = trainer.train(batch, slot, self.scales, images=images, largest=self.config.train.batch)
                else:
                    task = trainer.evaluate(batch, slot)
                thread.give(task)
                given += 1
        return given > 0

    def _feed_share(self, current: WorkerGeneration) -> bool:
        """Cut the share of the next clock's batch over the threads; return whether there was one."""
        if self.joint is not None or not current.data.arrived:
            return False
        # While this replica is far ahead, all gradient buffers are under way: it waits until one comes back.
        if (buffer := self.pool.take()) is None or (taken := current.take_batch()) is None:
            return False
        slot, batch = taken
        self.joint = JointShare(slot, buffer)
        for thread, part in zip(self.trainers, cut_batch(batch, len(self.trainers)), strict=True):
            thread.give(trainer.compute(part))
        return True

    def collect(self) -> bool:
        """Take the results of the threads; return whether there was one. Raises the error that ended a task."""
        worked = False
        while (result := self._next_result()) is not None:
            worked = True
            thread = self.trainers[result.thread]
            thread.waiting -= 1
            if result.error is not None:
                raise result.error
            if thread.unwanted:
                thread.unwanted -= 1
            elif self.joint is not None:
                self._collect_share(self.joint, result)
            else:
                self.finished.append(Computed(slot=result.slot, result=result.done, gradient=result.gradient))
        return worked

    def _collect_share(self, joint: JointShare, result: TaskResult) -> None:
        """Sum the parts of a clock in the order of the images, once every thread has computed its part."""
        joint.parts.append(result)
        if len(joint.parts) < len(self.trainers):
            return
        for part in sorted(joint.parts, key=lambda part: part.thread):
            assert part.done is not None, "a part of a batch has a result"
            thread = self.trainers[part.thread]
            add_scaled(joint.buffer.values, thread.gradient, np.float32(self.scales.push))
            joint.buffer.done.append(part.done)
            if part.done.images:
                thread.capture(joint.buffer)
        self.finished.append(Computed(slot=joint.slot, gradient=joint.buffer))
        self.joint = None

    def _next_result(self) -> TaskResult | None:
        if self.rested:
            return self.rested.popleft()
        try:
            return self.results.get_nowait()
        except Empty:
            return None

    def flush(self) -> None:
        """Ask every thread for the gradients it has summed so far."""
        for thread in self.trainers:
            thread.give(trainer.hand_over(self.scales))

    def renew(self, pulled: np.ndarray, missing: Iterable[tuple[slice, np.ndarray]]) -> None:
        """Set the local weights to `pulled` plus the steps predicted for what is in no server's weights yet.

        Those are the `missing` parts of pushes, and what the threads are summing now.
        """
        parts = list(missing)
        rows = [thread.buffer.row for thread in self.trainers if thread.buffer is not None]
        if not parts and not rows:
            self.local[:] = pulled
            return
        scale = np.float32(self.scales.predicted)
        self.predicted[:] = pulled
        for part, values in parts:
            add_scaled(self.predicted[part], values, scale)
        renew(self.local, self.predicted, self.pool.values, np.array(rows, np.int64), scale)

    def rest(self, seconds: float) -> bool:
        """Wait at most `seconds` for a result; return False at once if no thread has a task."""
        if not any(thread.waiting for thread in self.trainers):
            return False
        with suppress(Empty):
            self.rested.append(self.results.get(timeout=seconds))
        return True

    def pause(self) -> bool:
        """Return False: the rank rests as its other roles allow."""
        return False

    def end_threads(self) -> None:
        """End the threads after the tasks that they were given."""
        for thread in self.trainers:
            thread.tasks.put(None)

    def awaits(self, current: WorkerGeneration) -> Iterator[Wait]:
        """Yield nothing: a whole replica waits for no other rank."""
        yield from ()

    def transfers(self) -> Sequence[Any]:
        """Return nothing: threads transfer nothing."""
        return ()

    @property
    def windows(self) -> Sequence[Window]:
        """Return no window."""
        return ()

    @property
    def working(self) -> bool:
        """Return whether a thread has a task."""
        return any(thread.waiting for thread in self.trainers) or self.joint is not None

    @property
    def computes_share(self) -> bool:
        """Return whether the threads compute a share of a joint batch."""
        return self.joint is not None

    @property
    def waits_for_strips(self) -> bool:
        """Return False: a whole replica has no strips."""
        return False

    @property
    def idle_share(self) -> float:
        """Return the fraction of the threads that have no task."""
        return sum(thread.waiting == 0 for thread in self.trainers) / len(self.trainers)

    @property
    def busy(self) -> float:
        """Return the seconds that a thread has computed, on average, without its waits for a gradient buffer."""
        return (sum(thread.busy for thread in self.trainers) - self.pool.waited) / len(self.trainers)

    @property
    def trouble(self) -> Trouble | None:
        """Return the first number in a forward pass that was not finite, of the thread that took the fewest steps."""
        found = [thread.nan_detector.trouble for thread in self.trainers if thread.nan_detector.trouble is not None]
        return min(found, key=lambda trouble: trouble.step, default=None)
