"""The worker role: takes batches to the trainer threads, their gradients to the servers, and weights back."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.messages import HoldSnapshot, Message, SnapshotHeld, SnapshotWritten, Statistics, TakeSnapshot
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.world import World
from adam_mpi.model.network import Network
from adam_mpi.sharding.factors import matrices
from adam_mpi.sharding.joint_batches import Cuts, Piece
from adam_mpi.sharding.position import batch_id
from adam_mpi.sharding.push_protocol import largest_push
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.batch_message import cut_batch
from adam_mpi.transport.conservation import Conservation
from adam_mpi.transport.generation import Generation
from adam_mpi.worker import statistics, trainer
from adam_mpi.worker.data_client import DataClient, Slot
from adam_mpi.worker.diagnostics import Probe
from adam_mpi.worker.gradient_buffer import (
    BatchResult,
    GradientBuffer,
    GradientPool,
    Noise,
    descend,
    gradient_buffers,
    renew,
)
from adam_mpi.worker.pull_client import PullClient
from adam_mpi.worker.push_client import PushClient
from adam_mpi.worker.statistics import Waits
from adam_mpi.worker.thread_weights import ThreadWeights
from adam_mpi.worker.trainer import Result, Trainer

# Tasks a thread has in hand: the next one is there when it is done with one.
TASKS_AHEAD = 2


class Worker:
    def __init__(
        self,
        generation: Generation,
        network: Network,
        threads: int,
        carried: Spans | None = None,
        holding: WorkerShards | None = None,
    ) -> None:
        world, memory_layout = generation.world, generation.memory_layout
        self.config, self.shape = world.config, network.shapes[0].input
        holding = holding or WorkerShards(memory_layout)
        self.local = np.zeros(holding.size, np.float32)
        self.pushes = PushClient(generation, holding, carried)
        dense = {
            layer: matrix for layer, matrix in matrices(memory_layout.tensors).items() if layer in network.captured
        }
        count = gradient_buffers(threads, bool(memory_layout.peers.count), self.config.consistency.staleness)
        self.pool = GradientPool(count, holding.size, dense, largest_push(self.config))
        self.conservation: Conservation | None = None
        """In a run whose every push adds 1 to every parameter."""
        noise, seed = self.config.inject.noise, self.config.run.seed
        self.noise = Noise(noise, memory_layout.tensors, seed, world.place.member) if noise else None
        self.results: SimpleQueue[Result] = SimpleQueue()
        self.returned: deque[Result] = deque()
        """Results that ended a rest."""
        self._start(world, network, threads)
        self.factor = 0.0
        """Learning rate per image: the step that a gradient is predicted to lead to."""
        self.ended = False
        self.left_behind = 0.0
        """What the codec carried when this rank had another strip, and nobody will push; see `carried`."""
        self.images = self.since_pull = 0
        self.waits = Waits()
        # One worker's look at the model is enough.
        first = world.rank == world.layout.workers[0]
        self.probe = Probe(network.shapes, self.config.observe.interval) if first else None
        self.share: GradientBuffer | None = None
        """Where the gradients of the clock under way go."""
        self.held: set[int] = set()
        """Training batches (by id) that the threads have had and that are not reported."""
        self.pulled: Counter[str] = Counter()
        self.pull_traffic: Counter[str] = Counter()
        """In earlier generations."""
        self.cuts: Cuts | None = None
        """How batches are cut that all replicas compute together."""
        self.base = 0, 0
        """An epoch of such batches, and the clock of its first one."""
        self._begin(generation)

    def enter(self, generation: Generation, clock: int | None) -> None:
        """Begin a generation with what the threads have in hand, and ask where the job stands.

        With clocks the share that they compute is handed out again. In synchronous training all replicas go on from
        the same `clock`, and what was pushed of it is taken back too.
        """
        self.pulled, self.pull_traffic = self.all_pulled, self.pull_traffic + self.pulls.traffic
        if not self.config.asynchronous:
            self._drop_share()
        if self.config.consistency.staleness == 0:
            assert clock is not None
            self._take_back()
            for contribution in self.pushes.forget(clock):
                self.pool.give(contribution)
        self.pushes.enter(generation)
        self._begin(generation)
        if self.ended:
            self._say_last()
        else:
            self.data.next_phase()

    def _begin(self, generation: Generation) -> None:
        self.world = generation.world
        self.channel = generation.channel
        self.data = self._client(generation.world)
        self.pulls = PullClient(generation, self.pushes.holding)
        self.data.first_share, self.data.piece = self._first_share, self._piece
        self.fresh = self.flushed = False
        self.clocked: deque[Result] = deque()
        self.slot: Slot | None = None

    def cut_by(self, cuts: Cuts | None) -> None:
        """Take note of how joint batches are cut in a generation, before any of them is asked for."""
        if cuts is not None:
            self.cuts, self.base = cuts, (cuts.epoch, cuts.base)

    def _first_share(self, epoch: int, first: int) -> int:
        """Return which batch of an epoch is our next; `first`: the first that anybody needs."""
        if epoch != self.base[0]:
            self.base = epoch, self.pushes.clock - first
        return self.pushes.clock - self.base[1]

    def _piece(self, number: int) -> Piece:
        """Return our share of a batch of this epoch."""
        assert self.cuts is not None
        return self.cuts.piece(self.base[1] + number, self.world.place.member)

    def _drop_share(self) -> None:
        """What the threads compute of a clock is not used."""
        for thread in self.trainers:
            thread.unwanted = thread.waiting
        if self.share is not None:
            self.pool.give(self.share)
            self.share = None
        self.held &= {batch_id(done.epoch, done.number) for pushed in self._unreported() for done in pushed.done}

    def _take_back(self) -> None:
        """What is pushed and not reported is counted by nobody: servers know what is applied."""
        for contribution in self._unreported():
            contribution.counted = False
        self.held.clear()

    def _unreported(self) -> list[GradientBuffer]:
        """The pushes whose batches are not reported yet."""
        return [*self.pushes.acknowledged, *self.pushes.unacknowledged]

    def _client(self, world: World) -> DataClient:
        return DataClient(world, self.shape)

    def _start(self, world: World, network: Network, threads: int) -> None:
        """The trainer threads, and what the weights of a pull are put together in."""
        self.arrived = np.zeros_like(self.local)
        alone = threads == 1 or self.config.push.images <= self.config.train.batch
        copies = [ThreadWeights(network, self.local, index, alone) for index in range(threads)]
        self.trainers = [
            Trainer(index, network, copy, self.pool, self.results, world.injector) for index, copy in enumerate(copies)
        ]
        for thread in self.trainers:
            thread.start()

    def step(self) -> bool:
        worked = self.data.step()
        worked |= self._collect()
        worked |= self.pushes.step()
        self._tell_written()
        worked |= self._settle()
        worked |= self._pull()
        worked |= self._feed()
        self.waits.count(self)
        if self.data.drained:
            worked |= self._drain()
        return worked

    @property
    def unit(self) -> float:
        """What one gradient is in a push: itself, or the change of weights it makes."""
        return -self.factor if self.config.optimizer.where == "worker" else 1.0

    @property
    def _prediction(self) -> float:
        """What a push will take off the weights, times its values."""
        return -1.0 if self.config.optimizer.where == "worker" else self.factor

    def _feed(self) -> bool:
        """Give arrived batches to the threads, once this phase's first weights are there."""
        if not self.fresh:
            return False
        if self.data.shared:
            return self._feed_share()
        return self._give_out(TASKS_AHEAD)

    def compute_on(self) -> None:
        """Give the threads every batch that has arrived, to compute while this rank can push and pull nothing."""
        if self.fresh and self.config.asynchronous and self.data.phase.training:
            waiting = sum(thread.waiting for thread in self.trainers)
            self._give_out(-(-(waiting + len(self.data.arrived)) // len(self.trainers)))

    def _give_out(self, ahead: int) -> bool:
        """Give arrived batches to the threads, until each has so many in hand."""
        worked = False
        for thread in self.trainers:
            while thread.waiting < ahead and (taken := self.data.take()) is not None:
                slot, batch = taken
                if self.data.phase.training:
                    self.held.add(batch_id(batch.epoch, batch.number))
                    wanted = self.config.push.images, self.config.train.batch
                    thread.give(trainer.train(batch, slot, self.factor, self.unit, *wanted))
                else:
                    thread.give(trainer.evaluate(batch, slot))
                worked = True
        return worked

    def _feed_share(self) -> bool:
        """Cut our share of the next clock's batch over the threads."""
        if self.slot is not None or not self.data.arrived:
            return False
        # All gradient_buffers are under way while a replica is far ahead: then it waits for one to come back.
        if (contribution := self.pool.take()) is None or (taken := self.data.take()) is None:
            return False
        (self.slot, batch), self.share = taken, contribution
        self.held.add(batch_id(batch.epoch, batch.number))
        for thread, part in zip(self.trainers, cut_batch(batch, len(self.trainers)), strict=True):
            thread.give(trainer.compute(part))
        return True

    def _collect(self) -> bool:
        """Take back what the threads have done."""
        worked = False
        while (result := self._result()) is not None:
            worked = True
            thread = self.trainers[result.thread]
            thread.waiting -= 1
            if result.error is not None:
                raise result.error
            if thread.unwanted:
                thread.unwanted -= 1
                continue
            if self.data.shared:
                self._collect_share(result)
                continue
            if isinstance(result.token, Slot):
                self.data.release(result.token)
            if result.contribution is not None:
                self._push(result.contribution)
            if result.done is not None and self.data.phase.training:
                self.since_pull += result.done.images
            elif result.done is not None and result.done.phase == self.data.phase.number:
                self._report(result.done)
        return worked

    def _collect_share(self, result: Result) -> None:
        """When every thread has done its part of a clock, sum the parts in the order of the images and push."""
        self.clocked.append(result)
        if len(self.clocked) < len(self.trainers):
            return
        contribution, self.share = self.share, None
        assert contribution is not None and self.slot is not None
        parts = sorted(self.clocked, key=lambda part: part.thread)
        for part in parts:
            assert part.done is not None
            descend(contribution.values, self.trainers[part.thread].gradient, np.float32(-self.unit))
            contribution.done.append(part.done)
            if part.done.images:
                self.trainers[part.thread].capture(contribution)
        self.clocked.clear()
        self._end_share()
        self._push(contribution)

    def _end_share(self) -> None:
        """Our share of a clock is pushed; the next needs new weights."""
        assert self.slot is not None
        self.data.release(self.slot)
        self.slot, self.fresh = None, False

    def _push(self, contribution: GradientBuffer) -> None:
        if self.probe is not None:
            self.probe.look(contribution.values, contribution.images, self.local)
        if self.noise is not None:
            self.noise.add(contribution.values)
        if self.conservation is not None:
            self.conservation.pushed(contribution)
        self.pushes.push(contribution)

    def _result(self) -> Result | None:
        if self.returned:
            return self.returned.popleft()
        try:
            return self.results.get_nowait()
        except Empty:
            return None

    def rest(self, seconds: float) -> bool:
        """Until a thread is done with something, but not longer; False at once if none has anything to do."""
        if not any(thread.waiting for thread in self.trainers):
            return False
        with suppress(Empty):
            self.returned.append(self.results.get(timeout=seconds))
        return True

    def _settle(self) -> bool:
        """Report the batches of acknowledged pushes as done, and take their gradient_buffers back."""
        worked = bool(self.pushes.acknowledged)
        while self.pushes.acknowledged:
            contribution = self.pushes.acknowledged.popleft()
            if self.conservation is not None:
                self.conservation.acknowledged()
            for done in contribution.done if contribution.counted else ():
                self.images += done.images
                self.held.discard(batch_id(done.epoch, done.number))
                self._report(done)
            self.pool.give(contribution)
        return worked

    def _report(self, done: BatchResult) -> None:
        self.data.report(done.epoch, done.number, done.images, done.loss, done.correct)

    def _pull(self) -> bool:
        """Start a pull when one is due; put the weights in place when they have arrived."""
        if self.pulls.step():
            with trace.span("renew"):
                self._renew()
            return True
        if not self.pulls.active and self._pull_due():
            self.since_pull = 0
            self.pulls.start(self._least_clock(), ema=not self.data.phase.training)
            return True
        return False

    def _pull_due(self) -> bool:
        if self.data.drained:
            return False
        return not self.fresh and self.slot is None or self.since_pull >= self.config.pull.images

    def _least_clock(self) -> int | None:
        """The clock all servers must have reached before we may compute our next one."""
        if not self.data.shared:
            return None
        return max(0, self.pushes.clock - int(self.config.consistency.staleness))

    def _renew(self) -> None:
        """local = pulled + own updates that are not in it yet."""
        self.pulls.seen(self.pushes.seen)
        self.factor = self.pulls.rate / self.config.train.batch
        self.fresh, factor = True, np.float32(self._prediction)
        letters = [letter for lane in self.pushes.lanes for letter in lane.missing(self.pulls.applied[lane.server])]
        rows = [thread.contribution.row for thread in self.trainers if thread.contribution is not None]
        if not letters and not rows:
            self.local[:] = self.pulls.latest
            return
        self.arrived[:] = self.pulls.latest
        for letter in letters:
            for part in letter.missing():
                descend(self.arrived[part], letter.contribution.values[part], factor)
        renew(self.local, self.arrived, self.pool.values, np.array(rows, np.int64), factor)

    def _drain(self) -> bool:
        """The phase has no more batches for us: push what is left, then ask for the next phase."""
        # Asked for already: to flush again and again until it comes would keep two threads, and a core, busy.
        if self._working or self.ended or self.data.waits_for_phase:
            return False
        if self.data.phase.training and not self.data.shared and not self.flushed:
            self.flushed = True
            self._flush()
            return True
        if not self.pushes.idle or self.pulls.active or self.returned or not self.results.empty():
            return False
        if self.data.stopped:
            self._stop()
            return True
        self.fresh = self.flushed = False
        self.data.next_phase()
        return False

    @property
    def _working(self) -> bool:
        """Whether batches are under way."""
        return any(thread.waiting for thread in self.trainers) or self.slot is not None

    def _flush(self) -> None:
        """Hand over what has been summed up, for the last push of an epoch."""
        for thread in self.trainers:
            thread.give(trainer.hand_over(self.factor, self.unit))

    def _end_threads(self) -> None:
        for thread in self.trainers:
            thread.tasks.put(None)

    def _stop(self) -> None:
        self._end_threads()
        self.ended = True
        self._say_last()

    def _say_last(self) -> None:
        self._leave_residual()
        self.channel.send(Statistics(self.stats(), final=True), self.world.layout.head)

    @property
    def carried(self) -> float | None:
        """How much the codec has left out so far: the length of it as a mean gradient of a batch, or as a step."""
        return self.pushes.residual.norm(1 if self.config.optimizer.where == "worker" else 1 / self.config.train.batch)

    def _leave_residual(self) -> None:
        """In a conservation run: what the codec carries in the end."""
        residual = self.pushes.residual
        if self.conservation is not None and residual.values.size:
            self.conservation.leave(residual.shards, residual.parts)

    def handle(self, message: Message) -> None:
        """An order of the head: the residual of our pushes belongs to a snapshot."""
        residual = self.pushes.residual
        match message:
            case HoldSnapshot():
                clocks = residual.hold(self.pushes.clock)
                self.channel.send(SnapshotHeld("worker", list(clocks)), self.world.layout.head)
            case TakeSnapshot():
                residual.at(message.clocks, Path(message.folder))
            case _:
                raise TypeError(f"a worker does not handle {message}")

    def _tell_written(self) -> None:
        while (word := self.pushes.residual.cut.written()) is not None:
            self.channel.send(SnapshotWritten("worker", word), self.world.layout.head)

    @property
    def all_pulled(self) -> Counter[str]:
        """In this generation and before."""
        now = {"count": self.pulls.count, "bytes": self.pulls.bytes, "waited": self.pulls.waited}
        return Counter({key: value + self.pulled[key] for key, value in now.items()})

    def export_state(self, state: RankState) -> None:
        pushes = self.pushes
        state.clock = pushes.unacknowledged[0].clock if pushes.unacknowledged else pushes.clock
        state.batches, state.unacknowledged = frozenset(self.held), len(pushes.unacknowledged)
        state.acknowledged, state.strip = pushes.last, pushes.holding.strip
        if self.config.consistency.staleness > 0:
            state.resent = tuple((push.clock, push.images) for push in pushes.unacknowledged)
        if not self.config.asynchronous:
            self._export_shares(state)

    def _export_shares(self, state: RankState) -> None:
        """With clocks: what is pushed is in hand, and what the threads compute is not."""
        done = [done for pushed in self._unreported() for done in pushed.done if pushed.counted]
        state.batches = frozenset(batch_id(part.epoch, part.number) for part in done)
        pushed = Counter[int]()
        for part in done:
            pushed[part.number] += part.images
        state.progress = replace(state.progress, next=self.pushes.clock, base=self.base, pushed=dict(pushed))

    def transfers(self) -> list[Any]:
        far = [lane for lane in self.pushes.lanes if not lane.near]
        return [*far, self.data, *([self.pulls] if self.pulls.weights_window.late else [])]

    def awaits(self) -> Iterator[Wait]:
        yield from self.data.awaits()
        yield from self.pushes.awaits()
        yield from self.pulls.awaits()

    @property
    def parked(self) -> bool:
        """Whether threads have nothing to do because batches wait for other strips."""
        return False

    @property
    def idle_share(self) -> float:
        """Of the threads: those that have nothing to do."""
        return sum(thread.waiting == 0 for thread in self.trainers) / len(self.trainers)

    @property
    def busy(self) -> float:
        """Seconds that a thread has computed, on average."""
        return (sum(thread.busy for thread in self.trainers) - self.pool.waited) / len(self.trainers)

    def stats(self) -> dict[str, Any]:
        return statistics.told(self)
