"""The worker role: moves batches to the replica, its gradients to the servers, and their weights back.

A push passes these functions, from the thread that computes a batch to the ring of a server and its acknowledgement:

    Trainer.run                      trainer.py          a trainer thread: the task that `train` returned
      ThreadWeights.step             thread_weights.py   the gradient is added to the thread's GradientBuffer
      GradientBuffer.full            gradient_buffer.py  enough images: the thread takes an empty buffer
    Worker.step                      on the main thread, which calls MPI
      ThreadReplica.collect          thread_replica.py   full buffers of the threads
      Worker._push                   worker.py           noise, conservation
        PushClient.push              push_client.py      messages: one per shard, or per part of a layer's factors
      PushClient.step                push_client.py      PushRings.step (push_messages.py) for all servers
        RingSender.step              ring_sender.py      (transport) slots that are free take messages
          ShardMessage.write         push_messages.py    encodes the values (residual.py); FactorMessage packs factors
          ShardMessage.acknowledge   push_messages.py    the server has it: PushClient.acknowledge_message
      HeldBatches.report_done        (worker_generation.py) batches of acknowledged pushes are reported to data ranks

The server's half is in `server/server.py`.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.control_messages import Message, Statistics
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.world import World
from adam_mpi.sharding.batches import BatchCuts
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.shards import Spans
from adam_mpi.sharding.training_state import RankState
from adam_mpi.transport.generation import Generation
from adam_mpi.worker import diagnostics
from adam_mpi.worker.data_client import DataClient
from adam_mpi.worker.diagnostics import Probe, Waits
from adam_mpi.worker.gradient_buffer import GradientBuffer, GradientPool, Noise, StepScales
from adam_mpi.worker.pull_client import PullClient
from adam_mpi.worker.push_client import PushClient
from adam_mpi.worker.replica import Computed, Replica
from adam_mpi.worker.worker_generation import HeldBatches, JointSchedule, WorkerGeneration

log = logging.getLogger(__name__)


class Worker:
    """Work for `replica`: request batches, push gradients, pull weights, report what is done."""

    def __init__(
        self,
        generation: Generation,
        replica: Replica,
        pool: GradientPool,
        worker_shards: WorkerShards,
        carried: Spans | None = None,
    ) -> None:
        """Begin with `generation`; `carried` is what an earlier job's codec had left out of this worker's pushes.

        `pool` has the gradient buffers that `replica` fills; `worker_shards` are the parameters it computes with.
        """
        world = generation.world
        self.config = world.config
        self.replica = replica
        self.pool = pool
        self.pushes = PushClient(generation, worker_shards, carried)
        self.held = HeldBatches(self.pushes, pool)
        self.schedule = JointSchedule(self.pushes)
        self.noise = self._make_noise(generation)
        # One worker's look at the model is enough.
        looks = world.rank == world.layout.workers[0]
        self.probe = Probe(replica.network.shapes, self.config.observe.interval) if looks else None
        self.ended = False
        self.left_behind = 0.0
        """The length of what the codec carried while this rank had another strip, and no rank will push."""
        self.since_pull = 0
        """Images computed since the last pull began."""
        self.waits = Waits()
        self.pulled_before: Counter[str] = Counter()
        """The totals of pulls in earlier generations."""
        self.pull_traffic_before: Counter[str] = Counter()
        """The bytes pulled in earlier generations, by layer."""
        self.current = self._open_generation(generation, replica.begin_generation(world))

    def _make_noise(self, generation: Generation) -> Noise | None:
        if not self.config.inject.noise:
            return None
        member = generation.world.place.member
        return Noise(self.config.inject.noise, generation.memory_layout.tensors, self.config.run.seed, member)

    def _open_generation(self, generation: Generation, data: DataClient) -> WorkerGeneration:
        """Return what this worker has in `generation`, where batches arrive through `data`."""
        data.first_share = self.schedule.first_share
        data.piece = self.schedule.piece
        pulls = PullClient(generation, self.pushes.rings.worker_shards)
        return WorkerGeneration(generation, data, pulls, self.held)

    def begin_generation(self, generation: Generation, clock: int | None, taken: Mapping[int, int]) -> None:
        """Continue in `generation` with the work that the replica has under way, and request the current phase.

        With clocks the share under way is dropped, to be requested again. In synchronous training all replicas
        resume from `clock`, and what was pushed of it is taken back too. A replica of several ranks resumes nothing:
        what is in no server's weights is handed out again, and no push is sent again that other strips may never have
        made. `taken`: shard -> the highest number of this worker's messages that it had.
        """
        synchronous = self.config.consistency.staleness == 0
        if not self.replica.resumes or not self.config.asynchronous:
            self.replica.abandon()
            self.held.drop_unpushed()
        if not self.replica.resumes or synchronous:
            self.held.uncount()
        if not self.replica.resumes and not synchronous:
            assert clock is not None, "all strips of a replica resume from the same clock"
            self._give_back(self.pushes.take_back_missing(taken))
            self.pushes.clock = clock
        data = self.replica.begin_generation(generation.world)
        if synchronous:
            assert clock is not None, "all replicas resume from the same clock"
            self._give_back(self.pushes.take_back_from(clock))
        self.pulled_before = self.pulled
        self.pull_traffic_before += self.current.pulls.traffic
        self.pushes.begin_generation(generation)
        self.current = self._open_generation(generation, data)
        if self.ended:
            self._send_last_statistics()
        else:
            data.next_phase()

    def retire(self, clock: int | None, taken: Mapping[int, int]) -> None:
        """End, because this rank gets another strip or none; `clock` and `taken` are those of `begin_generation`.

        What the codec has left out is left behind, and counted: other strips push other parameters.
        """
        self.replica.abandon()
        self.replica.end_threads()
        if self.config.consistency.staleness == 0:
            assert clock is not None, "all replicas resume from the same clock"
            self.pushes.take_back_from(clock)
        else:
            self.pushes.take_back_missing(taken)
        self.pushes.record_residual()
        self.left_behind = float(np.hypot(self.left_behind, self.pushes.carried or 0.0))
        if self.left_behind:
            log.warning("this rank no longer pushes its strip: a residual of length %.3g is lost", self.left_behind)

    def end(self) -> None:
        """End the threads; what they compute and what was pushed is of no use any more."""
        self.replica.abandon()
        # Threads that wait for a buffer have to reach the end.
        self._give_back(self.pushes.discard())
        self.replica.end_threads()

    def _give_back(self, buffers: list[GradientBuffer]) -> None:
        for buffer in buffers:
            self.pool.give(buffer)

    def cut_by(self, cuts: BatchCuts | None) -> None:
        """Cut joint batches by `cuts` from now on; None in asynchronous training."""
        self.schedule.cut_by(cuts)

    def step(self) -> bool:
        """Do what a worker can do now; return whether that was anything."""
        worked = self.current.data.step()
        worked |= self._handle_finished()
        worked |= self.pushes.step()
        worked |= self.held.report_done(self.current.data)
        worked |= self._pull()
        worked |= self.current.fresh and self.replica.feed(self.current)
        self.waits.count(self)
        if self.current.data.drained:
            worked |= self._drain()
        return worked or self.replica.pause()

    def rest(self, seconds: float) -> bool:
        """Wait at most `seconds` for the replica; return False at once if it computes nothing."""
        return self.replica.rest(seconds)

    def compute_on(self) -> None:
        """Give the replica batches to compute while this rank can neither push nor pull."""
        if self.current.fresh and self.config.asynchronous and self.current.data.phase.training:
            self.replica.compute_through_recovery(self.current)

    def _handle_finished(self) -> bool:
        """Handle what the replica has finished; return whether anything moved."""
        worked = self.replica.collect()
        while self.replica.finished:
            self._handle_computed(self.replica.finished.popleft())
        return worked

    def _handle_computed(self, computed: Computed) -> None:
        data = self.current.data
        if computed.slot is not None:
            data.release_slot(computed.slot)
        if computed.gradient is not None:
            self._push(computed.gradient)
            if data.shared or self.sequential:
                # The next clock, or the next step, needs new weights.
                self.current.fresh = False
        if computed.result is None:
            return
        if data.phase.training:
            self.since_pull += computed.result.images
        elif computed.result.phase == data.phase.number:
            data.report_done(computed.result)

    def _push(self, buffer: GradientBuffer) -> None:
        if self.probe is not None:
            self.probe.look(buffer.values, buffer.images, self.replica.local)
        if self.noise is not None:
            self.noise.add(buffer.values)
        if self.pushes.conservation is not None:
            self.pushes.conservation.record_push(buffer)
        self.pushes.push(buffer)

    def _pull(self) -> bool:
        """Start a pull when one is due; put the weights in place when they have arrived; return whether either."""
        pulls = self.current.pulls
        if pulls.step():
            with trace.span("renew"):
                self._renew(pulls)
            return True
        if not pulls.active and self._pull_due():
            self.since_pull = 0
            pulls.start(self._least_clock(), ema=not self.current.data.phase.training)
            return True
        return False

    def _pull_due(self) -> bool:
        if self.current.data.drained:
            return False
        needed = not self.current.fresh and not self.replica.computes_share
        return needed or self.since_pull >= self.config.pull.images

    def _least_clock(self) -> int | None:
        """Return the clock that all servers must have reached before the next batch is computed; None if it is any."""
        if self.sequential and self.current.data.phase.training:
            return self.pushes.clock
        if not self.current.data.shared:
            return None
        return max(0, self.pushes.clock - int(self.config.consistency.staleness))

    def _renew(self, pulls: PullClient) -> None:
        """Give the replica the pulled weights, and the parts of pushes that are not in them."""
        pulls.seen(self.pushes.seen)
        self.replica.scales = StepScales.at(pulls.rate, self.config, self.replica.network.statistics)
        self.replica.renew(pulls.latest, self.pushes.missing_parts(pulls.stepped))
        self.current.fresh = True

    def _drain(self) -> bool:
        """Push what is left of a phase that has no more batches, then request the next phase; return whether it did."""
        data = self.current.data
        # While the next phase is requested nothing is flushed again: that would keep two threads and a core busy.
        if self.replica.working or self.ended or data.waits_for_phase:
            return False
        if data.phase.training and not data.shared and not self.current.flushed:
            self.current.flushed = True
            self.replica.flush()
            return True
        if not self.pushes.idle or self.current.pulls.active:
            return False
        if data.stopped:
            self.replica.end_threads()
            self.ended = True
            self._send_last_statistics()
            return True
        self.current.fresh = False
        self.current.flushed = False
        data.next_phase()
        return False

    def _send_last_statistics(self) -> None:
        self.pushes.record_residual()
        self.current.channel.send(Statistics(self.stats(), final=True), self.world.layout.coordinator)

    def handle(self, message: Message) -> None:
        """Follow an order of the coordinator: the residual of this worker's pushes belongs to a snapshot."""
        self.pushes.snapshot.handle(message, self.pushes.clock)

    def export_state(self, state: RankState) -> None:
        """Write what this worker brings into the next generation into `state`."""
        pushes = self.pushes
        state.acknowledged = pushes.last
        state.strip = pushes.rings.worker_shards.strip
        if not self.replica.resumes:
            state.clock = pushes.clock
            state.progress = replace(state.progress, base=self.schedule.base)
            return
        state.clock = pushes.unacknowledged[0].clock if pushes.unacknowledged else pushes.clock
        self.held.export_state(state, self.config, self.schedule.base)

    def transfers(self) -> list[Any]:
        """Return what may still send or receive when the generation ends."""
        current = self.current
        late = [current.pulls] if current.pulls.weights_window.late else []
        return [*self.pushes.rings.far, current.data, *late, *self.replica.transfers()]

    def awaits(self) -> Iterator[Wait]:
        """Yield what other ranks owe this worker."""
        yield from self.current.data.awaits()
        yield from self.pushes.awaits()
        yield from self.current.pulls.awaits()
        yield from self.replica.awaits(self.current)

    @property
    def sequential(self) -> bool:
        """Return whether one thread trains alone, without clocks: each batch is computed on the step of the last."""
        return self.config.asynchronous and self.replica.single and self.world.layout.replicas == 1

    @property
    def world(self) -> World:
        """Return the ranks of the current generation."""
        return self.current.world

    @property
    def strip(self) -> int | None:
        """Return the strip of its replica that this worker computes; None where it computes whole batches."""
        return self.replica.strip

    @property
    def pulled(self) -> Counter[str]:
        """Return the totals of all pulls, of this generation and earlier ones."""
        totals = Counter(self.pulled_before)
        totals.update(self.current.pulls.totals)
        return totals

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this worker, for the coordinator."""
        return diagnostics.worker_statistics(self)
