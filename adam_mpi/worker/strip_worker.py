"""The worker role of one strip: a replica of several ranks goes through its batches together.

The first strip asks for batches and all get their columns, so every strip sees the same batches in the same order. They
are cut into parts, and part number n is in context n mod `worker.in_flight` everywhere. Gradients are added up in that
order; those of convolutions, which every strip has a part of, are summed over the replica before each strip pushes what
is its own. Weights change by pulls only.

In a hybrid replica a part is a round: it has some images of each rank's share of the batch, whose outputs of the last
layer before the dense ones go to all ranks while others are computed.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.world import World
from adam_mpi.model.exchange_buffers import FORWARD
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition
from adam_mpi.sharding import batch_parts as parts
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.batch_message import Batch, cut_batch, cut_rounds
from adam_mpi.transport.generation import Generation
from adam_mpi.worker import channels
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.flow import Flight, Flow
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, descend, done_with, together
from adam_mpi.worker.link import Link
from adam_mpi.worker.sums import Sums
from adam_mpi.worker.worker import Worker

log = logging.getLogger(__name__)
REST_SECONDS, SPIN_SECONDS = 2e-3, 5e-3


class StripWorker(Worker):
    def __init__(
        self, generation: Generation, network: Network, threads: int, carried: Spans | None, cut: Partition
    ) -> None:
        self.cut = cut
        self.strip = cut.strips[generation.world.place.strip or 0]
        holding = WorkerShards(generation.memory_layout, cut, self.strip.number)
        super().__init__(generation, network, threads, carried, holding)
        self._clear()
        self.taken: Mapping[int, int] = {}
        """Shard -> the highest number of our messages that it had when the last generation ended."""
        self.since = time.perf_counter()
        """When threads began to wait for other strips."""

    def _clear(self) -> None:
        """Nothing is under way."""
        self.number = self.next = 0
        """Of the part that begins next, and of the one whose gradient is added next."""
        self.landed: dict[int, Flight] = {}
        self.waiting: deque[tuple[Batch, Slot | None]] = deque()
        """Parts of a batch that have not begun; with the last one goes the place of the batch."""
        self.added: list[BatchResult] = []
        """Parts of a batch whose gradients are added, while others of it are not."""
        self.complete: deque[GradientBuffer] = deque()

    def enter(self, generation: Generation, clock: int | None) -> None:
        """Begin a generation with empty hands: strips that are left may have come to different parts of a batch.

        What was under way and is in no server's weights is handed out again; no push is sent again that other strips
        of the replica may never have made.
        """
        self.flow.halt(self.config.cluster.seconds)
        for contribution in (*self.complete, *self.sums.under_way):
            self.pool.give(contribution)
        self._drop_share()
        # The servers know which batches are applied; data ranks hear it from them.
        self._take_back()
        if self.config.consistency.staleness > 0:
            for contribution in self.pushes.give_up(self.taken):
                self.pool.give(contribution)
            assert clock is not None, "strips of a replica go on alike"
            self.pushes.clock = clock
        self._clear()
        self._connect(generation.world)
        super().enter(generation, clock)

    def retire(self, clock: int | None) -> None:
        """End, because this rank has another strip from now on, or none; `clock`: see RecoveryPlan.

        What the codec has left out is left behind, and counted: other strips push other parameters.
        """
        self.flow.halt(self.config.cluster.seconds)
        self._end_threads()
        if self.config.consistency.staleness == 0:
            assert clock is not None
            self.pushes.forget(clock)
        else:
            self.pushes.give_up(self.taken)
        self._leave_residual()
        self.left_behind = float(np.hypot(self.left_behind, self.carried or 0.0))
        if self.left_behind:
            log.warning("what the codec has left out is left behind: %.3g", self.left_behind)

    def export_state(self, state: RankState) -> None:
        """Nothing that we have in hand goes on."""
        state.clock, state.acknowledged, state.strip = self.pushes.clock, self.pushes.last, self.pushes.holding.strip
        state.progress = replace(state.progress, base=self.base)

    def transfers(self) -> list[Any]:
        return [*super().transfers(), self.link]

    def awaits(self) -> Iterator[Wait]:
        yield from super().awaits()
        ranks = self.world.layout.strips(self.world.rank)
        for what, strip, turn in self._owed():
            yield Wait(what, ranks[strip], turn)

    def _owed(self) -> Iterator[tuple[str, int, int]]:
        """What other strips have not sent, and what they have not read while its memory is wanted; and the turn."""
        exchanges = list(self.cut.exchanges.values())
        for strip, (port, number) in self.flow.awaited().items():
            does = "needs" if port.direction == FORWARD else "gives back"
            side = "left" if strip < self.strip.number else "right"
            what = f"what {exchanges[port.passage].layer} {does} on the {side}, part {number} of the batches,"
            yield what, strip, number
        for strip in self.sums.missing:
            yield f"its share of sum {self.sums.done} of gradients", strip, self.sums.done
        for strip in self.flow.unread(self.number) if self.waiting or self.data.arrived else ():
            yield f"its end of what was sent before part {self.number} of the batches", strip, self.number
        for strip in self.sums.unread if self.complete else ():
            yield f"its end of what was sent before sum {self.sums.begun} of gradients", strip, self.sums.begun

    def step(self) -> bool:
        return super().step() or self._linger()

    def rest(self, seconds: float) -> bool:
        return self.flow.rest(seconds)

    def _linger(self) -> bool:
        """Rest while all threads compute: each look takes time from theirs. Stay awake while one waits for strips."""
        now = time.perf_counter()
        if not self.flow.idle:
            self.since = now
            return self.flow.rest(REST_SECONDS)
        os.sched_yield()
        return now - self.since < SPIN_SECONDS

    def _client(self, world: World) -> DataClient:
        columns = [strip.columns for strip in self.cut.strips]
        return DataClient(world, self.cut.shapes[0].input, self.strip.columns, columns)

    def _start(self, world: World, network: Network, threads: int) -> None:
        count, self.trainers = self.config.worker.in_flight, []
        self.vector = network.program.lanes if network.program else 0
        contexts = [network.strip_context() for _ in range(count)]
        gradients = [np.zeros_like(self.local) for _ in range(count)]
        self.flow = Flow(contexts, gradients, world.injector)
        self._connect(world)
        self.flow.start(threads)

    def _connect(self, world: World) -> None:
        """Collective over the replica of this generation."""
        assert world.replica is not None
        if len(set(world.replica.allgather(self.vector))) > 1:
            raise UserError("the CPUs of a replica have vectors of several lengths; set kernels.engine = reference")
        contexts = self.flow.contexts
        room = contexts[0].room, contexts[0].own_room
        self.link = Link(world, channels.plan(self.cut, len(contexts), *room))
        self.flow.attach(self.link)
        self.sums = Sums(self.link, self.cut)

    def compute_on(self) -> None:
        """Nothing: what strips have begun when a generation ends is given up."""

    def _feed(self) -> bool:
        worked = False
        while self.fresh and self.flow.takes(self.number) and (self.waiting or self._take_batch()):
            part, slot = self.waiting.popleft()
            self.flow.begin(self.number, part, slot, self.local, self.data.phase.training)
            self.number += 1
            worked = True
        return worked

    def _take_batch(self) -> bool:
        """Cut the next batch into parts, or our share of the next clock's when the one before is pushed."""
        if self.data.shared and (self.slot is not None or not self.data.arrived or not self._has_room()):
            return False
        if (taken := self.data.take()) is None:
            return False
        slot, batch = taken
        *others, last = self._cut(batch)
        self.waiting.extend([*((part, None) for part in others), (last, slot)])
        self.slot = slot if self.data.shared else None
        return True

    def _cut(self, batch: Batch) -> list[Batch]:
        """Into parts that are under way one by one."""
        most = parts.most(self.config.worker.in_flight, self.strip.ranks)
        count = parts.count(batch.labels.size, *most)
        if self.cut.hybrid:
            return cut_rounds(batch, count, self.strip.number)
        return cut_batch(batch, count)

    def _has_room(self) -> bool:
        """For one more gradient; all gradient_buffers are under way while servers are slow, or other replicas behind."""
        self.share = self.share or self.pool.take()
        return self.share is not None

    def _collect(self) -> bool:
        """Take back what has gone through all segments, in the order of the batches; then what is summed up."""
        worked = self.flow.step()
        while self.flow.landed:
            flight = self.flow.landed.popleft()
            self.landed[flight.number] = flight
        while self.next in self.landed and (not self.data.phase.training or self._has_room()):
            self._land(self.landed.pop(self.next))
            self.next += 1
            worked = True
        while self.complete and self.sums.begin(self.complete[0]):
            self.complete.popleft()
            worked = True
        while (summed := self.sums.step()) is not None:
            self._push(summed)
            worked = True
        return worked

    def _land(self, flight: Flight) -> None:
        self.added.append(done_with(flight.batch, *self.flow.contexts[flight.context].result))
        if self.data.phase.training:
            assert self.share is not None, "there was room"
            descend(self.share.values, self.flow.gradients[flight.context], np.float32(-self.unit))
        self.flow.release(flight)
        if flight.slot is not None:
            self._land_batch(flight.slot)

    def _land_batch(self, slot: Slot) -> None:
        """All parts of a batch are added."""
        done, self.added = together(self.added), []
        if not self.data.shared:
            self.data.release(slot)
        if not self.data.phase.training:
            self._report(done)
            return
        assert self.share is not None, "there was room"
        self.share.done.append(done)
        self.since_pull += 0 if self.data.shared else done.images
        self._complete(self.data.shared or self.share.full(self.config.push.images))

    def _complete(self, full: bool) -> None:
        if full and self.share is not None and self.share.done:
            self.complete.append(self.share)
            self.share = None

    def _push(self, contribution: GradientBuffer) -> None:
        super()._push(contribution)
        if self.data.shared:
            self._end_share()

    def _renew(self) -> None:
        self.pulls.seen(self.pushes.seen)
        self.factor = self.pulls.rate / self.config.train.batch
        self.local[:] = self.pulls.latest
        self.fresh = True

    @property
    def _working(self) -> bool:
        """Whether batches or sums are under way."""
        parts = self.next < self.number or bool(self.waiting)
        return parts or self.slot is not None or bool(self.complete) or self.sums.busy

    def _flush(self) -> None:
        self._complete(True)

    def _end_threads(self) -> None:
        self.flow.stop()

    @property
    def parked(self) -> bool:
        return self.flow.idle

    @property
    def idle_share(self) -> float:
        return max(0.0, 1 - self.flow.computing / len(self.flow.threads))

    @property
    def busy(self) -> float:
        return self.flow.busy / len(self.flow.threads)
